"""Which of our families' configs the transformers that is here has a class for."""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.configs import fixtures

#: model_type -> the oldest of the tested versions whose AutoConfig has it; None: not one of them.
SINCE = {
    "deepseek_v3": "4.57.6",
    "kimi_k2": None,
    "kimi_k25": "5.19.0",
    "kimi_k3": None,
    "kimi_linear": "5.19.0",
    "qwen3": "4.57.6",
    "qwen3_5": "5.6.0",
    "qwen3_5_moe": "5.6.0",
    "qwen3_moe": "4.57.6",
}


def type_of(name: str) -> str:
    """Return the model_type that the fixture ``name`` states."""
    return str(fixtures.read(name)["model_type"])


def own_class(model_type: str) -> type[PretrainedConfig] | None:
    """Return what AutoConfig takes for ``model_type``, None where transformers has nothing.

    Its table and not AutoConfig itself: SGLang, where it is imported, adds classes of its own to AutoConfig.
    """
    return getattr(transformers, CONFIG_MAPPING_NAMES[model_type]) if model_type in CONFIG_MAPPING_NAMES else None


def missing() -> list[str]:
    """Return the model_types of our families that are read from dicts and a plain PretrainedConfig alone."""
    types = {type_of(name) for name in fixtures.understood()}
    return sorted(model_type for model_type in types if own_class(model_type) is None)
