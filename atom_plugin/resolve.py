"""Which class of ours serves a config: by architecture and model_type, the same in every process."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from torch import nn

from atom_plugin import host
from atom_plugin.configs import SERVED, served_family

logger = logging.getLogger(__name__)

CLASSES: dict[tuple[str, str], str] = {
    ("Qwen3ForCausalLM", "qwen3"): "atom_plugin.models.qwen3:Qwen3ForCausalLM",
    ("Qwen3MoeForCausalLM", "qwen3_moe"): "atom_plugin.models.qwen3_moe:Qwen3MoeForCausalLM",
    ("DeepseekV3ForCausalLM", "kimi_k2"): "atom_plugin.models.kimi_k2:KimiK2ForCausalLM",
    ("KimiK25ForConditionalGeneration", "kimi_k25"): "atom_plugin.models.kimi_k2:KimiK25ForConditionalGeneration",
}
if CLASSES.keys() != SERVED:
    raise RuntimeError(f"configs and models disagree about what is served: {CLASSES.keys() ^ SERVED}")


def class_of(hf_config: Any) -> tuple[Any, str]:
    """Return (our class, the architecture's Hugging Face name) for a transformers config.

    Raises ConfigError when we do not have the architecture, ImportError when our module cannot be imported.
    """
    family = served_family(hf_config)
    return pkgutil.resolve_name(CLASSES[family]), family[0]


def our_model_architecture(model_config: Any) -> tuple[type[nn.Module], str]:
    """Return what SGLang's get_model_architecture returns, for a launch with `--model-impl atom`.

    SGLang tells implementations apart by the prefix of the resolved name, so the architecture keeps its own. Raises
    ConfigError for an architecture that we do not have.
    """
    model_class, architecture = class_of(model_config.hf_config)
    host.stamp_resolution(model_config, architecture)
    logger.info("--model-impl atom: %s is %s.%s", architecture, model_class.__module__, model_class.__qualname__)
    return model_class, architecture


def draft_model_architecture(original: Callable[..., Any], model_config: Any) -> tuple[type[nn.Module], str]:
    """Return SGLang's own class for the draft model of a launch with `--model-impl atom`, and say so in the log.

    ``original``: SGLang's get_model_architecture, which takes ``atom`` for a word that changes nothing.
    """
    model_class, architecture = original(model_config)
    logger.info(
        "--model-impl atom: the draft %s is SGLang's own, %s.%s",
        architecture, model_class.__module__, model_class.__qualname__,
    )  # fmt: skip
    return model_class, architecture
