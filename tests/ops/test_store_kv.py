"""A store leaves k / k_scale, rounded to the pool's dtype, in the slots it was given, and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv import TABLE, StoreKVProblem, store_kv

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


@pytest.mark.parametrize("row", ["eager", "reference"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), *((torch.bfloat16, dtype) for dtype in FLOAT8)])
def test_only_the_given_slots_change(row: str, page_size: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, pool_dtype = dtypes
    k_pages, v_pages = (torch.randn(64 // page_size, page_size, 2, dim).to(pool_dtype) for dim in (16, 8))
    k, v = torch.randn(5, 2, 16).to(dtype), torch.randn(5, 2, 8).to(dtype)
    given = k.clone(), v.clone()
    slots = torch.tensor([40, 3, 17, 63, 18])
    expected_k, expected_v = (pages.flatten(0, 1).float() for pages in (k_pages, v_pages))
    expected_k[slots], expected_v[slots] = (k / 0.5).to(pool_dtype).float(), (v / 2.0).to(pool_dtype).float()
    store_kv(k, v, k_pages, v_pages, TokenSlots(slots_T=slots), k_scale=0.5, v_scale=2.0, forced=row)
    assert torch.equal(k_pages.flatten(0, 1).float(), expected_k)
    assert torch.equal(v_pages.flatten(0, 1).float(), expected_v)
    assert torch.equal(k, given[0]) and torch.equal(v, given[1])


@pytest.mark.parametrize("pool_dtype", FLOAT8)
def test_float8_is_written_and_read_in_one_format(pool_dtype: torch.dtype) -> None:
    """fn and fnuz differ in bias, largest value and the byte 0x80, which fnuz must never hold for a number."""
    k_pages = torch.zeros(8, 1, 1, 4).to(pool_dtype)
    v_pages = torch.zeros(8, 1, 1, 4).to(pool_dtype)
    k = torch.tensor([[[0.5, -1.0, -0.0, 96.0]]])
    store_kv(k, k, k_pages, v_pages, TokenSlots(slots_T=torch.tensor([3])))
    assert k_pages.dtype == pool_dtype
    assert torch.equal(k_pages[3, 0].float(), k[0])
    if pool_dtype == torch.float8_e4m3fnuz:
        assert (k_pages.view(torch.uint8) != 0x80).all()


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "pool_dtype", "reason"),
    [
        (
            "gfx950",
            torch.bfloat16,
            torch.float8_e5m2,
            "runs on gfx950 only when forced by name: it is PyTorch for CPUs",
        ),
        ("cpu", torch.int8, torch.bfloat16, "keys and values of torch.int8: takes float32, bfloat16, float16"),
        (
            "cpu",
            torch.bfloat16,
            torch.float8_e5m2,
            "KV cache of torch.float8_e5m2: takes float32, bfloat16, float16, float8_e4m3",
        ),
        ("gfx950", torch.bfloat16, torch.float8_e5m2, "runs only when forced by name: it is the slow definition"),
    ],
)
def test_every_reason(arch: str, kv_dtype: torch.dtype, pool_dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(NoKernelError) as error:
        TABLE.choose(StoreKVProblem(arch=arch, kv_dtype=kv_dtype, pool_dtype=pool_dtype))
    assert reason in str(error.value)
