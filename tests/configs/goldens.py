"""What each published config means, written by hand from its file, the model card and the publisher's model code.

A model's name stands for both of its forms. Lists that a file spells out one by one are given by their rule.
"""

from __future__ import annotations

from dataclasses import replace

from atom_plugin.configs import (
    BlockFp8,
    DecoderSpec,
    KimiK2Spec,
    KimiK3Spec,
    KimiLinearSpec,
    PackedInt4,
    PackedMxfp4,
    Qwen3MoeSpec,
    Qwen3Spec,
    Qwen35MoeSpec,
    Qwen35Spec,
    RopeSpec,
)


def plain_rope(theta: float) -> RopeSpec:
    """Return a rope without scaling over all of a head of 128."""
    return RopeSpec(theta=theta, rope_type="default", scaling=(), rotary_dim=128, sections=None)


def kimi_rope(*, factor: float, beta_fast: float) -> RopeSpec:
    """Return yarn as in a Kimi-K2; both mscale are 1, so that they cancel in cosines and sines."""
    return RopeSpec(
        theta=50000.0,
        rope_type="yarn",
        scaling=(
            ("beta_fast", beta_fast),
            ("beta_slow", 1.0),
            ("factor", factor),
            ("mscale", 1.0),
            ("mscale_all_dim", 1.0),
            ("original_max_position_embeddings", 4096),
        ),
        rotary_dim=64,
        sections=None,
    )


QWEN3_8B = Qwen3Spec(
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    attention_bias=False,
    tie_word_embeddings=False,
    dtype="bfloat16",
    rope=plain_rope(1e6),
    quantization=None,
)
QWEN3_30B = Qwen3MoeSpec(
    num_hidden_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    attention_bias=False,
    tie_word_embeddings=False,
    dtype="bfloat16",
    rope=plain_rope(1e6),
    quantization=None,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    dense_layers=frozenset(),
)
QWEN3_235B_2507 = replace(
    QWEN3_30B,
    num_hidden_layers=94,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=64,
    moe_intermediate_size=1536,
    max_position_embeddings=262144,
    rope=plain_rope(5e6),
)
QWEN3_235B_FP8 = BlockFp8(
    block=(128, 128),
    unquantized=frozenset(
        {
            "lm_head",
            *(
                f"model.layers.{layer}.{module}"
                for layer in range(94)
                for module in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
            ),
        }
    ),
)
QWEN35_27B = Qwen35Spec(
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=248320,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    attention_bias=False,
    tie_word_embeddings=False,
    dtype="bfloat16",
    # a quarter of 256 turns: 64 elements, 32 frequencies
    rope=RopeSpec(theta=1e7, rope_type="default", scaling=(), rotary_dim=64, sections=(11, 11, 10)),
    quantization=None,
    linear_layers=frozenset(range(64)) - frozenset(range(3, 64, 4)),
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_num_value_heads=48,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    state_dtype="float32",
)
QWEN35_35B = Qwen35MoeSpec(
    num_hidden_layers=40,
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=248320,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    attention_bias=False,
    tie_word_embeddings=False,
    dtype="bfloat16",
    rope=QWEN35_27B.rope,
    quantization=None,
    linear_layers=frozenset(range(40)) - frozenset(range(3, 40, 4)),
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    state_dtype="float32",
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
KIMI_K2 = KimiK2Spec(
    num_hidden_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    vocab_size=163840,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    dtype="bfloat16",
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=kimi_rope(factor=32.0, beta_fast=1.0),
    quantization=BlockFp8(block=(128, 128), unquantized=frozenset()),
    dense_layers=frozenset({0}),
    num_experts=384,
    num_experts_per_tok=8,
    num_shared_experts=1,
    num_expert_groups=1,
    num_groups_per_token=1,
    num_draft_layers=0,
    moe_intermediate_size=2048,
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
)
ALL_BUT_EXPERTS = {"re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"}
KIMI_K2_THINKING = replace(
    KIMI_K2,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
    rope=kimi_rope(factor=64.0, beta_fast=1.0),
    quantization=PackedInt4(group_size=32, unquantized=frozenset({*ALL_BUT_EXPERTS, "lm_head"})),
)
KIMI_K25 = replace(
    KIMI_K2_THINKING,
    rope=kimi_rope(factor=64.0, beta_fast=32.0),
    quantization=PackedInt4(group_size=32, unquantized=frozenset({*ALL_BUT_EXPERTS, "re:.*lm_head.*"})),
)
KIMI_LINEAR = KimiLinearSpec(
    num_hidden_layers=27,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=32,
    vocab_size=163840,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    dtype="bfloat16",
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=None,
    quantization=None,
    dense_layers=frozenset({0}),
    num_experts=256,
    num_experts_per_tok=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    # every fourth layer attends, and the last one
    kda_layers=frozenset(range(26)) - frozenset(range(3, 27, 4)),
    kda_num_heads=32,
    kda_head_dim=128,
    kda_conv_kernel_size=4,
)
KIMI_K3 = KimiK3Spec(
    num_hidden_layers=93,
    hidden_size=7168,
    intermediate_size=33792,
    num_attention_heads=96,
    vocab_size=163840,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    dtype="bfloat16",
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=None,
    quantization=PackedMxfp4(unquantized=frozenset({*ALL_BUT_EXPERTS, "re:.*lm_head.*"})),
    dense_layers=frozenset({0}),
    num_experts=896,
    num_experts_per_tok=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    kda_layers=frozenset(range(92)) - frozenset(range(3, 92, 4)),
    kda_num_heads=96,
    kda_head_dim=128,
    kda_conv_kernel_size=4,
    kda_gate_lower_bound=-5.0,
    routed_expert_hidden_size=3584,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    attn_res_block_size=12,
)

GOLDENS: dict[str, DecoderSpec] = {
    "Qwen--Qwen3-0.6B": replace(
        QWEN3_8B,
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen--Qwen3-8B": QWEN3_8B,
    "Qwen--Qwen3-30B-A3B": QWEN3_30B,
    "Qwen--Qwen3-235B-A22B-FP8": replace(
        QWEN3_235B_2507, max_position_embeddings=40960, rope=plain_rope(1e6), quantization=QWEN3_235B_FP8
    ),
    "Qwen--Qwen3-235B-A22B-Instruct-2507": QWEN3_235B_2507,
    "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8": replace(QWEN3_235B_2507, quantization=QWEN3_235B_FP8),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": replace(
        QWEN3_30B,
        num_hidden_layers=62,
        hidden_size=6144,
        intermediate_size=8192,
        num_attention_heads=96,
        num_key_value_heads=8,
        num_experts=160,
        moe_intermediate_size=2560,
        max_position_embeddings=262144,
        rope=plain_rope(1e7),
    ),
    "Qwen--Qwen3.5-27B": QWEN35_27B,
    "Qwen--Qwen3.5-35B-A3B": QWEN35_35B,
    "moonshotai--Kimi-K2-Instruct": KIMI_K2,
    "moonshotai--Kimi-K2-Thinking": KIMI_K2_THINKING,
    "moonshotai--Kimi-K2.5": KIMI_K25,
    "moonshotai--Kimi-Linear-48B-A3B-Instruct": KIMI_LINEAR,
    "moonshotai--Kimi-K3": KIMI_K3,
}
