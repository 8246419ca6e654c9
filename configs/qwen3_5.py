"""The text models of Qwen3.5 (model_type qwen3_5) and Qwen3.5-MoE (qwen3_5_moe): gated delta net and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.decoder import DTYPES, DecoderSpec, read_decoder, text_of
from atom_plugin.configs.experts import EXPERTS, read_top_k
from atom_plugin.configs.fields import Fields
from atom_plugin.configs.quantization import BlockFp8
from atom_plugin.configs.qwen3 import read_kv_heads
from atom_plugin.configs.rope import RopeSpec, read_rope_with_sections


@dataclass(frozen=True, kw_only=True)
class Qwen35HybridSpec(DecoderSpec):
    """The layers that both kinds share; ``linear_layers`` are the indices of the gated delta net layers, from 0.

    The others attend, q and k normed, the output gated. A delta net layer has ``linear_num_key_heads`` heads of
    ``linear_key_head_dim`` for q and k, ``linear_num_value_heads`` of ``linear_value_head_dim`` for v, behind a causal
    convolution over ``linear_conv_kernel_dim`` tokens; its state is kept in ``state_dtype``.
    """

    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    rope: RopeSpec
    linear_layers: frozenset[int]
    linear_num_key_heads: int
    linear_key_head_dim: int
    linear_num_value_heads: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    state_dtype: str
    quantization: BlockFp8 | None


@dataclass(frozen=True, kw_only=True)
class Qwen35Spec(Qwen35HybridSpec):
    """A dense Qwen3.5: one MLP of ``intermediate_size`` a layer."""

    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeSpec(Qwen35HybridSpec):
    """A Qwen3.5-MoE: softmax-routed experts in each layer, their weights scaled to sum 1, and a gated shared one."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int


def read_qwen3_5(fields: Fields) -> Qwen35Spec:
    """Return the spec of a dense Qwen3.5's text model; raise ConfigError for the first field that we cannot take."""
    text = text_of(fields, ("qwen3_5_text",))
    spec = Qwen35Spec(**_hybrid(text), intermediate_size=text.positive("intermediate_size"))
    text.refuse_unknown()
    return spec


def read_qwen3_5_moe(fields: Fields) -> Qwen35MoeSpec:
    """Return the spec of a Qwen3.5-MoE's text model; raise ConfigError for the first field that we cannot take."""
    text = text_of(fields, ("qwen3_5_moe_text",))
    experts = text.positive(*EXPERTS)
    text.only("norm_topk_prob", (None, True))  # transformers always scales, and published files leave it out
    text.only("decoder_sparse_step", (None, 1))
    text.reads("output_router_logits", "router_aux_loss_coef")
    spec = Qwen35MoeSpec(
        **_hybrid(text),
        num_experts=experts,
        num_experts_per_tok=read_top_k(text, experts),
        moe_intermediate_size=text.positive("moe_intermediate_size"),
        shared_expert_intermediate_size=text.positive("shared_expert_intermediate_size"),
    )
    text.refuse_unknown()
    return spec


def _hybrid(text: Fields) -> dict[str, Any]:
    text.exactly(("hidden_act",), "silu")
    text.exactly(("attn_output_gate",), True)
    text.only("mlp_only_layers", (None, []))
    text.reads("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # draft layers, which are no part of this
    head_dim = text.positive("head_dim")
    state_dtype = text.require("mamba_ssm_dtype", str)
    if state_dtype not in DTYPES:
        raise text.error("mamba_ssm_dtype", f"accepted: {', '.join(map(repr, DTYPES))}")
    keys, values = text.positive("linear_num_key_heads"), text.positive("linear_num_value_heads")
    if values % keys:
        raise text.error("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads = {keys}")
    return {
        **read_decoder(text, quantizations=(BlockFp8,)),
        "num_key_value_heads": read_kv_heads(text),
        "head_dim": head_dim,
        "attention_bias": text.require("attention_bias", bool),
        "rope": read_rope_with_sections(text, head_dim=head_dim),
        "linear_layers": _linear_layers(text),
        "linear_num_key_heads": keys,
        "linear_key_head_dim": text.positive("linear_key_head_dim"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": text.positive("linear_value_head_dim"),
        "linear_conv_kernel_dim": text.positive("linear_conv_kernel_dim"),
        "state_dtype": state_dtype,
    }


def _linear_layers(text: Fields) -> frozenset[int]:
    """Return the delta net layers, from layer_types or full_attention_interval; given both, they must agree."""
    layers = text.positive("num_hidden_layers")
    types = text.require("layer_types", list) if text.has("layer_types") else None
    if types is None or text.has("full_attention_interval"):
        interval = text.positive("full_attention_interval")
        of_interval = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        if types is not None and types != of_interval:
            raise text.error("layer_types", f"it contradicts 'full_attention_interval' = {interval}")
        types = of_interval
    if len(types) != layers or not all(kind in ("linear_attention", "full_attention") for kind in types):
        raise text.error("layer_types", f"linear_attention or full_attention is required for each of {layers} layers")
    return frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
