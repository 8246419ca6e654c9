"""The Triton row of mla_attention on a GPU: numerics, replays with other lengths, padding; needs no SGLang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atom_plugin import device
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.mla_attention import TABLE, mla_attention
from atom_plugin.ops.mla_attention.config import choose_tiles
from atom_plugin.ops.paged_attention import PagedBatch
from tests.ops.batches import make_batch

pytestmark = pytest.mark.gpu

TRITON = next(kernel for kernel in TABLE.kernels if kernel.name == "triton")
RANK, ROPE = 512, 64
HOW: dict[str, Any] = {"kv_lora_rank": RANK, "scale": (128 + 64) ** -0.5 / 4, "kv_scale": 0.5}


def on_gpu(batch: PagedBatch) -> PagedBatch:
    """Return ``batch`` with its tensors on the GPU."""
    table = PageTable(pages_BP=batch.page_table.pages_BP.cuda(), page_size=batch.page_table.page_size)
    return dataclasses.replace(
        batch, qo_indptr_B1=batch.qo_indptr_B1.cuda(), seq_lens_B=batch.seq_lens_B.cuda(), page_table=table
    )


def latent_batch(
    q_lens: list[int], seq_lens: list[int], *, page_size: int, dtype: torch.dtype, dim: int = RANK + ROPE
) -> tuple[torch.Tensor, PagedBatch]:
    """Return (kv_pages, batch) on the CPU; what holds no key is NaN."""
    kv_pages, _, batch = make_batch(q_lens, seq_lens, page_size=page_size, kv_heads=1, dim=dim, v_dim=1, dtype=dtype)
    return kv_pages, batch


def expected_of(
    q: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, **how: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the eager row in fp32 on the CPU."""
    kv_pages = kv_pages if kv_pages.dtype.itemsize == 1 else kv_pages.float()
    return mla_attention(q.float(), kv_pages, batch, forced="eager", **{**HOW, **how})


def assert_right(q: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    """Compare with the eager row, within what the Triton row declares; freed memory that it gets is NaN."""
    poison_free_memory()
    out, lse = mla_attention(q.cuda(), kv_pages.cuda(), on_gpu(batch), forced="triton", **{**HOW, **how})
    expected, expected_lse = expected_of(q, kv_pages, batch, **how)
    tolerance = TRITON.tolerance[q.dtype]
    torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance.rtol, atol=tolerance.atol)
    if lse is not None:
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)


def poison_free_memory() -> None:
    """Leave NaN in the allocator's blocks of every size that the next call asks for."""
    for megabytes in (1, 4, 16, 64, 256):
        torch.full((megabytes << 18,), float("nan"), device="cuda")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [
        ([1] * 5, [1, 63, 64, 700, 3000]),
        ([8] * 3, [8, 900, 2049]),
        ([30, 1, 0, 77], [30, 1, 0, 2000]),
    ],
    ids=["decode", "verify", "mixed"],
)
def test_numerics(
    dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, q_lens: list[int], seq_lens: list[int]
) -> None:
    kv_pages, batch = latent_batch(q_lens, seq_lens, page_size=page_size, dtype=kv_dtype)
    q = torch.randn(sum(q_lens), 12, RANK + ROPE, dtype=dtype)
    assert_right(q, kv_pages, batch, return_lse=True)


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 128])
@pytest.mark.parametrize("q_len", [1, 2, 5, 16])
def test_heads_and_query_lengths(heads: int, q_len: int) -> None:
    """Also requests without queries, without keys, with queries before their first key, and rows of no request."""
    kv_pages, batch = latent_batch(
        [q_len, q_len, 0, q_len, q_len], [700, 65, 9, 0, 1], page_size=16, dtype=torch.bfloat16
    )
    q = torch.randn(4 * q_len + 3, heads, RANK + ROPE, dtype=torch.bfloat16)
    assert_right(q, kv_pages, batch, return_lse=True)


@pytest.mark.parametrize(("rank", "rope"), [(512, 0), (256, 64), (64, 16)])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_len", [1, 8])
def test_other_ranks(rank: int, rope: int, kv_dtype: torch.dtype, q_len: int) -> None:
    kv_pages, batch = latent_batch([q_len] * 3, [q_len, 200, 517], page_size=1, dim=rank + rope, dtype=kv_dtype)
    q = torch.randn(3 * q_len, 12, rank + rope, dtype=torch.bfloat16)
    assert_right(q, kv_pages, batch, kv_lora_rank=rank, return_lse=True)


@pytest.mark.parametrize("q_len", [1, 4])
def test_fp32(q_len: int) -> None:
    kv_pages, batch = latent_batch([q_len] * 3, [q_len, 200, 517], page_size=1, dtype=torch.float32)
    q = torch.randn(3 * q_len, 12, RANK + ROPE)
    poison_free_memory()
    out, _ = mla_attention(q.cuda(), kv_pages.cuda(), on_gpu(batch), forced="triton", **HOW)
    expected, _ = expected_of(q, kv_pages, batch)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_nothing_beside_the_queries_reaches_an_answer() -> None:
    kv_pages, batch = latent_batch([1, 3], [650, 10], page_size=64, dtype=torch.bfloat16)
    around = torch.full((8, 20, RANK + ROPE + 32), float("nan"), dtype=torch.bfloat16, device="cuda")
    q = around[2:6, 4:16, 16 : 16 + RANK + ROPE]
    q.copy_(torch.randn(4, 12, RANK + ROPE))
    out, _ = mla_attention(q, kv_pages.cuda(), on_gpu(batch), forced="triton", **HOW)
    expected, _ = expected_of(q.cpu(), kv_pages, batch)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("splits", [1, 2, 7, 100])
@pytest.mark.parametrize("q_len", [1, 2, 8])
def test_splits(splits: int, q_len: int) -> None:
    from atom_plugin.ops.mla_attention import kernel

    kv_pages, batch = latent_batch([q_len] * 4, [q_len, 33, 1000, 2500], page_size=16, dtype=torch.bfloat16)
    q = torch.randn(4 * q_len, 12, RANK + ROPE, dtype=torch.bfloat16)
    config = dataclasses.replace(choose_tiles(device.arch(), q_len * 12, 2, 2), splits=splits)
    poison_free_memory()
    out, lse = kernel.launch(q.cuda(), kv_pages.cuda(), on_gpu(batch), config, return_lse=True, **HOW)
    expected, expected_lse = expected_of(q, kv_pages, batch, return_lse=True)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("heads", [12, 64])
def test_a_captured_batch_replays_with_other_lengths(q_len: int, heads: int) -> None:
    """Captured at full length with every page in the table; replayed shorter, longer, and with padded requests."""
    kv_pages, batch = latent_batch([q_len] * 6, [2000] * 6, page_size=64, dtype=torch.bfloat16)
    captured = dataclasses.replace(on_gpu(batch), captured=True)
    static_q = torch.randn(6 * q_len, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    kv_gpu = kv_pages.cuda()
    mla_attention(static_q, kv_gpu, captured, return_lse=True, **HOW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_attention(static_q, kv_gpu, captured, return_lse=True, **HOW)
    assert lse is not None
    for lengths in ([2000] * 6, [q_len, 17, 500, 1999, 64, 1], [1] * 6, [2000, 0, 3, 0, 900, 1]):
        captured.seq_lens_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        static_q.copy_(torch.randn_like(static_q))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        now = dataclasses.replace(batch, seq_lens_B=torch.tensor(lengths, dtype=torch.int32), derived={})
        expected, expected_lse = expected_of(static_q.cpu(), kv_pages, now, return_lse=True)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1e-2)
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)


def test_calls_that_follow_each_other_in_one_graph() -> None:
    """Eight layers on one allocator's scratch, the lengths overwritten behind each: early reductions mix nothing up."""
    kv_pages, batch = latent_batch([1] * 6, [2000] * 6, page_size=64, dtype=torch.bfloat16)
    captured = dataclasses.replace(on_gpu(batch), captured=True)
    kv_gpu = kv_pages.cuda()
    layers = [torch.randn(6, 12, RANK + ROPE, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    lengths = [torch.randint(1, 2001, (6,), dtype=torch.int32, device="cuda") for _ in layers]
    mla_attention(layers[0], kv_gpu, captured, **HOW)
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for q, lens in zip(layers, lengths, strict=True):
            captured.seq_lens_B.copy_(lens)
            outs.append(mla_attention(q, kv_gpu, captured, **HOW)[0].clone())
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for q, lens, out in zip(layers, lengths, outs, strict=True):
        now = dataclasses.replace(batch, seq_lens_B=lens.cpu(), derived={})
        expected, _ = expected_of(q.cpu(), kv_pages, now, return_lse=False)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1e-2)


def test_the_same_inputs_give_the_same_bits() -> None:
    kv_pages, batch = latent_batch([1] * 9, [3000] * 9, page_size=1, dtype=torch.bfloat16)
    q = torch.randn(9, 12, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    first, _ = mla_attention(q, kv_pages.cuda(), on_gpu(batch), **HOW)
    for _ in range(5):
        again, _ = mla_attention(q, kv_pages.cuda(), on_gpu(batch), **HOW)
        assert torch.equal(first, again)
