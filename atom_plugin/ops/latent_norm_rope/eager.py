"""Norm and rope in PyTorch for CPUs."""

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
    rank = kv_weight_C.shape[0]
    cos_T1P, sin_T1P = cos_sin_cache[positions_T].float().unsqueeze(1).chunk(2, dim=-1)
    latent_TC = kv_TD[:, :rank].float()
    scale_T1 = torch.rsqrt(latent_TC.square().mean(dim=-1, keepdim=True) + eps)
    rows_T1D = torch.empty_like(kv_TD).unsqueeze(1)
    rows_T1D[:, 0, :rank] = latent_TC * scale_T1 * kv_weight_C.float()
    _turn(kv_TD[:, rank:].unsqueeze(1), rows_T1D[..., rank:], cos_T1P, sin_T1P)
    _turn(q_rope_THR, out_THR, cos_T1P, sin_T1P)
    return rows_T1D


def _turn(x_THR: torch.Tensor, out_THR: torch.Tensor, cos_T1P: torch.Tensor, sin_T1P: torch.Tensor) -> None:
    """Write ``x_THR`` with its neighbouring columns turned to ``out_THR``, which may be the same memory."""
    first, second = x_THR[..., 0::2].float(), x_THR[..., 1::2].float()
    turned = torch.stack((first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P), dim=-1)
    out_THR.copy_(turned.flatten(-2))
