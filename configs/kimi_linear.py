"""Kimi-Linear (model_type kimi_linear): layers of Kimi Delta Attention (KDA), and of MLA without positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atom_plugin.configs.fields import Fields
from atom_plugin.configs.latent_moe import LatentMoeSpec, read_latent_moe
from atom_plugin.configs.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class KimiLinearSpec(LatentMoeSpec):
    """MLA without positions and experts, plus the KDA layers: ``kda_layers`` are their indices, counted from 0.

    ``kda_num_heads`` heads of ``kda_head_dim`` elements, for q, k and v alike, behind a causal convolution over
    ``kda_conv_kernel_size`` tokens.
    """

    rope: None
    kda_layers: frozenset[int]
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_kernel_size: int


def read_kimi_linear(fields: Fields) -> KimiLinearSpec:
    """Return the spec of a Kimi-Linear; raise ConfigError for the first field that we cannot take."""
    fields.exactly(("hidden_act",), "silu")
    kda = fields.nested("linear_attn_config")
    # one is that of the file; SGLang's class does not know it, and adds a default of its own under the other name
    max_positions = "model_max_length" if fields.has("model_max_length") else "max_position_embeddings"
    if fields.as_published:
        fields.positive("model_max_length", "max_position_embeddings")
    spec = KimiLinearSpec(**read_hybrid(fields, kda, quantizations=(), max_positions=max_positions))
    kda.refuse_unknown()
    fields.refuse_unknown()
    return spec


def read_hybrid(
    fields: Fields, kda: Fields, *, quantizations: tuple[type[Quantization], ...], max_positions: str
) -> dict[str, Any]:
    """Return the fields of KimiLinearSpec by name; raise ConfigError for the first that we cannot take.

    ``kda`` is the config's linear_attn_config, which transformers 5 repeats under names of its own.
    """
    fields.exactly(("mla_use_nope",), True)
    fields.exactly(("use_grouped_topk",), True)
    fields.only("topk_method", (None, "noaux_tc"))
    fields.exactly(("n_group", "num_expert_group"), 1)
    fields.exactly(("topk_group",), 1)
    fields.only("num_nextn_predict_layers", (None, 0))
    # unused where nothing turns; head_dim: hidden_size / num_attention_heads, which no layer has
    fields.reads("rope_theta", "rope_scaling", "rope_parameters", "head_dim")
    repeated = {
        "kda_num_heads": ("num_heads", "linear_num_heads"),
        "kda_head_dim": ("head_dim", "linear_head_dim"),
        "kda_conv_kernel_size": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    }
    values = {ours: kda.positive(name) for ours, (name, _) in repeated.items()}
    for ours, (name, beside) in repeated.items():
        if fields.has(beside) and fields.positive(beside) != values[ours]:
            raise fields.error(beside, f"it contradicts 'linear_attn_config.{name}' = {values[ours]}")
    return {
        **read_latent_moe(fields, rope=None, quantizations=quantizations, max_positions=max_positions),
        **values,
        "kda_layers": _kda_layers(fields, kda),
    }


def _kda_layers(fields: Fields, kda: Fields) -> frozenset[int]:
    """Return the indices of the KDA layers from 0; the config counts from 1, and lists the other layers as well."""
    layers = fields.positive("num_hidden_layers")
    linear, full = kda.require("kda_layers", list), kda.require("full_attn_layers", list)
    if not all(type(index) is int for index in linear + full) or sorted(linear + full) != list(range(1, layers + 1)):
        raise kda.error("kda_layers", f"with full_attn_layers = {full} it must name each of 1 to {layers} once")
    types = fields.optional("layer_types")
    of_lists = ["linear_attention" if index in linear else "full_attention" for index in range(1, layers + 1)]
    if types is not None and types != of_lists:
        raise fields.error("layer_types", "it contradicts the kda_layers of 'linear_attn_config'")
    return frozenset(index - 1 for index in linear)
