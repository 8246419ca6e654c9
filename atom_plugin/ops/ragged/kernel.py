"""Around the attention kernels of other libraries: pack a page table, zero what they leave unwritten.

One launch each, of a size that depends on no length, so that both can be captured and replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.ragged import RaggedPages, RaggedSlots

#: Entries that name a page after the last request's: AITER's batch prefill reads up to 256 ahead.
TAIL = 256
_BLOCK = 1024
_PARTS = 8  # programs a request, so that one long request is not copied by one of them


@triton.jit
def _pack(
    seq_lens_ptr,
    pages_ptr,
    pages_stride,
    indptr_ptr,
    packed_ptr,
    last_lens_ptr,
    num_requests,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pack in units of UNIT tokens: PAGE_SIZE of them give pages, 1 gives slots."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    step = tl.num_programs(1) * BLOCK
    places = tl.arange(0, BLOCK)

    units_before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, request, BLOCK):
        others = first + places
        lens = tl.load(seq_lens_ptr + others, mask=others < request, other=0)
        units_before += (lens + UNIT - 1) // UNIT
    begin = tl.sum(units_before)
    seq_len = tl.load(seq_lens_ptr + request)
    num_units = (seq_len + UNIT - 1) // UNIT
    if part == 0:
        if request == 0:
            tl.store(indptr_ptr, 0)
        tl.store(indptr_ptr + request + 1, begin + num_units)
        tl.store(last_lens_ptr + request, seq_len - (num_units - 1) * UNIT)

    source = pages_ptr + request.to(tl.int64) * pages_stride
    target = packed_ptr + begin.to(tl.int64)
    for first in range(part * BLOCK, num_units, step):
        here = first + places < num_units
        tokens = (first + places) * UNIT
        pages = tl.load(source + tokens // PAGE_SIZE, mask=here)
        tl.store(target + first + places, pages * (PAGE_SIZE // UNIT) + tokens % PAGE_SIZE // UNIT, mask=here)
    if request == num_requests - 1:
        for first in range(part * BLOCK, TAIL, step):
            tl.store(target + num_units + first + places, 0, mask=first + places < TAIL)


def pack(seq_lens_B: torch.Tensor, page_table: PageTable) -> RaggedPages:
    """Return ``page_table`` as ragged pages in new memory.

    ``seq_lens_B``: int32 [requests], keys of each request, at least one request. The memory is as large as the table
    whatever the lengths are, and no length is read on the host. Raises ValueError for another dtype or shape.
    """
    packed = _packed(seq_lens_B, page_table, page_table.page_size, page_table.pages_BP.numel())
    return RaggedPages(indptr_B1=packed[0], pages_N=packed[1], last_lens_B=packed[2])


def pack_slots(seq_lens_B: torch.Tensor, page_table: PageTable, max_seq_len: int) -> RaggedSlots:
    """Return the slots of the keys that ``page_table`` names, in new memory.

    As ``pack``; the memory is for ``max_seq_len`` keys of each request, which has to bound every length.
    """
    packed = _packed(seq_lens_B, page_table, 1, seq_lens_B.shape[0] * max_seq_len)
    return RaggedSlots(indptr_B1=packed[0], slots_N=packed[1], ones_B=packed[2])


def _packed(
    seq_lens_B: torch.Tensor, page_table: PageTable, unit: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (bounds, at most ``most`` units of ``unit`` tokens and TAIL zeros, tokens in each last unit)."""
    pages_BP = page_table.pages_BP
    requests = seq_lens_B.shape[0]
    if seq_lens_B.dtype != torch.int32 or pages_BP.dtype != torch.int32:
        raise ValueError(f"lengths of {seq_lens_B.dtype} and pages of {pages_BP.dtype}: takes int32")
    if requests == 0 or pages_BP.shape[0] != requests or pages_BP.stride(1) != 1 or not seq_lens_B.is_contiguous():
        raise ValueError(
            f"lengths of shape {tuple(seq_lens_B.shape)} and strides {seq_lens_B.stride()}, pages of shape "
            f"{tuple(pages_BP.shape)} and strides {pages_BP.stride()}: takes [requests] and [requests, pages], dense "
            f"along the last axis, for at least one request"
        )
    indptr_B1 = seq_lens_B.new_empty(requests + 1)
    packed_N = seq_lens_B.new_empty(most + TAIL)
    last_lens_B = seq_lens_B.new_empty(requests)
    _pack[(requests, _PARTS)](
        seq_lens_B,
        pages_BP,
        pages_BP.stride(0),
        indptr_B1,
        packed_N,
        last_lens_B,
        requests,
        PAGE_SIZE=page_table.page_size,
        UNIT=unit,
        TAIL=TAIL,
        BLOCK=_BLOCK,
    )
    return indptr_B1, packed_N, last_lens_B


@triton.jit
def _zero_blind(out_ptr, num_rows, row_size, qo_indptr_ptr, seq_lens_ptr, num_requests, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    begin = tl.load(qo_indptr_ptr + request)
    if request < num_requests:
        num_blind = tl.load(qo_indptr_ptr + request + 1) - begin - tl.load(seq_lens_ptr + request)
    else:
        num_blind = num_rows - begin
    places = tl.arange(0, BLOCK)
    if num_blind > 0:
        rows = out_ptr + begin.to(tl.int64) * row_size
        for first in range(0, num_blind * row_size, BLOCK):
            tl.store(rows + first + places, 0.0, mask=first + places < num_blind * row_size)


def zero_blind(out_THD: torch.Tensor, qo_indptr_B1: torch.Tensor, seq_lens_B: torch.Tensor) -> None:
    """Write zeros to the rows of queries that see no key, and to those past the last request's.

    ``out_THD``: contiguous [tokens, query heads, v head dim]. The last query of a request is at its last key: of 4
    queries with 1 key, the first 3 see none. ``qo_indptr_B1``, ``seq_lens_B``: int32, as in PagedBatch.
    """
    if not out_THD.is_contiguous():
        raise ValueError(f"an output with strides {out_THD.stride()}: has to be contiguous")
    requests, row_size = seq_lens_B.shape[0], out_THD.shape[1] * out_THD.shape[2]
    _zero_blind[(requests + 1,)](out_THD, out_THD.shape[0], row_size, qo_indptr_B1, seq_lens_B, requests, BLOCK=_BLOCK)
