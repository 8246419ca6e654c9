"""store_kv on a GPU leaves the bytes that reference.py leaves on the CPU, in a graph as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atom_plugin import device
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv import store_kv
from tests.ops.poison import poison_empty

pytestmark = pytest.mark.gpu

FLOAT8 = torch.float8_e4m3fnuz if device.fp8_is_fnuz() else torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    poison_empty(monkeypatch)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def nan_pages(num_pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_pages, page_size, heads, dim), float("nan"), device="cuda").to(dtype)


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    ours, theirs = (x.cpu().contiguous().view(torch.uint8) for x in (actual, expected))
    assert torch.equal(ours, theirs), f"{(ours != theirs).sum()} of {ours.numel()} bytes differ"


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FLOAT8),
        (torch.float16, torch.float16),
        (torch.float16, FLOAT8),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "v_dim", "page_size", "index_dtype"),
    [(1, 1, 64, 64, 64, torch.int32), (77, 5, 80, 96, 1, torch.int64), (2100, 8, 256, 128, 64, torch.int64)],
)
def test_the_bytes_are_the_references(
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    tokens: int,
    heads: int,
    dim: int,
    v_dim: int,
    page_size: int,
    index_dtype: torch.dtype,
) -> None:
    kv = (4 * torch.randn(tokens, heads * (dim + v_dim) + 8, device="cuda")).to(dtype)
    k, v = kv[:, 8 : 8 + heads * dim].view(tokens, heads, dim), kv[:, 8 + heads * dim :].view(tokens, heads, v_dim)
    slots = torch.randperm(2112, device="cuda")[:tokens].to(index_dtype)
    pages = [nan_pages(2112 // page_size, page_size, heads, width, pool_dtype) for width in (dim, v_dim)]
    expected = [x.cpu() for x in pages]
    given = kv.clone()
    store_kv(k, v, *pages, TokenSlots(slots_T=slots), k_scale=0.3, v_scale=1.7, forced="triton")
    on_cpu = TokenSlots(slots_T=slots.cpu())
    store_kv(k.cpu(), v.cpu(), *expected, on_cpu, k_scale=0.3, v_scale=1.7, forced="reference")
    assert torch.equal(kv, given)
    for ours, theirs in zip(pages, expected, strict=True):
        assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_every_value_of_a_half_format_to_float8(dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(128, 4, 128)
    pages = [nan_pages(128, 1, 4, 128, FLOAT8) for _ in "kv"]
    x, slots = every.cuda(), TokenSlots(slots_T=torch.arange(128, device="cuda"))
    store_kv(x, x, *pages, slots, k_scale=scale, v_scale=scale, forced="triton")
    expected = (every / scale).to(FLOAT8) if scale != 1.0 else every.to(FLOAT8)
    nan = every.isnan()
    for ours in pages:
        ours = ours.cpu()[:, 0]
        assert torch.equal(ours.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])
        assert ours.float()[nan].isnan().all()


def test_slots_outside_of_the_pool_are_skipped() -> None:
    """The pool is the middle of a larger buffer, so that a write past either end would show."""
    memory = torch.zeros(2, 30, 2, 16, device="cuda")
    k_pages, v_pages = (memory[side, 4:20].view(4, 4, 2, 16) for side in (0, 1))
    slots = torch.tensor([-1, 16, 3, -4, 2**31, -(2**33), 17, 15], device="cuda")
    k = torch.ones(8, 2, 16, device="cuda")
    store_kv(k, k, k_pages, v_pages, TokenSlots(slots_T=slots), forced="triton")
    for side in (0, 1):
        assert memory[side].sum(dim=(1, 2)).nonzero().flatten().tolist() == [4 + 3, 4 + 15]


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FLOAT8])
def test_a_captured_store_is_replayed_with_other_tokens(pool_dtype: torch.dtype) -> None:
    """Rows past the real ones of a replay are padding: they go to slot 0, or nowhere."""
    tokens, heads, dim = 48, 4, 128
    k, v = (torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    slots = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    pages = [nan_pages(8, 16, heads, dim, pool_dtype) for _ in "kv"]
    arguments = (k, v, *pages, TokenSlots(slots_T=slots))
    store_kv(*arguments, k_scale=0.5, v_scale=2.0, forced="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv(*arguments, k_scale=0.5, v_scale=2.0, forced="triton")
    for real, padding in ((48, 0), (1, -1), (17, 0), (33, -1)):
        for x in (k, v):
            x.normal_()
        slots.fill_(padding)
        slots[:real] = torch.randperm(127, device="cuda")[:real] + 1
        for x in pages:
            x.view(torch.uint8).fill_(0x7F)
        expected = [x.cpu() for x in pages]
        graph.replay()
        torch.cuda.synchronize()
        only_real = TokenSlots(slots_T=slots[:real].cpu())
        store_kv(k[:real].cpu(), v[:real].cpu(), *expected, only_real, k_scale=0.5, v_scale=2.0, forced="reference")
        for ours, theirs in zip(pages, expected, strict=True):
            first = 0 if padding < 0 or real == tokens else 1  # padding may have written slot 0
            assert_same_bytes(ours.flatten(0, 1)[first:], theirs.flatten(0, 1)[first:])
