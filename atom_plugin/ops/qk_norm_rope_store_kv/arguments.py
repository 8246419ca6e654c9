"""What every caller of qk_norm_rope_store_kv has to hand over, checked without reading a tensor's values."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv.arguments import KV_DTYPES, check_index, check_rows
from atom_plugin.ops.store_kv.arguments import check as check_store


def check(
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
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:
    """Raise ValueError, with what was given and what is taken, where the arguments do not fit."""
    check_rows("q_THD", q_THD)
    check_store(k_THD, v_THD, k_pages, v_pages, slots)
    tokens, _, dim = q_THD.shape
    if k_THD.shape[::2] != (tokens, dim) or k_THD.dtype != q_THD.dtype:
        raise ValueError(
            f"k_THD is {tuple(k_THD.shape)} of {k_THD.dtype}: takes the tokens, head dim and dtype of q_THD, which is "
            f"{tuple(q_THD.shape)} of {q_THD.dtype}"
        )
    _check_cos_sin(cos_sin_cache, dim)
    check_index("positions", positions, (tokens,) if positions.dim() == 1 else (3, tokens))
    if positions.dim() == 2:
        if axis_of_frequency is None:
            raise ValueError(f"positions of shape {tuple(positions.shape)} need axis_of_frequency")
        check_index("axis_of_frequency", axis_of_frequency, (cos_sin_cache.shape[1] // 2,))
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != (dim,) or weight.stride(0) != 1 or weight.dtype not in KV_DTYPES):
            raise ValueError(
                f"{name} is {tuple(weight.shape)} of {weight.dtype}, strides {weight.stride()}: takes [{dim}] of "
                f"float32, bfloat16, float16 in one piece, or None for no norm"
            )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("one of q_weight and k_weight: takes both, or None twice for no norm")


def _check_cos_sin(cos_sin_cache: torch.Tensor, dim: int) -> None:
    if cos_sin_cache.dim() != 2 or cos_sin_cache.dtype not in KV_DTYPES or cos_sin_cache.stride(1) != 1:
        raise ValueError(
            f"cos_sin_cache is {tuple(cos_sin_cache.shape)} of {cos_sin_cache.dtype}, strides "
            f"{cos_sin_cache.stride()}: takes [positions, rotary dim] of float32, bfloat16, float16, last stride 1"
        )
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= dim:
        raise ValueError(f"cos_sin_cache has {rotary_dim} columns: takes an even number up to the head dim, {dim}")
