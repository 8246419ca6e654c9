"""Kimi-K2 (https://arxiv.org/abs/2507.20534): DeepSeek-V3's layers (https://arxiv.org/abs/2412.19437) in other numbers.

Latent attention whose q has a latent of its own; one dense layer, then routed experts beside a shared one. Kimi-K2.5
is the same language model inside of a model that sees, whose other half is neither built nor loaded here.

Shape suffixes: T tokens of the batch, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import nn

from atom_plugin.configs import KimiK2Spec, load_served_spec
from atom_plugin.layers.embedding import make_embedding, make_lm_head
from atom_plugin.layers.mla import LatentAttention
from atom_plugin.layers.mlp import GatedMLP
from atom_plugin.layers.moe import SigmoidRoutedExperts
from atom_plugin.layers.parallel import over_all_tokens
from atom_plugin.layers.residual import add_and_norm
from atom_plugin.layers.rope import make_rope
from atom_plugin.weights import CheckpointTable, load_checkpoint


class KimiK2Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); a sum travels as ``residual_TD`` and is added by the next norm."""

    def __init__(
        self,
        spec: KimiK2Spec,
        layer_id: int,
        rotary_emb: nn.Module,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = LatentAttention(
            spec,
            rotary_emb=rotary_emb,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = make_mlp(spec, layer_id, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def forward(
        self,
        positions_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (what this block adds, the sum of all before it), both [tokens, hidden_size]."""
        hidden_TD, residual_TD = add_and_norm(self.input_layernorm, hidden_TD, residual_TD)
        hidden_TD = self.self_attn(positions_T, hidden_TD, forward_batch)
        hidden_TD, residual_TD = add_and_norm(self.post_attention_layernorm, hidden_TD, residual_TD)
        return over_all_tokens(self.mlp, hidden_TD, forward_batch), residual_TD


def make_mlp(spec: KimiK2Spec, layer_id: int, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
    """Return the experts of layer ``layer_id``, or the ordinary MLP of the first layers."""
    if layer_id in spec.dense_layers:
        return GatedMLP(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            quant_config=quant_config,
            prefix=prefix,
        )
    return SigmoidRoutedExperts(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe_intermediate_size,
        num_experts=spec.num_experts,
        num_shared_experts=spec.num_shared_experts,
        top_k=spec.num_experts_per_tok,
        num_groups=spec.num_expert_groups,
        groups_per_token=spec.num_groups_per_token,
        renormalize=spec.norm_topk_prob,
        routed_scaling_factor=spec.routed_scaling_factor,
        layer_id=layer_id,
        quant_config=quant_config,
        prefix=prefix,
    )


class KimiK2Model(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, spec: KimiK2Spec, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = make_embedding(spec.vocab_size, spec.hidden_size, prefix=f"{prefix}.embed_tokens")
        rotary_emb = make_rope(
            spec.rope, head_dim=spec.qk_rope_head_dim, max_position=spec.max_position_embeddings, is_neox=False
        )
        self.layers = nn.ModuleList(
            KimiK2Block(spec, layer_id, rotary_emb, quant_config, f"{prefix}.layers.{layer_id}")
            for layer_id in range(spec.num_hidden_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the normed hidden states [tokens, hidden_size]; ``input_embeds`` stands in for the embedding."""
        hidden_TD = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual_TD = None
        for layer in self.layers:
            hidden_TD, residual_TD = layer(positions, hidden_TD, residual_TD, forward_batch)
        return add_and_norm(self.norm, hidden_TD, residual_TD)[0]


class KimiK2ForCausalLM(nn.Module):
    """Kimi-K2 with its language-model head, as SGLang builds, loads and calls it."""

    packed_modules_mapping: ClassVar = {
        "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    #: What the checkpoint writes before our names, and the parts of it that are not ours.
    checkpoint_prefix: ClassVar = ""
    not_ours: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        spec = load_served_spec(config)
        assert isinstance(spec, KimiK2Spec)
        self.spec = spec
        # quantisation is told by the checkpoint's names
        names = f"{prefix}.{self.checkpoint_prefix}" if prefix else self.checkpoint_prefix
        self.model = KimiK2Model(self.spec, quant_config, f"{names}model")
        self.lm_head = make_lm_head(self.spec, self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.get_text_config())

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding, for callers that embed by themselves."""
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """Return the logits of the positions that ``forward_batch`` asks for."""
        hidden_TD = self.model(input_ids, positions, forward_batch, input_embeds)
        return self.logits_processor(input_ids, hidden_TD, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from ``weights``; raise WeightError for what is missing, unknown or of a wrong shape."""
        load_checkpoint(self, weights, self.checkpoint_table(self.spec))

    @classmethod
    def checkpoint_table(cls, spec: KimiK2Spec) -> CheckpointTable:
        """Return the table from checkpoint names to parameters: what a complete checkpoint of ``spec`` holds."""
        table = CheckpointTable(spec.quantization, prefix=cls.checkpoint_prefix)
        table.embedding(spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings)
        table.vector("model.norm.weight", spec.hidden_size)
        for layer_id in range(spec.num_hidden_layers):
            layer = f"model.layers.{layer_id}"
            table.vector(f"{layer}.input_layernorm.weight", spec.hidden_size)
            table.vector(f"{layer}.post_attention_layernorm.weight", spec.hidden_size)
            table.latent_attention(f"{layer}.self_attn", spec)
            if layer_id in spec.dense_layers:
                table.gated_mlp(f"{layer}.mlp", spec.hidden_size, spec.intermediate_size)
                continue
            width = spec.moe_intermediate_size
            table.matrix(f"{layer}.mlp.gate.weight", spec.num_experts, spec.hidden_size)
            table.vector(f"{layer}.mlp.gate.e_score_correction_bias", spec.num_experts)
            table.experts(f"{layer}.mlp.experts", spec.num_experts, spec.hidden_size, width)
            table.gated_mlp(f"{layer}.mlp.shared_experts", spec.hidden_size, spec.num_shared_experts * width)
        for name, what in cls.not_ours.items():
            table.leave_out(name, what)
        for layer_id in range(spec.num_hidden_layers, spec.num_hidden_layers + spec.num_draft_layers):
            table.leave_out(f"{cls.checkpoint_prefix}model.layers.{layer_id}.", "multi-token prediction")
        return table


class KimiK25ForConditionalGeneration(KimiK2ForCausalLM):
    """The language model of Kimi-K2.5."""

    checkpoint_prefix: ClassVar = "language_model."
    not_ours: ClassVar = {"vision_tower.": "vision", "mm_projector.": "vision"}
