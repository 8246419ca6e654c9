"""The definition: one token at a time, in fp32."""

from __future__ import annotations

import torch


def latent_norm_rope(
    q_rope_THR: torch.Tensor,
    kv_TD: torch.Tensor,
    out_THR: torch.Tensor,
    *,
    positions_T: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_weight_C: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See ``atom_plugin.ops.latent_norm_rope.latent_norm_rope``."""
    rank, half = kv_weight_C.shape[0], cos_sin_cache.shape[1] // 2
    rows_T1D = torch.empty_like(kv_TD).unsqueeze(1)
    for token, position in enumerate(positions_T.tolist()):
        cos, sin = cos_sin_cache[position].float().split(half)
        latent = kv_TD[token, :rank].float()
        normed = latent / (latent.square().mean() + eps).sqrt() * kv_weight_C.float()
        rows_T1D[token, 0, :rank] = normed.to(kv_TD.dtype)
        rows_T1D[token, 0, rank:] = _turned(kv_TD[token, rank:], cos, sin)
        for head in range(q_rope_THR.shape[1]):
            out_THR[token, head] = _turned(q_rope_THR[token, head], cos, sin)
    return rows_T1D


def _turned(x_R: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = torch.empty_like(x_R)
    for pair in range(len(cos)):
        first, second = x_R[2 * pair].float(), x_R[2 * pair + 1].float()
        turned[2 * pair] = (first * cos[pair] - second * sin[pair]).to(x_R.dtype)
        turned[2 * pair + 1] = (second * cos[pair] + first * sin[pair]).to(x_R.dtype)
    return turned
