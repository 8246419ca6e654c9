"""AITER rows of absorbed MLA: what each function takes; the calls are in aiter_calls.py.

Left out: ``aiter.ops.triton.attention.mla_decode`` (it reads our layout, but each row of the pool once a head on AMD),
``aiter.ops.triton.attention.mla`` (a tile is a whole page of 16 keys or more: compiled for both chips it spills
registers with pages of 64 and with more than 16 heads) and FP8 queries (they round what the op promises).
Nothing here was run on an AMD GPU: the limits were read from AITER's source, from the kernels that it ships
(hsa/*/mla/mla_asm.csv) and from reports; where these leave a doubt the row refuses, as AITER aborts the process.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from atom_plugin import aiter_lib, device
from atom_plugin.dispatch import Kernel, Tolerance
from atom_plugin.ops.aiter_rows import FLOAT8_OF_ARCH, why_not_aiter

if TYPE_CHECKING:  # the package's __init__ imports this module
    from atom_plugin.ops.mla_attention import MlaAttention, MlaAttentionProblem

DECODE, GLUON, GROUPED = "aiter_mla_decode_fwd", "aiter_mla_gluon", "aiter_mla_decode_rope"
LATENT, ROPE = 512, 64
MOST_GLUON_QUERIES = 8
_TILE = 16  # heads of a kernel come in tiles of as many
_4_GIB = 1 << 32
_2_GI = 1 << 31

DECODE_PASSED = (
    "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q", "page_size",
    "nhead_kv", "sm_scale", "logit_cap", "num_kv_splits", "num_kv_splits_indptr", "work_meta_data", "work_indptr",
    "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map", "q_scale", "kv_scale",
    "intra_batch_mode", "return_lse", "causal",
)  # fmt: skip
INFO_PASSED = ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse", "fast_mode")
METADATA_PASSED = (
    "seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens", "num_heads_per_head_k", "num_heads_k", "is_causal",
    "work_metadata_ptrs", "work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map",
    "page_size", "kv_granularity", "max_seqlen_qo", "uni_seqlen_qo", "fast_mode", "max_split_per_batch", "dtype_q",
    "dtype_kv",
)  # fmt: skip
GLUON_PASSED = (
    "q_nope", "q_pe", "kv_c", "o", "page_table", "seq_info", "sm_scale", "kv_pe_offset", "use_2d_view", "kv_scale",
    "min_kv_seq_len", "return_lse",
)  # fmt: skip
GROUPED_PASSED = (
    "q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "k_pe_tokens", "kv_lora_rank", "rotary_dim",
    "cos_sin_cache", "positions", "attn_logits", "num_kv_splits", "sm_scale", "use_rope",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ``mla_decode_fwd`` runs a padded head count.

    ``planned``: with the metadata of get_mla_metadata_v1 (AITER: persistent). ``most_queries``: a request.
    ``wide``: counts the bytes of the pool in 64 bits. ``returns_lse``: with one query a request.
    """

    planned: bool
    most_queries: int
    wide: bool = False
    returns_lse: bool = False


def _tiles(*counts: int) -> tuple[int, ...]:
    return tuple(_TILE * count for count in counts)


#: 16 heads at a time, a request read once for each: planned so, AITER folds heads into requests. With more queries
#: it would lay out gigabytes of scratch.
_FOLDED = Launch(planned=True, most_queries=1)
_FLOAT8 = {16: Launch(planned=True, most_queries=4), **dict.fromkeys(_tiles(2, 3, 4, 5, 6, 7, 8), _FOLDED)}
# 5 and more queries without metadata are silently wrong on gfx942 (ROCm/aiter #5679)
_UNPLANNED = Launch(planned=False, most_queries=4, returns_lse=True)
# ROCm/aiter #3988, #4156 and #4452 made these kernels count in 64 bits, and #4258 made them take more queries;
# the ones that run without metadata still wrap (#5765)
_GFX950 = Launch(planned=True, most_queries=8, wide=True, returns_lse=True)
_GFX950_ODD = Launch(planned=True, most_queries=4, wide=True, returns_lse=True)
#: (architecture, bytes an element of the cache) -> padded head count -> launch; queries are bfloat16.
LAUNCHES: dict[tuple[str, int], dict[int, Launch]] = {
    ("gfx942", 2): {**dict.fromkeys(_tiles(1, 8), _UNPLANNED), **dict.fromkeys(_tiles(2, 3, 4, 5, 6, 7), _FOLDED)},
    ("gfx942", 1): _FLOAT8,
    ("gfx950", 2): {**dict.fromkeys(_tiles(1, 2, 4, 8), _GFX950), **dict.fromkeys(_tiles(3, 5, 6, 7), _GFX950_ODD)},
    ("gfx950", 1): _FLOAT8,
}


def padded_heads(heads: int) -> int:
    """Return the next multiple of 16: kernels for other counts are missing or untried (ROCm/aiter #2821)."""
    return -(-heads // _TILE) * _TILE


def _why_not_any(problem: MlaAttentionProblem) -> list[str]:
    """Return what neither function takes."""
    reasons = []
    if (problem.kv_lora_rank, problem.rope_dim) != (LATENT, ROPE):
        reasons.append(f"latent rows of {problem.kv_lora_rank} + {problem.rope_dim}: takes {LATENT} + {ROPE}")
    if problem.q_dtype != torch.bfloat16:
        reasons.append(f"queries of {problem.q_dtype}: takes bfloat16")
    if not problem.equal_q_lens:
        reasons.append("requests with different numbers of queries, or queries of no request: takes equal numbers")
    if problem.return_lse and problem.max_q_len > 1:
        reasons.append(f"lse of {problem.max_q_len} queries a request: returns it for one")
    return reasons


def _why_not_decode(problem: MlaAttentionProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, DECODE, problem.forced, "mla_decode_fwd", DECODE_PASSED)
    if not reasons:
        reasons += aiter_lib.why_not("get_mla_metadata_info_v1", INFO_PASSED)
        reasons += aiter_lib.why_not("get_mla_metadata_v1", METADATA_PASSED)
    reasons += _why_not_any(problem)
    if (problem.arch, 1) not in LAUNCHES:
        return reasons
    float8 = FLOAT8_OF_ARCH[problem.arch]
    if problem.kv_dtype not in (torch.bfloat16, float8):
        takes = str(float8).removeprefix("torch.")
        return [*reasons, f"KV cache of {problem.kv_dtype} on {problem.arch}: takes bfloat16 or {takes}"]
    launches = LAUNCHES[problem.arch, problem.kv_dtype.itemsize]
    heads, padded = problem.num_heads, padded_heads(problem.num_heads)
    if padded not in launches:
        return [*reasons, f"{heads} heads: takes up to {max(launches)}"]
    launch = launches[padded]
    of = f"{heads} heads, run as {padded}, on {problem.arch} with a cache of {problem.kv_dtype}"
    if problem.max_q_len > launch.most_queries:
        reasons.append(f"{problem.max_q_len} queries a request of {of}: takes up to {launch.most_queries}")
    if problem.pool_bytes > _4_GIB and not launch.wide:
        reasons.append(f"a pool of {problem.pool_bytes} bytes of {of}: takes up to {_4_GIB}, it counts in 32 bits")
    if problem.return_lse and not launch.returns_lse:
        reasons.append(f"returns no lse of {of}")
    return reasons


def _load_decode() -> MlaAttention:
    from atom_plugin.ops.mla_attention.aiter_calls import MlaDecode

    return MlaDecode(
        aiter_lib.load("mla_decode_fwd"),
        aiter_lib.load("get_mla_metadata_info_v1"),
        aiter_lib.load("get_mla_metadata_v1"),
    )


def _why_not_gluon(problem: MlaAttentionProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, GLUON, problem.forced, "mla_gluon", GLUON_PASSED)
    if problem.arch == "gfx942":
        reasons.append("runs on gfx950, this is gfx942")
    if not aiter_lib.is_assumed() and not _gluon_has_cga_layout():
        reasons.append("Triton here has no cga_layout of padded shared memory, which AITER's kernel names: takes 3.7")
    reasons += _why_not_any(problem)
    if problem.kv_dtype != torch.bfloat16:
        # of 1319 answers 285 were degenerate with 12 heads: vllm-project/vllm #51011
        reasons.append(f"KV cache of {problem.kv_dtype}: takes bfloat16, float8 was seen to ruin answers")
    if problem.num_heads > 96 or problem.num_heads == 64:
        # 64 and 128 go to a kernel that needs a lower bound on lengths and requests in multiples of 64
        reasons.append(f"{problem.num_heads} heads: takes up to 96 but not 64")
    if problem.max_q_len > MOST_GLUON_QUERIES:
        reasons.append(f"{problem.max_q_len} queries a request: takes up to {MOST_GLUON_QUERIES}")
    return reasons


@functools.cache
def _gluon_has_cga_layout() -> bool:
    """Return whether Triton's PaddedSharedLayout has the field; Triton is read and not imported."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin).parent / "experimental" / "gluon" / "language" / "_layouts.py"
    if not file.is_file():
        return False
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    (fields,) = [node.body for node in classes if node.name == "PaddedSharedLayout"] or [[]]
    return "cga_layout" in [ast.unparse(node.target) for node in fields if isinstance(node, ast.AnnAssign)]


def _load_gluon() -> MlaAttention:
    from atom_plugin.ops.mla_attention.aiter_calls import MlaGluon

    return MlaGluon(aiter_lib.load("mla_gluon"))


def _why_not_grouped(problem: MlaAttentionProblem) -> list[str]:
    function = "decode_attention_fwd_grouped_rope"
    reasons = why_not_aiter(problem.arch, GROUPED, problem.forced, function, GROUPED_PASSED, in_triton=True)
    if problem.max_q_len != 1 or not problem.equal_q_lens:
        reasons.append("takes one query of each request, and none of no request")
    if device.is_accelerator(problem.arch) and not problem.captured:
        reasons.append("not captured: AITER builds it anew for each number of requests")
    dtypes = [torch.bfloat16, torch.float16, *([] if device.is_accelerator(problem.arch) else [torch.float32])]
    if problem.q_dtype not in dtypes or problem.kv_dtype != problem.q_dtype:
        reasons.append(
            f"queries of {problem.q_dtype}, KV cache of {problem.kv_dtype}: takes bfloat16 or float16 of both"
        )
    rank, rope = problem.kv_lora_rank, problem.rope_dim
    if not _is_power(rank, 16, 512) or not _is_power(rope, 16, 64):
        reasons.append(f"latent rows of {rank} + {rope}: takes powers of two, 16 to 512 and 16 to 64")
    if problem.pool_bytes > _2_GI * problem.kv_dtype.itemsize:
        reasons.append(f"a pool of {problem.pool_bytes} bytes: takes up to {_2_GI} numbers, it counts in 32 bits")
    if problem.return_lse:
        reasons.append("returns no lse")
    return reasons


def _is_power(size: int, least: int, most: int) -> bool:
    return least <= size <= most and size & (size - 1) == 0


def _load_grouped() -> MlaAttention:
    from atom_plugin.ops.mla_attention.aiter_calls import MlaGrouped

    return MlaGrouped(aiter_lib.load("decode_attention_fwd_grouped_rope"))


# Probabilities are rounded to the dtype of the values before they weight them, and mla_gluon's splits before they are
# merged.
_TOLERANCE = {torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2)}
_GROUPED_TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    **_TOLERANCE,
}

#: Best first.
ROWS: list[Kernel[MlaAttentionProblem]] = [
    Kernel(DECODE, _why_not_decode, _load_decode, _TOLERANCE),
    Kernel(GLUON, _why_not_gluon, _load_gluon, _TOLERANCE),
    Kernel(GROUPED, _why_not_grouped, _load_grouped, _GROUPED_TOLERANCE),
]
