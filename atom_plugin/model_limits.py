"""What our models do not serve of a config at given parallel sizes and on a given machine, as lists of reasons."""

from __future__ import annotations

from atom_plugin import device
from atom_plugin.configs import BlockFp8, KimiK2Spec, PackedInt4, Qwen3MoeSpec, ServedSpec

#: The widths of feed-forward parts by name.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "width of the shared experts")


def method_of(spec: ServedSpec) -> tuple[str | None, str]:
    """Return how a checkpoint is stored: SGLang's --quantization, None for not at all, and in words."""
    methods: dict[type, tuple[str | None, str]] = {
        type(None): (None, "not quantised"),
        BlockFp8: ("fp8", "block FP8"),
        PackedInt4: ("compressed-tensors", "INT4"),
    }
    return methods[type(spec.quantization)]


def storage_problems(spec: ServedSpec, arch: str) -> list[str]:
    """Return the reasons against serving a checkpoint on ``arch`` as it is stored."""
    own, stored = method_of(spec)
    if own and not device.is_accelerator(arch):
        return [
            f"the checkpoint is {stored}, and SGLang's MoE and linear layers read no scales on a CPU: "
            "serve it on a GPU, or take a bf16 checkpoint of the model"
        ]
    return latent_quantization_problems(spec) if isinstance(spec, KimiK2Spec) else []


def latent_quantization_problems(spec: KimiK2Spec) -> list[str]:
    """Return the reasons against how the layers of a Kimi-K2 are stored: parts of one of our layers in two ways."""
    stored = spec.quantization
    if stored is None:
        return []
    problems, packed = [], []
    for layer in (f"model.layers.{index}" for index in range(spec.num_hidden_layers)):
        plain = [f"self_attn.{name}" for name in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")]
        mlps = ("mlp", "mlp.shared_experts")
        plain += [f"{mlp}.{name}" for mlp in mlps for name in ("gate_up_proj", "down_proj")]
        try:
            stored.covers(f"{layer}.mlp.experts")
            packed += [f"{layer}.{name}" for name in plain if stored.covers(f"{layer}.{name}")]
        except ValueError as error:
            problems.append(str(error))
    if isinstance(stored, PackedInt4) and packed:
        problems.append(f"INT4 is served for routed experts only, and {packed[0]} and {len(packed) - 1} more are INT4")
    if isinstance(stored, BlockFp8) and packed and spec.q_lora_rank % stored.block[0]:
        problems.append(f"q_lora_rank {spec.q_lora_rank} does not end with an FP8 block of {stored.block[0]} rows")
    return problems


def parallel_problems(spec: ServedSpec, *, tp: int, ep: int, attention_tp: int) -> list[str]:
    """Return the reasons against splitting ``spec`` over ``tp`` ranks, its experts over ``ep`` of them.

    ``attention_tp``: ranks that share the attention heads.
    """
    problems = head_problems(spec, attention_tp)
    if isinstance(spec, (Qwen3MoeSpec, KimiK2Spec)):
        if tp % ep:
            problems.append(f"--ep-size {ep} does not divide --tp-size {tp}")
        if spec.num_experts % ep:
            problems.append(f"--ep-size {ep} does not divide {spec.num_experts} experts")
    for name, (width, parts) in split_widths(spec, tp, ep, attention_tp).items():
        unit, units = 1, ""
        if isinstance(spec.quantization, BlockFp8):
            unit, units = spec.quantization.block[0], f" into whole FP8 blocks of {spec.quantization.block[0]}"
        elif isinstance(spec.quantization, PackedInt4) and name == "moe_intermediate_size":
            unit, units = spec.quantization.group_size, f" into whole INT4 groups of {spec.quantization.group_size}"
        if width % (parts * unit):
            way_out = "; a larger --ep-size cuts experts less" if name in WIDTHS else ""
            problems.append(f"{name} {width} is not divisible by {parts} ranks{units}{way_out}")
    return problems


def head_problems(spec: ServedSpec, attention_tp: int) -> list[str]:
    """Return the reasons against sharing the attention heads of ``spec`` among ``attention_tp`` ranks."""
    heads = spec.num_attention_heads
    if isinstance(spec, KimiK2Spec):
        return [f"attention TP {attention_tp} does not divide {heads} heads"] if heads % attention_tp else []
    kv_heads = spec.num_key_value_heads
    if heads % attention_tp or (kv_heads % attention_tp and attention_tp % kv_heads):
        return [f"attention TP {attention_tp} does not divide {heads} query heads and {kv_heads} KV heads"]
    return []


def split_widths(spec: ServedSpec, tp: int, ep: int, attention_tp: int) -> dict[str, tuple[int, int]]:
    """Return name -> (elements, over how many ranks they are split)."""
    widths = {"intermediate_size": (spec.intermediate_size, tp)}
    if isinstance(spec, (Qwen3MoeSpec, KimiK2Spec)):
        widths = widths if spec.dense_layers else {}
        widths["moe_intermediate_size"] = (spec.moe_intermediate_size, max(1, tp // ep))
    if isinstance(spec, KimiK2Spec):
        widths["width of the shared experts"] = (spec.num_shared_experts * spec.moe_intermediate_size, tp)
        widths["width of all queries"] = (spec.num_attention_heads * spec.qk_head_dim, attention_tp)
        widths["width of all values"] = (spec.num_attention_heads * spec.v_head_dim, attention_tp)
    return widths
