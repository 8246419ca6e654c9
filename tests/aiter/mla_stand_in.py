"""AITER's MLA for the stand-in: what the real functions would abort on, get wrong, or compute, in float32.

Which kernel a call finds is worked out from the kernels that ROCm/aiter e4048607 ships (hsa/*/mla/mla_asm.csv) and from
its dispatch (csrc/py_itfs_cu/asm_mla.cu), for bfloat16 queries.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from atom_plugin import aiter_lib, device
from tests.aiter.stand_in import _indices, _ragged_slots, _scale_of, refuse_unless, silent_unless

COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
FLOAT8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
#: (cache, heads, with metadata, queries as the kernel has them; 0: any), without lse.
_BOTH = {("bf16", 128, 0, 0), ("bf16", 16, 1, 4), ("bf16", 16, 0, 1), ("bf16", 16, 0, 4), ("bf16", 16, 0, 8),
         ("bf16", 32, 0, 0), ("bf16", 64, 0, 0), ("bf16", 8, 0, 1), ("fp8", 16, 1, 4)}  # fmt: skip
KERNELS = {
    "gfx942": _BOTH | {("bf16", 8, 1, 2)},
    "gfx950": _BOTH | {("bf16", 64, 0, 1), ("bf16", 8, 0, 2), ("bf16", 32, 1, 4), ("bf16", 64, 1, 1)},
}
WITH_LSE = {"gfx942": set[Any](), "gfx950": {("bf16", 16, 1, 4), ("bf16", 32, 1, 4), ("bf16", 64, 1, 1)}}
#: The metadata that was planned: address of its pointers -> arguments of the call.
PLANNED: dict[int, dict[str, Any]] = {}
_BUFFERS = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def _kernel(cache: str, heads: int, is_planned: bool, queries: int) -> tuple[str, int, int, int]:
    arch = device.arch()
    if is_planned and arch == "gfx950" and cache == "bf16" and heads >= 16:
        return (cache, 32, 1, 4) if (heads * queries >= 128 and heads != 48) or heads > 64 else (cache, 64, 1, 1)
    if heads == 128:
        return cache, heads, int(is_planned and arch != "gfx942"), 0
    if heads == 16 and is_planned:
        return cache, heads, 1, 4 if queries <= 4 else queries
    if heads == 16 and cache == "bf16":
        return cache, heads, 0, 1 if queries == 1 else 4 if queries <= 4 else 8
    if heads in (32, 64) and not is_planned and cache == "bf16":
        return cache, heads, 0, 1 if (heads, queries) == (64, 1) else 0
    return cache, heads, int(is_planned), queries


def get_mla_metadata_info_v1(
    *, batch_size: int, max_seqlen_qo: int, num_head_qo: int, q_dtype: torch.dtype, kv_dtype: torch.dtype,
    is_sparse: bool, fast_mode: bool, num_kv_splits: int = 32, intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> tuple[tuple[Any, torch.dtype], ...]:  # fmt: skip
    """Sizes as AITER counts them, a little simplified."""
    refuse_unless(num_head_qo % 8 == 0, f"{num_head_qo} heads")
    assert not is_sparse and fast_mode and not intra_batch_mode
    units = COMPUTE_UNITS[device.arch()]
    tiles = math.ceil(max_seqlen_qo * num_head_qo / (128 if num_head_qo == 16 else 16))
    return (
        (2, torch.uint64),
        (units + 1, torch.int32),
        (((batch_size + units - 1) * tiles, 8), torch.int32),
        (batch_size * tiles + 1, torch.int32),
        ((batch_size * tiles, 2), torch.int32),
        (min(batch_size + units - 1, 2 * (units - 1)) * tiles, torch.int32),
    )


def get_mla_metadata_v1(**how: Any) -> None:
    """Note what was planned for, so that the launch can be held against it."""
    assert how["fast_mode"] and how["is_causal"] and not how["intra_batch_mode"]
    requests = how["kv_last_page_lens"].shape[0]
    for name in ("seqlens_qo_indptr", "seqlens_kv_indptr"):
        _indices(name, how[name], torch.int32, requests + 1)
    granularity = how["kv_granularity"]
    refuse_unless(how["page_size"] == 1 and granularity & (granularity - 1) == 0, "a power of two")
    heads = how["num_heads_per_head_k"]
    is_bfloat16 = how["dtype_q"] == how["dtype_kv"] == torch.bfloat16
    native = heads == 16 or (device.arch() == "gfx950" and is_bfloat16)
    refuse_unless(native or heads % 16 == 0, f"metadata for {heads} heads")
    silent_unless(how["dtype_q"] is not None and how["dtype_kv"] is not None, "metadata for bfloat16 by default")
    for name, numbers in (("work_indptr", torch.int32), ("work_metadata_ptrs", torch.uint64)):
        silent_unless(how[name].dtype == numbers, f"{name} of {how[name].dtype}")
    kept = {name: how[name].clone() for name in ("seqlens_qo_indptr", "seqlens_kv_indptr")}
    PLANNED[how["work_metadata_ptrs"].data_ptr()] = {**how, **kept}


def mla_decode_fwd(
    *, q: torch.Tensor, kv_buffer: torch.Tensor, o: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor, kv_last_page_lens: torch.Tensor, max_seqlen_q: int, page_size: int, nhead_kv: int,
    sm_scale: float, logit_cap: float, num_kv_splits: int | None, num_kv_splits_indptr: torch.Tensor | None,
    work_meta_data: torch.Tensor | None, q_scale: None, kv_scale: torch.Tensor | None, intra_batch_mode: bool,
    return_logits: bool, return_lse: bool, g_kv_indptr: None, cp_world_size: int, cp_rank: int, causal: bool,
    **work: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Causal attention of as many queries of each request over pages of one token."""
    arch, (tokens, heads, dim) = device.arch(), q.shape
    is_planned = work_meta_data is not None
    silent_unless(page_size == 1 and kv_buffer.shape[1:3] == (1, 1), "pages of one token (ROCm/aiter #2996)")
    refuse_unless(q.is_contiguous() and kv_buffer.is_contiguous() and nhead_kv == 1, "only support Q.is_contiguous()")
    refuse_unless(dim == 576 and kv_buffer.shape[3] == 576 and logit_cap == 0, f"rows of {dim}")
    silent_unless(o.is_contiguous() and o.shape == (tokens, heads, 512) and o.dtype == q.dtype, "the output")
    refuse_unless(q.dtype == torch.bfloat16 and q_scale is None, f"queries of {q.dtype}")
    refuse_unless(kv_buffer.dtype in (torch.bfloat16, FLOAT8[arch]), f"a cache of {kv_buffer.dtype}")
    cache = "bf16" if kv_buffer.dtype == torch.bfloat16 else "fp8"
    assert causal and not intra_batch_mode and not return_logits and g_kv_indptr is None and cp_world_size == 1
    silent_unless(num_kv_splits is not None, "AITER chooses: metadata dropped, or a count by the size of a buffer")
    folded = is_planned and heads > 16 and not (arch == "gfx950" and cache == "bf16")
    found = _kernel(cache, 16 if folded else heads, is_planned, max_seqlen_q)
    refuse_unless(
        found in (WITH_LSE if return_lse and is_planned else KERNELS)[arch],
        f"get_heuristic_kernel_mla: cannot get heuristic kernel! q_type:bf16 kv_type:{cache} gqa:{found[1]} "
        f"ps:{found[2]} qseqlen:{found[3]} lse:{int(return_lse and is_planned)}",
    )
    silent_unless(not (arch == "gfx942" and not is_planned and max_seqlen_q > 4), "ROCm/aiter #5679")
    _check_split(heads, is_planned, qo_indptr, kv_indptr, num_kv_splits, num_kv_splits_indptr)
    if is_planned:
        _check_plan(work_meta_data, work, heads, q.dtype, kv_buffer.dtype, max_seqlen_q, qo_indptr, kv_indptr)
    factor = 1.0 if cache == "bf16" else _scale_of("kv_scale", kv_scale)
    silent_unless(bool(kv_buffer[0].float().isfinite().all()), "slot 0 is read where keys are masked: 0 * NaN")
    bounds = _indices("qo_indptr", qo_indptr, torch.int32)
    silent_unless(bounds == [*range(0, tokens + 1, max_seqlen_q)], f"qo_indptr {bounds}: {max_seqlen_q} of each")
    ones = _indices("kv_last_page_lens", kv_last_page_lens, torch.int32, len(bounds) - 1)
    silent_unless(set(ones) == {1}, f"last page lengths {ones} of pages of one token")
    slots = _ragged_slots(kv_indptr, kv_indices, None, kv_buffer.shape[0], 1)
    lse = torch.empty(tokens, heads) if return_lse else None
    _attend(q, kv_buffer.flatten(0, 2).float() * factor, slots, max_seqlen_q, sm_scale, o, lse)
    return o, lse


def _check_split(
    heads: int, is_planned: bool, qo: torch.Tensor, kv: torch.Tensor, splits: Any, starts: torch.Tensor | None
) -> None:
    silent_unless(qo.shape == kv.shape, "qo_indptr and kv_indptr of different batches")
    if is_planned:
        refuse_unless(starts is None, "with metadata there are no splits of each request")
        silent_unless(splits == COMPUTE_UNITS[device.arch()], f"{splits} splits bound those of a request")
    else:
        assert starts is not None
        wanted = [*range(0, qo.shape[0] * splits, splits)]
        silent_unless(_indices("num_kv_splits_indptr", starts, torch.int32) == wanted, f"splits {starts}")
        silent_unless(splits > 1, "without a reduction there is no lse")


def _check_plan(
    pointers: Any, work: dict[str, Any], heads: int, q_dtype: Any, kv_dtype: Any, queries: int, qo: Any, kv: Any
) -> None:
    """Silent unless the metadata is of this very call."""
    silent_unless(pointers.data_ptr() in PLANNED, "metadata that nobody planned")
    plan = PLANNED[pointers.data_ptr()]
    found = (plan["num_heads_per_head_k"], plan["dtype_q"], plan["dtype_kv"], plan["max_seqlen_qo"])
    silent_unless(found == (heads, q_dtype, kv_dtype, queries), f"metadata for {found}: {heads} heads, {queries} each")
    silent_unless(plan["uni_seqlen_qo"] == queries, "folded heads are found by the number of queries")
    silent_unless(all(work[name] is plan[name] for name in _BUFFERS), "buffers of another plan")
    for name, now in (("seqlens_qo_indptr", qo), ("seqlens_kv_indptr", kv)):
        silent_unless(torch.equal(plan[name], now), f"metadata of {plan[name].tolist()}, launched for {now.tolist()}")


def mla_gluon(
    *, q_nope: torch.Tensor, q_pe: torch.Tensor, kv_c: torch.Tensor, o: torch.Tensor, page_table: torch.Tensor,
    seq_info: torch.Tensor, sm_scale: float, k_pe: None, kv_pe_offset: int, use_2d_view: bool, kv_scale: float,
    min_kv_seq_len: int, return_lse: bool, has_pe: bool, attn_sink: None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The same for any number of heads that is not 64, over flat slots."""
    requests, queries, heads, latent = q_nope.shape
    refuse_unless(device.arch() == "gfx950", f"mla_gluon requires gfx950 (CDNA4), got {device.arch()}")
    refuse_unless(latent == 512 and q_pe.shape == (requests, queries, heads, 64), f"{latent}, {tuple(q_pe.shape)}")
    refuse_unless(heads <= 96 and heads != 64, "mla_gluon[bh64] requires batch_size divisible by 64")
    refuse_unless(q_nope.dtype == q_pe.dtype == kv_c.dtype == torch.bfloat16, f"{q_nope.dtype} and {kv_c.dtype}")
    silent_unless(q_nope.stride(3) == q_pe.stride(3) == o.stride(3) == kv_c.stride(1) == 1, "the last axis is dense")
    silent_unless(o.shape == q_nope.shape and o.dtype == q_nope.dtype, f"an output {tuple(o.shape)} of {o.dtype}")
    refuse_unless(kv_c.shape[1] == 576 and kv_pe_offset == 512 and k_pe is None, f"rows of {kv_c.shape[1]}")
    assert not use_2d_view and kv_scale == 1.0 and min_kv_seq_len == 1 and has_pe and attn_sink is None
    silent_unless(bool(kv_c[0].isfinite().all()), "slot 0 is read past the last key of a pool over 2 GB: 0 * NaN")
    _indices("seq_info", seq_info, torch.int32, requests + 1)
    slots = _ragged_slots(seq_info, page_table, None, kv_c.shape[0], 1)
    lse = torch.empty(requests, queries, heads) if return_lse else None
    q = torch.cat([q_nope, q_pe], dim=-1).flatten(0, 1)
    _attend(q, kv_c.float(), slots, queries, sm_scale, o.view(-1, heads, 512), None if lse is None else lse[:, 0])
    return o, lse


def _attend(
    q_THD: torch.Tensor, kv_SD: torch.Tensor, slots: list[list[int]], queries: int, scale: float, o: Any, lse: Any
) -> None:
    """NaN for queries that see no key."""
    for token, q_HD in enumerate(q_THD.float()):
        mine = slots[token // queries]
        seen = kv_SD[mine[: max(0, len(mine) - queries + 1 + token % queries)]]
        scores_HL = scale * q_HD @ seen.T
        o[token] = scores_HL.softmax(-1) @ seen[:, :512] if len(seen) else math.nan
        if lse is not None:
            lse[token] = scores_HL.logsumexp(-1)


def functions() -> dict[str, Any]:
    """Return the functions by name, after a look at the version: only main's are described here."""
    assert aiter_lib.version() == "main"
    return {f.__name__: f for f in (mla_decode_fwd, get_mla_metadata_info_v1, get_mla_metadata_v1, mla_gluon)}
