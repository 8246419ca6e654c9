"""Calls of AITER's paged attentions: a batch and pages of ours as each function takes them, always by keyword."""

from __future__ import annotations

import math
from typing import Any

import torch

from atom_plugin.ops.aiter_rows import number_on
from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch
from atom_plugin.ops.ragged.kernel import pack, zero_blind

_PARTITION = 256  # keys a program of paged_attention_ragged; the only size that it has
_PARTITIONS_A_LOOP = 64  # its build holds ceil(partitions / 64): another count is another build


class UnifiedAttention:
    """Triton, every phase. Reads each request's last page to its end: what no key was stored to has to be finite.

    SGLang's pools are: they are zeroed when they are allocated.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
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
        """See ``atom_plugin.ops.paged_attention.paged_attention``."""
        _check(q_THD, k_pages, v_pages, batch, return_lse)
        if sinks_H is not None and sinks_H.shape != q_THD.shape[1:2]:
            raise ValueError(f"sinks {tuple(sinks_H.shape)} for {q_THD.shape[1]} query heads: takes one a head")
        out_THD = _out_for(q_THD, batch)
        if not _has_work(q_THD, batch):
            return out_THD, None
        is_float8 = k_pages.dtype.itemsize == 1
        self._function(
            q=_dense_dims(q_THD),
            k=k_pages,
            v=v_pages,
            out=out_THD,
            cu_seqlens_q=batch.qo_indptr_B1,
            # main takes 1 for "row b is the query of request b"
            max_seqlen_q=1 if batch.one_query_each else max(2, batch.max_q_len),
            seqused_k=batch.seq_lens_B,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=scale if is_float8 else scale * k_scale,
            causal=True,
            window_size=(window, 0) if window != NO_WINDOW else (-1, -1),
            block_table=batch.page_table.pages_BP,
            softcap=logit_cap,
            q_descale=None,
            k_descale=number_on(q_THD.device, k_scale) if is_float8 else None,
            v_descale=number_on(q_THD.device, v_scale) if is_float8 else None,
            sinks=sinks_H,
        )
        _zero_blind(out_THD, batch)
        return (out_THD if is_float8 or v_scale == 1.0 else out_THD.mul_(v_scale)), None


class PagedAttentionRagged:
    """HIP, decode. Every request has a key: its new one."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
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
        """See ``atom_plugin.ops.paged_attention.paged_attention``."""
        _check(q_THD, k_pages, v_pages, batch, return_lse)
        num_tokens, heads, dim = q_THD.shape
        if (
            not batch.one_query_each
            or num_tokens != batch.seq_lens_B.shape[0]
            or window != NO_WINDOW
            or sinks_H is not None
        ):
            raise ValueError(
                f"{num_tokens} queries of {batch.seq_lens_B.shape[0]} requests, up to {batch.max_q_len} each, window "
                f"{window}, sinks {sinks_H is not None}: takes one query a request, no window and no sinks"
            )
        if k_pages.stride() != v_pages.stride():
            raise ValueError(f"pages with strides {k_pages.stride()} of k, {v_pages.stride()} of v: takes equal ones")
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if num_tokens == 0:
            return out_THD, None
        is_float8 = k_pages.dtype.itemsize == 1
        ragged = batch.once("ragged pages", lambda: pack(batch.seq_lens_B, batch.page_table))
        partitions = _partitions(min(batch.max_seq_len, k_pages.shape[0] * k_pages.shape[1]))
        workspace = q_THD.new_empty(
            num_tokens * heads * partitions * (2 * torch.float32.itemsize + dim * q_THD.dtype.itemsize),
            dtype=torch.uint8,
        )
        self._function(
            out=out_THD,
            workspace_buffer=workspace,
            query=_dense_heads(q_THD),
            key_cache=k_pages,
            value_cache=v_pages,
            scale=scale if is_float8 else scale * k_scale,
            kv_indptr=ragged.indptr_B1,
            kv_page_indices=ragged.pages_N,
            kv_last_page_lens=ragged.last_lens_B,
            block_size=batch.page_table.page_size,
            max_num_partitions=partitions,
            alibi_slopes=None,
            kv_cache_dtype="fp8" if is_float8 else "auto",
            kv_cache_layout="NHD",
            logits_soft_cap=logit_cap,
            k_scale=number_on(q_THD.device, k_scale if is_float8 else 1.0),
            v_scale=number_on(q_THD.device, v_scale if is_float8 else 1.0),
        )
        return (out_THD if is_float8 or v_scale == 1.0 else out_THD.mul_(v_scale)), None


def _partitions(max_seq_len: int) -> int:
    """Return how many partitions hold ``max_seq_len`` keys; past one loop a power of two of loops, for few builds."""
    partitions = max(1, math.ceil(max_seq_len / _PARTITION))
    if partitions <= _PARTITIONS_A_LOOP:
        return partitions
    loops = math.ceil(partitions / _PARTITIONS_A_LOOP)
    return _PARTITIONS_A_LOOP * (1 << (loops - 1).bit_length())


class BatchPrefill:
    """CK, extend."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
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
        """See ``atom_plugin.ops.paged_attention.paged_attention``."""
        _check(q_THD, k_pages, v_pages, batch, return_lse)
        if sinks_H is not None:
            raise ValueError("attention sinks: takes none")
        out_THD = _out_for(q_THD, batch)
        if not _has_work(q_THD, batch):
            return out_THD, None
        ragged = batch.once("ragged pages", lambda: pack(batch.seq_lens_B, batch.page_table))
        pages = [k_pages, v_pages] if batch.page_table.page_size > 1 else [k_pages.squeeze(1), v_pages.squeeze(1)]
        lengths = {"kv_last_page_lens": ragged.last_lens_B} if batch.page_table.page_size > 1 else {}
        self._function(
            q=_dense_dims(q_THD),
            k=pages[0],
            v=pages[1],
            cu_seqlens_q=batch.qo_indptr_B1,
            kv_indptr=ragged.indptr_B1,
            kv_page_indices=ragged.pages_N,
            max_seqlen_q=batch.max_q_len,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=scale * k_scale,
            logits_soft_cap=logit_cap,
            causal=True,
            window_size=(window, 0) if window != NO_WINDOW else (-1, 0),
            out=out_THD,
            **lengths,
        )
        _zero_blind(out_THD, batch)
        return (out_THD if v_scale == 1.0 else out_THD.mul_(v_scale)), None


def _check(
    q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, return_lse: bool
) -> None:
    """Raise ValueError for what would be read wrongly, or out of bounds: AITER checks little of it, or aborts."""
    if return_lse or not batch.causal:
        raise ValueError(f"lse {return_lse}, causal {batch.causal}: takes causal attention without an lse")
    table, requests = batch.page_table, batch.seq_lens_B.shape[0]
    if q_THD.dim() != 3 or k_pages.dim() != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"queries {tuple(q_THD.shape)}, pages {tuple(k_pages.shape)} and {tuple(v_pages.shape)}: takes [tokens, "
            f"heads, dim] and equal [pages, page size, KV heads, dim]"
        )
    if k_pages.shape[1] != table.page_size or k_pages.shape[3] != q_THD.shape[2] or q_THD.shape[1] % k_pages.shape[2]:
        raise ValueError(
            f"pages {tuple(k_pages.shape)} for queries {tuple(q_THD.shape)} and a page table of page size "
            f"{table.page_size}: page size and head dim have to agree, and KV heads to divide the query heads"
        )
    if k_pages.dtype != v_pages.dtype or k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise ValueError(
            f"pages of {k_pages.dtype} and {v_pages.dtype} with strides {k_pages.stride()} and {v_pages.stride()}: "
            f"takes one dtype, dense along the head dim"
        )
    indices = (batch.qo_indptr_B1, batch.seq_lens_B, table.pages_BP)
    if [index.dtype for index in indices] != [torch.int32] * 3:
        raise ValueError(f"indices of {', '.join(str(index.dtype) for index in indices)}: takes int32")
    if batch.qo_indptr_B1.shape != (requests + 1,) or table.pages_BP.shape[:1] != (requests,):
        raise ValueError(
            f"qo_indptr {tuple(batch.qo_indptr_B1.shape)} and pages {tuple(table.pages_BP.shape)} for {requests} "
            f"requests: takes [requests + 1] and [requests, pages]"
        )
    if table.pages_BP.stride(1) != 1 or table.pages_BP.shape[1] * table.page_size < batch.max_seq_len:
        raise ValueError(
            f"a page table {tuple(table.pages_BP.shape)} with strides {table.pages_BP.stride()} for up to "
            f"{batch.max_seq_len} keys: has to be dense along pages, and to hold them"
        )


def _has_work(q_THD: torch.Tensor, batch: PagedBatch) -> bool:
    return min(q_THD.shape[0], batch.seq_lens_B.shape[0], batch.max_q_len, batch.max_seq_len) > 0


def _out_for(q_THD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """Return memory for the output, without a value where the batch has work."""
    make = torch.empty_like if _has_work(q_THD, batch) else torch.zeros_like
    return make(q_THD, memory_format=torch.contiguous_format)


def _zero_blind(out_THD: torch.Tensor, batch: PagedBatch) -> None:
    """Zero what AITER leaves NaN or unwritten: queries that see no key, and rows that belong to no request.

    Not in a decode batch: there each row is a request's, and sees at least its own key.
    """
    if not batch.one_query_each:
        zero_blind(out_THD, batch.qo_indptr_B1, batch.seq_lens_B)


def _dense_dims(q_THD: torch.Tensor) -> torch.Tensor:
    return q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()


def _dense_heads(q_THD: torch.Tensor) -> torch.Tensor:
    return q_THD if q_THD.stride()[1:] == (q_THD.shape[2], 1) else q_THD.contiguous()
