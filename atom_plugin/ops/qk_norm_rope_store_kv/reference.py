"""The definition of q/k norm, rope and store: fp32, one token and one frequency at a time."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv.reference import store_kv


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
    q_done, k_done = _normed(q_THD, q_weight, eps), _normed(k_THD, k_weight, eps)
    half = cos_sin_cache.shape[1] // 2
    for token in range(q_THD.shape[0]):
        for i in range(half):
            axis = 0 if axis_of_frequency is None else int(axis_of_frequency[i])
            position = int(positions[token] if positions.dim() == 1 else positions[axis, token])
            cos, sin = cos_sin_cache[position, i].float(), cos_sin_cache[position, half + i].float()
            first, second = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
            for x_HD in (q_done[token], k_done[token]):
                x, y = x_HD[:, first].clone(), x_HD[:, second].clone()
                x_HD[:, first], x_HD[:, second] = x * cos - y * sin, y * cos + x * sin
    store_kv(k_done.to(k_THD.dtype), v_THD, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale)
    return q_done.to(q_THD.dtype)


def _normed(x_THD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return ``x_THD`` as a new float32 tensor, with each head's root mean square brought to 1 and weighted."""
    x = x_THD.to(torch.float32, copy=True)
    if weight_D is None:
        return x
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight_D.float()
