"""Every row of mla_attention computes what reference.py defines, within the tolerance that the row declares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.mla_attention import TABLE, MlaAttentionProblem, eager, mla_attention
from atom_plugin.ops.mla_attention.config import choose_tiles, split
from atom_plugin.ops.paged_attention import PagedBatch
from atom_plugin.ops.paged_attention.scratch import Scratch
from tests.ops.batches import make_batch

TOLERANCE = {kernel.name: kernel.tolerance for kernel in TABLE.kernels}
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def latent_batch(
    q_lens: list[int],
    seq_lens: list[int],
    *,
    page_size: int = 4,
    dim: int = 80,
    dtype: torch.dtype = torch.float32,
    captured: bool = False,
    orphans: int = 0,
) -> tuple[torch.Tensor, PagedBatch]:
    """Return (kv_pages, batch); what holds no key is NaN."""
    kv_pages, _, batch = make_batch(
        q_lens, seq_lens, page_size=page_size, kv_heads=1, dim=dim, dtype=dtype, captured=captured, orphans=orphans
    )
    return kv_pages, batch


def assert_is_the_reference(row: str, q: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    how = {"kv_lora_rank": 64, "scale": 0.1, **how}
    out, lse = mla_attention(q, kv_pages, batch, forced=row, **how)
    expected, expected_lse = mla_attention(q, kv_pages, batch, forced="reference", **how)
    tolerance = TOLERANCE[row][q.dtype]
    assert out.dtype == q.dtype
    torch.testing.assert_close(out, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    assert (lse is None) == (not how.get("return_lse", False))
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 5, 17, 40]), st.sampled_from([0, 1, 15, 16, 17, 33])),
        min_size=1,
        max_size=5,
    ),
    page_size=st.sampled_from([1, 4, 16, 64]),
    heads=st.sampled_from([1, 3, 12]),
    dims=st.sampled_from([(64, 16), (32, 0), (24, 8)]),
    return_lse=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_eager_on_random_batches(
    requests: list[tuple[int, int]],
    page_size: int,
    heads: int,
    dims: tuple[int, int],
    return_lse: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    q_lens, seq_lens = [new for new, _ in requests], [new + cached for new, cached in requests]
    kv_pages, batch = latent_batch(q_lens, seq_lens, page_size=page_size, dim=sum(dims), orphans=2)
    q = torch.randn(sum(q_lens) + 2, heads, sum(dims))
    assert_is_the_reference(
        "eager", q, kv_pages, batch, kv_lora_rank=dims[0], scale=0.2, kv_scale=0.5, return_lse=return_lse
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16, *FP8])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 30, 1]], ids=["decode", "extend"])
def test_eager_of_every_dtype(dtype: torch.dtype, kv_dtype: torch.dtype | None, q_lens: list[int]) -> None:
    kv_pages, batch = latent_batch(q_lens, [90, 31, 7], page_size=16, dtype=kv_dtype or dtype)
    assert_is_the_reference("eager", torch.randn(sum(q_lens), 3, 80, dtype=dtype), kv_pages, batch, kv_scale=0.5)


@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 20, 3, 60]], ids=["decode", "extend"])
def test_scratch_of_eager_stays_under_its_bound(monkeypatch: pytest.MonkeyPatch, q_lens: list[int]) -> None:
    monkeypatch.setattr(eager, "MAX_SCRATCH_BYTES", 64 << 10)
    monkeypatch.setattr(eager, "_SCRATCH", Scratch())
    kv_pages, batch = latent_batch(q_lens, [133, 200, 150, 101], dtype=torch.bfloat16)
    assert_is_the_reference("eager", torch.randn(sum(q_lens), 4, 80), kv_pages, batch, return_lse=True)
    assert 0 < sum(buffer.numel() for buffer in eager._SCRATCH.buffers.values()) <= 64 << 10


def test_eager_decode_makes_as_many_products_for_32_requests_as_for_2(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda *args: calls.append(1) or matmul(*args))
    for requests in (2, 32):
        kv_pages, batch = latent_batch([1] * requests, [100 + request % 7 for request in range(requests)])
        mla_attention(torch.randn(requests, 4, 80), kv_pages, batch, kv_lora_rank=64, scale=0.1)
    assert len(calls) == 4


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize(
    ("heads", "q_lens", "seq_lens", "page_size"),
    [
        (1, [1, 1, 1], [1, 63, 64], 1),
        (3, [2, 1, 0, 5], [65, 200, 9, 5], 4),
        (8, [4, 4], [64, 130], 64),
        (12, [1, 3, 2], [200, 65, 2], 1),
        (12, [8], [200], 64),
        (16, [1, 0, 1], [0, 0, 200], 4),
        (24, [3, 5], [63, 5], 3),
        (5, [16, 1, 16], [200, 1, 16], 4),
        (2, [40], [70], 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_over_odd_sizes(
    dtype: torch.dtype, heads: int, q_lens: list[int], seq_lens: list[int], page_size: int
) -> None:
    kv_pages, batch = latent_batch(q_lens, seq_lens, page_size=page_size, dtype=dtype)
    q = torch.randn(sum(q_lens), heads, 80, dtype=dtype)
    assert_is_the_reference("triton", q, kv_pages, batch, kv_scale=0.5, return_lse=True)


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize(("splits", "min_tiles"), [(1, 1), (3, 1), (7, 2), (40, 1)])
def test_triton_splits(splits: int, min_tiles: int) -> None:
    """More splits than tiles, requests shorter than a split, queries before the first key, rows of no request."""
    from atom_plugin.ops.mla_attention import kernel

    q_lens, seq_lens = [1, 3, 0, 4, 2, 0], [200, 65, 7, 1, 0, 0]
    kv_pages, batch = latent_batch(q_lens, seq_lens, dtype=torch.float32)
    q = torch.randn(sum(q_lens) + 3, 12, 80)
    config = dataclasses.replace(choose_tiles("sm90", 12, 4, 4), splits=splits, min_tiles=min_tiles)
    how = {"kv_lora_rank": 64, "scale": 0.1, "kv_scale": 0.5, "return_lse": True}
    out, lse = kernel.launch(q, kv_pages, batch, config, **how)
    expected, expected_lse = mla_attention(q, kv_pages, batch, forced="reference", **how)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert out[4:7].eq(0).all() and out[8:].eq(0).all() and lse[8:].eq(-torch.inf).all()


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dims", [(64, 16), (32, 0)])
def test_triton_fp8_and_no_rope(kv_dtype: torch.dtype, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    kv_pages, batch = latent_batch([2, 1], [70, 9], dim=sum(dims), dtype=kv_dtype)
    q = torch.randn(3, 12, sum(dims), dtype=dtype)
    assert_is_the_reference("triton", q, kv_pages, batch, kv_lora_rank=dims[0], kv_scale=0.5)


@pytest.mark.usefixtures("triton_interpreter")
def test_triton_takes_strided_queries_and_nothing_beside_them() -> None:
    """Queries lie between NaN heads and NaN tokens, which reach no answer."""
    kv_pages, batch = latent_batch([1, 3], [65, 10])
    around = torch.full((8, 20, 96), float("nan"))
    q = around[2:6, 4:16, 8:88]
    q.copy_(torch.randn(4, 12, 80))
    assert_is_the_reference("triton", q, kv_pages, batch, return_lse=True)


@pytest.mark.usefixtures("triton_interpreter")
def test_triton_launches_do_not_depend_on_lengths() -> None:
    """A captured batch refilled with other lengths gives their answer; the bounds stay."""
    kv_pages, batch = latent_batch([1, 1, 1], [130, 40, 9], captured=True)
    q = torch.randn(3, 12, 80)
    assert_is_the_reference("triton", q, kv_pages, batch, return_lse=True)
    batch.seq_lens_B.copy_(torch.tensor([3, 0, 8]))
    assert_is_the_reference("triton", q, kv_pages, batch, return_lse=True)


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    kv_pages, batch = latent_batch([4, 1], [1, 0])
    for row in ("eager", "reference"):
        out, lse = mla_attention(
            torch.randn(7, 2, 80), kv_pages, batch, kv_lora_rank=64, scale=1, return_lse=True, forced=row
        )
        assert out[:3].eq(0).all() and out[4:].eq(0).all() and lse is not None
        assert lse[:3].eq(-torch.inf).all() and lse[3].isfinite().all() and lse[4:].eq(-torch.inf).all()


def test_no_tokens_give_an_empty_answer() -> None:
    kv_pages, batch = latent_batch([0, 0], [5, 1])
    out, lse = mla_attention(torch.randn(0, 3, 80), kv_pages, batch, kv_lora_rank=64, scale=1, return_lse=True)
    assert out.shape == (0, 3, 64) and lse is not None and lse.shape == (0, 3)


def test_splits_fill_the_gpu_and_never_exceed_the_bounds() -> None:
    def splits(requests: int, rows: int, max_seq_len: int) -> int:
        config = split(
            choose_tiles("sm90", rows, 2, 2),
            num_requests=requests,
            num_rows=rows,
            max_seq_len=max_seq_len,
            num_multiprocessors=132,
        )
        assert config.splits * config.min_tiles * config.keys < max_seq_len + config.min_tiles * config.keys
        return config.splits

    assert splits(1, 12, 8192) == 64
    assert splits(1, 12, 100) == 1
    assert splits(64, 12, 8192) == 2
    assert splits(16, 128, 8192) == 4
    assert splits(4096, 12, 8192) == 1
    assert splits(1, 12 * 4096, 8192) == 1


PROBLEM = MlaAttentionProblem(
    arch="cpu",
    phase="decode",
    captured=False,
    q_dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_heads=12,
    kv_lora_rank=512,
    rope_dim=64,
    page_size=1,
    max_q_len=1,
    equal_q_lens=True,
    pool_bytes=0,
    return_lse=False,
)
#: The call that crashed others: q bf16, KV fp8, 12 heads padded to 16, query length 8.
CRASHED = {"kv_dtype": torch.float8_e4m3fn, "max_q_len": 8, "phase": "extend", "captured": True}


@pytest.mark.parametrize(
    ("cell", "row"),
    [
        ({}, "eager"),
        ({"captured": True, "page_size": 64, "return_lse": True}, "eager"),
        ({"kv_lora_rank": 24, "rope_dim": 8, "max_q_len": 500}, "eager"),
        ({"arch": "sm90", "captured": True}, "triton"),
        ({"arch": "sm90", **CRASHED}, "triton"),
        ({"arch": "gfx942", **CRASHED}, "triton"),
        ({"arch": "gfx942", **CRASHED, "kv_dtype": torch.float8_e4m3fnuz}, "triton"),
        ({"arch": "gfx950", **CRASHED}, "triton"),
        ({"arch": "sm90", "num_heads": 128, "page_size": 64, "return_lse": True}, "triton"),
        ({"arch": "gfx950", "rope_dim": 0, "max_q_len": 5000, "phase": "extend"}, "triton"),
    ],
)
def test_cells_that_have_to_be_served(cell: dict[str, Any], row: str) -> None:
    assert TABLE.choose(dataclasses.replace(PROBLEM, **cell)).name == row


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({}, "runs on GPUs; on cpu only interpreted: TRITON_INTERPRET=1, and forced by name"),
        ({"arch": "gfx942"}, "runs on gfx942 only when forced by name: it is PyTorch for CPUs"),
        ({"arch": "sm90", "captured": True}, "reads lengths on the host, which a graph captured on sm90 cannot repeat"),
        ({"q_dtype": torch.float8_e4m3fn}, "queries of torch.float8_e4m3fn: takes float32, bfloat16, float16"),
        (
            {"kv_dtype": torch.float8_e5m2},
            "KV cache of torch.float8_e5m2: takes float32, bfloat16, float16, float8_e4m3",
        ),
        (
            {"kv_dtype": torch.float16},
            "KV cache of torch.float16 with queries of torch.bfloat16: takes the dtype of the queries, float8_e4m3fn "
            "or float8_e4m3fnuz",
        ),
        (
            {"arch": "sm90", "kv_dtype": torch.float8_e4m3fnuz},
            "torch.float8_e4m3fnuz on sm90: it is the FP8 of gfx942 alone",
        ),
        ({"kv_lora_rank": 96}, "kv_lora_rank 96: takes powers of two from 32 to 512"),
        ({"kv_lora_rank": 1024}, "kv_lora_rank 1024: takes powers of two from 32 to 512"),
        ({"rope_dim": 8}, "rope_dim 8: takes 0 and powers of two from 16 to 128"),
        ({"arch": "gfx942"}, "runs only when forced by name: it is the slow definition"),
    ],
)
def test_every_reason(cell: dict[str, Any], reason: str) -> None:
    problem = dataclasses.replace(PROBLEM, **cell)
    assert reason in [told for kernel in TABLE.kernels for told in kernel.why_not(problem)]


def test_when_nothing_can_run_every_row_says_why() -> None:
    with pytest.raises(NoKernelError, match=r"(?s)triton:.*kv_lora_rank 96.*eager:.*sm90.*reference:"):
        TABLE.choose(dataclasses.replace(PROBLEM, arch="sm90", kv_lora_rank=96))


def bad(**changed: Any) -> tuple[torch.Tensor, torch.Tensor, PagedBatch, int]:
    """Return arguments of which ``changed`` is wrong."""
    kv_pages, batch = latent_batch([1, 1], [9, 5])
    of_batch = {name: value for name, value in changed.items() if name not in ("q", "kv_pages", "kv_lora_rank")}
    q = changed.get("q", torch.randn(2, 3, 80))
    return (
        q,
        changed.get("kv_pages", kv_pages),
        dataclasses.replace(batch, **of_batch),
        changed.get("kv_lora_rank", 64),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.randn(2, 240)}, r"q_THD \(2, 240\)"),
        ({"q": torch.randn(2, 0, 80)}, "at least one head"),
        ({"q": torch.randn(2, 80, 3).transpose(1, 2)}, "last stride 1"),
        ({"q": torch.randn(2, 3, 64)}, "queries of 64 columns, latent rows of 80"),
        ({"kv_lora_rank": 81}, "kv_lora_rank 81"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0"),
        ({"kv_pages": torch.randn(9, 4, 80)}, r"kv_pages \(9, 4, 80\)"),
        ({"kv_pages": torch.randn(9, 4, 2, 80)}, r"kv_pages \(9, 4, 2, 80\)"),
        ({"kv_pages": torch.randn(9, 4, 1, 160)[..., :80]}, "takes contiguous"),
        ({"page_table": PageTable(pages_BP=torch.zeros(2, 9, dtype=torch.int32), page_size=1)}, "page table's page"),
        ({"page_table": PageTable(pages_BP=torch.zeros(3, 9, dtype=torch.int32), page_size=4)}, "index tensors of"),
        (
            {"page_table": PageTable(pages_BP=torch.zeros(2, 9, dtype=torch.int64), page_size=4)},
            "pages_BP of torch",
        ),
        ({"seq_lens_B": torch.tensor([9, 5])}, "seq_lens_B of torch.int64"),
        ({"qo_indptr_B1": torch.tensor([0, 1], dtype=torch.int32)}, "index tensors of"),
        ({"max_seq_len": 1000}, "max_seq_len 1000 with a page table of 4 pages of 4"),
        ({"seq_lens_B": torch.zeros(2, dtype=torch.int32, device="meta")}, "tensors on cpu, meta: takes one device"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Any], message: str) -> None:
    q, kv_pages, batch, kv_lora_rank = bad(**changed)
    with pytest.raises(ValueError, match=message):
        mla_attention(q, kv_pages, batch, kv_lora_rank=kv_lora_rank, scale=1.0)


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("row", ["triton", "eager", "reference"])
def test_a_page_table_without_columns(row: str) -> None:
    kv_pages, batch = latent_batch([1, 1], [3, 5])
    table = dataclasses.replace(batch.page_table, pages_BP=batch.page_table.pages_BP[:, :0])
    empty = dataclasses.replace(batch, seq_lens_B=torch.zeros(2, dtype=torch.int32), page_table=table, max_seq_len=0)
    q = torch.randn(2, 3, 80)
    out, lse = mla_attention(q, kv_pages, empty, kv_lora_rank=64, scale=0.1, return_lse=True, forced=row)
    assert out.eq(0).all() and lse is not None and lse.eq(-torch.inf).all()
