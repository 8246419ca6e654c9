"""One loader for every family and every form that a config arrives in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atom_plugin.configs.airlock import read_any
from atom_plugin.configs.decoder import DecoderSpec
from atom_plugin.configs.experts import EXPERTS, TOP_K
from atom_plugin.configs.fields import ConfigError, Fields
from atom_plugin.configs.kimi_k2 import KimiK2Spec, read_kimi_k2, read_kimi_k25
from atom_plugin.configs.kimi_k3 import read_kimi_k3
from atom_plugin.configs.kimi_linear import read_kimi_linear
from atom_plugin.configs.qwen3 import Qwen3MoeSpec, Qwen3Spec, read_qwen3, read_qwen3_moe
from atom_plugin.configs.qwen3_5 import read_qwen3_5, read_qwen3_5_moe
from atom_plugin.configs.rope import without_other_types

Family = tuple[str, str]

#: (architecture, model_type) -> reader. Both must agree: Kimi-K2, say, shares its architecture with DeepSeek-V3.
FAMILIES: dict[Family, Callable[[Fields], DecoderSpec]] = {
    ("Qwen3ForCausalLM", "qwen3"): read_qwen3,
    ("Qwen3MoeForCausalLM", "qwen3_moe"): read_qwen3_moe,
    ("Qwen3_5ForConditionalGeneration", "qwen3_5"): read_qwen3_5,
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"): read_qwen3_5_moe,
    ("DeepseekV3ForCausalLM", "kimi_k2"): read_kimi_k2,
    ("KimiK25ForConditionalGeneration", "kimi_k25"): read_kimi_k25,
    ("KimiLinearForCausalLM", "kimi_linear"): read_kimi_linear,
    ("KimiK3ForConditionalGeneration", "kimi_k3"): read_kimi_k3,
}
#: The families that models/ has a model for; the others can be read, and are refused at launch.
SERVED: frozenset[Family] = frozenset(
    {
        ("Qwen3ForCausalLM", "qwen3"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("DeepseekV3ForCausalLM", "kimi_k2"),
        ("KimiK25ForConditionalGeneration", "kimi_k25"),
    }
)
ServedSpec = Qwen3Spec | Qwen3MoeSpec | KimiK2Spec

#: model_type of what is not ours -> what else there is to say about it.
NOT_OURS = {
    "deepseek_v3": (
        "It is DeepSeek-V3's, and also what transformers 5 writes into a Kimi-K2 that it saves: "
        'if this is a Kimi-K2, add --json-model-override-args \'{"model_type": "kimi_k2"}\'. '
    ),
    "k3_dspark": "It is a draft for speculative decoding and no model of its own. ",
}
#: Names of one field: an override of any of them replaces them all.
ALIASES = (("dtype", "torch_dtype"), EXPERTS, TOP_K)

#: The older and the newer name of the mapping that scales rope.
ROPE = ("rope_scaling", "rope_parameters")


def served_names() -> str:
    """Return the served architectures in words, for messages."""
    return ", ".join(
        f"{architecture} (model_type {kind})" for architecture, kind in FAMILIES if (architecture, kind) in SERVED
    )


def load_spec(config: Any, *, source: str | None = None, overrides: Mapping[str, Any] | None = None) -> DecoderSpec:
    """Return the frozen spec of ``config``, whether its model is served or not.

    ``config`` is whatever ``airlock.read_any`` takes, ``source`` what messages call it. ``overrides`` are set on top,
    as ``--json-model-override-args`` does. Nothing passed in is changed. Raises ConfigError.

    What an object cannot show: its class has put defaults where the file lacks a field, or dropped what it does not
    know, so that missing and misspelled fields are found in a path or a mapping alone. A launch reads the file as well.
    """
    fields = _fields(config, source, overrides)
    return FAMILIES[_family_of(fields)](fields)


def load_served_spec(
    config: Any, *, source: str | None = None, overrides: Mapping[str, Any] | None = None
) -> ServedSpec:
    """Return ``load_spec`` of a config whose model is served; raise ConfigError for any other."""
    fields = _fields(config, source, overrides)
    spec = FAMILIES[_served_family_of(fields)](fields)
    assert isinstance(spec, ServedSpec)
    return spec


def served_family(config: Any) -> Family:
    """Return the (architecture, model_type) of ``config``; raise ConfigError unless its model is served."""
    return _served_family_of(_fields(config, None, None))


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``overrides`` on top; raise ConfigError where they say of rope what SGLang cannot be told.

    Rope is one mapping, whichever of its names is used; what is meant for a nested config is merged into it. A launch
    holds the result against the object that SGLang made of the same overrides.
    """
    _refuse_odd_rope(values, overrides)
    if "rope_theta" in overrides:
        values = {name: _without_base(value) if name in ROPE else value for name, value in values.items()}
    replaced = {name for names in ALIASES if overrides.keys() & set(names) for name in names}
    result = {name: value for name, value in values.items() if name not in replaced} | dict(overrides)
    nested, stated = overrides.get("text_config"), values.get("text_config")
    if isinstance(nested, Mapping) and isinstance(stated, Mapping):
        result["text_config"] = with_overrides(stated, nested)
    changes = overrides.get("rope_parameters") or overrides.get("rope_scaling")
    if isinstance(changes, Mapping):  # anything else is refused where rope is read
        held = [values.get(name) for name in ROPE]
        rope = {key: value for one in held if isinstance(one, Mapping) for key, value in one.items()}
        kinds = [changes[key] for key in ("rope_type", "type") if key in changes]
        if kinds:
            rope = without_other_types(rope, kinds[0])
        result["rope_parameters"], result["rope_scaling"] = {**rope, **changes}, None
        if "rope_theta" in changes and "rope_theta" not in overrides:
            result.pop("rope_theta", None)
    return result


def _without_base(rope: Any) -> Any:
    if not isinstance(rope, Mapping):
        return rope
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _refuse_odd_rope(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    given = [name for name in ROPE if name in overrides]
    for name in given:
        if not overrides[name] and (overrides[name] is None or isinstance(overrides[name], Mapping)):
            raise ConfigError(
                f"overrides: {name!r} is {overrides[name]!r}: SGLang forgets the base of rope at null and changes "
                f"nothing at {{}}; for rope without scaling give {{{name!r}: {{'rope_type': 'default'}}}}"
            )
    if len(given) == 2 and overrides[ROPE[0]] != overrides[ROPE[1]]:
        raise ConfigError(f"overrides: {ROPE[0]!r} and {ROPE[1]!r} contradict each other: give one of them")
    if isinstance(values.get("text_config"), Mapping):
        for name in (*ROPE, "rope_theta"):
            if name in overrides:
                raise ConfigError(
                    f"overrides: {name!r} belongs to the text model of this multimodal config: "
                    f"give {{'text_config': {{{name!r}: ...}}}}"
                )


def _fields(config: Any, source: str | None, overrides: Mapping[str, Any] | None) -> Fields:
    raw = read_any(config)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides: a mapping is required, not {overrides!r}")
    values = with_overrides(raw.values, {} if overrides is None else overrides)
    return Fields(values, source or raw.source, as_published=raw.as_published)


def _family_of(fields: Fields) -> Family:
    architectures = fields.optional("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        raise fields.error("architectures", "a list of names is required")
    model_type = fields.require("model_type", str)
    for architecture in architectures:
        if (architecture, model_type) in FAMILIES:
            return architecture, model_type
    named = ", ".join(architectures) or "absent"
    raise ConfigError(
        f"{fields.source}: architecture {named} with model_type {model_type!r} is not one that "
        f"atom-plugin has. It has: {served_names()}. {NOT_OURS.get(model_type, '')}"
        "Drop `--model-impl atom` to serve it with SGLang's own model."
    )


def _served_family_of(fields: Fields) -> Family:
    family = _family_of(fields)
    if family not in SERVED:
        architecture, model_type = family
        raise ConfigError(
            f"{fields.source}: atom-plugin reads configs of {architecture} with model_type {model_type!r}, but has no "
            f"model for it yet. It has: {served_names()}. "
            "Drop `--model-impl atom` to serve it with SGLang's own model."
        )
    return family
