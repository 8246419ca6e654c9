"""Kimi-K2, Kimi-Linear, Kimi-K3 and Qwen3.5: what contradicts itself or is no model of ours is refused by its path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from atom_plugin.configs import ConfigError, KimiK2Spec, load_spec
from tests.configs import fixtures
from tests.configs.goldens import GOLDENS

K2, K25, K3 = "moonshotai--Kimi-K2-Instruct", "moonshotai--Kimi-K2.5", "moonshotai--Kimi-K3"
LINEAR, QWEN35, QWEN35_MOE = "moonshotai--Kimi-Linear-48B-A3B-Instruct", "Qwen--Qwen3.5-27B", "Qwen--Qwen3.5-35B-A3B"


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """Return a published config with changes to its (text) model; ``a__b`` is field b of the mapping a."""
    values = fixtures.read(name)
    for path, value in changes.items():
        *outer, last = path.split("__")
        holder = values.get("text_config", values)
        for part in outer:
            holder = holder[part]
        holder[last] = value
    return values


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (K2, {"num_key_value_heads": 8}, "field 'num_key_value_heads' is 8: accepted: 64"),
    (K2, {"n_group": 7}, "field 'n_group' is 7: 384 experts do not split into so many equal groups"),
    (K2, {"n_group": 384}, "field 'n_group' is 384: 384 experts do not split into so many equal groups of two or"),
    (K2, {"topk_group": 4}, "field 'topk_group' is 4: of 1 groups of 384 experts it must hold 8"),
    (K2, {"n_group": 96}, "field 'topk_group' is 1: of 96 groups of 4 experts it must hold 8"),
    (K2, {"scoring_func": "softmax"}, "field 'scoring_func' is 'softmax': accepted: 'sigmoid'"),
    (K2, {"topk_method": "greedy"}, "field 'topk_method' is 'greedy': accepted: 'noaux_tc'"),
    (K2, {"attention_bias": True}, "field 'attention_bias' is True: accepted: None, False"),
    (K2, {"moe_layer_freq": 2}, "field 'moe_layer_freq' is 2: accepted: 1"),
    (K2, {"num_nextn_predict_layers": -1}, "field 'num_nextn_predict_layers' is -1: it must not be negative"),
    (K2, {"head_dim": 128}, "field 'head_dim' is 128: accepted: None, 64"),
    (K2, {"qk_head_dim": 128}, "field 'qk_head_dim' is 128: accepted: None, 192"),
    (K2, {"rope_interleave": False}, "field 'rope_interleave' is False: accepted: None, True"),
    (K2, {"num_experts": 256}, "field 'num_experts' is 256: it contradicts 'n_routed_experts' = 384"),
    (K2, {"num_experts_per_tok": 385}, "field 'num_experts_per_tok' is 385: it must be at most num_experts = 384"),
    (K2, {"first_k_dense_replace": 62}, "it must lie between 0 and num_hidden_layers = 61"),
    (K2, {"q_lora_rank": None}, "field 'q_lora_rank' is None: it is required, as int"),
    (K2, {"dtype": "float16"}, "field 'dtype' is 'float16': it contradicts 'torch_dtype' = 'bfloat16'"),
    (K2, {"torch_dtype": "int8"}, "field 'torch_dtype' is 'int8': accepted: 'bfloat16', 'float16', 'float32'"),
    (K2, {"add_cross_attention": True}, "field 'add_cross_attention' is True: our model does not compute this"),
    (K2, {"rope_parameters": {"rope_type": "linear", "factor": 32.0}}, "it contradicts 'rope_scaling'"),
    (K2, {"rope_scaling__rope_type": "linear"}, "rope_type and type contradict each other"),
    (K2, {"rope_scaling__factor": 16.0}, "less than 131072 positions"),
    (K2, {"rope_scaling__beta_slow": 2.0}, "its beta_fast must be at least its beta_slow"),
    (K2, {"rope_scaling__truncate": 1}, "its truncate must be true or false"),
    (K2, {"rope_scaling__extrapolation_factor": 1.0}, "unknown ['extrapolation_factor']"),
    (K2, {"rope_scaling__mrope_section": [1, 1, 1]}, "unknown ['mrope_section']"),
    (K25, {"model_type": "qwen3"}, "field 'text_config.model_type' is 'qwen3': accepted: 'kimi_k2', 'deepseek_v3'"),
    (K25, {"n_shared_experts": 0}, "field 'text_config.n_shared_experts' is 0: it must be greater than zero"),
    (K25, {"tie_word_embeddings": True}, "'tie_word_embeddings' is False: it contradicts 'text_config.tie_word_em"),
    (K25, {"dtype": "float16"}, "field 'dtype' is 'bfloat16': it contradicts 'text_config.dtype' = 'float16'"),
    (K25, {"torch_dtype": "float16"}, "'text_config.dtype' is 'bfloat16': it contradicts 'torch_dtype' = 'float16'"),
    (LINEAR, {"mla_use_nope": False}, "field 'mla_use_nope' is False: accepted: True"),
    (LINEAR, {"use_grouped_topk": False}, "field 'use_grouped_topk' is False: accepted: True"),
    (LINEAR, {"max_position_embeddings": 4096}, "'model_max_length' is 1048576: it contradicts 'max_position_em"),
    (LINEAR, {"linear_num_heads": 16}, "'linear_num_heads' is 16: it contradicts 'linear_attn_config.num_heads' = 32"),
    (LINEAR, {"layer_types": ["full_attention"] * 27}, "it contradicts the kda_layers of 'linear_attn_config'"),
    (LINEAR, {"mlp_layer_types": ["sparse"] * 27}, "it contradicts 'first_k_dense_replace' = 1"),
    (LINEAR, {"linear_attn_config": None}, "field 'linear_attn_config' is None: it is required, as a mapping"),
    (LINEAR, {"linear_attn_config__kda_layers": [1, 2]}, "it must name each of 1 to 27 once"),
    (LINEAR, {"linear_attn_config__full_attn_layers": [4, 4]}, "it must name each of 1 to 27 once"),
    (LINEAR, {"linear_attn_config__gate_lower_bound": -5.0}, "'linear_attn_config.gate_lower_bound' is -5.0: unknown"),
    (LINEAR, {"hidden_act": "situ"}, "field 'hidden_act' is 'situ': accepted: 'silu'"),
    (LINEAR, {"attn_res_block_size": 12}, "field 'attn_res_block_size' is 12: unknown fields"),
    (K3, {"hidden_act": "silu"}, "field 'text_config.hidden_act' is 'silu': accepted: 'situ'"),
    (K3, {"mla_use_output_gate": False}, "field 'text_config.mla_use_output_gate' is False: accepted: True"),
    (K3, {"latent_moe_use_norm": False}, "field 'text_config.latent_moe_use_norm' is False: accepted: True"),
    (K3, {"linear_attn_config__use_full_rank_gate": False}, "linear_attn_config.use_full_rank_gate' is False: acce"),
    (K3, {"linear_attn_config__gate_lower_bound": 0.5}, "linear_attn_config.gate_lower_bound' is 0.5: it must lie"),
    (QWEN35, {"layer_types": ["linear_attention"] * 64}, "it contradicts 'full_attention_interval' = 4"),
    (QWEN35, {"layer_types": ["full_attention"], "full_attention_interval": None}, "for each of 64 layers"),
    (QWEN35, {"attn_output_gate": False}, "field 'text_config.attn_output_gate' is False: accepted: True"),
    (QWEN35, {"linear_num_value_heads": 24}, "it must be a multiple of linear_num_key_heads = 16"),
    (QWEN35, {"num_key_value_heads": 5}, "it must divide num_attention_heads = 24"),
    (QWEN35, {"mamba_ssm_dtype": "int8"}, "field 'text_config.mamba_ssm_dtype' is 'int8': accepted"),
    (QWEN35, {"partial_rotary_factor": 0.5}, "it contradicts the 0.25 of rope_parameters"),
    (QWEN35, {"rope_theta": 10000.0}, "it contradicts rope_parameters with rope_theta 10000000"),
    (QWEN35, {"rope_parameters__partial_rotary_factor": 2}, "must lie above 0 and be at most 1"),
    (QWEN35, {"rope_parameters__mrope_section": [11, 11, 11]}, "does not fill the 32 frequencies"),
    (QWEN35, {"rope_parameters__mrope_section": [16, 16]}, "its mrope_section must be three positive integers"),
    (QWEN35, {"rope_parameters__mrope_interleaved": False}, "its mrope_interleaved must be true"),
    (QWEN35_MOE, {"norm_topk_prob": False}, "field 'text_config.norm_topk_prob' is False: accepted: None, True"),
    (QWEN35_MOE, {"decoder_sparse_step": 2}, "field 'text_config.decoder_sparse_step' is 2: accepted: None, 1"),
    (QWEN35_MOE, {"mlp_only_layers": [0]}, "field 'text_config.mlp_only_layers' is [0]: accepted: None, []"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_refused(name: str, changes: dict[str, Any], message: str) -> None:
    """One error with the path of the field, its value and what is accepted."""
    with pytest.raises(ConfigError) as error:
        load_spec(changed(name, **changes))
    assert message in str(error.value)


@pytest.mark.parametrize("name", [K25, K3, QWEN35, QWEN35_MOE])
def test_a_multimodal_config_without_its_text(name: str) -> None:
    """The text model is required, as a mapping; a field beside it that nobody knows is refused."""
    for text, message in ((None, "it is required, as a mapping"), ("kimi", "a mapping is required")):
        with pytest.raises(ConfigError, match=f"field 'text_config' is .*: {message}"):
            load_spec({**fixtures.read(name), "text_config": text})
    with pytest.raises(ConfigError, match="unknown fields \\(hidden_scale\\)"):
        load_spec({**fixtures.read(name), "hidden_scale": 2})


@pytest.mark.parametrize(
    ("scaling", "cos_sin_scale", "softmax_mscale"),
    [
        (None, 1.0, 1.0),
        ({"type": "linear", "factor": 4.0}, 1.0, 1.0),
        ({"rope_type": "dynamic", "factor": 4.0}, 1.0, 1.0),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            1.0,
            1.0,
        ),
        ({"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 0.1 * math.log(32) + 1, 1.0),
        (
            {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
            1.25,
            1.0,
        ),
        (
            {
                "type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "mscale": 0.5,
                "mscale_all_dim": 0.25,
            },
            (0.05 * math.log(32) + 1) / (0.025 * math.log(32) + 1),
            0.025 * math.log(32) + 1,
        ),
    ],
)
def test_every_rope_type_can_be_read(
    scaling: dict[str, Any] | None, cos_sin_scale: float, softmax_mscale: float
) -> None:
    """And says what its magnitudes are, by the formulas of the paper and of DeepSeek's attention."""
    spec = load_spec(changed(K2, rope_scaling=scaling))
    assert isinstance(spec, KimiK2Spec)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    pairs = tuple(sorted((key, value) for key, value in (scaling or {}).items() if key not in ("type", "rope_type")))
    golden = GOLDENS[K2]
    assert isinstance(golden, KimiK2Spec)
    assert spec == replace(golden, rope=replace(golden.rope, rope_type=kind, scaling=pairs))
    assert spec.rope.cos_sin_scale == pytest.approx(cos_sin_scale)
    assert spec.rope.softmax_mscale == pytest.approx(softmax_mscale)
    assert spec.softmax_scale == pytest.approx(192**-0.5 * softmax_mscale**2)


def test_layers_by_interval_alone() -> None:
    """A Qwen3.5 may leave layer_types out: every fourth layer attends."""
    values = changed(QWEN35)
    del values["text_config"]["layer_types"]
    assert load_spec(values) == GOLDENS[QWEN35]
