"""Qwen3, dense (https://arxiv.org/abs/2505.09388): pre-norm blocks, grouped-query attention with per-head q/k RMSNorm.

Shape suffixes: T tokens of the batch, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import nn

from atom_plugin.configs import Qwen3Spec, load_served_spec
from atom_plugin.layers.attention import QKNormAttention
from atom_plugin.layers.embedding import make_embedding, make_lm_head
from atom_plugin.layers.mlp import GatedMLP
from atom_plugin.layers.parallel import over_all_tokens
from atom_plugin.layers.residual import add_and_norm
from atom_plugin.layers.rope import make_rope
from atom_plugin.weights import CheckpointTable, load_checkpoint


class Qwen3Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); a sum travels as ``residual_TD`` and is added by the next norm."""

    def __init__(
        self,
        spec: Qwen3Spec,
        layer_id: int,
        rotary_emb: nn.Module,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = QKNormAttention(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_attention_heads,
            num_kv_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            bias=spec.attention_bias,
            rotary_emb=rotary_emb,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = self.make_mlp(spec, layer_id, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    @staticmethod
    def make_mlp(spec: Any, layer_id: int, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
        """Return the feed-forward part of layer ``layer_id``."""
        return GatedMLP(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            quant_config=quant_config,
            prefix=prefix,
        )

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


class Qwen3Model(nn.Module):
    """Embedding, blocks, final norm."""

    block = Qwen3Block

    def __init__(self, spec: Qwen3Spec, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = make_embedding(spec.vocab_size, spec.hidden_size, prefix=f"{prefix}.embed_tokens")
        rotary_emb = make_rope(spec.rope, head_dim=spec.head_dim, max_position=spec.max_position_embeddings)
        self.layers = nn.ModuleList(
            self.block(spec, layer_id, rotary_emb, quant_config, f"{prefix}.layers.{layer_id}")
            for layer_id in range(spec.num_hidden_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        #: Layers whose sums an EAGLE-3 draft reads.
        self.captured_layers: frozenset[int] = frozenset()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the normed hidden states [tokens, hidden_size]; ``input_embeds`` stands in for the embedding.

        With ``captured_layers`` also the sums after them, each [tokens, hidden_size], in the order of the layers.
        """
        hidden_TD = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        residual_TD, captured = None, []
        for layer_id, layer in enumerate(self.layers):
            hidden_TD, residual_TD = layer(positions, hidden_TD, residual_TD, forward_batch)
            if layer_id in self.captured_layers:
                captured.append(hidden_TD + residual_TD)
        normed_TD = add_and_norm(self.norm, hidden_TD, residual_TD)[0]
        return (normed_TD, captured) if self.captured_layers else normed_TD


class Qwen3ForCausalLM(nn.Module):
    """Qwen3 with its language-model head, as SGLang builds, loads and calls it."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    body = Qwen3Model

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        spec = load_served_spec(config)
        assert isinstance(spec, Qwen3Spec)
        self.spec = spec
        self.model = self.body(self.spec, quant_config, f"{prefix}.model" if prefix else "model")
        self.lm_head = make_lm_head(self.spec, self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config)

    @property
    def capture_aux_hidden_states(self) -> bool:
        """Return whether the body hands sums between layers over as well."""
        return bool(self.model.captured_layers)

    def get_embed_and_head(self) -> tuple[Any, Any]:
        """Return the weights that a draft shares, embedding and head, both [vocabulary of this rank, hidden_size]."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None = None) -> None:
        """Hand the sums after these layers to an EAGLE-3 draft; None for the three that SGLang takes of a model.

        Raises ValueError for layers that the model does not have, and where the three are fewer.
        """
        layers = self.spec.num_hidden_layers
        chosen = (1, layers // 2 - 1, layers - 4) if layer_ids is None else tuple(layer_ids)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(layers)):
            raise ValueError(
                f"the EAGLE-3 draft reads layers {list(chosen)} of a model of {layers}: different ones of 0 to "
                f"{layers - 1} are required, as eagle_config.eagle_aux_hidden_state_layer_ids of the draft's config"
            )
        self.model.captured_layers = frozenset(chosen)

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
        captured = None
        if self.capture_aux_hidden_states:
            hidden_TD, captured = hidden_TD
        return self.logits_processor(input_ids, hidden_TD, self.lm_head, forward_batch, captured)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from ``weights``; raise WeightError for what is missing, unknown or of a wrong shape."""
        load_checkpoint(self, weights, self.checkpoint_table(self.spec))

    @classmethod
    def checkpoint_table(cls, spec: Any) -> CheckpointTable:
        """Return the table from checkpoint names to parameters: what a complete checkpoint of ``spec`` holds."""
        table = CheckpointTable(spec.quantization)
        table.embedding(spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings)
        table.vector("model.norm.weight", spec.hidden_size)
        for layer_id in range(spec.num_hidden_layers):
            layer = f"model.layers.{layer_id}"
            table.vector(f"{layer}.input_layernorm.weight", spec.hidden_size)
            table.vector(f"{layer}.post_attention_layernorm.weight", spec.hidden_size)
            table.qk_norm_attention(f"{layer}.self_attn", spec)
            cls.mlp_rows(table, f"{layer}.mlp", spec, layer_id)
        return table

    @staticmethod
    def mlp_rows(table: CheckpointTable, prefix: str, spec: Any, layer_id: int) -> None:
        """Add the rows of the feed-forward part of layer ``layer_id`` to ``table``."""
        table.gated_mlp(prefix, spec.hidden_size, spec.intermediate_size)
