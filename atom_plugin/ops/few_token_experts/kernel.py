"""The experts of a few tokens in two Triton kernels: each token and expert reads its weights row by row.

A step of few tokens reads its experts' weights once, whatever computes it, so that what counts are bytes in flight and
launches: products of a matrix with a vector need neither the sorting of tokens by expert nor a sum of their results.
From five tokens on experts begin to be shared, and tiles that read an expert once for all its tokens win.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Rows of a weight that a program computes, and columns that it reads at a time: 16 KiB of each weight in flight.
_ROWS, _COLUMNS = 4, 2048


@triton.jit
def _gate_up(
    x_ptr, w13_ptr, ids_ptr, inner_ptr, x_stride, expert_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, tokens * TOP_K): write silu(gate) * up of one token and expert, in fp32."""
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert >= 0:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        real = rows[:, None] < WIDTH
        gate_ptr = w13_ptr + expert * expert_stride + rows[:, None] * HIDDEN
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.static_range(0, HIDDEN, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_ptr + pair // TOP_K * x_stride + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
            mask = real & (column < HIDDEN)[None, :]
            gate += tl.load(gate_ptr + column[None, :], mask=mask, other=0.0).to(tl.float32) * x[None, :]
            up += tl.load(gate_ptr + WIDTH * HIDDEN + column[None, :], mask=mask, other=0.0).to(tl.float32) * x[None, :]
        of_gate, of_up = tl.sum(gate, 1), tl.sum(up, 1)
        tl.store(inner_ptr + pair * WIDTH + rows, of_gate * tl.sigmoid(of_gate) * of_up, mask=rows < WIDTH)


@triton.jit
def _down(
    inner_ptr, w2_ptr, weights_ptr, ids_ptr, out_ptr, expert_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, tokens): write the weighted sum of one token's experts."""
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows[:, None] < HIDDEN
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        taken = expert >= 0  # a padded row of a graph has none, and nobody wrote its inner values
        for start in tl.static_range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inner = tl.load(inner_ptr + pair * WIDTH + column, mask=taken & (column < WIDTH), other=0.0)
            down = tl.load(
                w2_ptr + expert * expert_stride + rows[:, None] * WIDTH + column[None, :],
                mask=taken & real & (column < WIDTH)[None, :], other=0.0,
            )  # fmt: skip
            total += down.to(tl.float32) * (weight * inner)[None, :]
    tl.store(out_ptr + token * HIDDEN + rows, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=rows < HIDDEN)


def few_token_experts(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
) -> torch.Tensor:
    """See ``reference.few_token_experts``; the order of the sums does not depend on other tokens."""
    (tokens, hidden), top_k, width = hidden_TD.shape, ids_TK.shape[1], w2_EDI.shape[2]
    out_TD = torch.empty(tokens, hidden, dtype=hidden_TD.dtype, device=hidden_TD.device)
    if tokens == 0:
        return out_TD
    if hidden_TD.stride(1) != 1 or not all(one.is_contiguous() for one in (weights_TK, ids_TK, w13_EFD, w2_EDI)):
        raise ValueError("hidden_TD takes a last stride of 1, and weights_TK, ids_TK, w13_EFD and w2_EDI no gaps")
    inner = torch.empty(tokens * top_k, width, dtype=torch.float32, device=hidden_TD.device)
    shape = {"HIDDEN": hidden, "WIDTH": width, "TOP_K": top_k, "ROWS": _ROWS, "num_warps": 4}
    _gate_up[(triton.cdiv(width, _ROWS), tokens * top_k)](
        hidden_TD, w13_EFD, ids_TK, inner, hidden_TD.stride(0), w13_EFD.stride(0),
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(hidden)), **shape,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, _ROWS), tokens)](
        inner, w2_EDI, weights_TK, ids_TK, out_TD, w2_EDI.stride(0),
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)), **shape,
    )  # fmt: skip
    return out_TD
