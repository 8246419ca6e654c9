"""One loader for every form that a config arrives in. transformers objects are read, never changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atom_plugin.configs.fields import ConfigError, Fields
from atom_plugin.configs.qwen3 import Qwen3MoeSpec, Qwen3Spec, read_qwen3, read_qwen3_moe

Spec = Qwen3Spec | Qwen3MoeSpec

#: What messages call a config that came as a transformers object.
OBJECT = "hf_config"

#: (architecture, model_type) -> reader. Both must agree: Kimi-K2, say, shares its architecture with DeepSeek-V3.
FAMILIES: dict[tuple[str, str], Callable[[Fields], Spec]] = {
    ("Qwen3ForCausalLM", "qwen3"): read_qwen3,
    ("Qwen3MoeForCausalLM", "qwen3_moe"): read_qwen3_moe,
}


def served_names() -> str:
    """Return the served architectures in words, for messages."""
    return ", ".join(f"{architecture} (model_type {model_type})" for architecture, model_type in FAMILIES)


def load_spec(config: Any, *, source: str | None = None, overrides: Mapping[str, Any] | None = None) -> Spec:
    """Return the frozen spec of ``config``.

    ``config`` is a path (config.json or its folder), a dict, or an object with ``to_dict`` (a transformers config of
    any version). ``overrides`` are set on top, as ``--json-model-override-args`` does. Raises ConfigError.
    """
    values, name = _as_mapping(config)
    fields = Fields(with_overrides(values, overrides or {}), source or name, as_published=name != OBJECT)
    return FAMILIES[family_of(fields)](fields)


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` changed as SGLang changes a config: rope is one mapping, whichever of its names is used."""
    result = {**values, **overrides}
    changes = overrides.get("rope_parameters") or overrides.get("rope_scaling")
    if isinstance(changes, Mapping):  # anything else is refused where rope is read
        stated = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
        if changes.keys() & {"rope_type", "type"}:
            stated = {key: value for key, value in stated.items() if key not in ("rope_type", "type")}
        result["rope_parameters"], result["rope_scaling"] = {**stated, **changes}, None
    return result


def family_of(fields: Fields) -> tuple[str, str]:
    """Return the (architecture, model_type) of ``fields``; raise ConfigError when it is not one that we serve."""
    architectures = fields.optional("architectures") or []
    if not isinstance(architectures, list):
        raise fields.error("architectures", "a list is required")
    model_type = fields.require("model_type", str)
    for architecture in architectures:
        if (architecture, model_type) in FAMILIES:
            return architecture, model_type
    named = ", ".join(map(str, architectures)) or "absent"
    raise ConfigError(
        f"{fields.source}: architecture {named} with model_type {model_type!r} is not one that "
        f"atom-plugin has. It has: {served_names()}. "
        "Drop `--model-impl atom` to serve it with SGLang's own model."
    )


def _as_mapping(config: Any) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as a config: {error}") from error
        return values, str(path)
    if isinstance(config, Mapping):
        return config, "config"
    values = config.to_dict()
    rope = values.get("rope_parameters")
    if rope and "rope_type" in rope:  # SGLang keeps the older key beside it, and an override leaves it behind
        values["rope_parameters"] = {key: value for key, value in rope.items() if key != "type"}
    return values, OBJECT


def raw_config(model_path: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Return (where it was read, config.json as published) of a folder or a repo, before any class fills in defaults.

    Raises ConfigError when there is none.
    """
    from transformers import PretrainedConfig

    try:
        values, _ = PretrainedConfig.get_config_dict(model_path, revision=revision)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_path}: no config.json can be read: {error}") from error
    return f"{model_path}/config.json", dict(values)
