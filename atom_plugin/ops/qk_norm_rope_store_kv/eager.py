"""q/k norm, rope and store in PyTorch for CPUs: q and k as one tensor of heads, all tokens at once."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv.eager import store_kv


def qk_norm_rope_store_kv(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: TokenSlots,
    *,
    positions: torch.Tensor,
    axis_of_frequency: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """See ``atom_plugin.ops.qk_norm_rope_store_kv.qk_norm_rope_store_kv``."""
    num_q_heads = q_THD.shape[1]
    x_THD = torch.cat([q_THD, k_THD], dim=1).float()  # q and k heads take the same steps: one tensor, half the calls
    if q_weight is not None and k_weight is not None:
        inverse_rms_TH1 = torch.rsqrt(x_THD.square().mean(-1, keepdim=True).add_(eps))
        weight_HD = torch.cat([q_weight.expand(num_q_heads, -1), k_weight.expand(k_THD.shape[1], -1)])
        x_THD.mul_(inverse_rms_TH1).mul_(weight_HD)
    done_THD = _rotated(x_THD, *_cos_sin(cos_sin_cache, positions, axis_of_frequency), is_neox).to(q_THD.dtype)
    store_kv(done_THD[:, num_q_heads:], v_THD, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale)
    return done_THD[:, :num_q_heads]


def _cos_sin(
    cos_sin_cache: torch.Tensor, positions: torch.Tensor, axis_of_frequency: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 cosines and sines, [tokens, 1, rotary dim / 2] each."""
    half = cos_sin_cache.shape[1] // 2
    if positions.dim() == 1:
        cos_sin_T1R = cos_sin_cache.index_select(0, positions).float()[:, None]
        return cos_sin_T1R[..., :half], cos_sin_T1R[..., half:]
    if axis_of_frequency is None:
        raise ValueError(f"positions of shape {tuple(positions.shape)} need axis_of_frequency")
    position_TF = positions[axis_of_frequency].T
    frequency_F = torch.arange(half, device=positions.device)
    cos_TF, sin_TF = cos_sin_cache[position_TF, frequency_F], cos_sin_cache[position_TF, half + frequency_F]
    return cos_TF.float()[:, None], sin_TF.float()[:, None]


def _rotated(x_THD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Return float32 ``x_THD`` with its leading dims rotated, in new memory."""
    half = cos_T1F.shape[2]
    out_THD = torch.empty_like(x_THD)
    if is_neox:
        first, second = x_THD[..., :half], x_THD[..., half : 2 * half]
        out_first, out_second = out_THD[..., :half], out_THD[..., half : 2 * half]
    else:
        first, second = x_THD[..., : 2 * half : 2], x_THD[..., 1 : 2 * half : 2]
        out_first, out_second = out_THD[..., : 2 * half : 2], out_THD[..., 1 : 2 * half : 2]
    torch.mul(first, cos_T1F, out=out_first).addcmul_(second, sin_T1F, value=-1)
    torch.mul(second, cos_T1F, out=out_second).addcmul_(first, sin_T1F)
    if 2 * half < x_THD.shape[2]:
        out_THD[..., 2 * half :] = x_THD[..., 2 * half :]
    return out_THD
