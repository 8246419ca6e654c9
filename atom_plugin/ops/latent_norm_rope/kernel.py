"""Norm and rope of MLA's new tokens in Triton: a program makes a token's row of the cache, or turns some heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Heads of a program: 16 of 64 columns are a few numbers a thread.
_HEADS = 16


@triton.jit
def _turned(x_ptr, cos, sin, rows, real, row_stride, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Return ``rows`` [ROWS, 2 * PAIRS] of ``x_ptr`` with columns 2 i and 2 i + 1 turned, of its dtype."""
    i = tl.arange(0, 2 * PAIRS)[None, :]
    both = tl.load(x_ptr + rows[:, None] * row_stride + i, mask=real[:, None] & (i < 2 * HALF), other=0.0)
    first, second = tl.split(tl.reshape(both.to(tl.float32), (ROWS, PAIRS, 2)))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(turned, (ROWS, 2 * PAIRS)).to(x_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_positions"])
def _latent_norm_rope(
    q_ptr, kv_ptr, out_ptr, rows_ptr, positions_ptr, cos_sin_ptr, weight_ptr, num_positions, q_token_stride,
    q_head_stride, kv_stride, out_token_stride, out_head_stride, position_stride, eps,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 1 + blocks of heads): program 0 of a token makes its row, the others turn HEADS heads each."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    readable = (pair < HALF) & (position >= 0) & (position < num_positions)
    angles = cos_sin_ptr + position * position_stride + pair
    cos = tl.load(angles, mask=readable, other=float("nan")).to(tl.float32)
    sin = tl.load(angles + HALF, mask=readable, other=float("nan")).to(tl.float32)
    column = tl.arange(0, 2 * PAIRS)[None, :]
    if part == 0:
        c = tl.arange(0, BLOCK_C)
        latent = tl.load(kv_ptr + token * kv_stride + c, mask=c < RANK, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + c, mask=c < RANK, other=0.0).to(tl.float32)
        normed = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * weight
        row_ptr = rows_ptr + token * (RANK + 2 * HALF)
        tl.store(row_ptr + c, normed.to(rows_ptr.dtype.element_ty), mask=c < RANK)
        one = tl.arange(0, 1)
        turned_k = _turned(kv_ptr + token * kv_stride + RANK, cos, sin, one, one == 0, 0, HALF, 1, PAIRS)
        tl.store(row_ptr + RANK + column, turned_k, mask=column < 2 * HALF)
    else:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        real = heads < NUM_HEADS
        turned_q = _turned(
            q_ptr + token * q_token_stride, cos, sin, heads, real, q_head_stride, HALF, HEADS, PAIRS
        )  # fmt: skip
        tl.debug_barrier()  # out may be q: where threads hold one number twice, all have to read before one writes
        at = out_ptr + token * out_token_stride + heads[:, None] * out_head_stride + column
        tl.store(at, turned_q, mask=real[:, None] & (column < 2 * HALF))


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
    """See ``atom_plugin.ops.latent_norm_rope.latent_norm_rope``; a position past the cache gives NaN."""
    (tokens, num_heads, rope_dim), rank = q_rope_THR.shape, kv_weight_C.shape[0]
    rows_T1D = torch.empty(tokens, 1, rank + rope_dim, dtype=kv_TD.dtype, device=kv_TD.device)
    if tokens == 0:
        return rows_T1D
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    _latent_norm_rope[(tokens, 1 + triton.cdiv(num_heads, heads))](
        q_rope_THR, kv_TD, out_THR, rows_T1D, positions_T, cos_sin_cache, kv_weight_C, cos_sin_cache.shape[0],
        q_rope_THR.stride(0), q_rope_THR.stride(1), kv_TD.stride(0), out_THR.stride(0), out_THR.stride(1),
        cos_sin_cache.stride(0), eps,
        NUM_HEADS=num_heads, RANK=rank, HALF=rope_dim // 2, HEADS=heads, BLOCK_C=triton.next_power_of_2(rank),
        PAIRS=triton.next_power_of_2(rope_dim // 2), num_warps=4,
    )  # fmt: skip
    return rows_T1D
