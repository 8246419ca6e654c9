"""Rows planted in front of the tables of every process that has this folder on PYTHONPATH: each fails in its own way.

Each takes one mode alone, so that the rows after it run as well.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops import paged_attention, qk_norm_rope_store_kv, store_kv

TOLERANCE = dict.fromkeys((torch.float32, torch.bfloat16), Tolerance(rtol=1e-3, atol=1e-3))


def aborts(*args: Any, **kwargs: Any) -> Any:
    """End the process as a failed check in a C++ library does."""
    print("Assertion `is_supported' failed.", flush=True)
    os.abort()


def hangs(*args: Any, **kwargs: Any) -> Any:
    """Wait as for a GPU that never answers."""
    time.sleep(10_000)


def is_wrong(q: torch.Tensor, k: Any, v: torch.Tensor, batch: Any, **kwargs: Any) -> Any:
    """Return the right shape, and a number a little off."""
    from atom_plugin.ops.paged_attention.eager import paged_attention as eager

    out, lse = eager(q, k, v, batch, **kwargs)
    return out + 0.01, lse


def leaves_out(k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Store nothing."""


def raises(*args: Any, **kwargs: Any) -> Any:
    """Fail as a wrapper in Python does."""
    raise RuntimeError("get_device_arch: no such architecture")


def plant(table: Table[Any], name: str, row: Any, takes: Any) -> None:
    """Put ``row`` in front of ``table`` for the problems that ``takes`` says."""

    def why_not(problem: Any) -> list[str]:
        return [] if takes(problem) else ["planted for another mode"]

    table.kernels = (Kernel(name, why_not, lambda: row, TOLERANCE), *table.kernels)


plant(paged_attention.TABLE, "planted_abort", aborts, lambda p: p.phase == "decode" and not p.captured)
plant(paged_attention.TABLE, "planted_hang", hangs, lambda p: p.phase == "extend" and not p.captured)
plant(paged_attention.TABLE, "planted_wrong", is_wrong, lambda p: p.phase == "decode" and p.captured)
plant(store_kv.TABLE, "planted_nothing", leaves_out, lambda p: True)
plant(qk_norm_rope_store_kv.TABLE, "planted_raise", raises, lambda p: True)
