"""Kimi-K2, Kimi-K2-Thinking (model_type kimi_k2) and the text model of Kimi-K2.5 (model_type kimi_k25)."""

from __future__ import annotations

from dataclasses import dataclass

from atom_plugin.configs.decoder import text_of
from atom_plugin.configs.fields import Fields
from atom_plugin.configs.latent_moe import LatentMoeSpec, read_latent_moe
from atom_plugin.configs.quantization import BlockFp8, PackedInt4
from atom_plugin.configs.rope import RopeSpec, read_rope


@dataclass(frozen=True, kw_only=True)
class KimiK2Spec(LatentMoeSpec):
    """What a Kimi-K2 is: DeepSeek-V3's layers, q compressed; elements 2i and 2i + 1 of a rotary part turn together.

    A token's experts are in the ``num_groups_per_token`` of ``num_expert_groups`` equal groups whose two best experts
    are best. ``num_draft_layers``: multi-token prediction layers that the checkpoint holds after the last layer.
    """

    q_lora_rank: int
    rope: RopeSpec
    quantization: BlockFp8 | PackedInt4 | None
    num_expert_groups: int
    num_groups_per_token: int
    num_draft_layers: int


def read_kimi_k2(fields: Fields) -> KimiK2Spec:
    """Return the spec of a Kimi-K2; raise ConfigError for the first field that we cannot take."""
    rotary = fields.positive("qk_rope_head_dim")
    fields.positive("q_lora_rank")
    fields.only("head_dim", (None, rotary))  # transformers 5 puts the rotary part there
    fields.only("rope_interleave", (None, True))
    fields.exactly(("hidden_act",), "silu")
    fields.exactly(("topk_method",), "noaux_tc")
    values = read_latent_moe(
        fields,
        rope=read_rope(fields, head_dim=rotary),
        quantizations=(BlockFp8, PackedInt4),
        max_positions="max_position_embeddings",
    )
    values |= _groups(fields, values["num_experts"], values["num_experts_per_tok"])
    values["num_draft_layers"] = _draft_layers(fields)
    fields.refuse_unknown()
    return KimiK2Spec(**values)


def _groups(fields: Fields, experts: int, top_k: int) -> dict[str, int]:
    """Return the groups of experts; raise ConfigError where they are unequal, too small, or hold too few experts."""
    groups, taken = fields.positive("n_group"), fields.positive("topk_group")
    if experts % groups or experts // groups < 2:
        raise fields.error("n_group", f"{experts} experts do not split into so many equal groups of two or more")
    if taken > groups or taken * (experts // groups) < top_k:
        raise fields.error("topk_group", f"of {groups} groups of {experts // groups} experts it must hold {top_k}")
    return {"num_expert_groups": groups, "num_groups_per_token": taken}


def _draft_layers(fields: Fields) -> int:
    if not fields.has("num_nextn_predict_layers"):
        return 0
    layers = fields.require("num_nextn_predict_layers", int)
    if layers < 0:
        raise fields.error("num_nextn_predict_layers", "it must not be negative")
    return layers


def read_kimi_k25(fields: Fields) -> KimiK2Spec:
    """Return the spec of a Kimi-K2.5's text model; raise ConfigError for the first field that we cannot take.

    transformers 5 writes deepseek_v3 for the model_type of its text model; what it belongs to says that it is a Kimi.
    """
    return read_kimi_k2(text_of(fields, ("kimi_k2", "deepseek_v3")))
