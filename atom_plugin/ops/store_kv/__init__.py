"""Writes new keys and values into a paged KV pool, quantised by the layer's scales where the pool is float8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_plugin import device
from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops import triton_rows
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv import arguments
from atom_plugin.ops.store_kv.aiter import ROWS as AITER_ROWS

FLOAT8_DTYPES = arguments.FLOAT8_DTYPES


@dataclass(frozen=True, kw_only=True)
class StoreKVProblem:
    """What a row has to know to say whether it can run. ``forced``: the row that a person asked for by name."""

    arch: str
    kv_dtype: torch.dtype
    pool_dtype: torch.dtype
    forced: str | None = None


class StoreKV(Protocol):
    """What every row is called with; see ``store_kv``."""

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
    ) -> None: ...


def why_not_on_host(
    arch: str, kv_dtype: torch.dtype, pool_dtype: torch.dtype, row: str, forced: str | None
) -> list[str]:
    """Return what keeps the PyTorch row called ``row`` from storing ``kv_dtype`` into a ``pool_dtype`` pool."""
    on_gpu = device.is_accelerator(arch) and forced != row
    reasons = [f"runs on {arch} only when forced by name: it is PyTorch for CPUs"] if on_gpu else []
    return reasons + _why_not_dtypes(kv_dtype, pool_dtype)


def why_not_triton(
    arch: str, kv_dtype: torch.dtype, pool_dtype: torch.dtype, row: str, forced: str | None
) -> list[str]:
    """Return what keeps the Triton row called ``row`` from storing ``kv_dtype`` into a ``pool_dtype`` pool."""
    reasons = triton_rows.why_not_triton(arch, row, forced, (kv_dtype, pool_dtype))
    return reasons + _why_not_dtypes(kv_dtype, pool_dtype)


def _why_not_dtypes(kv_dtype: torch.dtype, pool_dtype: torch.dtype) -> list[str]:
    reasons = []
    if kv_dtype not in arguments.KV_DTYPES:
        reasons.append(f"keys and values of {kv_dtype}: takes float32, bfloat16, float16")
    if pool_dtype not in (*arguments.KV_DTYPES, *FLOAT8_DTYPES):
        reasons.append(f"KV cache of {pool_dtype}: takes float32, bfloat16, float16, float8_e4m3")
    return reasons


def _why_not_triton(problem: StoreKVProblem) -> list[str]:
    return why_not_triton(problem.arch, problem.kv_dtype, problem.pool_dtype, "triton", problem.forced)


def _load_triton() -> StoreKV:
    from atom_plugin.ops.store_kv.kernel import store_kv as row

    return row


def _why_not_eager(problem: StoreKVProblem) -> list[str]:
    return why_not_on_host(problem.arch, problem.kv_dtype, problem.pool_dtype, "eager", problem.forced)


def _load_eager() -> StoreKV:
    from atom_plugin.ops.store_kv.eager import store_kv as row

    return row


def _why_not_reference(problem: StoreKVProblem) -> list[str]:
    reasons = why_not_on_host(problem.arch, problem.kv_dtype, problem.pool_dtype, "reference", problem.forced)
    if problem.forced != "reference":
        reasons.append("runs only when forced by name: it is the slow definition")
    return reasons


def _load_reference() -> StoreKV:
    from atom_plugin.ops.store_kv.reference import store_kv as row

    return row


# A store is a rounding: every row leaves the same bytes.
_EXACT = dict.fromkeys(arguments.KV_DTYPES, Tolerance(rtol=0.0, atol=0.0))

TABLE: Table[StoreKVProblem] = Table(
    "store_kv",
    [
        *AITER_ROWS,
        Kernel("triton", _why_not_triton, _load_triton, _EXACT),
        Kernel("eager", _why_not_eager, _load_eager, _EXACT),
        Kernel("reference", _why_not_reference, _load_reference, _EXACT),
    ],
)


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: TokenSlots,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    forced: str | None = None,
) -> None:
    """Write token t of ``k_THD``, ``v_THD`` ([tokens, KV heads, head dim]) to pool slot ``slots.slots_T[t]``.

    ``k_pages``, ``v_pages``: [pages, page size, KV heads, head dim], the pool's memory, written in place. What is
    written is ``k / k_scale`` rounded to the pool's dtype: division and rounding to the dtype of ``k`` first, as
    SGLang's own writer does it, so that both leave the same bytes. The arguments keep their values. Where two tokens
    share a slot (SGLang's dump slot for padding) either may stay. ``slots_T`` may be int32 as well. A slot outside of
    the pool is not written; eager raises IndexError for it instead. Raises ValueError for arguments that do not fit
    together and NoKernelError when no row can run this.
    """
    arguments.check(k_THD, v_THD, k_pages, v_pages, slots)
    problem = StoreKVProblem(arch=device.arch(), kv_dtype=k_THD.dtype, pool_dtype=k_pages.dtype, forced=forced)
    row: StoreKV = TABLE.choose(problem, forced).load()
    row(k_THD, v_THD, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale)
