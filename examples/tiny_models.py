"""The tiny models: their configs, and how they are built and loaded; the classes are transformers' own."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

EOS_ID, PAD_ID = 0, 1
VOCAB_SIZE = 704
MAX_POSITIONS = 8192
ROPE_THETA = 1e6

COMMON_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "initializer_range": 0.05,
    "eos_token_id": EOS_ID,
}
MOE_CONFIG = COMMON_CONFIG | {
    "intermediate_size": 768,
    "moe_intermediate_size": 384,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
}
DENSE_CONFIG = COMMON_CONFIG | {"intermediate_size": 1280, "tie_word_embeddings": True}
#: Kimi-K2's own yarn, its context scaled down: training rows are longer than ``original_max_position_embeddings``.
KIMI_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 768,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
}
#: What ``--model`` names: transformers' class, its config class, and the config.
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE_CONFIG),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, DENSE_CONFIG),
    "kimi-k2": (DeepseekV3ForCausalLM, DeepseekV3Config, KIMI_CONFIG),
}


def build_model(name: str, *, seed: int) -> PreTrainedModel:
    """A fresh model in bf16, on the CPU; correction biases of routers in fp32, as checkpoints keep them."""
    torch.manual_seed(seed)
    model_class, config_class, config = MODELS[name]
    model = model_class(config_class(**config)).to(torch.bfloat16)
    for moe in biased_experts(model):
        moe.gate.e_score_correction_bias = moe.gate.e_score_correction_bias.float()
    return model


def biased_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The layers whose router adds a correction bias to the scores that it chooses by."""
    return [module for module in model.modules() if isinstance(module, DeepseekV3MoE)]


def load(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The checkpoint with transformers' plain loop over experts, its definition of the layer.

    By architecture, and with the model_type of its class: transformers knows no kimi_k2, and would leave every expert
    as it was initialised. Raises ValueError when a weight is missing or left over.
    """
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class, config_class, _ = next(row for row in MODELS.values() if row[0].__name__ == architecture)
    config = config_class.from_pretrained(folder)
    config.model_type = config_class.model_type
    model, report = model_class.from_pretrained(
        folder, config=config, dtype=dtype, experts_implementation="eager", output_loading_info=True
    )
    lost = {kind: names for kind, names in report.items() if names}
    if lost:
        raise ValueError(f"{folder} was not loaded whole: {lost}")
    return model.to(device).eval()
