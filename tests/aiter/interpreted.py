"""AITER's own Triton kernels on a CPU, called through our rows and held against the reference: a process of its own.

    TRITON_INTERPRET=1 python -m tests.aiter.interpreted FOLDER GROUP

FOLDER holds AITER's package folder. Its ``__init__`` is not run, as that raises without ROCm; what it asks the driver
and the device is answered for an MI300X. bfloat16 is left out: the interpreter rounds it towards zero.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_plugin import aiter_lib
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.mla_attention import TABLE as MLA
from atom_plugin.ops.mla_attention import mla_attention
from atom_plugin.ops.paged_attention import TABLE as ATTENTION
from atom_plugin.ops.paged_attention import PagedBatch, paged_attention
from atom_plugin.ops.qk_norm_rope_store_kv import TABLE as NORM_ROPE_STORE
from atom_plugin.ops.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from tests.ops.batches import make_batch
from tests.ops.poison import poison_empty

UNIFIED, ROPE_CACHE = "aiter_unified_attention", "aiter_fused_qk_rope_reshape_and_cache"
MLA_DECODE = "aiter_mla_decode_rope"
STALE = 1e4  # where no key was stored: AITER reads a last page to its end, so that it may be anything finite
FLOAT16, FLOAT32 = torch.float16, torch.float32


def _dtypes() -> tuple[torch.dtype, ...]:
    return (FLOAT16, FLOAT32) if aiter_lib.version() == "wheel" else (FLOAT16,)


class _Driver:
    """Triton's answers about a GPU that is not there."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(arch="gfx942", backend="hip", warp_size=64)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, *device: Any) -> tuple[int, int]:
        return 9, 4


def install(package: Path) -> None:
    """Make ``import aiter.ops.triton...`` work in this process from the folder ``package``, on a CPU."""
    import triton

    triton.runtime.driver.set_active(_Driver())
    spec = importlib.machinery.ModuleSpec("aiter", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    module = types.ModuleType("aiter")
    module.__path__, module.__spec__ = [str(package)], spec
    sys.modules["aiter"] = module
    properties = types.SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942",
        multi_processor_count=304,
        total_memory=192 << 30,
        warp_size=64,
    )
    torch.cuda.get_device_properties = lambda *device: properties  # type: ignore[assignment, misc]
    torch.cuda.get_device_name = lambda *device: properties.name  # type: ignore[assignment, misc]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]


def _assert_attends(
    q_lens: list[int], seq_lens: list[int], dtype: torch.dtype, *, heads: int = 8, orphans: int = 0, **changes: Any
) -> None:
    """Assert that AITER's kernel gives what the reference gives; ``orphans``: rows that belong to no request."""
    shape = {"page_size": 16, "kv_heads": 2, "dim": 32}
    shape.update({name: changes.pop(name) for name in shape if name in changes})
    kv_dtype = changes.pop("kv_dtype", dtype)
    k, v, batch = make_batch(q_lens, seq_lens, v_dim=shape["dim"], orphans=orphans, **shape)
    k, v = (pages.nan_to_num(STALE if kv_dtype.itemsize > 1 else 100).to(kv_dtype) for pages in (k, v))
    q = torch.randn(sum(q_lens) + orphans, heads, shape["dim"]).to(dtype)
    _assert_equal(q, k, v, batch, scale=shape["dim"] ** -0.5, **changes)


def _assert_equal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    (row,) = [kernel for kernel in ATTENTION.kernels if kernel.name == UNIFIED]
    out, _ = paged_attention(q, k, v, batch, forced=UNIFIED, **how)
    expected, _ = paged_attention(q, k, v, batch, forced="reference", **how)
    tolerance = row.tolerance[q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance.rtol, atol=tolerance.atol)


def decode() -> None:
    """One query a request: pages of 16 and 64, window, soft cap, sinks, GQA of 1, 3 and 4, a head dim of 80."""
    for dtype in _dtypes():
        _assert_attends([1, 1, 1], [40, 33, 1], dtype)
        _assert_attends([1, 1], [130, 64], dtype, page_size=64, kv_heads=1)
        _assert_attends([1, 1], [40, 90], dtype, window=20)
        _assert_attends([1, 1], [40, 16], dtype, logit_cap=5.0, kv_heads=8)
    _assert_attends([1, 1], [17, 50], FLOAT16, kv_heads=2, heads=6, dim=64, sinks_H=torch.randn(6))
    _assert_attends([1], [20], FLOAT16, window=0)
    if aiter_lib.version() == "main":
        _assert_attends([1, 1], [20, 31], FLOAT16, dim=80)


def split() -> None:
    """More than 512 keys: AITER splits them over programs and reduces."""
    _assert_attends([1, 1], [700, 33], FLOAT16)
    _assert_attends([1, 1], [520, 1], _dtypes()[-1], logit_cap=5.0, sinks_H=torch.randn(8))
    _assert_attends([2], [530], FLOAT16, kv_heads=4, orphans=1)
    if aiter_lib.version() == "main":
        _assert_attends([1], [530], FLOAT16, dim=80, kv_heads=4)


def extend() -> None:
    """Any number of queries with and without cached keys; queries that see no key; rows of no request."""
    for dtype in _dtypes():
        _assert_attends([3, 20, 1], [40, 33, 17], dtype)
        _assert_attends([17, 5], [17, 64], dtype, page_size=64, window=9)
        _assert_attends([2, 9], [70, 9], dtype, logit_cap=5.0, kv_heads=8)
    _assert_attends([4, 4, 2], [1, 9, 5], FLOAT16, orphans=3)
    _assert_attends([4, 0, 2], [1, 0, 5], FLOAT16)
    _assert_attends([1, 1], [7, 5], FLOAT16, orphans=2)
    _assert_attends([3, 5], [20, 5], _dtypes()[-1], kv_heads=2, heads=6, sinks_H=torch.randn(6))


def float8() -> None:
    """The float8 of gfx942 with unequal scales, in both of AITER's kernels."""
    how = {"kv_dtype": torch.float8_e4m3fnuz, "k_scale": 0.5, "v_scale": 2.0}
    _assert_attends([1, 1], [40, 33], FLOAT16, **how)
    _assert_attends([3, 7], [40, 7], FLOAT16, **how)
    _assert_attends([1], [520], FLOAT16, **how)


def captured() -> None:
    """A captured batch whose tensors are refilled: the same call, other lengths and pages."""
    k, v, batch = make_batch([2, 2], [40, 33], page_size=16, dim=32, v_dim=32, captured=True)
    k, v = k.nan_to_num(STALE), v.nan_to_num(STALE)
    k, v, q = k.to(FLOAT16), v.to(FLOAT16), torch.randn(4, 4, 32).to(FLOAT16)
    _assert_equal(q, k, v, batch, scale=0.2)
    batch.seq_lens_B.copy_(torch.tensor([17, 1]))
    batch.page_table.pages_BP[:, :2] = torch.tensor([[3, 1], [5, 0]])
    k[[1, 3, 5]], v[[1, 3, 5]] = torch.randn(2, 3, 16, 2, 32).to(FLOAT16).unbind()
    _assert_equal(q, k, v, batch, scale=0.2)


def empty() -> None:
    """No tokens: no launch, an empty answer."""
    k, v, batch = make_batch([0], [5], page_size=16, dim=32, v_dim=32)
    k, v = k.to(FLOAT16), v.to(FLOAT16)
    out, _ = paged_attention(torch.empty(0, 4, 32, dtype=FLOAT16), k, v, batch, scale=1.0, forced=UNIFIED)
    assert out.shape == (0, 4, 32)


def rope_cache() -> None:
    """Rope and cache write without q/k norm: both rotation orders, slices of one projection, pages of 1 and 4.

    The wheel's only: main takes bfloat16 alone.
    """
    (row,) = [kernel for kernel in NORM_ROPE_STORE.kernels if kernel.name == ROPE_CACHE]
    angles = torch.arange(128)[:, None] * 1e4 ** (-torch.arange(0, 32, 2) / 32)
    for dtype in (FLOAT16, FLOAT32):
        for is_neox, page_size, table in ((True, 4, FLOAT32), (False, 1, dtype)):
            qkv = torch.randn(7, (4 + 2 + 2) * 32).to(dtype)
            given, results = qkv.clone(), []
            for name in (ROPE_CACHE, "reference"):
                pages = [torch.zeros(32 // page_size, page_size, 2, 32, dtype=dtype) for _ in range(2)]
                q = qk_norm_rope_store_kv(
                    qkv[:, :128].view(7, 4, 32),
                    qkv[:, 128:192].view(7, 2, 32),
                    qkv[:, 192:].view(7, 2, 32),
                    *pages,
                    TokenSlots(slots_T=torch.tensor([9, 10, 11, 30, 31, 4, 12])),
                    positions=torch.tensor([0, 1, 2, 50, 51, 127, 7]),
                    cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=-1).to(table),
                    is_neox=is_neox,
                    q_weight=None,
                    k_weight=None,
                    eps=1e-6,
                    forced=name,
                )
                results.append([q, *pages])
            tolerance = row.tolerance[dtype]
            for ours, expected in zip(*results, strict=True):
                torch.testing.assert_close(ours, expected, rtol=tolerance.rtol, atol=tolerance.atol)
            assert torch.equal(results[0][2], results[1][2]), "the values are copied"
            assert torch.equal(qkv, given), "the arguments keep their values"


def _assert_mla(heads: int, seq_lens: list[int], dtype: torch.dtype, *, rank: int = 32, **how: Any) -> None:
    """Assert the same of MLA: slot 0 and what holds no key are NaN, and the queries are a slice."""
    page_size = how.pop("page_size", 1)
    pages, _, batch = make_batch([1] * len(seq_lens), seq_lens, page_size=page_size, kv_heads=1, dim=rank + 16)
    q = torch.randn(len(seq_lens), heads, rank + 24)[..., : rank + 16].to(dtype)
    _assert_mla_equal(q, pages.to(dtype), batch, kv_lora_rank=rank, scale=(rank + 16) ** -0.5, **how)


def _assert_mla_equal(q: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    (row,) = [kernel for kernel in MLA.kernels if kernel.name == MLA_DECODE]
    out, _ = mla_attention(q, pages, batch, forced=MLA_DECODE, **how)
    expected, _ = mla_attention(q, pages, batch, forced="reference", **how)
    tolerance = row.tolerance[q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance.rtol, atol=tolerance.atol)


def mla_decode() -> None:
    """MLA without AITER's own rotation: every head count up to 16, then 24 to 128; pages of 1 and 16; a scale."""
    for heads in (*range(1, 17), 24, 32, 64, 128):
        _assert_mla(heads, [1, 37], FLOAT32, page_size=1 if heads % 2 else 16)
    _assert_mla(12, [40, 33, 1], FLOAT16, kv_scale=0.5)
    _assert_mla(16, [300, 1], FLOAT32, rank=512)


def mla_captured() -> None:
    """A captured batch whose tensors are refilled."""
    pages, _, batch = make_batch([1, 1], [40, 33], page_size=16, kv_heads=1, dim=48, captured=True)
    pages, q = pages.to(FLOAT32), torch.randn(2, 12, 48)
    _assert_mla_equal(q, pages, batch, kv_lora_rank=32, scale=0.2)
    batch.seq_lens_B.copy_(torch.tensor([17, 1]))
    batch.page_table.pages_BP[:, :2] = torch.tensor([[3, 1], [5, 4]])
    pages[[1, 3, 4, 5]] = torch.randn(4, 16, 1, 48)
    _assert_mla_equal(q, pages, batch, kv_lora_rank=32, scale=0.2)


GROUPS = {
    group.__name__: group
    for group in (decode, split, extend, float8, captured, empty, rope_cache, mla_decode, mla_captured)
}


def main(folder: str, group: str) -> None:
    """Run one group; raises AssertionError where AITER's kernel and the reference differ."""
    install(Path(folder) / "aiter")
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        poison_empty(monkeypatch)
        GROUPS[group]()
    print(f"AITER {aiter_lib.version()}: {group} ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
