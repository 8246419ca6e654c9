"""AITER rows of qk_norm_rope_store_kv: with q/k norm in HIP, without it in Triton; the calls are in aiter_calls.py.

Both write NHD pages. Float8 pools are left to other rows: AITER multiplies by the reciprocal of the scale in float32,
where SGLang's writer divides in the dtype of the keys, so that the bytes differ. Left out:
``fused_qk_norm_rope_cache_quant_shuffle`` (SHUFFLE pages only, and our pools are NHD).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_plugin import aiter_lib
from atom_plugin.dispatch import Kernel, Tolerance
from atom_plugin.ops.aiter_rows import why_not_aiter

if TYPE_CHECKING:  # the package's __init__ imports this module
    from atom_plugin.ops.qk_norm_rope_store_kv import QKNormRopeStoreKV, QKNormRopeStoreKVProblem

NORMED, PLAIN = "aiter_fused_qk_norm_rope_cache_pts_quant_shuffle", "aiter_fused_qk_rope_reshape_and_cache"
_NORMED_FUNCTION, _PLAIN_FUNCTION = NORMED.removeprefix("aiter_"), PLAIN.removeprefix("aiter_")

_NORMED_PASSED = (
    "qkv", "qw", "kw", "cos_sin", "positions", "num_tokens", "num_heads_q", "num_heads_k", "num_heads_v", "head_size",
    "is_neox_style", "eps", "q_out", "k_cache", "v_cache", "slot_mapping", "per_tensor_k_scale", "per_tensor_v_scale",
    "k_out", "v_out", "return_kv", "use_shuffle_layout", "block_size", "x", "rotary_dim",
)  # fmt: skip
_PLAIN_PASSED = (
    "q", "k", "v", "key_cache", "value_cache", "slot_mapping", "pos", "cos", "sin", "k_scale", "v_scale", "is_neox",
    "flash_layout", "apply_scale", "output_zeros",
)  # fmt: skip


def _why_not_any(problem: QKNormRopeStoreKVProblem, dtypes: list[torch.dtype]) -> list[str]:
    reasons = []
    if problem.qkv_dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        reasons.append(f"q, k and v of {problem.qkv_dtype}: takes {names}")
    if problem.pool_dtype.itemsize == 1:
        reasons.append(
            f"KV cache of {problem.pool_dtype}: AITER scales in float32, its bytes are not SGLang's writer's"
        )
    elif problem.pool_dtype != problem.qkv_dtype:
        reasons.append(f"KV cache of {problem.pool_dtype} for keys of {problem.qkv_dtype}: takes equal ones")
    if problem.num_position_axes != 1:
        reasons.append(f"{problem.num_position_axes} position axes: takes 1")
    return reasons


def _why_not_normed(problem: QKNormRopeStoreKVProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, NORMED, problem.forced, _NORMED_FUNCTION, _NORMED_PASSED)
    reasons += _why_not_any(problem, [torch.bfloat16, torch.float16])
    if not problem.normed:
        reasons.append("no q/k norm: it always norms")
    dim, rotary_dim = problem.head_dim, problem.rotary_dim
    if dim not in (64, 128, 256):
        reasons.append(f"head dim {dim}: takes 64, 128, 256")
    elif not 0 < rotary_dim <= dim or rotary_dim % (dim // 16):
        # each of 32 lanes turns dim / 32 values with those of another lane
        reasons.append(f"rotary dim {rotary_dim} of head dim {dim}: takes multiples of {dim // 16} up to it")
    return reasons


def _load_normed() -> QKNormRopeStoreKV:
    from atom_plugin.ops.qk_norm_rope_store_kv.aiter_calls import NormRopeCache

    return NormRopeCache(aiter_lib.load(_NORMED_FUNCTION))


def _why_not_plain(problem: QKNormRopeStoreKVProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, PLAIN, problem.forced, _PLAIN_FUNCTION, _PLAIN_PASSED, in_triton=True)
    is_main = aiter_lib.version() != "wheel"
    dtypes = [torch.bfloat16] if is_main else [torch.bfloat16, torch.float16, torch.float32]
    reasons += _why_not_any(problem, dtypes)
    if problem.normed:
        reasons.append("q/k norm: it does none")
    dim = problem.head_dim
    if dim & (dim - 1) or dim < 16:
        reasons.append(f"head dim {dim}: takes powers of two from 16")
    if problem.rotary_dim != dim:
        reasons.append(f"rotary dim {problem.rotary_dim} of head dim {dim}: rotates whole heads")
    if problem.num_q_heads % problem.num_kv_heads:
        reasons.append(f"{problem.num_q_heads} query heads do not divide over {problem.num_kv_heads} KV heads")
    return reasons


def _load_plain() -> QKNormRopeStoreKV:
    from atom_plugin.ops.qk_norm_rope_store_kv.aiter_calls import RopeCache

    return RopeCache(aiter_lib.load(_PLAIN_FUNCTION))


#: Best first. The first rounds cosines, sines and what it normed to the dtype of q before it rotates.
ROWS: list[Kernel[QKNormRopeStoreKVProblem]] = [
    Kernel(
        NORMED,
        _why_not_normed,
        _load_normed,
        {
            torch.float16: Tolerance(rtol=2e-3, atol=4e-3),
            torch.bfloat16: Tolerance(rtol=1.6e-2, atol=3e-2),
        },
    ),
    Kernel(
        PLAIN,
        _why_not_plain,
        _load_plain,
        {
            torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
            torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
            torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
        },
    ),
]
