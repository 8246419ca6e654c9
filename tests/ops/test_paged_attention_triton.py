"""The Triton row of paged_attention, interpreted, against the definition; and bad calls of the public function."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import TABLE, PagedBatch, paged_attention
from tests.ops.batches import make_batch

TRITON = next(kernel for kernel in TABLE.kernels if kernel.name == "triton")
HOW = {"scale": 0.3, "k_scale": 0.5, "v_scale": 2.0}


def assert_defined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    out, lse = paged_attention(q, k, v, batch, forced="triton", **HOW, **how)
    expected, expected_lse = paged_attention(q, k, v, batch, forced="reference", **HOW, **how)
    tolerance = TRITON.tolerance[q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    assert (lse is None) == (not how.get("return_lse", False))
    if lse is not None:
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


@pytest.fixture(params=[1, 5], ids=["whole", "ranges"])
def _splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, triton_interpreter: None) -> None:
    from atom_plugin.ops.paged_attention import kernel

    monkeypatch.setattr(kernel, "splits_for", lambda **_shape: request.param)


BATCHES = {
    "decode": ([1, 1, 1, 1], [1, 63, 65, 200]),
    "verify": ([4, 4, 4], [4, 64, 131]),
    "mixed": ([1, 33, 0, 70], [150, 33, 5, 90]),
    "blind": ([4, 2, 0, 1], [1, 31, 7, 0]),
}


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str, page_size: int) -> None:
    q_lens, seq_lens = BATCHES[name]
    k, v, batch = make_batch(q_lens, seq_lens, page_size=page_size, orphans=2)
    assert_defined(torch.randn(sum(q_lens) + 2, 6, 16), k, v, batch, return_lse=True)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("name", BATCHES)
def test_not_causal(name: str, heads: tuple[int, int]) -> None:
    """Queries see every key, as those of a chunk of prefixes; more queries than a block holds, and masks left out."""
    q_lens, seq_lens = BATCHES[name]
    dims = {"kv_heads": heads[1], "dim": 24, "v_dim": 20}
    k, v, batch = make_batch(q_lens, seq_lens, **dims, orphans=2, causal=False)
    assert_defined(torch.randn(sum(q_lens) + 2, heads[0], 24), k, v, batch, return_lse=True)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize(
    "how",
    [
        {"window": 7},
        {"logit_cap": 3.0},
        {"sinks_H": torch.tensor([-2.0, 0.0, 3.0, 9.0])},
        {"sinks_H": torch.tensor([-torch.inf, -300.0, 90.0, 300.0])},
        {"window": 70, "logit_cap": 3.0, "sinks_H": torch.tensor([-2.0, 0.0, 3.0, 9.0])},
    ],
    ids=["window", "cap", "sinks", "extreme sinks", "all"],
)
@pytest.mark.parametrize("name", ["decode", "mixed", "blind"])
def test_options(name: str, how: dict[str, Any]) -> None:
    q_lens, seq_lens = BATCHES[name]
    k, v, batch = make_batch(q_lens, seq_lens, page_size=16, orphans=1)
    assert_defined(torch.randn(sum(q_lens) + 1, 4, 16), k, v, batch, return_lse=True, **how)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (7, 1), (12, 2), (16, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (24, 40)])
def test_groups_and_head_dims(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    k, v, batch = make_batch([1, 3], [66, 20], page_size=4, kv_heads=heads[1], dim=dims[0], v_dim=dims[1])
    assert_defined(torch.randn(4, heads[0], dims[0]), k, v, batch)


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(16, 16), (48, 32), (192, 128)])
def test_keys_that_lie_one_after_the_other(dims: tuple[int, int], causal: bool) -> None:
    """Of the page table the first column alone is read: the other places name pages that do not exist."""
    q_lens, seq_lens = [5, 1, 70, 3], [90, 1, 70, 20]
    k, v, batch = make_batch(q_lens, seq_lens, dim=dims[0], v_dim=dims[1], causal=causal, orphans=1, consecutive=True)
    q = torch.randn(sum(q_lens) + 1, 4, dims[0]) * (16 / dims[0]) ** 0.5
    assert_defined(q, k, v, batch, return_lse=True)
    how = {"scale": 0.3, "forced": "triton"}
    whole, _ = paged_attention(q, k, v, batch, **how)
    first_alone = batch.page_table.pages_BP.clone()
    first_alone[:, 1:] = 0
    alone = dataclasses.replace(batch, page_table=PageTable(pages_BP=first_alone, page_size=1))
    assert torch.equal(paged_attention(q, k, v, alone, **how)[0], whole)


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_half_precision_and_float8(kv_dtype: torch.dtype) -> None:
    k, v, batch = make_batch([1, 40], [90, 70], page_size=16, dtype=kv_dtype)
    assert_defined(torch.randn(41, 4, 16, dtype=torch.float16), k, v, batch)


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_every_float8_value_is_read_as_it_is(kv_dtype: torch.dtype) -> None:
    """One key a request, so that the output is its value: all 256 of them, but the NaNs."""
    every = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    keys = torch.zeros(16, 1, 1, 16).to(kv_dtype)
    batch = PagedBatch(
        qo_indptr_B1=torch.arange(17, dtype=torch.int32),
        seq_lens_B=torch.ones(16, dtype=torch.int32),
        page_table=PageTable(pages_BP=torch.arange(16, dtype=torch.int32)[:, None], page_size=1),
        max_q_len=1,
        max_seq_len=1,
        captured=False,
        one_query_each=True,
    )
    q = torch.randn(16, 1, 16)
    out, _ = paged_attention(q, keys, every.view(16, 1, 1, 16), batch, scale=1.0, forced="triton")
    expected = every.float()
    kept = ~expected.isnan()
    assert int(kept.sum()) in (254, 255)
    assert torch.equal(out.flatten()[kept], expected[kept])


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    """Return name -> (what is changed in a good call, what the error says)."""
    ints = torch.int32
    return {
        "rank": ({"q_THD": torch.zeros(2, 64)}, "q_THD has shape (2, 64): takes 3 dims"),
        "stride": ({"q_THD": torch.zeros(2, 16, 4).transpose(1, 2)}, "q_THD has stride 4 in its last dim: takes 1"),
        "head dim": ({"q_THD": torch.zeros(2, 4, 8)}, "queries of head dim 8 on keys of head dim 16"),
        "groups": ({"q_THD": torch.zeros(2, 5, 16)}, "5 query heads do not divide over 2 KV heads"),
        "v": ({"v_pages": torch.zeros(9, 4, 3, 16)}, "v_pages is torch.float32 (9, 4, 3, 16)"),
        "page size": ({"page_size": 8}, "pages of 4 tokens, the page table says 8"),
        "indptr": ({"qo_indptr_B1": torch.tensor([0, 1, 2])}, "qo_indptr_B1 is torch.int64 of shape (3,): takes int32"),
        "bounds": ({"qo_indptr_B1": torch.tensor([0, 2, 1], dtype=ints)}, "runs [0, 2, 1] ... 1: has to rise"),
        "too many": ({"qo_indptr_B1": torch.tensor([0, 1, 3], dtype=ints)}, "has to rise from 0 to 2"),
        "lengths": ({"seq_lens_B": torch.tensor([5, 9, 1], dtype=ints)}, "3 lengths, 3 bounds of queries and 2 rows"),
        "long": ({"seq_lens_B": torch.tensor([5, 90], dtype=ints)}, "a request of 90 keys: max_seq_len is 9"),
        "pool": ({"pages_BP": torch.full((2, 4), 7000, dtype=ints)}, "pages 7000 to 7000 are used, the pool has 0 to"),
        "negative": ({"pages_BP": torch.full((2, 4), -1, dtype=ints)}, "pages -1 to -1 are used"),
        "sinks": ({"sinks_H": torch.zeros(3)}, "sinks of torch.float32 (3,): takes one"),
        "device": ({"q_THD": torch.zeros(2, 4, 16, device="meta")}, "tensors on cpu, meta: takes one device"),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_calls())
def test_a_bad_call_gets_one_error(name: str) -> None:
    changes, says = bad_calls()[name]
    k, v, batch = make_batch([1, 1], [5, 9], page_size=4)
    table = batch.page_table
    batch = dataclasses.replace(
        batch,
        qo_indptr_B1=changes.get("qo_indptr_B1", batch.qo_indptr_B1),
        seq_lens_B=changes.get("seq_lens_B", batch.seq_lens_B),
        page_table=PageTable(
            pages_BP=changes.get("pages_BP", table.pages_BP), page_size=changes.get("page_size", table.page_size)
        ),
    )
    with pytest.raises(ValueError) as error:
        paged_attention(
            changes.get("q_THD", torch.zeros(2, 4, 16)),
            k,
            changes.get("v_pages", v),
            batch,
            scale=0.3,
            sinks_H=changes.get("sinks_H"),
        )
    assert says in str(error.value)


@pytest.mark.usefixtures("triton_interpreter")
def test_no_tokens_and_no_positive_scale() -> None:
    k, v, batch = make_batch([0, 0], [5, 9], page_size=4)
    out, lse = paged_attention(torch.zeros(0, 4, 16), k, v, batch, scale=0.3, return_lse=True, forced="triton")
    assert out.shape == (0, 4, 16) and lse is not None and lse.shape == (0, 4)
    k, v, batch = make_batch([1, 1], [5, 9], page_size=4)
    with pytest.raises(ValueError, match=r"scale -0\.3 times k_scale 1\.0 has to be positive"):
        paged_attention(torch.zeros(2, 4, 16), k, v, batch, scale=-0.3, forced="triton")


def test_a_window_of_what_is_not_causal() -> None:
    k, v, batch = make_batch([1, 1], [5, 9], page_size=4, causal=False)
    with pytest.raises(ValueError, match="window 5 of a batch that is not causal: takes NO_WINDOW"):
        paged_attention(torch.zeros(2, 4, 16), k, v, batch, scale=0.3, window=5)


@pytest.mark.parametrize("window", [-2, 1.5])
def test_a_window_that_is_none(window: float) -> None:
    k, v, batch = make_batch([1, 1], [5, 9], page_size=4)
    with pytest.raises(ValueError, match="takes a number of keys, or NO_WINDOW"):
        paged_attention(torch.zeros(2, 4, 16), k, v, batch, scale=0.3, window=window)  # type: ignore[arg-type]
