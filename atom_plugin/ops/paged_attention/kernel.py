"""Paged attention in Triton: blocks of queries over ranges of keys, then one reduction over the ranges.

A block of queries holds every head of one KV head's group, so K and V are read once for all of them. The keys of a
block are cut into ranges whose bounds each program works out from the lengths on the device: the grid
depends on shapes only, and a captured launch serves any lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_plugin import device
from atom_plugin.ops.indices import slot_stride
from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch
from atom_plugin.ops.paged_attention.launch_shape import column_blocks, dot_dtype, shape_for, splits_for

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _request_of(block, qo_indptr, num_requests, BLOCK_Q: tl.constexpr):
    """Return the request whose blocks of queries hold ``block``: request r has a block a BLOCK_Q tokens, and one more.

    Its first block is ``qo_indptr[r] // BLOCK_Q + r``, which grows with r, so that a binary search finds it.
    """
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        first = tl.load(qo_indptr + middle) // BLOCK_Q + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _slots(n, page_row, key_end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pool slots of the BLOCK_N keys from ``n`` on; those past ``key_end`` are in page 0.

    Without a PAGE_SIZE they are counted from the request's first key.
    """
    offsets = tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        return (n + offsets).to(tl.int64)
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(page_row + n // PAGE_SIZE)
        return page.to(tl.int64) * PAGE_SIZE + (n % PAGE_SIZE + offsets)
    positions = n + offsets
    pages = tl.load(page_row + positions // PAGE_SIZE, mask=positions < key_end, other=0.0)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit
def _unpaired(pairs):
    """Return the (even, odd) columns, in fp16, of e4m3fn values that were loaded as int16, two neighbours at a time.

    16 bits is what NVIDIA's matrix loads transpose; bytes of V, summed over its keys, would be read one by one.
    Two keys come in a register: (e0 o0 e1 o1) becomes (e0 e1) and (o0 o1).
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b16 a, b; .reg .b32 x, y;
             mov.b32 {a, b}, $2;
             cvt.rn.f16x2.e4m3x2 x, a;
             cvt.rn.f16x2.e4m3x2 y, b;
             prmt.b32 $0, x, y, 0x5410;
             prmt.b32 $1, x, y, 0x7632; }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _over_keys(
    acc, acc_odd, top, total, q, q_more, q_scale, position, page_row, k, v, k_stride, v_stride, begin, end, key_end,
    window, cap,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_MORE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DOT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Take keys ``begin`` to ``end`` into the running softmax (acc [M, V], top [M] in log2, total [M]).

    MASKED: some query of the block may not see some of these keys, or they are past the request's last one. BLOCK_MORE:
    ``q_more`` holds the columns from BLOCK_D on, so many and padding. PAIRS: dims count pairs of columns, ``acc`` and
    ``q`` hold the even ones, ``acc_odd`` and ``q_more`` the odd ones.
    """
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for n in tl.range(begin, end, BLOCK_N):
        slots = _slots(n, page_row, key_end, PAGE_SIZE, BLOCK_N)
        positions = n + tl.arange(0, BLOCK_N)
        k_at = k + slots[None, :] * k_stride + d[:, None]
        v_at = v + slots[:, None] * v_stride + dv[None, :]
        there = positions < key_end
        if MASKED:
            k_DN = tl.load(k_at, mask=there[None, :] & (d[:, None] < HEAD_DIM), other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k_DN = tl.load(k_at, mask=d[:, None] < HEAD_DIM, other=0.0)
        else:
            k_DN = tl.load(k_at)
        if PAIRS:
            k_even, k_odd = _unpaired(k_DN)
            scores = tl.dot(q_more, k_odd, tl.dot(q, k_even))
        else:
            scores = tl.dot(q, k_DN.to(DOT), input_precision="ieee")
        if BLOCK_MORE > 0:
            more = BLOCK_D + tl.arange(0, BLOCK_MORE)
            more_at = k + slots[None, :] * k_stride + more[:, None]
            if MASKED:
                more_DN = tl.load(more_at, mask=there[None, :] & (more[:, None] < HEAD_DIM), other=0.0)
            elif HEAD_DIM < BLOCK_D + BLOCK_MORE:
                more_DN = tl.load(more_at, mask=more[:, None] < HEAD_DIM, other=0.0)
            else:
                more_DN = tl.load(more_at)
            scores = tl.dot(q_more, more_DN.to(DOT), scores, input_precision="ieee")
        if HAS_CAP:  # cap * tanh, in log2
            scores = cap * _LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (q_scale * (2.0 * _LOG2E))[:, None]) + 1.0))
        if MASKED:
            seen = (positions[None, :] <= position[:, None]) & there[None, :]
            if HAS_WINDOW:
                seen = seen & (positions[None, :] >= position[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
        # q_scale is positive: the largest score stays the largest, and one instruction scales and subtracts
        new_top = tl.maximum(top, tl.max(scores, 1) if HAS_CAP else tl.max(scores, 1) * q_scale)
        base = tl.where(new_top == -float("inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2((scores if HAS_CAP else scores * q_scale[:, None]) - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        if MASKED:
            v_NV = tl.load(v_at, mask=there[:, None] & (dv[None, :] < V_DIM), other=0.0)
        elif V_DIM != BLOCK_V:
            v_NV = tl.load(v_at, mask=dv[None, :] < V_DIM, other=0.0)
        else:
            v_NV = tl.load(v_at)
        weights = weights.to(DOT)
        acc = acc * fade[:, None]
        if PAIRS:
            v_even, v_odd = _unpaired(v_NV)
            acc_odd = tl.dot(weights, v_odd, acc_odd * fade[:, None])
            acc = tl.dot(weights, v_even, acc)
        else:
            acc = tl.dot(weights, v_NV.to(DOT), acc, input_precision="ieee")
        top = new_top
    return acc, acc_odd, top, total


@triton.jit
def _finished(acc, top, total, sink, v_scale, HAS_SINKS: tl.constexpr):
    """Return (out, natural-log lse) of a whole softmax; no key seen: zeros and -inf."""
    blind = top == -float("inf")
    if HAS_SINKS:  # the sink may be the largest score by far
        sink = sink * _LOG2E
        largest = tl.maximum(top, sink)
        fade = tl.where(blind, 1.0, tl.exp2(top - largest))
        acc, total = acc * fade[:, None], total * fade + tl.where(blind, 0.0, tl.exp2(sink - largest))
        top = largest
    lse = (top + tl.log2(tl.where(blind, 1.0, total))) / _LOG2E
    out = acc * (v_scale / tl.where(blind, 1.0, total))[:, None]
    return out, tl.where(blind, -float("inf"), lse)


@triton.jit
def _write_nothing(
    out, lse, token, heads, mask, HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, HAS_LSE: tl.constexpr
):
    """Write zeros and -inf to the ``heads`` of a row of no request, BLOCK_V columns at a time."""
    rows = tl.zeros_like(heads).to(tl.int64) + token * HEADS + heads
    for first in tl.range(0, V_DIM, BLOCK_V):
        dv = first + tl.arange(0, BLOCK_V)
        zeros = (rows[:, None] * 0 + dv[None, :] * 0).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * V_DIM + dv[None, :], zeros, mask=mask[:, None] & (dv[None, :] < V_DIM))
    if HAS_LSE:
        tl.store(lse + rows, (rows * 0).to(tl.float32) - float("inf"), mask=mask)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "pages_stride"])
def _attend(
    q, k, v, out, lse, qo_indptr, seq_lens, pages, sinks, num_requests, num_tokens, q_stride_t, q_stride_h, k_stride,
    k_stride_h, v_stride, v_stride_h, pages_stride, scale, cap, v_scale, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_MORE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_A_REQUEST: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, NARROW: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of queries of one KV head over one range of its keys.

    ``out``, ``lse``: the op's, but with IS_SPLIT [ranges, tokens, heads, V_DIM] and [ranges, tokens, heads] in float32,
    lse in log2. BLOCK_MORE: columns of q and k past BLOCK_D, and padding. PAGE_SIZE 0: a request's keys lie in one run
    of slots, whose first stands in ``pages``. BLOCK_A_REQUEST: every request has one block. NARROW: q in bf16 is
    brought into fp16. PAIRS: ``k`` and ``v`` are int16, each of two float8 columns; dims count them, and so do their
    strides. Numbers that change from step
    to step are not constants: each would compile anew.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head, block, split = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS, tl.program_id(1)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows % GROUP
    if (block == 0) & (not IS_SPLIT):  # rows of no request; with ranges the reduction writes them
        for token in tl.range(tl.load(qo_indptr + num_requests), num_tokens):
            _write_nothing(out, lse, token, heads, rows < GROUP, HEADS, 2 * V_DIM if PAIRS else V_DIM, BLOCK_V, HAS_LSE)
    if BLOCK_A_REQUEST:
        request, first = block, 0
    else:
        block = (
            tl.num_programs(0) // KV_HEADS - 1 - block
        )  # the last queries of a request see most keys: they start first
        request = _request_of(block, qo_indptr, num_requests, BLOCK_Q)
        first = (block - (tl.load(qo_indptr + request) // BLOCK_Q + request)) * BLOCK_Q
    q_begin, q_end, seq_len = (
        tl.load(qo_indptr + request),
        tl.load(qo_indptr + request + 1),
        tl.load(seq_lens + request),
    )
    q_len = q_end - q_begin
    if first >= q_len:
        return
    query = first + rows // GROUP
    real = (rows < BLOCK_Q * GROUP) & (query < q_len)
    start = seq_len - q_len if CAUSAL else seq_len  # of the queries: position of the first
    position = start + query
    row_THs = (q_begin + query).to(tl.int64) * HEADS + heads

    key_end = tl.minimum(seq_len, start + first + BLOCK_Q)
    key_begin = 0
    if HAS_WINDOW:
        key_begin = tl.maximum(start + first - window, 0) // BLOCK_N * BLOCK_N
    blocks_each = tl.cdiv(tl.cdiv(tl.maximum(key_end - key_begin, 0), BLOCK_N), tl.num_programs(1))
    begin = key_begin + split * blocks_each * BLOCK_N
    end = tl.minimum(begin + blocks_each * BLOCK_N, key_end)

    q_row = q + (q_begin + query).to(tl.int64)[:, None] * q_stride_t + heads[:, None] * q_stride_h
    q_there = real[:, None] & (d[None, :] < HEAD_DIM)
    q_MD = tl.load(q_row + (2 * d[None, :] if PAIRS else d[None, :]), mask=q_there, other=0.0)
    q_more = q_MD
    if PAIRS:
        q_more = tl.load(q_row + 2 * d[None, :] + 1, mask=q_there, other=0.0)
    elif BLOCK_MORE > 0:
        more = BLOCK_D + tl.arange(0, BLOCK_MORE)
        q_more = tl.load(q_row + more[None, :], mask=real[:, None] & (more[None, :] < HEAD_DIM), other=0.0)
    q_scale = tl.full([BLOCK_M], scale, tl.float32)
    if NARROW:  # by its largest value, as fp16 ends at 65504
        largest = tl.maximum(tl.max(tl.abs(q_MD.to(tl.float32)), 1), tl.max(tl.abs(q_more.to(tl.float32)), 1))
        largest = tl.maximum(largest, 1e-30)
        q_MD, q_more = q_MD.to(tl.float32) / largest[:, None], q_more.to(tl.float32) / largest[:, None]
        q_scale = q_scale * largest
    q_MD, q_more = q_MD.to(DOT), q_more.to(DOT)
    if not HAS_CAP:
        q_scale = q_scale * _LOG2E

    acc, acc_odd = tl.zeros([BLOCK_M, BLOCK_V], tl.float32), tl.zeros([BLOCK_M, BLOCK_V if PAIRS else 1], tl.float32)
    top, total = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    page_row = pages + request.to(tl.int64) * pages_stride
    k_head, v_head = k + kv_head * k_stride_h, v + kv_head * v_stride_h
    if PAGE_SIZE == 0:
        first_slot = tl.load(page_row).to(tl.int64)
        k_head += first_slot * k_stride
        v_head += first_slot * v_stride
    seen_by_all = begin
    if BLOCK_M >= 64 and not HAS_WINDOW:  # many queries compute more than they wait: masks only where needed
        seen_by_all = tl.maximum(tl.minimum(end, start + first + 1), begin)
        seen_by_all = begin + (seen_by_all - begin) // BLOCK_N * BLOCK_N
        acc, acc_odd, top, total = _over_keys(
            acc, acc_odd, top, total, q_MD, q_more, q_scale, position, page_row, k_head, v_head, k_stride, v_stride,
            begin, seen_by_all, key_end, window, cap, HAS_CAP, HAS_WINDOW, False, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_MORE,
            BLOCK_V, BLOCK_N, PAGE_SIZE, DOT, PAIRS,
        )  # fmt: skip
    acc, acc_odd, top, total = _over_keys(
        acc, acc_odd, top, total, q_MD, q_more, q_scale, position, page_row, k_head, v_head, k_stride, v_stride,
        seen_by_all, end, key_end, window, cap, HAS_CAP, HAS_WINDOW, True, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_MORE,
        BLOCK_V, BLOCK_N, PAGE_SIZE, DOT, PAIRS,
    )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    V_COLUMNS: tl.constexpr = 2 * V_DIM if PAIRS else V_DIM
    dv = tl.arange(0, 2 * BLOCK_V if PAIRS else BLOCK_V)

    if not IS_SPLIT:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) if HAS_SINKS else top
        acc, lse_M = _finished(acc, top, total, sink, v_scale, HAS_SINKS)
        if HAS_LSE:
            tl.store(lse + row_THs, lse_M, mask=real)
        tl.store(out + row_THs[:, None] * V_COLUMNS + dv[None, :], acc, mask=real[:, None] & (dv[None, :] < V_COLUMNS))
    else:
        row_THs += split.to(tl.int64) * num_tokens * HEADS
        empty = top == -float("inf")
        tl.store(lse + row_THs, tl.where(empty, top, top + tl.log2(tl.where(empty, 1.0, total))), mask=real)
        acc = acc / total[:, None]
        written = real & (total > 0)
        tl.store(
            out + row_THs[:, None] * V_COLUMNS + dv[None, :], acc, mask=written[:, None] & (dv[None, :] < V_COLUMNS)
        )


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "splits"])
def _reduce(
    parts, part_lses, out, lse, qo_indptr, sinks, num_requests, num_tokens, splits, v_scale,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the ranges of one query head: ``parts``, ``part_lses`` as ``_attend`` writes them."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * HEADS + head
    s, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    of_a_request = token < tl.load(qo_indptr + num_requests)
    rows = s.to(tl.int64) * num_tokens * HEADS + row
    lse_S = tl.load(part_lses + rows, mask=(s < splits) & of_a_request, other=-float("inf"))
    top = tl.max(lse_S, 0)
    weight_S = tl.exp2(lse_S - tl.where(top == -float("inf"), 0.0, top))
    there = (lse_S > -float("inf"))[:, None] & (dv[None, :] < V_DIM)
    part_SV = tl.load(parts + rows[:, None] * V_DIM + dv[None, :], mask=there, other=0.0)
    acc_1V = tl.sum(part_SV * weight_S[:, None], 0)[None, :]
    top_1, total_1 = tl.full([1], 0.0, tl.float32) + top, tl.full([1], 0.0, tl.float32) + tl.sum(weight_S, 0)
    sink = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else 0.0
    out_1V, lse_1 = _finished(acc_1V, top_1, total_1, sink, v_scale, HAS_SINKS)
    tl.store(out + row * V_DIM + dv[None, :], out_1V, mask=dv[None, :] < V_DIM)
    if HAS_LSE:
        tl.store(lse + row + tl.arange(0, 1), lse_1)


_TRITON = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def paged_attention(
    q_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    k_scale: float,
    v_scale: float,
    window: int,
    logit_cap: float,
    return_lse: bool,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``atom_plugin.ops.paged_attention.paged_attention``; scratch of the ranges is allocated for each call."""
    (num_tokens, num_heads, head_dim), kv_heads, v_dim = q_THD.shape, k_pages.shape[2], v_pages.shape[3]
    out_THD = torch.empty(num_tokens, num_heads, v_dim, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_THD.device) if return_lse else None
    if num_tokens == 0 or batch.seq_lens_B.shape[0] == 0:
        return out_THD.zero_(), None if lse_TH is None else lse_TH.fill_(-torch.inf)
    if not scale * k_scale > 0:
        raise ValueError(f"paged_attention: scale {scale} times k_scale {k_scale} has to be positive")
    group, requests, dot = num_heads // kv_heads, batch.seq_lens_B.shape[0], dot_dtype(q_THD.dtype, k_pages.dtype)
    shape = shape_for(
        device.arch(), rows=batch.max_q_len * group, all_rows=num_tokens * num_heads,
        head_dim=max(head_dim, v_dim), itemsize=dot.itemsize, float8=k_pages.dtype.itemsize == 1,
    )  # fmt: skip
    tokens_a_block = shape.block_m // group
    a_block_a_request = batch.max_q_len <= tokens_a_block
    blocks = requests if a_block_a_request else num_tokens // tokens_a_block + requests
    splits = splits_for(programs=kv_heads * blocks, beside=shape.beside, max_seq_len=batch.max_seq_len)
    parts, part_lses = out_THD, lse_TH
    if splits > 1:
        part_lses = torch.empty(splits, num_tokens, num_heads, dtype=torch.float32, device=q_THD.device)
        parts = part_lses.new_empty(*part_lses.shape, v_dim)
    pairs = k_pages.dtype == torch.float8_e4m3fn and dot == torch.float16 and device.arch().startswith("sm")
    k_pages, v_pages = (pages.view(torch.int16) if pairs else pages for pages in (k_pages, v_pages))
    block_d, block_more = column_blocks(k_pages.shape[3], in_one=pairs)
    _attend[(kv_heads * blocks, splits)](
        q_THD, k_pages, v_pages, parts, parts if part_lses is None else part_lses, batch.qo_indptr_B1,
        batch.seq_lens_B, batch.page_table.pages_BP, q_THD if sinks_H is None else sinks_H, requests, num_tokens,
        q_THD.stride(0), q_THD.stride(1), slot_stride(k_pages), k_pages.stride(2), slot_stride(v_pages),
        v_pages.stride(2), batch.page_table.pages_BP.stride(0),
        scale * k_scale / logit_cap if logit_cap > 0 else scale * k_scale, logit_cap, v_scale, window,
        GROUP=group, HEADS=num_heads, HEAD_DIM=k_pages.shape[3], V_DIM=v_pages.shape[3], BLOCK_D=block_d,
        BLOCK_MORE=block_more, BLOCK_V=max(16, triton.next_power_of_2(v_pages.shape[3])), BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, PAGE_SIZE=0 if batch.consecutive else batch.page_table.page_size, IS_SPLIT=splits > 1,
        BLOCK_A_REQUEST=a_block_a_request, HAS_CAP=logit_cap > 0, HAS_WINDOW=window != NO_WINDOW,
        HAS_SINKS=sinks_H is not None, HAS_LSE=return_lse or splits > 1,
        NARROW=dot == torch.float16 and q_THD.dtype != dot, DOT=_TRITON[dot], PAIRS=pairs, CAUSAL=batch.causal,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if splits > 1:
        _reduce[(num_tokens, num_heads)](
            parts, part_lses, out_THD, out_THD if lse_TH is None else lse_TH, batch.qo_indptr_B1,
            q_THD if sinks_H is None else sinks_H, requests, num_tokens, splits, v_scale,
            HEADS=num_heads, V_DIM=v_dim, BLOCK_V=triton.next_power_of_2(v_dim), BLOCK_S=8 if splits <= 8 else 64,
            HAS_SINKS=sinks_H is not None, HAS_LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return out_THD, lse_TH
