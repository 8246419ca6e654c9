"""The Triton row of paged_attention on a GPU: numerics, replays with other lengths, padding; needs no SGLang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import TABLE, PagedBatch, paged_attention
from tests.ops.batches import make_batch

pytestmark = pytest.mark.gpu

TRITON = next(kernel for kernel in TABLE.kernels if kernel.name == "triton")
HOW = {"scale": 0.1, "k_scale": 0.5, "v_scale": 2.0}


def on_gpu(batch: PagedBatch) -> PagedBatch:
    """Return ``batch`` with its tensors on the GPU."""
    table = PageTable(pages_BP=batch.page_table.pages_BP.cuda(), page_size=batch.page_table.page_size)
    return dataclasses.replace(
        batch, qo_indptr_B1=batch.qo_indptr_B1.cuda(), seq_lens_B=batch.seq_lens_B.cuda(), page_table=table
    )


def assert_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    """Compare with the eager row in fp32 on the CPU, within what the row declares."""
    sinks = how.pop("sinks_H", None)
    on_device = {} if sinks is None else {"sinks_H": sinks.cuda()}
    out, lse = paged_attention(q.cuda(), k.cuda(), v.cuda(), on_gpu(batch), forced="triton", **HOW, **how, **on_device)
    torch.cuda.synchronize()
    kf, vf = (pool if pool.dtype.itemsize == 1 else pool.float() for pool in (k, v))
    expected, expected_lse = expected_on_cpu(q.float(), kf, vf, batch, sinks, **how)
    tolerance = TRITON.tolerance[q.dtype]
    torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance.rtol, atol=tolerance.atol)
    if lse is not None:
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-3, atol=2e-3)


def expected_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, sinks: torch.Tensor | None, **how: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the eager row, which a GPU machine runs when it is forced."""
    return paged_attention(q, k, v, batch, forced="eager", **HOW, **how, sinks_H=sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 16, 64, 1024])
@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [
        ([1] * 5, [1, 63, 64, 700, 3000]),
        ([8] * 3, [8, 900, 2049]),
        ([300, 1, 0, 77, 513], [300, 1, 0, 4000, 700]),
        ([2500], [2500]),
    ],
    ids=["decode", "verify", "mixed", "prefill"],
)
def test_numerics(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, page_size: int, q_lens: list[int], seq_lens: list[int]
) -> None:
    k, v, batch = make_batch(
        q_lens, seq_lens, page_size=page_size, kv_heads=2, dim=128, v_dim=128, dtype=kv_dtype or dtype
    )
    assert_right(torch.randn(sum(q_lens), 16, 128, dtype=dtype), k, v, batch)


@pytest.mark.parametrize("dim", [64, 80, 96, 256])
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (6, 2), (16, 1), (24, 2)])
@pytest.mark.parametrize("q_len", [1, 3, 70])
def test_head_dims_and_groups(dim: int, heads: tuple[int, int], q_len: int) -> None:
    k, v, batch = make_batch(
        [q_len] * 3, [q_len, 200, 517], page_size=16, kv_heads=heads[1], dim=dim, v_dim=dim, dtype=torch.bfloat16
    )
    assert_right(torch.randn(3 * q_len, heads[0], dim, dtype=torch.bfloat16), k, v, batch, return_lse=True)


@pytest.mark.parametrize(
    "how",
    [
        {"window": 33, "return_lse": True},
        {"logit_cap": 5.0},
        {"sinks_H": torch.linspace(-3, 9, 8), "return_lse": True},
        {"sinks_H": torch.linspace(-3, 9, 8), "window": 100, "logit_cap": 20.0, "return_lse": True},
    ],
    ids=["window", "cap", "sinks", "all"],
)
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [5, 200, 0, 1], [4, 4, 4, 4]], ids=["decode", "extend", "blind"])
def test_every_option(how: dict[str, Any], q_lens: list[int]) -> None:
    k, v, batch = make_batch(q_lens, [5, 1300, 9, 1], page_size=16, dim=128, v_dim=128, dtype=torch.bfloat16, orphans=3)
    assert_right(torch.randn(sum(q_lens) + 3, 8, 128, dtype=torch.bfloat16), k, v, batch, **how)


@pytest.mark.parametrize("heads", [(8, 8), (12, 12)])
@pytest.mark.parametrize("dims", [(192, 128), (48, 32)])
@pytest.mark.parametrize("how", [{"causal": False}, {"causal": False, "consecutive": True}, {"consecutive": True}])
def test_keys_that_are_handed_over(heads: tuple[int, int], dims: tuple[int, int], how: dict[str, Any]) -> None:
    """MLA's un-absorbed form: a value narrower than its key, the keys of a request in a row, and an lse."""
    q_lens, seq_lens = [5, 200, 1, 70], [300, 1, 1000, 64]
    k, v, batch = make_batch(
        q_lens, seq_lens, kv_heads=heads[1], dim=dims[0], v_dim=dims[1], dtype=torch.bfloat16, **how
    )
    q = torch.randn(sum(q_lens), heads[0], dims[0], dtype=torch.bfloat16)
    assert_right(q, k, v, batch, return_lse=True)


def test_queries_beyond_the_range_of_fp16() -> None:
    """float8 keys are multiplied in fp16: queries of 1e6 must not become infinite."""
    k, v, batch = make_batch([1, 1], [100, 9], dim=128, v_dim=128, dtype=torch.float8_e4m3fn)
    q = 1e6 * torch.randn(2, 8, 128, dtype=torch.bfloat16)
    how = {"scale": 1e-7, "k_scale": 0.5, "v_scale": 2.0}
    out, _ = paged_attention(q.cuda(), k.cuda(), v.cuda(), on_gpu(batch), forced="triton", **how)
    expected, _ = paged_attention(q.float(), k, v, batch, forced="eager", **how)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("q_len", [1, 4])
def test_a_captured_batch_replays_with_other_lengths(q_len: int) -> None:
    """Captured at full length with every page in the table; replayed shorter, longer, and with padded requests."""
    k, v, batch = make_batch([q_len] * 6, [2000] * 6, page_size=16, dim=128, v_dim=128, dtype=torch.bfloat16)
    q = torch.randn(6 * q_len, 8, 128, dtype=torch.bfloat16)
    captured = dataclasses.replace(on_gpu(batch), captured=True)
    static_q, k_gpu, v_gpu = q.cuda(), k.cuda(), v.cuda()
    paged_attention(static_q, k_gpu, v_gpu, captured, forced="triton", **HOW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = paged_attention(static_q, k_gpu, v_gpu, captured, forced="triton", **HOW)
    for lengths in ([2000] * 6, [q_len, 17, 500, 1999, 64, 1], [1] * 6, [2000, 0, 3, 0, 900, 1]):
        captured.seq_lens_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        fresh = torch.randn_like(static_q)
        static_q.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        now = dataclasses.replace(batch, seq_lens_B=torch.tensor(lengths, dtype=torch.int32), derived={})
        expected, _ = paged_attention(fresh.float().cpu(), k.float(), v.float(), now, forced="eager", **HOW)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1e-2)


def test_the_same_inputs_give_the_same_bits() -> None:
    k, v, batch = make_batch([1] * 9, [3000] * 9, page_size=1, dim=128, v_dim=128, dtype=torch.bfloat16)
    q = torch.randn(9, 8, 128, dtype=torch.bfloat16).cuda()
    first, _ = paged_attention(q, k.cuda(), v.cuda(), on_gpu(batch), forced="triton", **HOW)
    for _ in range(5):
        again, _ = paged_attention(q, k.cuda(), v.cuda(), on_gpu(batch), forced="triton", **HOW)
        assert torch.equal(first, again)
