"""A tiny random Kimi-K2 in transformers, which is the oracle for our model: no SGLang in here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "rope_parameters": YARN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def make_config(**changes: Any) -> DeepseekV3Config:
    """Return transformers' config of a tiny model with ``changes``."""
    return DeepseekV3Config(**{**TINY, **changes})


def make_oracle(config: DeepseekV3Config) -> DeepseekV3ForCausalLM:
    """Return transformers' model in fp32: scores that make attention peaky, and a router without ties."""
    torch.manual_seed(7)
    model = DeepseekV3ForCausalLM._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.uniform_(0.6, 1.4)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
            elif tensor.dim() > 1:
                gain = 2.5 if any(part in name for part in ("q_b_proj", "kv_a_proj", "gate.weight")) else 1.0
                tensor.normal_(std=gain * tensor.shape[-1] ** -0.5)
    return model
