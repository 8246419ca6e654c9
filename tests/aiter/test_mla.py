"""What our MLA rows hand to AITER: a stand-in checks it all, computes in float32, and catches planted faults."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from atom_plugin.ops.mla_attention import TABLE, mla_attention
from atom_plugin.ops.paged_attention import PagedBatch
from tests.aiter import stand_in
from tests.aiter.conftest import Install
from tests.aiter.stand_in import Refused, Silent
from tests.ops.batches import make_batch

BF16, FNUZ, FN = torch.bfloat16, torch.float8_e4m3fnuz, torch.float8_e4m3fn
DECODE, GLUON = "aiter_mla_decode_fwd", "aiter_mla_gluon"
SCALE = 576**-0.5
Patch = pytest.MonkeyPatch


def random_batch(
    heads: int,
    q_lens: list[int],
    seq_lens: list[int],
    *,
    page_size: int = 1,
    kv_dtype: torch.dtype = BF16,
    captured: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Return (q, kv_pages, batch): q is a slice, slot 0 and what holds no key are NaN."""
    shape = {"page_size": page_size, "kv_heads": 1, "dim": 576, "captured": captured}
    kv_pages, _, batch = make_batch(q_lens, seq_lens, **shape)
    return torch.randn(sum(q_lens), heads, 600)[..., :576].to(BF16), kv_pages.to(kv_dtype), batch


def assert_attends(row: str, q: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    """Assert that ``row``, through the stand-in, gives what the reference gives."""
    how = {"kv_lora_rank": 512, "scale": SCALE, **how}
    out, lse = mla_attention(q, kv_pages, batch, forced=row, **how)
    expected, expected_lse = _reference(q, kv_pages, batch, **how)
    (kernel,) = [kernel for kernel in TABLE.kernels if kernel.name == row]
    torch.testing.assert_close(out, expected, **kernel.tolerance[BF16]._asdict())
    assert out.is_contiguous()
    if expected_lse is None:
        assert lse is None
    else:
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def _reference(q: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, **how: Any) -> Any:
    from atom_plugin.ops.mla_attention.reference import mla_attention as reference

    return reference(q, kv_pages, batch, **{"kv_scale": 1.0, "return_lse": False, **how})


#: architecture, row, heads, queries of each request, cache.
CELLS = [
    *[("gfx942", DECODE, heads, 1, FNUZ) for heads in (*range(1, 17), 24, 32, 64, 128)],
    *[("gfx942", DECODE, heads, queries, BF16) for heads in (3, 12, 128) for queries in (1, 2, 3, 4)],
    *[("gfx942", DECODE, heads, 1, BF16) for heads in (*range(1, 17), 24, 48, 64, 112)],
    *[("gfx942", DECODE, 12, queries, FNUZ) for queries in (2, 3, 4)],
    *[("gfx950", DECODE, heads, queries, BF16) for heads in (1, 12, 16, 24, 64, 128) for queries in (1, 2, 5, 8)],
    *[("gfx950", DECODE, heads, 4, BF16) for heads in (40, 80, 96, 112)],
    *[("gfx950", DECODE, heads, queries, FN) for heads in (5, 12, 16) for queries in (1, 3, 4)],
    *[("gfx950", DECODE, heads, 1, FN) for heads in (24, 64, 128)],
    *[("gfx950", GLUON, heads, 1, BF16) for heads in (*range(1, 17), 24, 32, 65, 96)],
    *[("gfx950", GLUON, 12, queries, BF16) for queries in (2, 8)],
]


@pytest.mark.parametrize(("arch", "row", "heads", "queries", "kv_dtype"), CELLS)
def test_a_cell(
    install: Install, interpreted_calls: None, arch: str, row: str, heads: int, queries: int, kv_dtype: torch.dtype
) -> None:
    """One request as short as its queries, one that ends a page, one of odd length; two page sizes and scales."""
    install("main", arch=arch)
    page_size, kv_scale = (1, 0.5) if heads % 2 == queries % 2 else (16, 1.0)
    batch = random_batch(heads, [queries] * 3, [queries, 32, 37], page_size=page_size, kv_dtype=kv_dtype)
    assert_attends(row, *batch, kv_scale=kv_scale)


@pytest.mark.parametrize(
    ("arch", "row", "heads"),
    [("gfx942", DECODE, 12), ("gfx942", DECODE, 128), ("gfx950", DECODE, 33), ("gfx950", GLUON, 12)],
)
def test_lse(install: Install, interpreted_calls: None, arch: str, row: str, heads: int) -> None:
    install("main", arch=arch)
    assert_attends(row, *random_batch(heads, [1] * 3, [1, 300, 37]), return_lse=True, kv_scale=0.5)


@pytest.mark.parametrize(("arch", "row"), [("gfx942", DECODE), ("gfx950", DECODE), ("gfx950", GLUON)])
def test_queries_that_see_no_key_get_zeros(install: Install, interpreted_calls: None, arch: str, row: str) -> None:
    install("main", arch=arch)
    assert_attends(row, *random_batch(12, [4] * 4, [1, 9, 0, 4], page_size=4), kv_scale=2.0)


@pytest.mark.parametrize(
    ("arch", "row", "kv_dtype", "queries"),
    [("gfx942", DECODE, BF16, 1), ("gfx942", DECODE, FNUZ, 2), ("gfx950", DECODE, BF16, 2), ("gfx950", GLUON, BF16, 2)],
)
def test_a_captured_batch_is_packed_anew_at_every_call(
    install: Install, interpreted_calls: None, arch: str, row: str, kv_dtype: torch.dtype, queries: int
) -> None:
    """And what a graph would launch, tensors and numbers alike, depends on no length."""
    install("main", arch=arch)
    shape = {"page_size": 16, "kv_dtype": kv_dtype, "captured": True}
    q, kv_pages, batch = random_batch(12, [queries] * 2, [40, 33], **shape)
    assert_attends(row, q, kv_pages, batch)
    batch.seq_lens_B.copy_(torch.tensor([17, 2]))
    batch.page_table.pages_BP[:, :2] = torch.tensor([[3, 1], [5, 4]])
    kv_pages[[1, 3, 4, 5]] = torch.randn(4, 16, 1, 576).to(kv_dtype)
    assert_attends(row, q, kv_pages, batch)
    launched = [
        [(name, tuple(x.shape) if isinstance(x, torch.Tensor) else x) for name, x in arguments.items()]
        for _, arguments in stand_in.CALLS
    ]
    half = len(launched) // 2
    assert launched[:half] == launched[half:]


@pytest.mark.parametrize("kv_dtype", [BF16, FNUZ])
def test_an_eager_batch_is_planned_once_for_all_layers(
    install: Install, interpreted_calls: None, kv_dtype: torch.dtype
) -> None:
    install("main")
    batch = random_batch(12, [1, 1], [40, 33], kv_dtype=kv_dtype)
    for _layer in range(3):
        assert_attends(DECODE, *batch)
    names = [name for name, _ in stand_in.CALLS]
    assert names.count("mla_decode_fwd") == 3 and names.count("get_mla_metadata_v1") == (kv_dtype == FNUZ)
    assert len({how["kv_indptr"].data_ptr() for name, how in stand_in.CALLS if name == "mla_decode_fwd"}) == 1


def test_padded_heads_are_copies_and_metadata_is_for_all_of_them(install: Install, interpreted_calls: None) -> None:
    install("main", arch="gfx950")
    q, kv_pages, batch = random_batch(6, [2, 2], [40, 33], kv_dtype=FN)
    assert_attends(DECODE, q, kv_pages, batch)
    (_, info), (_, metadata), (_, decode) = stand_in.CALLS
    assert info["num_head_qo"] == metadata["num_heads_per_head_k"] == decode["q"].shape[1] == 16
    assert decode["q"].is_contiguous() and torch.equal(decode["q"], q.repeat(1, 3, 1)[:, :16])


def test_slot_0_keeps_what_is_a_number(install: Install, interpreted_calls: None) -> None:
    """Only what is not finite becomes 0: a pool whose slot 0 is a key stays as it was."""
    install("main", arch="gfx950")
    for dtype in (BF16, FNUZ, FN):
        calls = importlib.import_module("atom_plugin.ops.mla_attention.aiter_calls")
        pages = torch.randn(3, 4, 1, 576).to(dtype)
        pages[0, 0, 0, :2] = torch.tensor([float("nan"), -float("nan")]).to(dtype)
        expected = pages.float()
        expected[0, 0, 0, :2] = 0
        assert torch.equal(calls._finite_slot_0(pages).float(), expected)


def test_no_tokens(install: Install) -> None:
    install("main")
    q, kv_pages, batch = random_batch(12, [0], [5])
    out, lse = mla_attention(q, kv_pages, batch, kv_lora_rank=512, scale=1.0)
    assert out.shape == (0, 12, 512) and lse is None and not stand_in.CALLS


@pytest.fixture
def calls(install: Install, interpreted_calls: None) -> Any:
    """Return the module with the calls, of AITER main on an MI300X."""
    install("main")
    return importlib.import_module("atom_plugin.ops.mla_attention.aiter_calls")


def _row(calls: Any) -> Any:
    """Return the row itself, as a layer has it: without the table's checks."""
    (kernel,) = [kernel for kernel in TABLE.kernels if kernel.name == DECODE]
    return kernel.load()


HOW: dict[str, Any] = {"kv_lora_rank": 512, "scale": SCALE, "kv_scale": 1.0, "return_lse": False}


def test_the_call_that_crashed_others_is_not_made(calls: Any, monkeypatch: Patch) -> None:
    """Queries in bfloat16, cache in float8, 12 heads padded to 16, 8 queries a request; and what AITER would do."""
    crash = random_batch(12, [8, 8], [40, 33], kv_dtype=FNUZ)
    with pytest.raises(ValueError, match="8 queries a request, lse False: takes Launch"):
        _row(calls)(*crash, **HOW)
    assert not stand_in.CALLS
    launches = {("gfx942", 1): {16: dataclasses.replace(calls.LAUNCHES["gfx942", 1][16], most_queries=8)}}
    monkeypatch.setattr(calls, "LAUNCHES", launches)
    with pytest.raises(Refused, match="q_type:bf16 kv_type:fp8 gqa:16 ps:1 qseqlen:8 lse:0"):
        _row(calls)(*crash, **HOW)


@pytest.mark.parametrize(
    ("kv_dtype", "heads", "queries", "changes", "error", "what"),
    [
        (FNUZ, 16, 1, {"planned": False}, Refused, "kv_type:fp8 gqa:16 ps:0 qseqlen:1"),
        (BF16, 64, 1, {"planned": False}, Refused, "kv_type:bf16 gqa:64 ps:0 qseqlen:1"),
        (BF16, 16, 8, {"most_queries": 8}, Silent, "ROCm/aiter #5679"),
        (BF16, 32, 1, {"returns_lse": True}, Refused, "lse:1"),
    ],
)
def test_launches_beside_the_table(
    calls: Any, monkeypatch: Patch, kv_dtype: Any, heads: int, queries: int, changes: Any, error: Any, what: str
) -> None:
    cell = ("gfx942", kv_dtype.itemsize)
    launch = dataclasses.replace(calls.LAUNCHES[cell][heads], **changes)
    monkeypatch.setattr(calls, "LAUNCHES", {cell: {heads: launch}})
    how = {**HOW, "return_lse": "returns_lse" in changes}
    with pytest.raises(error, match=what):
        _row(calls)(*random_batch(heads, [queries] * 2, [40, 33], kv_dtype=kv_dtype), **how)


def test_heads_that_are_not_padded(calls: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(calls, "padded_heads", lambda heads: heads)
    monkeypatch.setattr(calls, "LAUNCHES", {("gfx942", 2): {12: calls.LAUNCHES["gfx942", 2][16]}})
    with pytest.raises(Refused, match="kv_type:bf16 gqa:12"):
        _row(calls)(*random_batch(12, [1], [9]), **HOW)


def test_metadata_for_the_heads_before_padding(calls: Any, monkeypatch: Patch) -> None:
    plan = calls.MlaDecode._plan
    monkeypatch.setattr(calls.MlaDecode, "_plan", lambda self, heads, *rest: plan(self, 16, *rest))
    with pytest.raises(Silent, match=r"metadata for \(16, .*: 32 heads"):
        _row(calls)(*random_batch(24, [1], [9], kv_dtype=FNUZ), **HOW)


def test_metadata_of_an_earlier_step(calls: Any) -> None:
    """What a captured batch would get if the plan were kept."""
    q, kv_pages, batch = random_batch(12, [1, 1], [40, 33], kv_dtype=FNUZ)
    _row(calls)(q, kv_pages, batch, **HOW)
    del batch.derived["ragged slots"]
    batch.seq_lens_B.copy_(torch.tensor([17, 2]))
    with pytest.raises(Silent, match=r"metadata of \[0, 40, 73\], launched for \[0, 17, 19\]"):
        _row(calls)(q, kv_pages, batch, **HOW)


def _packing(calls: Any, monkeypatch: Patch, **changes: Any) -> None:
    """Let what ``pack_slots`` returns be changed: field -> function of its value."""
    pack = calls.pack_slots

    def faulty(*arguments: Any) -> Any:
        ragged = pack(*arguments)
        return dataclasses.replace(ragged, **{name: change(vars(ragged)[name]) for name, change in changes.items()})

    monkeypatch.setattr(calls, "pack_slots", faulty)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"slots_N": lambda slots: slots.long()}, "kv_page_indices of torch.int64 is read as torch.int32"),
        ({"indptr_B1": lambda bounds: bounds.long()}, "kv_indptr of torch.int64 is read as torch.int32"),
        ({"slots_N": lambda slots: slots * 16}, "of a pool of"),
        ({"ones_B": lambda ones: ones + 8}, r"last page lengths \[9, 9\] of pages of one token"),
        ({"indptr_B1": lambda bounds: bounds[:-1]}, "of different batches"),
    ],
)
def test_wrong_indices(calls: Any, monkeypatch: Patch, changes: Any, what: str) -> None:
    _packing(calls, monkeypatch, **changes)
    with pytest.raises(Silent, match=what):
        _row(calls)(*random_batch(16, [1, 1], [40, 33], page_size=16), **HOW)


def test_pages_where_slots_are_meant(calls: Any, monkeypatch: Patch) -> None:
    """sgl-project/sglang #25556: right at page size 1 only."""
    _packing(calls, monkeypatch, slots_N=lambda slots: slots // 16)
    batch = random_batch(16, [1, 1], [40, 33], page_size=16)
    out, _ = _row(calls)(*batch, **HOW)
    assert not torch.allclose(out.float(), _reference(*batch, kv_lora_rank=512, scale=SCALE)[0].float(), atol=0.1)


def test_not_a_number_in_slot_0(calls: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(calls, "_finite_slot_0", lambda kv_pages: kv_pages)
    with pytest.raises(Silent, match=r"slot 0 is read where keys are masked"):
        _row(calls)(*random_batch(16, [1], [9]), **HOW)


def test_requests_with_different_numbers_of_queries(calls: Any) -> None:
    batch = random_batch(16, [2, 1], [40, 33])
    with pytest.raises(ValueError, match="3 queries of 2 requests, up to 2 each: takes as many of each"):
        _row(calls)(*batch, **HOW)
    q, kv_pages, equal = random_batch(16, [2, 2], [40, 33])
    shifted = dataclasses.replace(equal, qo_indptr_B1=torch.tensor([0, 1, 4], dtype=torch.int32))
    with pytest.raises(Silent, match=r"qo_indptr \[0, 1, 4\]: 2 of each"):
        _row(calls)(q, kv_pages, shifted, **HOW)


def test_latent_rows_without_a_rope_part(calls: Any) -> None:
    """vllm-project/vllm #56314: the kernel's rows are 576 wide."""
    kv_pages, _, batch = make_batch([1], [9], kv_heads=1, dim=512, dtype=BF16)
    with pytest.raises(ValueError, match="latent rows of 512 of 512: takes 512 of 576"):
        _row(calls)(torch.randn(1, 16, 512).to(BF16), kv_pages, batch, **HOW)


def test_queries_that_see_no_key_stay_nan_without_the_row(calls: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(calls, "zero_blind", lambda *tensors: None)
    out, _ = _row(calls)(*random_batch(12, [4], [1]), **HOW)
    assert out[:3].isnan().all() and out[3].isfinite().all()
