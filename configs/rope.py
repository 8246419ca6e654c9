"""Rotary position embedding parameters, from rope_theta/rope_scaling and from rope_parameters alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.fields import Fields

#: rope type -> (fields that it needs beside the type, fields that it may have).
SCALING_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
#: Written by transformers beside any rope type.
ALWAYS_ALLOWED = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings")
#: Only where a model has positions of time, height and width.
SECTIONS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one model: base ``theta``, and ``scaling`` as sorted (name, value) pairs, () for none.

    ``rotary_dim``: how many leading elements of a head turn. ``sections``: over how many frequencies each of time,
    height and width rules, interleaved; None where a token has one position.
    """

    theta: float
    rope_type: str
    scaling: tuple[tuple[str, Any], ...]
    rotary_dim: int
    sections: tuple[int, ...] | None

    @property
    def cos_sin_scale(self) -> float:
        """Return what cosines and sines are multiplied by: 1 but for yarn (transformers' attention_factor)."""
        scaling = dict(self.scaling)
        if self.rope_type != "yarn":
            return 1.0
        if "attention_factor" in scaling:
            return float(scaling["attention_factor"])
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            return self._mscale(scaling["mscale"]) / self._mscale(scaling["mscale_all_dim"])
        return self._mscale(1.0)

    @property
    def softmax_mscale(self) -> float:
        """Return the factor of q and of k in the softmax scale of MLA: of yarn with mscale_all_dim, otherwise 1."""
        return self._mscale(dict(self.scaling).get("mscale_all_dim", 0.0))

    def _mscale(self, weight: float) -> float:
        """Return yarn's magnitude for a context ``factor`` times as long."""
        return 0.1 * weight * math.log(dict(self.scaling).get("factor", 1.0)) + 1.0


def read_rope(fields: Fields, *, head_dim: int) -> RopeSpec:
    """Return the rope of a model whose heads of ``head_dim`` turn whole.

    Raises ConfigError for an unknown type, a missing theta or a contradiction.
    """
    name, parameters = _parameters(fields)
    fields.only("partial_rotary_factor", (None, 1.0))
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise fields.error(name, "partial_rotary_factor: accepted is 1.0, all of a head turns")
    theta = _theta(fields, name, parameters, beside=True)
    return _rope(fields, name, parameters, theta=theta, rotary_dim=head_dim, sections=None)


def read_rope_with_sections(fields: Fields, *, head_dim: int) -> RopeSpec:
    """Return the rope of a model that turns a part of each head, by positions of time, height and width.

    Raises ConfigError as ``read_rope`` does, and for a missing part or sections that do not fill it.
    """
    name, parameters = _parameters(fields)
    inner = parameters.get("partial_rotary_factor")
    if inner is None:
        inner = fields.require("partial_rotary_factor", float)
    elif fields.has("partial_rotary_factor") and fields.optional("partial_rotary_factor") != inner:
        raise fields.error("partial_rotary_factor", f"it contradicts the {inner!r} of {name}")
    if type(inner) not in (int, float) or not 0 < inner <= 1:
        raise fields.error(name, "its partial_rotary_factor must lie above 0 and be at most 1")
    rotary_dim = int(head_dim * inner)
    sections, interleaved = parameters.get("mrope_section"), parameters.get("mrope_interleaved")
    if interleaved is not True:
        raise fields.error(name, "its mrope_interleaved must be true")
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n > 0 for n in sections):
        raise fields.error(name, "its mrope_section must be three positive integers")
    if 2 * sum(sections) != rotary_dim:
        raise fields.error(name, f"its mrope_section does not fill the {rotary_dim // 2} frequencies of a head")
    # SGLang's class puts a default of its own beside the parameters; a launch is compared with the file as well
    theta = _theta(fields, name, parameters, beside=fields.as_published)
    return _rope(fields, name, parameters, theta=theta, rotary_dim=rotary_dim, sections=tuple(sections))


def _parameters(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Return (which field holds them, the parameters), from the old field, the new one or both."""
    new, old = fields.optional("rope_parameters"), fields.optional("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise fields.error(name, "a mapping is required")
    bases = {one["rope_theta"] for one in (new, old) if one and one.get("rope_theta") is not None}
    if new and old and (_one_spelling(new) != _one_spelling(old) or len(bases) > 1):
        raise fields.error("rope_parameters", f"it contradicts 'rope_scaling' = {dict(old)!r}")
    return "rope_parameters" if new else "rope_scaling", dict(old or {}) | dict(new or {})


def _one_spelling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two forms have to agree on: all but nulls, the base, and how the type is spelled."""
    given = {key: value for key, value in parameters.items() if value is not None and key != "rope_theta"}
    older = given.pop("type", "default")
    return {"rope_type": older, **given}


def without_other_types(parameters: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return ``parameters`` without the type, and without what only types other than ``kind`` have.

    A type that nobody knows keeps all of them: it is refused where rope is read.
    """
    if not isinstance(kind, str) or kind not in SCALING_FIELDS:
        return {key: value for key, value in parameters.items() if key not in ("rope_type", "type")}
    own = {name for names in SCALING_FIELDS[kind] for name in names}
    others = {name for each in SCALING_FIELDS.values() for names in each for name in names} - own
    return {key: value for key, value in parameters.items() if key not in {"rope_type", "type", *others}}


def _rope(
    fields: Fields,
    name: str,
    parameters: Mapping[str, Any],
    *,
    theta: float,
    rotary_dim: int,
    sections: tuple[int, ...] | None,
) -> RopeSpec:
    rope_type = _rope_type(fields, name, parameters)
    needed, possible = SCALING_FIELDS[rope_type]
    allowed = {*needed, *possible, *ALWAYS_ALLOWED, *(SECTIONS if sections else ())}
    unknown = sorted((key for key in parameters.keys() - allowed if parameters[key] is not None), key=str)
    missing = [key for key in needed if parameters.get(key) is None]
    if unknown or missing:
        raise fields.error(
            name, f"rope type {rope_type!r}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}"
        )
    _refuse_odd_values(fields, name, rope_type, parameters)
    scaling = tuple(sorted((key, parameters[key]) for key in (*needed, *possible) if parameters.get(key) is not None))
    return RopeSpec(theta=theta, rope_type=rope_type, scaling=scaling, rotary_dim=rotary_dim, sections=sections)


def _refuse_odd_values(fields: Fields, name: str, rope_type: str, parameters: Mapping[str, Any]) -> None:
    given = {key: value for key, value in parameters.items() if value is not None}
    if type(given.pop("truncate", True)) is not bool:
        raise fields.error(name, "its truncate must be true or false")
    numbers = {key: value for key, value in given.items() if key not in ("rope_type", "type", *SECTIONS)}
    for key, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise fields.error(name, f"its {key} must be a finite number greater than zero")
    if numbers.get("factor", 1) < 1:
        raise fields.error(name, "its factor must be at least 1")
    original = numbers.get("original_max_position_embeddings", 1)
    if type(original) is not int:
        raise fields.error(name, "its original_max_position_embeddings must be an integer")
    if rope_type == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise fields.error(name, "its low_freq_factor must be less than its high_freq_factor")
    if rope_type not in ("yarn", "llama3"):
        return
    longest = fields.require("max_position_embeddings", int)
    # an object may have the --context-length of the launch there, which may be short; a launch reads the file as well
    if fields.as_published and original > longest:
        raise fields.error(name, f"its original_max_position_embeddings is more than the {longest} positions")
    if rope_type != "yarn":
        return
    if numbers.get("beta_fast", 32) < numbers.get("beta_slow", 1):
        raise fields.error(name, "its beta_fast must be at least its beta_slow (where not given: 32 and 1)")
    if numbers["original_max_position_embeddings"] * numbers["factor"] < longest:
        raise fields.error(name, f"its factor times original_max_position_embeddings is less than {longest} positions")


def _theta(fields: Fields, name: str, parameters: Mapping[str, Any], *, beside: bool) -> float:
    """Return the base, from the parameters or beside them; ``beside``: given in both places they must agree."""
    inner = parameters.get("rope_theta")
    if inner is None and parameters and not fields.has("rope_theta"):
        raise fields.error(
            name,
            "it has no rope_theta, and the config has none beside it. Before 0.5.23 SGLang's "
            "--json-model-override-args replaces the whole mapping: give rope_theta in the override as well",
        )
    if inner is None:
        return fields.between("rope_theta", 0.0, math.inf)
    if type(inner) not in (int, float) or not 0 < inner < math.inf:
        raise fields.error(name, "its rope_theta must be a finite number greater than zero")
    if beside and fields.has("rope_theta") and fields.require("rope_theta", float) != float(inner):
        told = (
            "" if fields.as_published else "; SGLang takes an override of it as {'rope_scaling': {'rope_theta': ...}}"
        )
        raise fields.error("rope_theta", f"it contradicts {name} with rope_theta {inner!r}{told}")
    return float(inner)


def _rope_type(fields: Fields, name: str, parameters: Mapping[str, Any]) -> str:
    kinds = [parameters[key] for key in ("rope_type", "type") if parameters.get(key) is not None]
    if any(kind != kinds[0] for kind in kinds):
        raise fields.error(name, "rope_type and type contradict each other")
    if not kinds and "factor" in parameters:
        raise fields.error(name, "a factor without a rope_type")
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in SCALING_FIELDS:
        raise fields.error(name, f"rope type {kind!r} is not known; accepted: {', '.join(SCALING_FIELDS)}")
    return kind
