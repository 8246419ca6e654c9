"""The text model of Kimi-K3 (model_type kimi_k3): Kimi-Linear with gates, latent experts and attention residuals."""

from __future__ import annotations

from dataclasses import dataclass

from atom_plugin.configs.decoder import text_of
from atom_plugin.configs.fields import Fields
from atom_plugin.configs.kimi_linear import KimiLinearSpec, read_hybrid
from atom_plugin.configs.quantization import PackedMxfp4


@dataclass(frozen=True, kw_only=True)
class KimiK3Spec(KimiLinearSpec):
    """KimiLinearSpec, q compressed, plus what Kimi-K3 adds.

    ``kda_gate_lower_bound`` bounds the log decay of KDA from below; its output gates have full rank, and MLA has an
    output gate as well. Routed experts work on ``routed_expert_hidden_size`` elements, normed after the experts.
    The activation is SiTU with ``situ_beta`` for the gate and ``situ_linear_beta`` for the linear part.
    ``attn_res_block_size``: layers a block of attention residuals.
    """

    q_lora_rank: int
    quantization: PackedMxfp4 | None
    kda_gate_lower_bound: float
    routed_expert_hidden_size: int
    situ_beta: float
    situ_linear_beta: float
    attn_res_block_size: int


def read_kimi_k3(fields: Fields) -> KimiK3Spec:
    """Return the spec of a Kimi-K3's text model; raise ConfigError for the first field that we cannot take."""
    text = text_of(fields, ("kimi_linear",))
    kda = text.nested("linear_attn_config")
    text.positive("q_lora_rank")
    text.exactly(("hidden_act",), "situ")
    text.exactly(("mla_use_output_gate",), True)
    text.exactly(("latent_moe_use_norm",), True)
    kda.exactly(("use_full_rank_gate",), True)
    infinity = float("inf")
    spec = KimiK3Spec(
        **read_hybrid(text, kda, quantizations=(PackedMxfp4,), max_positions="max_position_embeddings"),
        kda_gate_lower_bound=kda.between("gate_lower_bound", -infinity, 0.0),
        routed_expert_hidden_size=text.positive("routed_expert_hidden_size"),
        situ_beta=text.between("activation_situ_beta", 0.0, infinity),
        situ_linear_beta=text.between("activation_situ_linear_beta", 0.0, infinity),
        attn_res_block_size=text.positive("attn_res_block_size"),
    )
    kda.refuse_unknown()
    text.refuse_unknown()
    return spec
