"""AITER row of store_kv: reshape_and_cache_flash, into NHD pages of the dtype of the keys.

Float8 pools are left to other rows: AITER multiplies by the reciprocal of the scale in float32, where SGLang's writer
divides in the dtype of the keys, so that the bytes differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from atom_plugin import aiter_lib
from atom_plugin.dispatch import Kernel, Tolerance
from atom_plugin.ops.aiter_rows import number_on, why_not_aiter
from atom_plugin.ops.indices import TokenSlots

if TYPE_CHECKING:  # the package's __init__ imports this module
    from atom_plugin.ops.store_kv import StoreKV, StoreKVProblem

NAME = "aiter_reshape_and_cache_flash"
_PASSED = (
    "key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale",
)  # fmt: skip
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _why_not(problem: StoreKVProblem) -> list[str]:
    reasons = why_not_aiter(problem.arch, NAME, problem.forced, "reshape_and_cache_flash", _PASSED)
    if problem.kv_dtype not in _FLOATS:
        reasons.append(f"keys and values of {problem.kv_dtype}: takes float32, bfloat16, float16")
    if problem.pool_dtype.itemsize == 1:
        reasons.append(
            f"KV cache of {problem.pool_dtype}: AITER scales in float32, its bytes are not SGLang's writer's"
        )
    elif problem.pool_dtype != problem.kv_dtype:
        reasons.append(f"KV cache of {problem.pool_dtype}, keys of {problem.kv_dtype}: copies, and does not convert")
    return reasons


def _load() -> StoreKV:
    return ReshapeAndCacheFlash(aiter_lib.load("reshape_and_cache_flash"))


#: Best first.
ROWS: list[Kernel[StoreKVProblem]] = [
    Kernel(NAME, _why_not, _load, dict.fromkeys(_FLOATS, Tolerance(rtol=0.0, atol=0.0)))
]


class ReshapeAndCacheFlash:
    """Calls AITER's ``reshape_and_cache_flash``."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: TokenSlots,
        *,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """See ``atom_plugin.ops.store_kv.store_kv``."""
        _check(k_THD, k_pages, slots)
        _check(v_THD, v_pages, slots)
        if k_THD.shape[0] == 0:
            return
        k_THD, v_THD = _dense_heads(k_THD, k_scale), _dense_heads(v_THD, v_scale)
        if k_THD.shape == v_THD.shape:
            self._store(k_THD, v_THD, k_pages, v_pages, slots)
            return
        # the function takes the head dim of the keys for that of the values too: each for both, one after the other
        self._store(k_THD, k_THD, k_pages, k_pages, slots)
        self._store(v_THD, v_THD, v_pages, v_pages, slots)

    def _store(
        self, key: torch.Tensor, value: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: TokenSlots
    ) -> None:
        one = number_on(key.device, 1.0)  # read, whatever the dtype: no null pointer
        self._function(
            key=key,
            value=value,
            key_cache=k_pages,
            value_cache=v_pages,
            slot_mapping=slots.slots_T,
            kv_cache_dtype="auto",
            k_scale=one,
            v_scale=one,
        )


def _dense_heads(x_THD: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``x_THD`` divided by ``scale``, dense over heads and dims: only its token stride is read."""
    if scale != 1.0:
        return (x_THD / scale).contiguous()
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


def _check(x_THD: torch.Tensor, pages: torch.Tensor, slots: TokenSlots) -> None:
    """Raise ValueError for what AITER would write elsewhere, or read beyond the end."""
    if x_THD.dim() != 3 or pages.dim() != 4 or pages.shape[2:] != x_THD.shape[1:] or pages.dtype != x_THD.dtype:
        raise ValueError(
            f"{x_THD.dtype} {tuple(x_THD.shape)} into pages of {pages.dtype} {tuple(pages.shape)}: takes [tokens, KV "
            f"heads, dim] and [pages, page size, KV heads, dim] of one dtype"
        )
    if not pages.is_contiguous():
        raise ValueError(f"pages with strides {pages.stride()}: have to be contiguous")
    if slots.slots_T.dtype != torch.int64 or slots.slots_T.shape != x_THD.shape[:1] or slots.slots_T.stride() != (1,):
        raise ValueError(
            f"slots {tuple(slots.slots_T.shape)} of {slots.slots_T.dtype} with strides {slots.slots_T.stride()} for "
            f"{x_THD.shape[0]} tokens: takes one int64 a token, contiguous"
        )
