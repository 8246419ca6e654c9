"""Rotary position embedding parameters, from rope_theta/rope_scaling and from rope_parameters alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.fields import Fields

#: Rope types that SGLang's get_rope computes as transformers does, with the fields that each needs beside the type.
SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# not attention_factor: SGLang reads another name for another quantity and would drop it
YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
#: Written by transformers beside any rope type.
ALWAYS_ALLOWED = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one model: base ``theta``, and ``scaling`` as sorted (name, value) pairs, () for none."""

    theta: float
    rope_type: str
    scaling: tuple[tuple[str, Any], ...]

    def scaling_dict(self) -> dict[str, Any] | None:
        """Return the scaling in the form of SGLang's get_rope: a dict with rope_type, or None for the default type."""
        return {"rope_type": self.rope_type, **dict(self.scaling)} if self.rope_type != "default" else None


def read_rope(fields: Fields) -> RopeSpec:
    """Return the rope of ``fields``; raise ConfigError for an unknown type, a missing theta or a contradiction."""
    new, old = fields.optional("rope_parameters"), fields.optional("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise fields.error(name, "a mapping is required")
    parameters = dict(old or {}) | dict(new or {})
    if new and old and any(new[key] != old[key] for key in new.keys() & old.keys()):
        raise fields.error("rope_parameters", f"it contradicts 'rope_scaling' = {dict(old)!r}")
    theta = _theta(fields, parameters)
    rope_type = _rope_type(fields, parameters)
    allowed = {*SCALING_FIELDS[rope_type], *ALWAYS_ALLOWED, *(YARN_OPTIONAL if rope_type == "yarn" else ())}
    name = "rope_parameters" if new else "rope_scaling"
    fields.only("partial_rotary_factor", (None, 1.0))
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise fields.error(name, "partial_rotary_factor: accepted is 1.0, all of a head turns")
    unknown = sorted(key for key in parameters.keys() - allowed if parameters[key] is not None)
    missing = [key for key in SCALING_FIELDS[rope_type] if parameters.get(key) is None]
    if unknown or missing:
        raise fields.error(
            name, f"rope type {rope_type!r}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}"
        )
    _refuse_odd_numbers(fields, name, parameters)
    kept = (*SCALING_FIELDS[rope_type], *(YARN_OPTIONAL if rope_type == "yarn" else ()))
    scaling = tuple(sorted((key, parameters[key]) for key in kept if parameters.get(key) is not None))
    return RopeSpec(theta=theta, rope_type=rope_type, scaling=scaling)


def _refuse_odd_numbers(fields: Fields, name: str, parameters: Mapping[str, Any]) -> None:
    numbers = {
        key: value for key, value in parameters.items() if key not in ("rope_type", "type") and value is not None
    }
    for key, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise fields.error(name, f"its {key} must be a finite number greater than zero")
    if numbers.get("factor", 1) < 1:
        raise fields.error(name, "its factor must be at least 1")
    original, longest = numbers.get("original_max_position_embeddings"), fields.require("max_position_embeddings", int)
    if "factor" in numbers and original is not None and original * numbers["factor"] < longest:
        raise fields.error(name, f"its factor times original_max_position_embeddings is less than {longest} positions")


def _theta(fields: Fields, parameters: Mapping[str, Any]) -> float:
    inner = parameters.get("rope_theta")
    if inner is None and parameters and not fields.has("rope_theta"):
        name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
        raise fields.error(
            name,
            "it has no rope_theta, and the config has none beside it. Before 0.5.23 SGLang's "
            "--json-model-override-args replaces the whole mapping: give rope_theta in the override as well",
        )
    if inner is None:
        return fields.between("rope_theta", 0.0, math.inf)
    if type(inner) not in (int, float) or not 0 < inner < math.inf:
        raise fields.error("rope_parameters", "its rope_theta must be a finite number greater than zero")
    if fields.has("rope_theta") and fields.require("rope_theta", float) != float(inner):
        raise fields.error("rope_theta", f"it contradicts rope_parameters with rope_theta {inner!r}")
    return float(inner)


def _rope_type(fields: Fields, parameters: Mapping[str, Any]) -> str:
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key) is not None}
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if len(kinds) > 1:
        raise fields.error(name, "rope_type and type contradict each other")
    kind = kinds.pop() if kinds else "default"
    if not kinds and kind == "default" and "factor" in parameters and not parameters.keys() & {"rope_type", "type"}:
        raise fields.error(name, "a factor without a rope_type")
    if kind not in SCALING_FIELDS:
        raise fields.error(name, f"rope type {kind!r} is not served; accepted: {', '.join(SCALING_FIELDS)}")
    return str(kind)
