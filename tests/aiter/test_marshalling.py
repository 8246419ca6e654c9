"""What our rows hand to AITER's functions without a Triton body: a stand-in checks it all, and computes in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atom_plugin import aiter_lib
from atom_plugin.dispatch import Table
from atom_plugin.ops import paged_attention as attention
from atom_plugin.ops import qk_norm_rope_store_kv as norm_rope_store
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.paged_attention import PagedBatch, paged_attention
from atom_plugin.ops.paged_attention.reference import paged_attention as reference_attention
from atom_plugin.ops.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from atom_plugin.ops.qk_norm_rope_store_kv.reference import qk_norm_rope_store_kv as reference_norm_rope_store
from atom_plugin.ops.store_kv import store_kv
from tests.aiter import stand_in
from tests.aiter.conftest import Install
from tests.ops.batches import make_batch

BF16, FP16, FNUZ = torch.bfloat16, torch.float16, torch.float8_e4m3fnuz
RAGGED, PREFILL = "aiter_paged_attention_ragged", "aiter_mha_batch_prefill"
STORE, NORMED = "aiter_reshape_and_cache_flash", "aiter_fused_qk_norm_rope_cache_pts_quant_shuffle"
ROPE = "aiter_fused_qk_rope_reshape_and_cache"
BOTH = pytest.mark.parametrize("version", aiter_lib.VERSIONS)


def tolerance_of(table: Table[Any], row: str, dtype: torch.dtype) -> dict[str, float]:
    (kernel,) = [kernel for kernel in table.kernels if kernel.name == row]
    return kernel.tolerance[dtype]._asdict()


def assert_attends(row: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    """Assert that ``row``, through the stand-in, gives what the reference gives."""
    how = {"scale": q.shape[2] ** -0.5, **how}
    out, _ = paged_attention(q, k, v, batch, forced=row, **how)
    default = {"k_scale": 1.0, "v_scale": 1.0, "window": -1, "logit_cap": 0.0, "return_lse": False, "sinks_H": None}
    expected, _ = reference_attention(q, k, v, batch, **{**default, **how})
    torch.testing.assert_close(out, expected, **tolerance_of(attention.TABLE, row, q.dtype))


def random_batch(
    q_lens: list[int],
    seq_lens: list[int],
    dtype: torch.dtype = BF16,
    *,
    kv_dtype: torch.dtype | None = None,
    orphans: int = 0,
    **shape: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Return (q, k_pages, v_pages, batch); ``orphans``: rows that belong to no request."""
    shape = {"kv_heads": 2, "dim": 128, **shape}
    k, v, batch = make_batch(q_lens, seq_lens, v_dim=shape["dim"], dtype=kv_dtype or dtype, **shape)
    return torch.randn(sum(q_lens) + orphans, 8, shape["dim"]).to(dtype), k, v, batch


@BOTH
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_decode_over_ragged_pages(install: Install, interpreted_calls: None, version: Any, page_size: int) -> None:
    install(version)
    assert_attends(RAGGED, *random_batch([1] * 4, [40, 33, 1, page_size], page_size=page_size))
    assert_attends(RAGGED, *random_batch([1, 1], [300, 257], FP16, page_size=page_size, dim=64), logit_cap=5.0)
    float8 = random_batch([1, 1], [70, 64], page_size=64, kv_dtype=FNUZ)
    assert_attends(RAGGED, *float8, k_scale=0.5, v_scale=2.0)
    assert_attends(RAGGED, *random_batch([1], [9], page_size=page_size), k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize(("version", "page_size"), [("wheel", 1), ("main", 1), ("main", 16)])
def test_extend_over_ragged_pages(install: Install, interpreted_calls: None, version: Any, page_size: int) -> None:
    install(version)
    assert_attends(PREFILL, *random_batch([3, 20, 1], [40, 33, 17], page_size=page_size))
    assert_attends(PREFILL, *random_batch([2, 9], [50, 9], FP16, page_size=page_size), window=7, logit_cap=5.0)
    blind = random_batch([4, 4, 2], [1, 9, 5], page_size=page_size, orphans=3)
    assert_attends(PREFILL, *blind, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("row", [RAGGED, PREFILL])
def test_a_captured_batch_is_packed_anew_at_every_call(install: Install, interpreted_calls: None, row: str) -> None:
    install("main")
    q_lens = [1, 1] if row == RAGGED else [2, 2]
    q, k, v, batch = random_batch(q_lens, [40, 33], page_size=16, captured=True)
    assert_attends(row, q, k, v, batch)
    batch.seq_lens_B.copy_(torch.tensor([17, 2]))
    batch.page_table.pages_BP[:, :2] = torch.tensor([[3, 1], [5, 0]])
    k[[1, 3, 5]], v[[1, 3, 5]] = torch.randn(2, 3, 16, 2, 128).to(BF16).unbind()
    assert_attends(row, q, k, v, batch)
    shapes = [
        [(name, tuple(x.shape)) for name, x in arguments.items() if isinstance(x, torch.Tensor)]
        for _, arguments in stand_in.CALLS
    ]
    assert shapes[0] == shapes[1], "what a graph launches depends on no length"


def test_an_eager_batch_is_packed_once_for_all_layers(install: Install, interpreted_calls: None) -> None:
    install("main")
    q, k, v, batch = random_batch([1, 1], [40, 33])
    for _layer in range(3):
        assert_attends(RAGGED, q, k, v, batch)
    assert len({arguments["kv_indptr"].data_ptr() for _, arguments in stand_in.CALLS}) == 1


def test_partitions_follow_the_pool_and_builds_stay_few(install: Install, interpreted_calls: None) -> None:
    """A context of 131,072 tokens over a small pool: no request is longer than the pool, and the workspace follows."""
    from atom_plugin.ops.paged_attention.aiter_calls import _partitions

    install("main")
    q, k, v, batch = random_batch([1], [600], captured=True)
    table = dataclasses.replace(batch.page_table, pages_BP=torch.zeros(1, 131_072, dtype=torch.int32))
    table.pages_BP[:, :600] = batch.page_table.pages_BP[:, :600]
    assert_attends(RAGGED, q, k, v, dataclasses.replace(batch, page_table=table, max_seq_len=131_072))
    assert stand_in.CALLS[-1][1]["max_num_partitions"] == 3
    assert _partitions(16_384) == 64 and _partitions(131_072) == 512
    assert {_partitions(length) // 64 for length in range(16_385, 131_073, 256)} == {2, 4, 8}


@pytest.mark.parametrize("dims", [(16, 16), (16, 8)], ids=["equal dims", "v narrower"])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@BOTH
def test_a_store(install: Install, version: Any, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Slices of a projection, a scale, a pool of 4 tokens a page: the bytes of the reference."""
    install(version)
    pages = [torch.randn(16, 4, 2, dim).to(dtype) for dim in dims]
    expected = [page.clone() for page in pages]
    k, v = (torch.randn(5, 2 * dim + 3).to(dtype)[:, 3:].view(5, 2, dim) for dim in dims)
    slots = torch.tensor([40, 3, 17, 63, 18])
    store_kv(k, v, *pages, TokenSlots(slots_T=slots), k_scale=0.5, forced=STORE)
    expected[0].flatten(0, 1)[slots], expected[1].flatten(0, 1)[slots] = k / 0.5, v
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(pages, expected, strict=True))
    store_kv(k[:0], v[:0], *pages, TokenSlots(slots_T=slots[:0]), forced=STORE)


def finished(row: str, dtype: torch.dtype, *, dim: int, rotary_dim: int, page_size: int, **how: Any) -> None:
    """Assert that ``row`` leaves what the reference leaves: q, and the pages."""
    heads, weight = [4, 2, 2], torch.rand(dim).to(dtype) + 0.5
    qkv = torch.randn(7, sum(heads) * dim).to(dtype)
    given = qkv.clone()
    angles = torch.arange(128)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    normed = row == NORMED
    arguments = {
        "positions": torch.tensor([0, 1, 2, 50, 51, 127, 7]),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "q_weight": weight if normed else None,
        "k_weight": weight.flip(0) if normed else None,
        "eps": 1e-6,
        **how,
    }
    results = []
    for ours in (True, False):
        q, k, v = (part.view(7, -1, dim) for part in qkv.split([count * dim for count in heads], dim=-1))
        pages = [torch.zeros(32 // page_size, page_size, 2, dim, dtype=dtype) for _ in range(2)]
        slots = TokenSlots(slots_T=torch.tensor([9, 10, 11, 30, 31, 4, 12]))
        if ours:
            done = qk_norm_rope_store_kv(q, k, v, *pages, slots, **arguments, forced=row)
        else:
            reference = {**arguments, "axis_of_frequency": None, "k_scale": 1.0, "v_scale": 1.0}
            done = reference_norm_rope_store(q, k, v, *pages, slots, **reference)
        results.append([done, *pages])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, **tolerance_of(norm_rope_store.TABLE, row, dtype))
    assert torch.equal(results[0][2], results[1][2]) and torch.equal(qkv, given)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 64), (128, 128), (256, 64)])
def test_norm_rope_and_store(install: Install, dtype: torch.dtype, is_neox: bool, dim: int, rotary_dim: int) -> None:
    install("main")
    finished(NORMED, dtype, dim=dim, rotary_dim=rotary_dim, page_size=4, is_neox=is_neox)
    ((_, arguments),) = stand_in.CALLS
    assert arguments["qkv"].untyped_storage().nbytes() == 7 * 8 * dim * 2, "q, k and v are slices: nothing is copied"


def test_norm_rope_and_store_of_one_token_and_of_tensors_of_their_own(install: Install) -> None:
    install("main")
    pages = [torch.zeros(8, 1, 2, 64, dtype=BF16) for _ in range(2)]
    arguments: dict[str, Any] = {
        "cos_sin_cache": torch.randn(9, 64), "is_neox": True, "q_weight": torch.ones(64), "k_weight": torch.ones(64),
        "eps": 1e-6, "forced": NORMED,
    }  # fmt: skip
    for tokens in (1, 3, 0):
        q, k, v = torch.randn(tokens, 4, 64).to(BF16), *torch.randn(2, tokens, 2, 64).to(BF16).unbind()
        where = {"positions": torch.arange(tokens)}
        out = qk_norm_rope_store_kv(q, k, v, *pages, TokenSlots(slots_T=torch.arange(tokens)), **where, **arguments)
        assert out.shape == q.shape and torch.equal(pages[1][:tokens, 0], v)
    assert len(stand_in.CALLS) == 2, "no launch without tokens"


@BOTH
@pytest.mark.parametrize("is_neox", [True, False])
def test_rope_and_store_without_norm(install: Install, version: Any, is_neox: bool) -> None:
    install(version)
    finished(ROPE, BF16, dim=64, rotary_dim=64, page_size=4, is_neox=is_neox)
