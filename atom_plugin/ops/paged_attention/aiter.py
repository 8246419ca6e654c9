"""AITER rows of paged attention on NHD pages: what each function takes; the calls are in aiter_calls.py.

Left out: ``flash_attn_varlen_func`` (dense K and V: right only where no request has cached keys, which a PagedBatch
cannot say without reading lengths) and ``pa_persistent_fwd`` / ``pa_decode_gluon`` (SHUFFLE pages, and our pools are
NHD). Nothing here was run on an AMD GPU: the limits were read from AITER's source, and where that leaves a
doubt the row refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_plugin import aiter_lib
from atom_plugin.dispatch import Kernel, Tolerance
from atom_plugin.ops.aiter_rows import FLOAT8_OF_ARCH, why_not_aiter

if TYPE_CHECKING:  # the package's __init__ imports this module
    from atom_plugin.ops.paged_attention import PagedAttention, PagedAttentionProblem

UNIFIED, RAGGED, BATCH_PREFILL = "aiter_unified_attention", "aiter_paged_attention_ragged", "aiter_mha_batch_prefill"

_UNIFIED_PASSED = (
    "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal",
    "window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale", "sinks",
)  # fmt: skip
_RAGGED_PASSED = (
    "out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "kv_indptr", "kv_page_indices",
    "kv_last_page_lens", "block_size", "max_num_partitions", "alibi_slopes", "kv_cache_dtype", "kv_cache_layout",
    "logits_soft_cap", "k_scale", "v_scale",
)  # fmt: skip
_PREFILL_PASSED = (
    "q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "logits_soft_cap", "causal", "window_size", "out",
)  # fmt: skip


def _why_not_any(problem: PagedAttentionProblem) -> list[str]:
    """Return what none of AITER's paged attentions takes."""
    reasons = []
    if problem.qk_head_dim != problem.v_head_dim:
        reasons.append(f"head dim {problem.qk_head_dim} of q and k, {problem.v_head_dim} of v: takes equal ones")
    if problem.num_q_heads % problem.num_kv_heads:
        reasons.append(f"{problem.num_q_heads} query heads do not divide over {problem.num_kv_heads} KV heads")
    if problem.return_lse:
        reasons.append("returns no lse")
    if not problem.causal:
        reasons.append("not causal: called for causal attention only")
    return reasons


def _why_not_dtypes(problem: PagedAttentionProblem, *, takes_float8: bool, takes_float32: bool = False) -> list[str]:
    reasons = []
    queries = [torch.bfloat16, torch.float16, *([torch.float32] if takes_float32 else [])]
    if problem.q_dtype not in queries:
        reasons.append(f"queries of {problem.q_dtype}: takes {', '.join(map(_name, queries))}")
    caches = [problem.q_dtype]
    if takes_float8 and problem.arch in FLOAT8_OF_ARCH:
        caches.append(FLOAT8_OF_ARCH[problem.arch])
    if problem.kv_dtype not in caches:
        reasons.append(
            f"KV cache of {problem.kv_dtype} on {problem.arch} for these queries: "
            f"takes {' or '.join(map(_name, caches))}"
        )
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_not_unified(problem: PagedAttentionProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, UNIFIED, problem.forced, "unified_attention", _UNIFIED_PASSED, in_triton=True)
    is_wheel = aiter_lib.version() == "wheel"
    takes_float32 = is_wheel and problem.arch == "cpu"  # main asserts against it where it splits the keys
    reasons += _why_not_any(problem) + _why_not_dtypes(problem, takes_float8=True, takes_float32=takes_float32)
    dim, page_size = problem.qk_head_dim, problem.page_size
    if not 16 <= dim <= 512:
        reasons.append(f"head dim {dim}: takes 16 to 512")
    elif is_wheel and dim & (dim - 1):
        reasons.append(f"head dim {dim}: AITER wheel takes powers of two")  # its reduction names a variable it lacks
    if page_size < 16 or page_size & (page_size - 1):
        reasons.append(f"page size {page_size}: takes powers of two from 16")
    return reasons


def _load_unified() -> PagedAttention:
    from atom_plugin.ops.paged_attention.aiter_calls import UnifiedAttention

    return UnifiedAttention(aiter_lib.load("unified_attention"))


def _why_not_ragged(problem: PagedAttentionProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, RAGGED, problem.forced, "paged_attention_ragged", _RAGGED_PASSED)
    reasons += _why_not_any(problem) + _why_not_dtypes(problem, takes_float8=True)
    if problem.phase != "decode":
        reasons.append("extend: takes one query a request")
    if problem.has_sinks:
        reasons.append("attention sinks: takes none")
    dim, group = problem.qk_head_dim, problem.num_q_heads // problem.num_kv_heads
    if dim % 64 or not 64 <= dim <= 256:
        reasons.append(f"head dim {dim}: takes 64, 128, 192, 256")
    if group > 16:
        reasons.append(f"{group} query heads a KV head: takes up to 16")
    page_sizes = (1, 16, 32, 64) if problem.kv_dtype.itemsize == 1 else (1, 16, 32)
    if problem.page_size not in page_sizes:
        reasons.append(f"page size {problem.page_size} of {problem.kv_dtype}: takes {', '.join(map(str, page_sizes))}")
    if problem.window >= 0:
        reasons.append(f"sliding window {problem.window}: takes none")
    return reasons


def _load_ragged() -> PagedAttention:
    from atom_plugin.ops.paged_attention.aiter_calls import PagedAttentionRagged

    return PagedAttentionRagged(aiter_lib.load("paged_attention_ragged"))


def _why_not_batch_prefill(problem: PagedAttentionProblem) -> list[str]:
    is_main = aiter_lib.version() != "wheel"
    passed = (*_PREFILL_PASSED, *(["kv_last_page_lens"] if problem.page_size > 1 and is_main else []))
    reasons = why_not_aiter(problem.arch, BATCH_PREFILL, problem.forced, "mha_batch_prefill_func", passed)
    reasons += _why_not_any(problem) + _why_not_dtypes(problem, takes_float8=False)
    if problem.phase != "extend":
        reasons.append("decode: takes extend")
    if problem.has_sinks:
        reasons.append("attention sinks: main finds no kernel for them (ROCm/aiter #4976)")
    dims, page_sizes = ((128, 256), (1, 16, 1024)) if is_main else ((128,), (1,))
    if problem.qk_head_dim not in dims:
        reasons.append(f"head dim {problem.qk_head_dim}: takes {', '.join(map(str, dims))}")
    if problem.page_size not in page_sizes:
        reasons.append(f"page size {problem.page_size}: takes {', '.join(map(str, page_sizes))}")
    return reasons


def _load_batch_prefill() -> PagedAttention:
    from atom_plugin.ops.paged_attention.aiter_calls import BatchPrefill

    return BatchPrefill(aiter_lib.load("mha_batch_prefill_func"))


# Probabilities are rounded to the dtype of the values before they weight them.
_16_BIT = {
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
}

#: Best first.
ROWS: list[Kernel[PagedAttentionProblem]] = [
    Kernel(UNIFIED, _why_not_unified, _load_unified, {torch.float32: Tolerance(rtol=1e-5, atol=1e-5), **_16_BIT}),
    Kernel(RAGGED, _why_not_ragged, _load_ragged, _16_BIT),
    Kernel(BATCH_PREFILL, _why_not_batch_prefill, _load_batch_prefill, _16_BIT),
]
