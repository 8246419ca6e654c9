"""Packing of page tables and zeroing of blind queries, interpreted, against loops."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from atom_plugin.ops.indices import PageTable
from tests.ops.interpreted import triton_interpreter  # noqa: F401 - a fixture
from tests.ops.ragged import assert_packed, assert_slots, random_table, zeroed


@pytest.fixture
def kernel(triton_interpreter: None) -> Any:  # noqa: F811
    # not ``from ... import kernel``: the package still holds the module of an earlier test
    return importlib.import_module("atom_plugin.ops.ragged.kernel")


@pytest.mark.parametrize("block", [16, 1024], ids=["many blocks", "one block"])
@pytest.mark.parametrize("page_size", [1, 16, 1024])
@pytest.mark.parametrize("seq_lens", [[1], [40, 33, 1, 0, 16], [0, 0], [900, 1, 1025], [1, 2] * 20])
def test_pages_of_all_requests_follow_each_other(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, seq_lens: list[int], block: int
) -> None:
    monkeypatch.setattr(kernel, "_BLOCK", block)
    seq_lens_B, table = random_table(seq_lens, page_size)
    assert_packed(kernel.pack(seq_lens_B, table), seq_lens, table, kernel.TAIL)


@pytest.mark.parametrize("block", [16, 1024], ids=["many blocks", "one block"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("seq_lens", [[1], [40, 33, 1, 0, 16], [0, 0], [900, 1, 1025]])
def test_slots_of_all_requests_follow_each_other(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, seq_lens: list[int], block: int
) -> None:
    """In memory for the bound alone, whatever the table has room for."""
    monkeypatch.setattr(kernel, "_BLOCK", block)
    seq_lens_B, table = random_table(seq_lens, page_size)
    ragged = kernel.pack_slots(seq_lens_B, table, max(seq_lens))
    assert_slots(ragged, seq_lens, table, kernel.TAIL)
    assert ragged.slots_N.shape[0] == len(seq_lens) * max(seq_lens) + kernel.TAIL


@pytest.mark.parametrize(
    ("seq_lens", "pages", "reason"),
    [
        (torch.ones(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int32), "lengths of torch.int64 and pages of"),
        (torch.ones(2, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int64), "pages of torch.int64: takes int32"),
        (
            torch.ones(2, dtype=torch.int32),
            torch.ones(3, 3, dtype=torch.int32),
            r"takes \[requests\] and \[requests, p",
        ),
        (torch.ones(0, dtype=torch.int32), torch.ones(0, 3, dtype=torch.int32), "for at least one request"),
        (torch.ones(3, dtype=torch.int32), torch.ones(3, 3, dtype=torch.int32).T, "dense along the last axis"),
    ],
)
def test_other_tables_are_refused(kernel: Any, seq_lens: torch.Tensor, pages: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kernel.pack(seq_lens, PageTable(pages_BP=pages, page_size=1))


@pytest.mark.parametrize("orphans", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("q_lens", "seq_lens"), [([4, 4, 2], [1, 9, 0]), ([0, 700], [0, 2]), ([3], [3])], ids=["some", "many", "none"]
)
def test_blind_queries_and_rows_of_no_request_are_zeroed(
    kernel: Any, q_lens: list[int], seq_lens: list[int], dtype: torch.dtype, orphans: int
) -> None:
    out = torch.randn(sum(q_lens) + orphans, 3, 24).to(dtype)
    expected = zeroed(out, q_lens, seq_lens)
    bounds = torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32)
    kernel.zero_blind(out, bounds, torch.tensor(seq_lens, dtype=torch.int32))
    assert torch.equal(out, expected)


def test_an_output_with_gaps_is_refused(kernel: Any) -> None:
    with pytest.raises(ValueError, match="has to be contiguous"):
        kernel.zero_blind(
            torch.zeros(3, 2, 8)[:, :1], torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        )
