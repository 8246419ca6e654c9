"""q/k norm, rope and KV store in Triton: one launch, whose programs take a few (token, head) rows of q, of k or of v.

Every row loads the cosines and sines of its own token: that costs reads of a cache that is near, and no exchange
between threads, and any number of heads fills its programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_plugin.ops.indices import TokenSlots, slot_stride
from atom_plugin.ops.qk_norm_rope_store_kv.arguments import check
from atom_plugin.ops.store_kv.kernel import (
    FLOAT8_BIAS,
    launch_shape,
    load_rows,
    pool_memory,
    slot_of,
    store_rows,
    token_and_head,
)


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
    check(
        q_THD, k_THD, v_THD, k_pages, v_pages, slots,
        positions=positions, axis_of_frequency=axis_of_frequency, cos_sin_cache=cos_sin_cache,
        q_weight=q_weight, k_weight=k_weight,
    )  # fmt: skip
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    tokens, q_heads, dim = q_THD.shape
    if tokens == 0:
        return out_THD
    kv_heads, v_dim, rotary_dim = k_THD.shape[1], v_THD.shape[2], cos_sin_cache.shape[1]
    block = triton.next_power_of_2(max(dim, v_dim))
    rows, warps = launch_shape(tokens * (q_heads + 2 * kv_heads), block)
    programs = triton.cdiv(tokens * q_heads, rows) + 2 * triton.cdiv(tokens * kv_heads, rows)
    _qk_norm_rope_store_kv[(programs,)](
        q_THD, k_THD, v_THD, out_THD, pool_memory(k_pages), pool_memory(v_pages), slots.slots_T, positions,
        axis_of_frequency if positions.dim() == 2 else None, cos_sin_cache, q_weight, k_weight,
        tokens, k_pages.shape[0] * k_pages.shape[1], cos_sin_cache.shape[0],
        q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
        slot_stride(k_pages), k_pages.stride(2), slot_stride(v_pages), v_pages.stride(2), positions.stride(0),
        cos_sin_cache.stride(0), eps, k_scale, v_scale, q_heads, kv_heads, dim, v_dim, rotary_dim // 2, is_neox,
        k_scale != 1.0 or v_scale != 1.0, FLOAT8_BIAS.get(k_pages.dtype, 0), rows,
        triton.next_power_of_2(rotary_dim // 2),
        triton.next_power_of_2(dim - rotary_dim) if dim > rotary_dim else 0, triton.next_power_of_2(v_dim),
        num_warps=warps,
    )  # fmt: skip
    return out_THD


@triton.jit
def _pairs(tile, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Return the even and the odd columns of ``tile`` [ROWS, 2 * BLOCK_HALF]."""
    return tl.split(tl.reshape(tile, (ROWS, BLOCK_HALF, 2)))


@triton.jit
def _load_shared(x_ptr, other, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first ``DIM`` values once a row, [ROWS, BLOCK]: a thread then finds its own without an exchange."""
    i = tl.arange(0, BLOCK)[None, :]
    return tl.load(tl.broadcast_to(x_ptr + i, (ROWS, BLOCK)), mask=i < DIM, other=other)


@triton.jit
def _cos_sin(cos_sin_ptr, positions_ptr, axes_ptr, token, live, num_positions, axis_stride, position_stride,
             HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Return float32 cosines and sines [ROWS, BLOCK_HALF]; a position past the cache gives NaN and reads nothing."""
    i = tl.arange(0, BLOCK_HALF)[None, :]
    if axes_ptr is None:
        position = tl.load(positions_ptr + token, mask=live, other=-1).to(tl.int64)[:, None]
    else:
        axis = _load_shared(axes_ptr, -1, HALF, ROWS, BLOCK_HALF).to(tl.int64)
        known = live[:, None] & (axis >= 0) & (axis < 3)
        position = tl.load(positions_ptr + axis * axis_stride + token[:, None], mask=known, other=-1).to(tl.int64)
    readable = (position >= 0) & (position < num_positions) & (i < HALF)
    cos_ptr = cos_sin_ptr + position * position_stride + i
    cos = tl.load(cos_ptr, mask=readable, other=float("nan")).to(tl.float32)
    sin = tl.load(cos_ptr + HALF, mask=readable, other=float("nan")).to(tl.float32)
    return cos, sin


@triton.jit
def _finish_rows(x_ptr, token, head, live, x_token_stride, x_head_stride, weight_ptr, eps, cos, sin,
                 out_ptr, slot, writable, slot_stride, out_head_stride, scale,
                 DIM: tl.constexpr, HALF: tl.constexpr, IS_NEOX: tl.constexpr, SCALED: tl.constexpr,
                 BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
                 BLOCK_REST: tl.constexpr):  # fmt: skip
    """Norm and rotate rows of q or of k and write them where ``slot`` says: a token of q, a slot of the pool."""
    if IS_NEOX:
        first = load_rows(x_ptr, token, head, live, x_token_stride, x_head_stride, HALF, BLOCK_HALF)
        second = load_rows(x_ptr + HALF, token, head, live, x_token_stride, x_head_stride, HALF, BLOCK_HALF)
    else:
        both = load_rows(x_ptr, token, head, live, x_token_stride, x_head_stride, 2 * HALF, 2 * BLOCK_HALF)
        first, second = _pairs(both, ROWS, BLOCK_HALF)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if BLOCK_REST > 0:
        rest = load_rows(
            x_ptr + 2 * HALF, token, head, live, x_token_stride, x_head_stride, DIM - 2 * HALF, BLOCK_REST
        ).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / DIM + eps)
        if IS_NEOX:
            of_first = _load_shared(weight_ptr, 0.0, HALF, ROWS, BLOCK_HALF)
            of_second = _load_shared(weight_ptr + HALF, 0.0, HALF, ROWS, BLOCK_HALF)
        else:
            of_both = _load_shared(weight_ptr, 0.0, 2 * HALF, ROWS, 2 * BLOCK_HALF)
            of_first, of_second = _pairs(of_both, ROWS, BLOCK_HALF)
        first *= inverse * of_first.to(tl.float32)
        second *= inverse * of_second.to(tl.float32)
        if BLOCK_REST > 0:
            of_rest = _load_shared(weight_ptr + 2 * HALF, 0.0, DIM - 2 * HALF, ROWS, BLOCK_REST)
            rest *= inverse * of_rest.to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    out_first = (first * cos - second * sin).to(dtype)
    out_second = (second * cos + first * sin).to(dtype)
    if IS_NEOX:
        store_rows(out_first, out_ptr, slot, writable, head, slot_stride, out_head_stride, scale,
                   HALF, SCALED, BIAS, BLOCK_HALF)  # fmt: skip
        store_rows(out_second, out_ptr + HALF, slot, writable, head, slot_stride, out_head_stride, scale,
                   HALF, SCALED, BIAS, BLOCK_HALF)  # fmt: skip
    else:
        out_both = tl.reshape(tl.join(out_first, out_second), (ROWS, 2 * BLOCK_HALF))
        store_rows(out_both, out_ptr, slot, writable, head, slot_stride, out_head_stride, scale,
                   2 * HALF, SCALED, BIAS, 2 * BLOCK_HALF)  # fmt: skip
    if BLOCK_REST > 0:
        store_rows(rest.to(dtype), out_ptr + 2 * HALF, slot, writable, head, slot_stride, out_head_stride, scale,
                   DIM - 2 * HALF, SCALED, BIAS, BLOCK_REST)  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "num_slots", "num_positions", "axis_stride"])
def _qk_norm_rope_store_kv(
    q_ptr, k_ptr, v_ptr, out_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, positions_ptr, axes_ptr, cos_sin_ptr,
    q_weight_ptr, k_weight_ptr, tokens, num_slots, num_positions,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    k_slot_stride, k_pool_head_stride, v_slot_stride, v_pool_head_stride, axis_stride, position_stride,
    eps, k_scale, v_scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, HALF: tl.constexpr,
    IS_NEOX: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    q_programs = (tokens * Q_HEADS + ROWS - 1) // ROWS
    kv_programs = (tokens * KV_HEADS + ROWS - 1) // ROWS
    if program < q_programs:
        token, head, live = token_and_head(program, tokens, Q_HEADS, ROWS)
        cos, sin = _cos_sin(cos_sin_ptr, positions_ptr, axes_ptr, token, live, num_positions, axis_stride,
                            position_stride, HALF, ROWS, BLOCK_HALF)  # fmt: skip
        _finish_rows(q_ptr, token, head, live, q_token_stride, q_head_stride, q_weight_ptr, eps, cos, sin,
                     out_ptr, token, live, Q_HEADS * DIM, DIM, 1.0,
                     DIM, HALF, IS_NEOX, False, 0, ROWS, BLOCK_HALF, BLOCK_REST)  # fmt: skip
    elif program < q_programs + kv_programs:
        token, head, live = token_and_head(program - q_programs, tokens, KV_HEADS, ROWS)
        slot, writable = slot_of(slots_ptr, token, live, num_slots)
        cos, sin = _cos_sin(cos_sin_ptr, positions_ptr, axes_ptr, token, live, num_positions, axis_stride,
                            position_stride, HALF, ROWS, BLOCK_HALF)  # fmt: skip
        _finish_rows(k_ptr, token, head, live, k_token_stride, k_head_stride, k_weight_ptr, eps, cos, sin,
                     k_pool_ptr, slot, writable, k_slot_stride, k_pool_head_stride, k_scale,
                     DIM, HALF, IS_NEOX, SCALED, BIAS, ROWS, BLOCK_HALF, BLOCK_REST)  # fmt: skip
    else:
        token, head, live = token_and_head(program - q_programs - kv_programs, tokens, KV_HEADS, ROWS)
        slot, writable = slot_of(slots_ptr, token, live, num_slots)
        v = load_rows(v_ptr, token, head, live, v_token_stride, v_head_stride, V_DIM, BLOCK_V)
        store_rows(v, v_pool_ptr, slot, writable, head, v_slot_stride, v_pool_head_stride, v_scale,
                   V_DIM, SCALED, BIAS, BLOCK_V)  # fmt: skip
