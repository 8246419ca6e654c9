"""MLA attention in Triton: keys split over programs, then one reduction over the splits.

A program holds a tile of rows, which are (query, head) pairs of one request, and walks its share of the request's
keys. A tile of latent rows is read from memory once and serves both products, scores and values. What a program's
share is comes from ``seq_lens_B`` on the device, so the grid depends on shapes and bounds only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_plugin import device
from atom_plugin.ops.mla_attention.config import Config, choose_tiles, split
from atom_plugin.ops.paged_attention import PagedBatch

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
# where a row has seen no key yet; finite, so that exp2(-inf - lowest) is 0 and exp2(lowest - lowest) is no NaN
_LOWEST = tl.constexpr(-1e30)
_REDUCED_AT_ONCE = 64
#: Chips where the reduction is launched while the splits run and waits for them: programmatic dependent launch. It
#: rests on three things: the splits themselves are launched as usual, so that what came before them is done when the
#: reduction reads the bounds; every program of the reduction waits before it returns or reads a partial result; and
#: the splits write neither ``qo_indptr`` nor ``seq_lens``.
_LAUNCHES_EARLY = ("sm90",)


@triton.jit
def _used_splits(seq_len, num_splits, min_tiles, KEYS: tl.constexpr):
    """Return (keys a split, splits that have any) of a request: the same in the split kernel and in the reduction."""
    tiles = (seq_len + KEYS - 1) // KEYS
    tiles_per_split = tl.maximum((tiles + num_splits - 1) // num_splits, min_tiles)
    return tiles_per_split * KEYS, (tiles + tiles_per_split - 1) // tiles_per_split


@triton.jit
def _bounds_of(request, num_requests, qo_indptr, seq_lens):
    """Return (first token, end token, keys) of a request, read at once: one wait for memory instead of three.

    The one after the last has no tokens, and keys that mean nothing.
    """
    first_token = tl.load(qo_indptr + request)
    end_token = tl.load(qo_indptr + tl.minimum(request + 1, num_requests))
    return first_token, end_token, tl.load(seq_lens + tl.minimum(request, num_requests - 1))


@triton.jit
def _zero_rows_of_no_request(
    out, lse, first_row, step, end_row, LATENT: tl.constexpr, ROWS: tl.constexpr, WRITE_LSE: tl.constexpr
):
    """Write what a query without keys gets into the (token, head) rows first_row, first_row + step, ... in tiles."""
    columns = tl.arange(0, LATENT)
    for start in range(first_row, end_row, step):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < end_row
        zeros = tl.full([ROWS, LATENT], 0.0, dtype=out.dtype.element_ty)
        tl.store(out + rows[:, None] * LATENT + columns[None, :], zeros, mask=inside[:, None])
        if WRITE_LSE:
            tl.store(lse + rows, tl.full([ROWS], float("-inf"), dtype=tl.float32), mask=inside)


@triton.jit
def _pages_of(pages_row, start, last_key, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Return the pages of the keys start ... start + KEYS - 1: one for all of them where they share it.

    Keys past ``last_key`` give its page.
    """
    if PAGE_SIZE % KEYS == 0:
        pages = tl.load(pages_row + tl.minimum(start, last_key) // PAGE_SIZE)
    else:
        pages = tl.load(pages_row + tl.minimum(start + tl.arange(0, KEYS), last_key) // PAGE_SIZE)
    return pages


@triton.jit(do_not_specialize=["num_tokens", "stride_pages_row", "min_tiles"])
def _split_kernel(
    q,
    kv,
    out,
    lse,
    qo_indptr,
    seq_lens,
    pages,
    num_tokens,
    stride_q_token,
    stride_q_head,
    stride_pages_row,
    min_tiles,
    scale_log2,
    kv_scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend one tile of rows to one split of its request's keys; grid (row tiles, splits, requests + 1).

    Without IS_SPLIT ``out`` [tokens, heads, LATENT] and ``lse`` [tokens, heads] are the answer. Else they are float32
    [splits, tokens, heads, LATENT] and [splits, tokens, heads], the latter base 2; splits without keys stay unwritten.
    """
    request = tl.program_id(2)
    split = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    first_token, end_token, seq_len = _bounds_of(request, tl.num_programs(2) - 1, qo_indptr, seq_lens)
    if request == tl.num_programs(2) - 1:
        if not IS_SPLIT:
            _zero_rows_of_no_request(
                out,
                lse,
                first_token * HEADS + first_row,
                tl.num_programs(0) * ROWS,
                num_tokens * HEADS,
                LATENT,
                ROWS,
                WRITE_LSE,
            )
        return
    q_len = end_token - first_token
    if first_row >= q_len * HEADS:
        return
    keys_per_split, used_splits = _used_splits(seq_len, tl.num_programs(1), min_tiles, KEYS)
    if IS_SPLIT and split >= used_splits:
        return
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()

    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < q_len * HEADS
    # where position -1 stands, no key is seen: rows past the last one, and queries before the first key
    position = tl.where(is_row, seq_len - q_len + rows // HEADS, -1)
    q_rows = q + (first_token + rows // HEADS).to(tl.int64) * stride_q_token + (rows % HEADS) * stride_q_head
    # the latent columns in halves: two chains of products for the scores, where one would wait for each of its steps
    low = tl.arange(0, LATENT // 2)
    high = LATENT // 2 + low
    q_low = tl.load(q_rows[:, None] + low[None, :], mask=is_row[:, None], other=0.0)
    q_high = tl.load(q_rows[:, None] + high[None, :], mask=is_row[:, None], other=0.0)
    if ROPE > 0:
        rope = LATENT + tl.arange(0, ROPE)
        q_rope = tl.load(q_rows[:, None] + rope[None, :], mask=is_row[:, None], other=0.0)

    top = tl.full([ROWS], _LOWEST, dtype=tl.float32)
    total = tl.full([ROWS], 0.0, dtype=tl.float32)
    acc_low = tl.full([ROWS, LATENT // 2], 0.0, dtype=tl.float32)
    acc_high = tl.full([ROWS, LATENT // 2], 0.0, dtype=tl.float32)

    last_row = tl.minimum(first_row + ROWS, q_len * HEADS) - 1
    start = split * keys_per_split
    end = tl.minimum(start + keys_per_split, seq_len - q_len + last_row // HEADS + 1)
    pages_row = pages + request.to(tl.int64) * stride_pages_row
    # pages are looked up a tile ahead: loads of latent rows that waited for them would not be pipelined
    page = _pages_of(pages_row, start, tl.maximum(end - 1, 0), PAGE_SIZE, KEYS)
    for first_key in tl.range(start, end, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        # past the last key, that key again: every load is of the request's own rows, and no mask is needed
        in_page = tl.minimum(keys, end - 1) % PAGE_SIZE
        key_rows = kv + page.to(tl.int64) * (PAGE_SIZE * (LATENT + ROPE)) + in_page * (LATENT + ROPE)
        page = _pages_of(pages_row, first_key + KEYS, end - 1, PAGE_SIZE, KEYS)
        k_low = tl.load(key_rows[:, None] + low[None, :]).to(q_low.dtype)
        k_high = tl.load(key_rows[:, None] + high[None, :]).to(q_low.dtype)
        scores_high = tl.dot(q_high, tl.trans(k_high), input_precision="ieee")
        scores_low = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        if ROPE > 0:
            k_rope = tl.load(key_rows[:, None] + rope[None, :]).to(q_low.dtype)
            scores_low = tl.dot(q_rope, tl.trans(k_rope), scores_low, input_precision="ieee")
        # scaled apart: the compiler would make one chain of a plain sum of products
        scores = scores_low * scale_log2 + scores_high * scale_log2
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        top = new_top
        weights = tl.exp2(scores - top[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        weights = weights.to(q_low.dtype)
        acc_low = tl.dot(weights, k_low, acc_low * fade[:, None], input_precision="ieee")
        acc_high = tl.dot(weights, k_high, acc_high * fade[:, None], input_precision="ieee")

    sums = tl.where(total == 0.0, 1.0, total)  # a row that saw no key: acc is 0
    log_sums = tl.where(total == 0.0, float("-inf"), top + tl.log2(sums))
    # rows of a tile follow each other: one address and constant offsets, as the loop needs the registers
    first_index = first_token.to(tl.int64) * HEADS + first_row
    within = tl.arange(0, ROWS)
    if IS_SPLIT:
        first_index += split.to(tl.int64) * num_tokens * HEADS
        tl.store(lse + first_index + within, log_sums, mask=is_row)
    elif WRITE_LSE:
        tl.store(lse + first_index + within, log_sums * _LN_2, mask=is_row)
    norm = (kv_scale / sums)[:, None]
    places = within[:, None] * LATENT + low[None, :]
    out += first_index * LATENT
    tl.store(out + places, (acc_low * norm).to(out.dtype.element_ty), mask=is_row[:, None])
    tl.store(out + LATENT // 2 + places, (acc_high * norm).to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "min_tiles"])
def _reduce_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    qo_indptr,
    seq_lens,
    num_tokens,
    num_splits,
    min_tiles,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combine the splits of one row, COLUMNS columns of it; grid (rows of a request, column blocks, requests + 1)."""
    request = tl.program_id(2)
    row = tl.program_id(0)
    first_token, end_token, seq_len = _bounds_of(request, tl.num_programs(2) - 1, qo_indptr, seq_lens)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if request == tl.num_programs(2) - 1:
        if tl.program_id(1) == 0:
            _zero_rows_of_no_request(
                out,
                lse,
                first_token * HEADS + row,
                tl.num_programs(0),
                num_tokens * HEADS,
                LATENT,
                1,
                WRITE_LSE,
            )
        return
    q_len = end_token - first_token
    if row >= q_len * HEADS:
        return
    _, used_splits = _used_splits(seq_len, num_splits, min_tiles, KEYS)
    row_index = first_token.to(tl.int64) * HEADS + row
    stride_split = num_tokens.to(tl.int64) * HEADS

    splits = tl.arange(0, SPLITS_BLOCK)
    lse_S = tl.load(partial_lse + splits * stride_split + row_index, mask=splits < used_splits, other=float("-inf"))
    top = tl.max(lse_S, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse_S - base), axis=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.full([COLUMNS], 0.0, dtype=tl.float32)
    for first_split in range(0, used_splits, AT_ONCE):
        part = first_split + tl.arange(0, AT_ONCE)
        used = part < used_splits
        part_rows = part * stride_split + row_index
        part_lse = tl.load(partial_lse + part_rows, mask=used, other=float("-inf"))
        values = tl.load(partial_out + part_rows[:, None] * LATENT + columns[None, :], mask=used[:, None], other=0.0)
        acc += tl.sum(values * tl.exp2(part_lse - base)[:, None], axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total
    tl.store(out + row_index * LATENT + columns, acc.to(out.dtype.element_ty))
    if WRITE_LSE and tl.program_id(1) == 0:
        tl.store(lse + row_index, (top + tl.log2(total)) * _LN_2)


def mla_attention(
    q_THD: torch.Tensor,
    kv_pages: torch.Tensor,
    batch: PagedBatch,
    *,
    kv_lora_rank: int,
    scale: float,
    kv_scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``atom_plugin.ops.mla_attention.mla_attention``."""
    if batch.seq_lens_B.shape[0] == 0 or batch.page_table.pages_BP.shape[1] == 0:  # no key in the whole batch
        lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=torch.float32, device=q_THD.device)
        return q_THD.new_zeros(*q_THD.shape[:2], kv_lora_rank), lse_TH if return_lse else None
    num_rows = batch.max_q_len * q_THD.shape[1]
    config = split(
        choose_tiles(device.arch(), num_rows, q_THD.dtype.itemsize, kv_pages.dtype.itemsize),
        num_requests=batch.seq_lens_B.shape[0],
        num_rows=num_rows,
        max_seq_len=batch.max_seq_len,
        num_multiprocessors=device.num_multiprocessors(),
    )
    return launch(
        q_THD,
        kv_pages,
        batch,
        config,
        kv_lora_rank=kv_lora_rank,
        scale=scale,
        kv_scale=kv_scale,
        return_lse=return_lse,
    )


def launch(
    q_THD: torch.Tensor,
    kv_pages: torch.Tensor,
    batch: PagedBatch,
    config: Config,
    *,
    kv_lora_rank: int,
    scale: float,
    kv_scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernels as ``config`` cuts them; else as ``mla_attention``."""
    num_tokens, heads, dim = q_THD.shape
    num_requests = batch.seq_lens_B.shape[0]
    num_rows = max(1, batch.max_q_len) * heads
    out_THC = q_THD.new_empty(num_tokens, heads, kv_lora_rank)
    lse_TH = torch.empty(num_tokens, heads, dtype=torch.float32, device=q_THD.device) if return_lse else out_THC
    is_split = config.splits > 1
    early = is_split and device.arch() in _LAUNCHES_EARLY
    split_out, split_lse = out_THC, lse_TH
    if is_split:
        split_lse = torch.empty(config.splits, num_tokens, heads, dtype=torch.float32, device=q_THD.device)
        split_out = split_lse.new_empty(*split_lse.shape, kv_lora_rank)
    _split_kernel[(triton.cdiv(num_rows, config.rows), config.splits, num_requests + 1)](
        q_THD, kv_pages, split_out, split_lse, batch.qo_indptr_B1, batch.seq_lens_B, batch.page_table.pages_BP,
        num_tokens, q_THD.stride(0), q_THD.stride(1), batch.page_table.pages_BP.stride(0), config.min_tiles,
        scale * kv_scale * _LOG2_E, kv_scale,
        HEADS=heads, LATENT=kv_lora_rank, ROPE=dim - kv_lora_rank, PAGE_SIZE=batch.page_table.page_size,
        ROWS=config.rows, KEYS=config.keys, IS_SPLIT=is_split, WRITE_LSE=return_lse, EARLY=early,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if is_split:
        columns = min(128, kv_lora_rank)
        splits_block = triton.next_power_of_2(config.splits)
        _reduce_kernel[(num_rows, kv_lora_rank // columns, num_requests + 1)](
            split_out, split_lse, out_THC, lse_TH, batch.qo_indptr_B1, batch.seq_lens_B, num_tokens, config.splits,
            config.min_tiles,
            HEADS=heads, LATENT=kv_lora_rank, COLUMNS=columns, KEYS=config.keys, SPLITS_BLOCK=splits_block,
            AT_ONCE=min(_REDUCED_AT_ONCE, splits_block), WRITE_LSE=return_lse, EARLY=early,
            num_warps=4, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out_THC, lse_TH if return_lse else None
