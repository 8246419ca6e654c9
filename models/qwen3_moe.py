"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3 whose feed-forward parts are softmax-routed experts, none shared.

The router takes the top ``num_experts_per_tok`` of a softmax over all experts and, with ``norm_topk_prob``, scales the
taken weights to sum 1.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.quantization.base_config import QuantizationConfig
from torch import nn

from atom_plugin.layers.moe import SoftmaxRoutedExperts
from atom_plugin.models.qwen3 import Qwen3Block, Qwen3ForCausalLM, Qwen3Model
from atom_plugin.weights import CheckpointTable


class Qwen3MoeBlock(Qwen3Block):
    """A Qwen3 block with experts, but for the layers that the config keeps dense."""

    @staticmethod
    def make_mlp(spec: Any, layer_id: int, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
        """Return the experts of layer ``layer_id``, or the ordinary MLP where the config wants one."""
        if layer_id in spec.dense_layers:
            return Qwen3Block.make_mlp(spec, layer_id, quant_config, prefix)
        return SoftmaxRoutedExperts(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.moe_intermediate_size,
            num_experts=spec.num_experts,
            top_k=spec.num_experts_per_tok,
            renormalize=spec.norm_topk_prob,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=prefix,
        )


class Qwen3MoeModel(Qwen3Model):
    """Embedding, blocks, final norm."""

    block = Qwen3MoeBlock


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE with its language-model head, as SGLang builds, loads and calls it."""

    body = Qwen3MoeModel

    @staticmethod
    def mlp_rows(table: CheckpointTable, prefix: str, spec: Any, layer_id: int) -> None:
        """Add the rows of the feed-forward part of layer ``layer_id`` to ``table``."""
        if layer_id in spec.dense_layers:
            Qwen3ForCausalLM.mlp_rows(table, prefix, spec, layer_id)
        else:
            table.linear(f"{prefix}.gate", spec.num_experts, spec.hidden_size)
            table.experts(f"{prefix}.experts", spec.num_experts, spec.hidden_size, spec.moe_intermediate_size)
