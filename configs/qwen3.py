"""Qwen3 and Qwen3-MoE (model_type qwen3, qwen3_moe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.decoder import DecoderSpec, read_decoder
from atom_plugin.configs.experts import EXPERTS, read_top_k
from atom_plugin.configs.fields import Fields
from atom_plugin.configs.quantization import BlockFp8
from atom_plugin.configs.rope import RopeSpec, read_rope

#: Fields that change the forward pass of models like these and that ours does not compute: name -> neutral values.
FIELDS_OF_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "qkv_bias": (None, False),
    "use_qk_norm": (None, True),
    "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1.0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "first_k_dense_replace": (None, 0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "kv_lora_rank": (None,),
    "full_attention_interval": (None, 1),
    "num_nextn_predict_layers": (None, 0),
}


@dataclass(frozen=True, kw_only=True)
class Qwen3Spec(DecoderSpec):
    """What a dense Qwen3 is. Heads: of the whole model."""

    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    rope: RopeSpec
    quantization: BlockFp8 | None


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeSpec(Qwen3Spec):
    """Qwen3Spec plus its experts; ``dense_layers`` are the layers with one ordinary MLP of ``intermediate_size``."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int]


def read_kv_heads(fields: Fields) -> int:
    """Return num_key_value_heads; raise ConfigError unless query heads share them evenly."""
    heads, kv_heads = fields.positive("num_attention_heads"), fields.positive("num_key_value_heads")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    return kv_heads


def _head_dim(fields: Fields, *, may_be_absent: bool) -> int:
    if fields.has("head_dim") or not may_be_absent:
        return fields.positive("head_dim")
    heads, hidden = fields.positive("num_attention_heads"), fields.positive("hidden_size")
    if hidden % heads:
        raise fields.error(
            "head_dim", f"it is required: hidden_size {hidden} / num_attention_heads {heads} is no integer"
        )
    # transformers' rule for qwen3_moe; for qwen3 its class has a default of 128, so there it has to be stated
    return hidden // heads


def _common(fields: Fields, *, head_dim_may_be_absent: bool) -> dict[str, Any]:
    head_dim = _head_dim(fields, may_be_absent=head_dim_may_be_absent)
    if head_dim % 2:
        raise fields.error("head_dim", f"rope turns pairs of elements, and a head has {head_dim}")
    fields.only("hidden_act", ("silu",))
    fields.only("use_sliding_window", (None, False))
    if fields.optional("use_sliding_window") is None:  # else the flag decides, and files carry an unused width
        fields.only("sliding_window", (None,))
    fields.reads("sliding_window", "max_window_layers")
    fields.refuse(FIELDS_OF_OTHER_MODELS)
    types = fields.optional("layer_types")
    if types is not None and types != ["full_attention"] * fields.positive("num_hidden_layers"):
        raise fields.error("layer_types", "accepted: full_attention in every layer")
    return {
        **read_decoder(fields, quantizations=(BlockFp8,)),
        "intermediate_size": fields.positive("intermediate_size"),
        "num_key_value_heads": read_kv_heads(fields),
        "head_dim": head_dim,
        # Qwen3-Coder-480B is published without it, and its layers have no bias
        "attention_bias": fields.absent_means("attention_bias", False),
        "rope": read_rope(fields, head_dim=head_dim),
    }


def read_qwen3(fields: Fields) -> Qwen3Spec:
    """Return the spec of a dense Qwen3; raise ConfigError for the first field that we cannot take."""
    values = _common(fields, head_dim_may_be_absent=False)
    fields.refuse_unknown()
    return Qwen3Spec(**values)


def read_qwen3_moe(fields: Fields) -> Qwen3MoeSpec:
    """Return the spec of a Qwen3-MoE; raise ConfigError for the first field that we cannot take."""
    values = _common(fields, head_dim_may_be_absent=True)
    layers = fields.positive("num_hidden_layers")
    experts = fields.positive(*EXPERTS)
    step = fields.positive("decoder_sparse_step")
    listed = fields.optional("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(index) is int and 0 <= index < layers for index in listed):
        raise fields.error("mlp_only_layers", f"layer indices below {layers} are required")
    fields.reads("output_router_logits", "router_aux_loss_coef")
    spec = Qwen3MoeSpec(
        **values,
        num_experts=experts,
        num_experts_per_tok=read_top_k(fields, experts),
        moe_intermediate_size=fields.positive("moe_intermediate_size"),
        norm_topk_prob=fields.require("norm_topk_prob", bool),
        dense_layers=frozenset(i for i in range(layers) if i in listed or (i + 1) % step),
    )
    fields.refuse_unknown()
    return spec
