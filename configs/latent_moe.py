"""What the Kimi families share: multi-head latent attention (MLA), and experts routed by sigmoid scores with a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.decoder import DecoderSpec, read_decoder
from atom_plugin.configs.experts import EXPERTS, read_top_k
from atom_plugin.configs.fields import Fields
from atom_plugin.configs.quantization import Quantization
from atom_plugin.configs.rope import RopeSpec

#: Fields of training and of other ways to split the model.
NOT_OF_THE_FORWARD_PASS = ("aux_loss_alpha", "ep_size", "output_router_logits", "pretraining_tp", "seq_aux")


@dataclass(frozen=True, kw_only=True)
class LatentMoeSpec(DecoderSpec):
    """MLA and experts. Widths in elements, of one head where they say so; ``q_lora_rank`` None: q is not compressed.

    ``dense_layers`` have one ordinary MLP of ``intermediate_size``; the others route each token to
    ``num_experts_per_tok`` of ``num_experts`` and add ``num_shared_experts`` that every token goes to.
    ``rope`` None: no positions at all (NoPE), and the ``qk_rope_head_dim`` part is not turned.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeSpec | None
    intermediate_size: int
    dense_layers: frozenset[int]
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def qk_head_dim(self) -> int:
        """Return the width of a query or key head: its part without positions and its part with them."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Return what scores are multiplied by before the softmax: yarn's magnitude comes in for q and for k."""
        mscale = self.rope.softmax_mscale if self.rope is not None else 1.0
        return float(self.qk_head_dim**-0.5 * mscale**2)


def read_latent_moe(
    fields: Fields, *, rope: RopeSpec | None, quantizations: tuple[type[Quantization], ...], max_positions: str
) -> dict[str, Any]:
    """Return the fields of LatentMoeSpec by name; raise ConfigError for the first that we cannot take.

    Queries and keys have equally many heads, and the router picks by sigmoid scores plus a bias: the published models,
    and the only ones that are read. The groups of experts are the caller's to read.
    """
    heads, layers = fields.positive("num_attention_heads"), fields.positive("num_hidden_layers")
    fields.exactly(("num_key_value_heads",), heads)
    fields.only("attention_bias", (None, False))
    fields.exactly(("scoring_func", "moe_router_activation_func"), "sigmoid")
    fields.exactly(("moe_layer_freq",), 1)
    fields.reads(*NOT_OF_THE_FORWARD_PASS)
    experts = fields.positive(*EXPERTS)
    nope, rotary = fields.positive("qk_nope_head_dim"), fields.positive("qk_rope_head_dim")
    fields.only("qk_head_dim", (None, nope + rotary))
    return {
        **read_decoder(fields, quantizations=quantizations, max_positions=max_positions),
        "q_lora_rank": fields.nullable("q_lora_rank"),
        "kv_lora_rank": fields.positive("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotary,
        "v_head_dim": fields.positive("v_head_dim"),
        "rope": rope,
        "intermediate_size": fields.positive("intermediate_size"),
        "dense_layers": _dense_layers(fields, layers),
        "num_experts": experts,
        "num_experts_per_tok": read_top_k(fields, experts),
        "num_shared_experts": fields.positive("n_shared_experts", "num_shared_experts"),
        "moe_intermediate_size": fields.positive("moe_intermediate_size"),
        "norm_topk_prob": fields.one_of(("norm_topk_prob", "moe_renormalize"), bool),
        "routed_scaling_factor": fields.between("routed_scaling_factor", 0.0, float("inf")),
    }


def _dense_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Return the first layers, which are dense; mlp_layer_types, where transformers 5 adds them, must say the same."""
    first = fields.require("first_k_dense_replace", int)
    if not 0 <= first <= layers:
        raise fields.error("first_k_dense_replace", f"it must lie between 0 and num_hidden_layers = {layers}")
    types = fields.optional("mlp_layer_types")
    if types is not None and types != ["dense"] * first + ["sparse"] * (layers - first):
        raise fields.error("mlp_layer_types", f"it contradicts 'first_k_dense_replace' = {first}")
    return frozenset(range(first))
