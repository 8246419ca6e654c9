"""Grouped-query attention with per-head RMSNorm of q and k before rope."""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from atom_plugin import host
from atom_plugin.attention.active import takes_qk_norm_rope
from atom_plugin.attention.qk_norm_rope import QKNormRope
from atom_plugin.layers.parallel import heads_per_rank, reduce_attention


class QKNormAttention(nn.Module):
    """Projections, q/k norm, rope and attention of one layer.

    A backend that takes it gets q, k and v as projected, with ``cos_sin_cache`` and ``is_neox``, and does norm, rope
    and cache write itself; ``attn.qk_norm_rope`` holds what is constant. Any other backend gets them normed and
    rotated.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        bias: bool,
        rotary_emb: nn.Module,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, kv_heads = heads_per_rank(num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.split_sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            **host.attention_tp_group(),
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=bias,
            reduce_results=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            **host.attention_tp_group(),
        )
        self.q_norm = RMSNorm(head_dim, eps=rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.attn = RadixAttention(
            heads, head_dim, head_dim**-0.5, num_kv_heads=kv_heads, layer_id=layer_id, prefix=f"{prefix}.attn"
        )
        self.attn.qk_norm_rope = QKNormRope(
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            eps=rms_norm_eps,
            rotary_dim=head_dim,
            position_source="positions",
        )

    def forward(self, positions_T: torch.Tensor, hidden_TD: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Return [tokens, hidden_size], summed over the attention-TP group."""
        if hidden_TD.shape[0] == 0:
            return hidden_TD
        qkv, _ = self.qkv_proj(hidden_TD)
        q, k, v = qkv.split(self.split_sizes, dim=-1)
        if takes_qk_norm_rope(get_attn_backend(), forward_batch.forward_mode):
            attended = self.attn(
                q,
                k,
                v,
                forward_batch,
                cos_sin_cache=self.rotary_emb.cos_sin_cache,
                is_neox=self.rotary_emb.is_neox_style,
            )
        else:
            q, k = self.norm_heads(self.q_norm, q), self.norm_heads(self.k_norm, k)
            q, k = self.rotary_emb(positions_T, q, k)
            attended = self.attn(q, k, v.contiguous(), forward_batch)
        partial_TD, _ = self.o_proj(attended)
        return reduce_attention(partial_TD)

    def norm_heads(self, norm: nn.Module, heads_TD: torch.Tensor) -> torch.Tensor:
        """Return ``heads_TD`` [tokens, heads * head_dim] with every head normed by itself."""
        return norm(heads_TD.reshape(-1, self.head_dim)).view(heads_TD.shape)
