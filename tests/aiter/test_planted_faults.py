"""The stand-in catches what others got wrong: each fault is planted in a row, and would be silent or fatal on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from atom_plugin.ops.store_kv import store_kv
from tests.aiter import stand_in
from tests.aiter.conftest import Install
from tests.aiter.stand_in import Refused, Silent
from tests.aiter.test_marshalling import NORMED, PREFILL, RAGGED, STORE, assert_attends, random_batch

Patch = pytest.MonkeyPatch
HOW: dict[str, Any] = {
    "scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "window": -1, "logit_cap": 0.0, "return_lse": False, "sinks_H": None,
}  # fmt: skip


@pytest.fixture
def calls(install: Install, interpreted_calls: None) -> Any:
    """Return the module with the calls of paged attention, of AITER main."""
    install("main")
    return importlib.import_module("atom_plugin.ops.paged_attention.aiter_calls")


def _packing(calls: Any, monkeypatch: Patch, **changes: Any) -> None:
    """Let what ``pack`` returns be changed: field -> function of its value."""
    pack = calls.pack

    def faulty(*arguments: Any) -> Any:
        ragged = pack(*arguments)
        return dataclasses.replace(ragged, **{name: change(vars(ragged)[name]) for name, change in changes.items()})

    monkeypatch.setattr(calls, "pack", faulty)


@pytest.mark.parametrize("row", [RAGGED, PREFILL])
@pytest.mark.parametrize("index", ["indptr_B1", "pages_N", "last_lens_B"])
def test_int64_where_int32_is_read(calls: Any, monkeypatch: Patch, row: str, index: str) -> None:
    _packing(calls, monkeypatch, **{index: torch.Tensor.long})
    with pytest.raises(Silent, match=r"of torch.int64 is read as torch.int32"):
        assert_attends(row, *random_batch([1] if row == RAGGED else [3], [20], page_size=16))


@pytest.mark.parametrize("row", [RAGGED, PREFILL])
def test_slots_of_tokens_where_pages_are_meant(calls: Any, monkeypatch: Patch, row: str) -> None:
    _packing(calls, monkeypatch, pages_N=lambda pages: pages * 16)
    with pytest.raises(Silent, match="of a pool of"):
        assert_attends(row, *random_batch([1] if row == RAGGED else [3], [20], page_size=16))


def test_last_page_lengths_counted_in_pages_of_one(calls: Any, monkeypatch: Patch) -> None:
    _packing(calls, monkeypatch, last_lens_B=torch.ones_like)
    with pytest.raises(AssertionError, match="not close"):
        assert_attends(RAGGED, *random_batch([1], [20], page_size=16))


def test_queries_counted_by_the_full_lengths(calls: Any) -> None:
    """Right only without cached keys: ROCm/ATOM #1551."""
    q, k, v, batch = random_batch([3, 2], [20, 9])
    full = dataclasses.replace(batch, qo_indptr_B1=torch.tensor([0, 20, 29], dtype=torch.int32), max_q_len=20)
    with pytest.raises(Silent, match="cu_seqlens_q ends at 29, there are 5 queries"):
        _prefill(calls)(q, k, v, full, **HOW)


def test_a_bound_of_an_earlier_batch(calls: Any) -> None:
    q, k, v, batch = random_batch([9, 1], [20, 9])
    with pytest.raises(Silent, match="9 queries, max_seqlen_q is 2"):
        _prefill(calls)(q, k, v, dataclasses.replace(batch, max_q_len=2), **HOW)


def _prefill(calls: Any) -> Any:
    """Return the row itself, as a layer has it: without the public function's own checks."""
    return calls.BatchPrefill(importlib.import_module("aiter.ops.mha").mha_batch_prefill_func)


def test_no_page_numbers_past_the_last(calls: Any, monkeypatch: Patch) -> None:
    _packing(calls, monkeypatch, pages_N=lambda pages: pages[:-255])
    with pytest.raises(Silent, match="reads 256 page indices past the last"):
        assert_attends(PREFILL, *random_batch([3], [20]))


def test_a_workspace_for_fewer_keys(calls: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(calls, "_partitions", lambda max_seq_len: 1)
    with pytest.raises(Silent, match="300 keys, 1 partitions"):
        assert_attends(RAGGED, *random_batch([1], [300]))


def test_a_window_that_is_one_key_wider(calls: Any, monkeypatch: Patch) -> None:
    function = stand_in.mha_batch_prefill_func
    monkeypatch.setattr(
        stand_in,
        "mha_batch_prefill_func",
        lambda **how: function(**{**how, "window_size": (how["window_size"][0] + 1, 0)}),
    )
    with pytest.raises(AssertionError, match="not close"):
        assert_attends(PREFILL, *random_batch([5], [20]), window=2)


def test_queries_that_see_no_key_stay_nan_without_the_row(calls: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(calls, "zero_blind", lambda *tensors: None)
    with pytest.raises(AssertionError, match="not close"):
        assert_attends(PREFILL, *random_batch([4], [1]))


def test_calls_that_the_kernels_do_not_take(calls: Any) -> None:
    """Past the table's checks: what the rows refuse by ``why_not`` the stand-in refuses as well."""
    row = calls.PagedAttentionRagged(importlib.import_module("aiter.ops.attention").paged_attention_ragged)
    for shape, what in (({"page_size": 64}, "no build for pages of 64"), ({"dim": 80}, "no build for head dim 80")):
        with pytest.raises(Refused, match=what):
            row(*random_batch([1], [9], **shape), **HOW)
    with pytest.raises(ValueError, match="takes one query a request, no window and no sinks"):
        row(*random_batch([2], [9]), **HOW)
    with pytest.raises(ValueError, match="takes causal attention without an lse"):
        row(*random_batch([1], [9]), **{**HOW, "return_lse": True})


def _store(slots: torch.Tensor, *, pool: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    k, pages = torch.randn(2, 2, 16).to(dtype), torch.zeros(4, 4, 2, 16, dtype=dtype) if pool is None else pool
    store_kv(k, k, pages, pages.clone(), TokenSlots(slots_T=slots), forced=STORE)


def test_a_store_outside_of_its_limits(install: Install, monkeypatch: Patch) -> None:
    install("main")
    with pytest.raises(ValueError, match=r"of torch.int32 .* takes one int64 a token"):
        _store(torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="have to be contiguous"):
        _store(torch.tensor([1, 2]), pool=torch.zeros(4, 4, 4, 16, dtype=torch.bfloat16)[:, :, :2])
    with pytest.raises(Silent, match=r"slots .* of a pool of 16"):
        _store(torch.tensor([1, 16]))
    from atom_plugin.ops.store_kv import aiter

    monkeypatch.setattr(aiter, "_check", lambda *tensors: None)
    with pytest.raises(Silent, match=r"slot_mapping of torch.int32 is read as torch.int64"):
        _store(torch.tensor([1, 2], dtype=torch.int32))


def test_a_norm_outside_of_its_limits(install: Install, monkeypatch: Patch) -> None:
    from atom_plugin.ops.qk_norm_rope_store_kv import aiter_calls

    install("main")

    def finish(**changes: Any) -> None:
        q, k = torch.randn(2, 4, 64).bfloat16(), torch.randn(2, 2, 64).bfloat16()
        pages = torch.zeros(8, 1, 2, 64).bfloat16()
        how = {"positions": torch.tensor([0, 1]), "cos_sin_cache": torch.randn(4, 64), "is_neox": True, **changes}
        weights = {"q_weight": torch.ones(64), "k_weight": torch.ones(64), "eps": 1e-6}
        slots = TokenSlots(slots_T=torch.tensor([3, 4]))
        qk_norm_rope_store_kv(q, k, k.clone(), pages, pages.clone(), slots, forced=NORMED, **{**weights, **how})

    with pytest.raises(ValueError, match=r"positions .* of torch.int32: takes one int64 a token"):
        finish(positions=torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"scales 0.5 and 1.0: a pool of torch.bfloat16 takes 1"):
        finish(k_scale=0.5)
    with pytest.raises(Silent, match="positions"):
        finish(positions=torch.tensor([0, 4]))
    monkeypatch.setattr(aiter_calls, "converted", lambda table, dtype: table)
    with pytest.raises(Silent, match="one dtype is used for all"):
        finish()
    monkeypatch.setattr(aiter_calls, "converted", lambda table, dtype: table.to(dtype))
    with pytest.raises(Silent, match="the last row is read past its end"):
        finish(is_neox=False)
