"""Qwen3 and Qwen3-MoE (model_type qwen3, qwen3_moe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.fields import Fields
from atom_plugin.configs.quantization import BlockFp8, read_quantization
from atom_plugin.configs.rope import RopeSpec, read_rope

#: Fields that change the forward pass of models like these and that ours does not compute: name -> neutral values.
FIELDS_OF_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "mlp_bias": (None, False),
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
    "attention_sinks": (None, False),
    "num_nextn_predict_layers": (None, 0),
}


@dataclass(frozen=True, kw_only=True)
class Qwen3Spec:
    """What a dense Qwen3 is: counts, widths (elements), rope, quantisation. Heads: of the whole model."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
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


def _common(fields: Fields, *, head_dim_may_be_absent: bool) -> dict[str, object]:
    heads = fields.positive("num_attention_heads", int)
    hidden = fields.positive("hidden_size", int)
    kv_heads = fields.positive("num_key_value_heads", int)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    if fields.has("head_dim") or not head_dim_may_be_absent:
        head_dim = fields.positive("head_dim", int)
    elif hidden % heads:
        raise fields.error(
            "head_dim", f"it is required: hidden_size {hidden} / num_attention_heads {heads} is no integer"
        )
    else:
        # transformers' rule for qwen3_moe; for qwen3 its class has a default of 128, so there it has to be stated
        head_dim = hidden // heads
    fields.only("hidden_act", ("silu",))
    fields.only("use_sliding_window", (None, False))
    if fields.optional("use_sliding_window") is None:  # else the flag decides, and files carry an unused width
        fields.only("sliding_window", (None,))
    fields.reads("sliding_window", "max_window_layers")
    fields.refuse(FIELDS_OF_OTHER_MODELS)
    types = fields.optional("layer_types")
    if types is not None and set(types) != {"full_attention"}:
        raise fields.error("layer_types", "accepted: full_attention in every layer")
    return {
        "num_hidden_layers": fields.positive("num_hidden_layers", int),
        "hidden_size": hidden,
        "intermediate_size": fields.positive("intermediate_size", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.positive("vocab_size", int),
        "max_position_embeddings": fields.positive("max_position_embeddings", int),
        "rms_norm_eps": fields.between("rms_norm_eps", 0.0, 0.1),
        # Qwen3-Coder-480B is published without it, and its layers have no bias
        "attention_bias": fields.absent_means("attention_bias", False),
        "tie_word_embeddings": fields.require("tie_word_embeddings", bool),
        "rope": read_rope(fields),
        "quantization": read_quantization(fields),
    }


def read_qwen3(fields: Fields) -> Qwen3Spec:
    """Return the spec of a dense Qwen3; raise ConfigError for the first field that we cannot take."""
    values = _common(fields, head_dim_may_be_absent=False)
    fields.refuse_unknown()
    return Qwen3Spec(**values)  # type: ignore[arg-type]


def read_qwen3_moe(fields: Fields) -> Qwen3MoeSpec:
    """Return the spec of a Qwen3-MoE; raise ConfigError for the first field that we cannot take."""
    values = _common(fields, head_dim_may_be_absent=True)
    layers = fields.require("num_hidden_layers", int)
    experts = fields.one_of(("num_experts", "num_local_experts", "n_routed_experts"), int)
    top_k = fields.positive("num_experts_per_tok", int)
    if not 0 < top_k <= experts:
        raise fields.error("num_experts_per_tok", f"it must be at most num_experts = {experts}")
    step = fields.positive("decoder_sparse_step", int)
    listed = fields.optional("mlp_only_layers") or []
    if not all(type(index) is int and 0 <= index < layers for index in listed):
        raise fields.error("mlp_only_layers", f"layer indices below {layers} are required")
    fields.reads("output_router_logits", "router_aux_loss_coef")
    spec = Qwen3MoeSpec(
        **values,  # type: ignore[arg-type]
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=fields.positive("moe_intermediate_size", int),
        norm_topk_prob=fields.require("norm_topk_prob", bool),
        dense_layers=frozenset(i for i in range(layers) if i in listed or (i + 1) % step),
    )
    fields.refuse_unknown()
    return spec
