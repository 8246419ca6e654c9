"""Layout of the KV pool: pages, strides, scales, and which pools of SGLang have it.

NHD: token slot s of a layer is row s of [slots, KV heads, head dim]; page p holds the slots p * page_size ... and page
0 is SGLang's dump for padding. K and V are separate tensors, possibly with different head dims; MLA's pool has one
tensor with one head, whose rows are keys, and values in their first kv_lora_rank columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom_plugin import host
from atom_plugin.ops.store_kv import FLOAT8_DTYPES

_FP8_NAMES = ("fp8", "fp8_e4m3", "fp8_e5m2")
_ALL_FLOAT8 = (*FLOAT8_DTYPES, torch.float8_e5m2, torch.float8_e5m2fnuz)


def is_fp8_kv(kv_cache_dtype: str | torch.dtype | None) -> bool:
    """Return whether a ``--kv-cache-dtype`` string or a pool's dtype means one byte a value, in any spelling."""
    if isinstance(kv_cache_dtype, str):
        return kv_cache_dtype in _FP8_NAMES
    return kv_cache_dtype in _ALL_FLOAT8


def pool_dtype_of(kv_cache_dtype: str, model_dtype: torch.dtype, *, fnuz: bool) -> torch.dtype:
    """Return what a pool of ``--kv-cache-dtype`` holds; ``fnuz``: FP8 e4m3 is the variant of MI300X here."""
    if is_fp8_kv(kv_cache_dtype):
        return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    named = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    return named.get(kv_cache_dtype, model_dtype)


@dataclass(frozen=True, kw_only=True)
class KVScales:
    """What stored keys and values are multiplied with when read, and divided by when written; 1 in float pools."""

    k: float
    v: float

    @classmethod
    def of(cls, layer: Any, pool_dtype: torch.dtype) -> KVScales:
        """Return the scales of a RadixAttention whose cache holds ``pool_dtype``."""
        if not is_fp8_kv(pool_dtype):
            return cls(k=1.0, v=1.0)
        return cls(
            k=_scale("k", layer.k_scale, layer.k_scale_float, layer.layer_id),
            v=_scale("v", layer.v_scale, layer.v_scale_float, layer.layer_id),
        )


def _scale(name: str, tensor: Any, number: float | None, layer_id: int) -> float:
    """Return a scale that SGLang keeps twice, as a tensor and as a float, after checking that they agree."""
    if number is None:
        number = None if tensor is None else float(tensor)
    elif tensor is not None and abs(float(tensor) - number) > 1e-6 * abs(number):
        raise ValueError(
            f"layer {layer_id}: {name}_scale is {float(tensor)} as a tensor and {number} as a float; "
            f"the checkpoint's loader set only one of them"
        )
    if number is None:
        return 1.0
    if not number > 0:
        raise ValueError(f"layer {layer_id}: {name}_scale is {number}, a KV scale has to be positive")
    return number


def as_pages(buffer_SHD: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return a layer's [slots, KV heads, head dim] as [pages, page_size, KV heads, head dim], the same memory."""
    slots, heads, dim = buffer_SHD.shape
    if slots % page_size:  # SGLang rounds the number of slots up to whole pages where it can
        buffer_SHD = buffer_SHD[: slots - slots % page_size]
    return buffer_SHD.view(-1, page_size, heads, dim)


def latent_pool_bytes(pool: Any) -> int:
    """Return the bytes of one layer of SGLang's MLATokenToKVPool: a latent row a slot, and nothing a head."""
    return int((pool.size + pool.page_size) * pool.kv_cache_dim * pool.dtype.itemsize)


def why_not_pool(pool: Any) -> list[str]:
    """Return why the atom backend cannot read and write SGLang's KV ``pool``; empty where it can."""
    inner = host.full_attention_pool(pool)
    is_latent = host.is_plain_mla_pool(inner)
    if not is_latent and not host.is_plain_mha_pool(inner):
        return [
            f"the KV pool is a {type(inner).__name__}: takes MHATokenToKVPool and MLATokenToKVPool, alone or inside "
            f"HybridLinearKVPool (no sliding-window, sparse, FP4, MXFP8 or unified pool)"
        ]
    reasons = []
    if is_latent and inner.kv_cache_dim != inner.kv_lora_rank + inner.qk_rope_head_dim:
        reasons.append(
            f"the KV pool's rows have {inner.kv_cache_dim} columns: takes kv_lora_rank {inner.kv_lora_rank} + "
            f"qk_rope_head_dim {inner.qk_rope_head_dim}"
        )
    if not is_latent and inner.kv_cache_layout != "nhd":
        reasons.append(
            f"the KV pool's layout is {inner.kv_cache_layout}: takes NHD only; unset SGLANG_USE_HND_KVCACHE and "
            f"SGLANG_AITER_KV_CACHE_LAYOUT"
        )
    if inner.dtype not in (torch.float32, torch.bfloat16, torch.float16, *FLOAT8_DTYPES):
        reasons.append(f"the KV pool holds {inner.dtype}: takes float32, bfloat16, float16, float8_e4m3")
    return reasons
