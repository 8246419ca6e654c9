"""Airlock to transformers: every form that a config arrives in, as one plain mapping. Nothing passed in is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from atom_plugin.configs.fields import ConfigError
from atom_plugin.configs.rope import without_other_types

#: What messages call a config that came as an object, and one that came as a mapping.
OBJECT = "hf_config"
MAPPING = "config"


@dataclass(frozen=True, kw_only=True)
class Raw:
    """One config: its plain ``values``, what messages call it, and whether a class may have added fields of its own."""

    values: dict[str, Any]
    source: str
    as_published: bool


#: What SGLang's get_quant_config leaves in the quantization_config of the object that models are built from: the config
#: itself among it.
SGLANG_NOTES = ("hf_config", "packed_modules_mapping")


def read_any(config: Any) -> Raw:
    """Return the fields of ``config`` as they are, in new containers.

    Taken are a path (config.json or its folder), a mapping, an object with ``to_dict`` (a PretrainedConfig of any
    version, a class of remote code), and an object that keeps one of these as ``hf_config`` (SGLang's ModelConfig).
    Nested configs may be objects too. Raises ConfigError for anything else.
    """
    try:
        return _read(config)
    except RecursionError as error:
        raise ConfigError(f"a {type(config).__name__} is no config: it contains itself, or nests too deep") from error


def _read(config: Any) -> Raw:
    if isinstance(config, (str, Path)):
        return _read_path(Path(config))
    if isinstance(config, Mapping):
        return Raw(values=_plain(config), source=MAPPING, as_published=True)
    if hasattr(config, "hf_config"):
        return _read(config.hf_config)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"{type(config).__name__} is no config: a path, a mapping, an object with to_dict, or one with hf_config "
            "is required"
        )
    return Raw(values=_plain(config), source=OBJECT, as_published=False)


def raw_config(model_path: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Return (where it was read, config.json as published) of a folder or a repo, before any class fills in defaults.

    No code of the repo runs, whatever its auto_map says. Raises ConfigError when there is none.
    """
    from transformers import PretrainedConfig

    if os.path.isdir(model_path):
        raw = _read_path(Path(model_path))
        return raw.source, raw.values
    try:
        values, _ = PretrainedConfig.get_config_dict(model_path, revision=revision)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{model_path}: no config.json can be read: {error}") from error
    if not values:  # what some versions return for a folder without one
        raise ConfigError(f"{model_path}: no config.json can be read: there is none")
    source = f"{model_path}/config.json"
    return source, _mapping(values, source)


def _read_path(path: Path) -> Raw:
    try:
        path = path / "config.json" if path.is_dir() else path
        values = json.loads(path.read_text(), object_pairs_hook=_without_duplicates)
        beside = path.name == "config.json" and path.with_name("hf_quant_config.json").exists()
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8, or a name twice
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from error
    stated = _mapping(values, str(path))
    levels = [one for one in (stated, stated.get("text_config")) if isinstance(one, Mapping)]
    if beside and all(one.get("quantization_config") is None for one in levels):
        raise ConfigError(
            f"{path}: it has no quantization_config, and hf_quant_config.json beside it says how ModelOpt has "
            "quantised the checkpoint, which atom-plugin does not read; drop `--model-impl atom`"
        )
    return Raw(values=stated, source=str(path), as_published=True)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return values


def _mapping(values: Any, source: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: cannot be read as a config: it holds a {type(values).__name__}, no mapping")
    try:
        return _plain(values)
    except RecursionError as error:
        raise ConfigError(f"{source}: cannot be read as a config: it nests too deep") from error


def _plain(value: Any) -> Any:
    """Return a copy in which objects that can turn into mappings have done so, at any depth."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):  # the quant_method of transformers' objects
        return value.value
    if not hasattr(value, "to_dict"):
        return value
    if isinstance(value, type):
        raise ConfigError(f"{value.__name__} is no config but a class: an object of it is required")
    stated = value.to_dict()
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{type(value).__name__} is no config: its to_dict returns {stated!r}, no mapping")
    stated = dict(stated)
    for name, held in vars(value).items() if hasattr(value, "__dict__") else ():
        # to_dict writes the model_type of the class, and drops what --json-model-override-args has set
        if name == "model_type" or hasattr(held, "to_dict"):
            stated[name] = held
    quantization = stated.get("quantization_config")
    if isinstance(quantization, Mapping) and "hf_config" in quantization:
        stated["quantization_config"] = {k: v for k, v in quantization.items() if k not in SGLANG_NOTES}
    rope = stated.get("rope_parameters")
    if isinstance(rope, Mapping) and "type" in rope and rope["type"] != rope.get("rope_type", rope["type"]):
        # SGLang keeps the older key beside it, and an override leaves it behind with what its type has
        stated["rope_parameters"] = {**without_other_types(rope, rope["rope_type"]), "rope_type": rope["rope_type"]}
    return _plain(stated)
