"""Calls of AITER's MLA: a batch and latent pages of ours as each function takes them, always by keyword.

AITER sees the pool as pages of one token, whatever SGLang's page size is: its kernels ignore larger ones
(ROCm/aiter #2996). Requests have equal numbers of queries, so that row ``b * max_q_len + i`` is query i of request b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom_plugin import device
from atom_plugin.ops.aiter_rows import number_on
from atom_plugin.ops.mla_attention import check
from atom_plugin.ops.mla_attention.aiter import LATENT, LAUNCHES, MOST_GLUON_QUERIES, ROPE, Launch, padded_heads
from atom_plugin.ops.paged_attention import PagedBatch
from atom_plugin.ops.ragged import RaggedSlots
from atom_plugin.ops.ragged.kernel import pack_slots, zero_blind

_GRANULARITY = 16  # keys: AITER cuts requests at multiples of it
_MOST_SPLITS = 16
_HEADS_OF_A_PROGRAM = 16  # of decode_attention_fwd_grouped_rope
_2_GIB = 1 << 31


@dataclass(frozen=True)
class _Work:
    """What get_mla_metadata_v1 wrote: which part of which request each compute unit attends to, and what is merged.

    All None: AITER launches without, and splits each request alike.
    """

    metadata_ptrs: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    info_set: torch.Tensor | None = None
    reduce_indptr: torch.Tensor | None = None
    reduce_final_map: torch.Tensor | None = None
    reduce_partial_map: torch.Tensor | None = None


class MlaDecode:
    """Assembly, 1 to 8 queries a request. Heads are padded to a multiple of 16 by copies, whose output is dropped."""

    def __init__(self, decode: Any, metadata_info: Any, metadata: Any) -> None:
        self._decode = decode
        self._metadata_info = metadata_info
        self._metadata = metadata

    def __call__(
        self,
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
        _check(q_THD, kv_pages, batch, kv_lora_rank)
        num_tokens, heads, _ = q_THD.shape
        padded = padded_heads(heads)
        launch = LAUNCHES[device.arch(), kv_pages.element_size()].get(padded)
        if launch is None or batch.max_q_len > launch.most_queries or (return_lse and not launch.returns_lse):
            raise ValueError(f"{heads} heads, {batch.max_q_len} queries a request, lse {return_lse}: takes {launch}")
        out_THC = q_THD.new_empty(num_tokens, padded, LATENT)
        slots = _slots(batch)
        work, splits, splits_indptr = self._split(launch, padded, q_THD, kv_pages, batch, slots)
        is_float8 = kv_pages.element_size() == 1
        _, lse_TH = self._decode(
            q=_tiled(q_THD, padded),
            kv_buffer=_finite_slot_0(kv_pages).view(-1, 1, 1, LATENT + ROPE),
            o=out_THC,
            qo_indptr=batch.qo_indptr_B1,
            kv_indptr=slots.indptr_B1,
            kv_indices=slots.slots_N,
            kv_last_page_lens=slots.ones_B,
            max_seqlen_q=batch.max_q_len,
            page_size=1,
            nhead_kv=1,
            sm_scale=scale * kv_scale,
            logit_cap=0.0,
            num_kv_splits=splits,
            num_kv_splits_indptr=splits_indptr,
            work_meta_data=work.metadata_ptrs,
            work_indptr=work.indptr,
            work_info_set=work.info_set,
            reduce_indptr=work.reduce_indptr,
            reduce_final_map=work.reduce_final_map,
            reduce_partial_map=work.reduce_partial_map,
            q_scale=None,
            kv_scale=number_on(q_THD.device, 1.0) if is_float8 else None,  # ours is in sm_scale and after the call
            intra_batch_mode=False,
            return_lse=return_lse,
            causal=True,
        )
        return _finished(out_THC[:, :heads], batch, kv_scale), lse_TH[:, :heads].contiguous() if return_lse else None

    def _split(
        self,
        launch: Launch,
        heads: int,
        q_THD: torch.Tensor,
        kv_pages: torch.Tensor,
        batch: PagedBatch,
        slots: RaggedSlots,
    ) -> tuple[_Work, int, torch.Tensor | None]:
        """Return how requests are split: (work, splits, and without work the first split of each request).

        Both counts are given to AITER. With None it drops the metadata of 32 and more requests on gfx950, and takes a
        count, and a tensor that a capture may have made, from a cache whose key is the size of our buffer.
        """
        if launch.planned:
            key = ("mla work", heads, q_THD.dtype, kv_pages.dtype)
            work = batch.once(key, lambda: self._plan(heads, q_THD.dtype, kv_pages.dtype, batch, slots))
            return work, device.num_multiprocessors(), None
        requests = batch.seq_lens_B.shape[0]
        # one split is another way through AITER, which leaves lse unwritten
        splits = max(2, min(_MOST_SPLITS, device.num_multiprocessors() // requests))
        starts_B1 = batch.once(
            ("mla splits", splits),
            lambda: torch.arange(0, (requests + 1) * splits, splits, dtype=torch.int32, device=q_THD.device),
        )
        return _Work(), splits, starts_B1

    def _plan(
        self, heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, batch: PagedBatch, slots: RaggedSlots
    ) -> _Work:
        """Return work for ``heads``, the padded count: the dtypes and the count select the kernel's tiles."""
        sizes = self._metadata_info(
            batch_size=batch.seq_lens_B.shape[0],
            max_seqlen_qo=batch.max_q_len,
            num_head_qo=heads,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            is_sparse=False,
            fast_mode=True,
        )
        where = batch.seq_lens_B.device
        work = _Work(*(torch.empty(size, dtype=dtype, device=where) for size, dtype in sizes))
        self._metadata(
            seqlens_qo_indptr=batch.qo_indptr_B1,
            seqlens_kv_indptr=slots.indptr_B1,
            kv_last_page_lens=slots.ones_B,
            num_heads_per_head_k=heads,
            num_heads_k=1,
            is_causal=True,
            work_metadata_ptrs=work.metadata_ptrs,
            work_info_set=work.info_set,
            work_indptr=work.indptr,
            reduce_indptr=work.reduce_indptr,
            reduce_final_map=work.reduce_final_map,
            reduce_partial_map=work.reduce_partial_map,
            page_size=1,
            kv_granularity=_GRANULARITY,
            max_seqlen_qo=batch.max_q_len,
            uni_seqlen_qo=batch.max_q_len,
            fast_mode=True,
            max_split_per_batch=-1,
            dtype_q=q_dtype,
            dtype_kv=kv_dtype,
        )
        return work


class MlaGluon:
    """Gluon on gfx950, 1 to 8 queries a request, any head count: what its tiles of 16 hold too much is masked."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
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
        _check(q_THD, kv_pages, batch, kv_lora_rank)
        if batch.max_q_len > MOST_GLUON_QUERIES:
            raise ValueError(f"{batch.max_q_len} queries a request: takes up to {MOST_GLUON_QUERIES}")
        slots = _slots(batch)
        q_bytes, slots_bytes = q_THD.shape[0] * q_THD.stride(0) * q_THD.element_size(), 4 * slots.slots_N.numel()
        if max(q_bytes, slots_bytes) >= _2_GIB:
            raise ValueError(f"queries of {q_bytes} and slots of {slots_bytes} bytes: takes less than {_2_GIB} each")
        q_BnHD = q_THD.unflatten(0, (-1, batch.max_q_len))
        out_THC = q_THD.new_empty(*q_THD.shape[:2], LATENT)
        _, lse_BnH = self._function(
            q_nope=q_BnHD[..., :LATENT],
            q_pe=q_BnHD[..., LATENT:],
            kv_c=_finite_slot_0(kv_pages).view(-1, LATENT + ROPE),
            o=out_THC.unflatten(0, (-1, batch.max_q_len)),
            page_table=slots.slots_N,
            seq_info=slots.indptr_B1,
            sm_scale=scale * kv_scale,
            kv_pe_offset=LATENT,
            use_2d_view=False,
            kv_scale=1.0,  # ours is in sm_scale and after the call
            min_kv_seq_len=1,
            return_lse=return_lse,
        )
        return _finished(out_THC, batch, kv_scale), lse_BnH.flatten(0, 1) if return_lse else None


class MlaGrouped:
    """Triton, decode. The function can rotate queries and keys first, which ours are already."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
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
        check(q_THD, kv_pages, batch, kv_lora_rank)
        num_tokens, heads, dim = q_THD.shape
        if num_tokens != batch.seq_lens_B.shape[0] or batch.max_q_len != 1 or return_lse:
            raise ValueError(
                f"{num_tokens} queries of {batch.seq_lens_B.shape[0]} requests, up to {batch.max_q_len} each, lse "
                f"{return_lse}: takes one query of each request and returns no lse"
            )
        slots = _slots(batch)
        programs = num_tokens * -(-heads // _HEADS_OF_A_PROGRAM)
        splits = _power_up_to(min(_MOST_SPLITS, max(1, device.num_multiprocessors() // programs)))
        rows_S1D = kv_pages.view(-1, 1, dim)
        out_THC = q_THD.new_empty(num_tokens, heads, kv_lora_rank)
        self._function(
            q=q_THD,
            k_buffer=rows_S1D,
            v_buffer=rows_S1D[..., :kv_lora_rank],
            o=out_THC,
            kv_indptr=slots.indptr_B1,
            kv_indices=slots.slots_N,
            k_pe_tokens=None,
            kv_lora_rank=kv_lora_rank,
            rotary_dim=dim - kv_lora_rank,
            cos_sin_cache=None,
            positions=None,
            # a split's output and, after it, its lse
            attn_logits=torch.empty(
                num_tokens, heads, splits, kv_lora_rank + 1, dtype=torch.float32, device=q_THD.device
            ),
            num_kv_splits=splits,
            sm_scale=scale * kv_scale,
            use_rope=False,
        )
        return _finished(out_THC, batch, kv_scale), None


def _power_up_to(number: int) -> int:
    """Return the largest power of two that is at most ``number``: each split count is a build."""
    return 1 << (number.bit_length() - 1)


def _check(q_THD: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, kv_lora_rank: int) -> None:
    """Raise ValueError for what would be read wrongly, or out of bounds: AITER checks little of it, or aborts."""
    check(q_THD, kv_pages, batch, kv_lora_rank)
    if (kv_lora_rank, q_THD.shape[2]) != (LATENT, LATENT + ROPE):
        raise ValueError(f"latent rows of {kv_lora_rank} of {q_THD.shape[2]}: takes {LATENT} of {LATENT + ROPE}")
    requests = batch.seq_lens_B.shape[0]
    if q_THD.shape[0] != requests * batch.max_q_len:
        raise ValueError(
            f"{q_THD.shape[0]} queries of {requests} requests, up to {batch.max_q_len} each: takes as many of each"
        )


def _slots(batch: PagedBatch) -> RaggedSlots:
    slots: RaggedSlots = batch.once(
        "ragged slots", lambda: pack_slots(batch.seq_lens_B, batch.page_table, batch.max_seq_len)
    )
    return slots


def _tiled(q_THD: torch.Tensor, heads: int) -> torch.Tensor:
    """Return contiguous queries of ``heads`` heads: those given, then copies of them, which are as finite as they."""
    num_tokens, given, dim = q_THD.shape
    if given == heads:
        return q_THD.contiguous()
    tiled = q_THD.new_empty(num_tokens, heads, dim)
    tiled[:, :given] = q_THD
    while given < heads:
        more = min(given, heads - given)
        tiled[:, given : given + more] = tiled[:, :more]
        given += more
    return tiled


def _finite_slot_0(kv_pages: torch.Tensor) -> torch.Tensor:
    """Return ``kv_pages`` after what is no finite number in slot 0 became 0.

    AITER's kernels read slot 0 where a key is masked and weight it with 0, and 0 * NaN is NaN. It is SGLang's dump:
    padded tokens are stored there, whatever they came to.
    """
    row_D = kv_pages.view(-1, kv_pages.shape[3])[0]
    if kv_pages.element_size() > 1:
        row_D.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    else:
        bytes_D = row_D.view(torch.uint8)
        is_fnuz = kv_pages.dtype == torch.float8_e4m3fnuz
        bytes_D.masked_fill_(bytes_D == 0x80 if is_fnuz else (bytes_D & 0x7F) == 0x7F, 0)
    return kv_pages


def _finished(out_THC: torch.Tensor, batch: PagedBatch, kv_scale: float) -> torch.Tensor:
    """Return the output in one piece, scaled, and zero where a query sees no key: in decode each sees its own."""
    out_THC = out_THC.contiguous()
    if batch.max_q_len > 1:
        zero_blind(out_THC, batch.qo_indptr_B1, batch.seq_lens_B)
    return out_THC if kv_scale == 1.0 else out_THC.mul_(kv_scale)
