"""The Triton row of qk_norm_rope_store_kv is reference.py; and what the op refuses, with which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.qk_norm_rope_store_kv import TABLE, QKNormRopeStoreKVProblem, qk_norm_rope_store_kv

TOLERANCE = next(kernel for kernel in TABLE.kernels if kernel.name == "triton").tolerance
HALF, SINGLE, FN = torch.float16, torch.float32, torch.float8_e4m3fn
NUM_POSITIONS = 40


def rope_cache(rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(NUM_POSITIONS)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def run(
    row: str,
    *,
    dtype: torch.dtype = SINGLE,
    pool_dtype: torch.dtype | None = None,
    tokens: int = 5,
    heads: tuple[int, int] = (3, 2),
    dims: tuple[int, int, int] = (16, 16, 16),
    normed: tuple[bool, bool] = (True, True),
    **changes: Any,
) -> list[torch.Tensor]:
    """Return [q, k_pages, v_pages] after the op on slices of one projection; ``dims``: of a head, rotated, of v."""
    torch.manual_seed(7)
    (q_heads, kv_heads), (dim, rotary_dim, v_dim) = heads, dims
    widths = [q_heads * dim, kv_heads * dim, kv_heads * v_dim]
    qkv = (2 * torch.randn(tokens, sum(widths) + 8)).to(dtype)
    given = qkv.clone()
    q, k, v = (
        x.view(tokens, heads, x.shape[1] // heads)
        for x, heads in zip(qkv[:, 8:].split(widths, dim=1), (q_heads, kv_heads, kv_heads), strict=True)
    )
    pages = [torch.full((8, 4, kv_heads, x), float("nan"), dtype=SINGLE).to(pool_dtype or dtype) for x in (dim, v_dim)]
    weights = [torch.rand(dim) + 0.5 if wanted else None for wanted in normed]
    arguments: dict[str, Any] = {
        "positions": torch.randint(NUM_POSITIONS, (tokens,)),
        "cos_sin_cache": rope_cache(rotary_dim),
        "is_neox": True,
        "slots_T": torch.randperm(32)[:tokens],
        **changes,
    }
    slots = TokenSlots(slots_T=arguments.pop("slots_T"))
    out = qk_norm_rope_store_kv(
        q, k, v, *pages, slots, q_weight=weights[0], k_weight=weights[1], eps=1e-6, forced=row, **arguments
    )
    assert torch.equal(qkv, given), "the op changed its arguments"
    assert out.is_contiguous() and out.dtype == dtype and out.shape == q.shape
    return [out, *pages]


def assert_triton_is_the_reference(dtype: torch.dtype = SINGLE, **how: Any) -> None:
    """q and k within the row's tolerance, v in the same bytes, and nothing else written."""
    actual, expected = (run(row, dtype=dtype, **how) for row in ("triton", "reference"))
    tolerance = TOLERANCE[dtype]
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
        )
    v, expected_v = (x[2].contiguous().view(torch.uint8) for x in (actual, expected))
    assert torch.equal(v, expected_v)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dims", [(64, 64, 64), (80, 80, 80), (96, 24, 64), (128, 64, 128), (256, 64, 256)])
def test_head_dims_and_rotated_parts(
    triton_interpreter: None, dtype: torch.dtype, is_neox: bool, dims: tuple[int, int, int]
) -> None:
    assert_triton_is_the_reference(dtype, dims=dims, is_neox=is_neox, k_scale=0.5, v_scale=1.7)


@pytest.mark.parametrize("is_neox", [True, False])
def test_norms_are_optional(triton_interpreter: None, is_neox: bool) -> None:
    assert_triton_is_the_reference(normed=(False, False), is_neox=is_neox, dims=(24, 16, 8))
    with pytest.raises(ValueError, match="one of q_weight and k_weight: takes both, or None twice"):
        assert_triton_is_the_reference(normed=(True, False), is_neox=is_neox, dims=(24, 16, 8))


@pytest.mark.parametrize(("tokens", "heads"), [(1, (1, 1)), (13, (5, 5)), (3, (64, 4)), (2, (128, 1)), (9, (12, 3))])
def test_numbers_of_tokens_and_heads(triton_interpreter: None, tokens: int, heads: tuple[int, int]) -> None:
    assert_triton_is_the_reference(tokens=tokens, heads=heads)


def test_wide_programs(triton_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large batches take: programs of more rows, in which heads of several tokens meet."""
    from atom_plugin.ops.store_kv import kernel

    monkeypatch.setattr(kernel, "_FEW_ELEMENTS", 0)
    assert_triton_is_the_reference(HALF, tokens=21, heads=(6, 3), dims=(128, 64, 96), k_scale=0.5)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("tokens", [5, 1])
def test_three_position_axes(triton_interpreter: None, is_neox: bool, tokens: int) -> None:
    positions = torch.randint(NUM_POSITIONS, (3, tokens + 3))[
        :, :tokens
    ]  # the first of more tokens, as in a padded batch
    axes = torch.tensor([0, 1, 2, 0, 2, 1])
    assert_triton_is_the_reference(
        tokens=tokens, positions=positions, axis_of_frequency=axes, is_neox=is_neox, dims=(16, 12, 16)
    )


@pytest.mark.parametrize("cache_dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_dtypes_of_the_cache_and_of_the_indices(
    triton_interpreter: None, cache_dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    assert_triton_is_the_reference(
        cos_sin_cache=rope_cache(16).to(cache_dtype),
        positions=torch.tensor([0, 39, 3, 4, 5], dtype=index_dtype),
        slots_T=torch.tensor([31, 0, 2, 7, 5], dtype=index_dtype),
    )


@pytest.mark.parametrize("pool_dtype", [FN, torch.float8_e4m3fnuz, HALF])
@pytest.mark.parametrize("is_neox", [True, False])
def test_a_quantised_k_has_the_references_bytes(
    triton_interpreter: None, pool_dtype: torch.dtype, is_neox: bool
) -> None:
    """Without a norm and at angle 0 norm and rope are exact, so that the store alone is compared."""
    how = {
        "dtype": HALF if pool_dtype != HALF else SINGLE,
        "pool_dtype": pool_dtype,
        "dims": (80, 24, 40),
        "normed": (False, False),
        "positions": torch.zeros(5, dtype=torch.int64),
        "is_neox": is_neox,
        "k_scale": 0.3,
        "v_scale": 1.7,
    }
    actual, expected = run("triton", **how), run("reference", **how)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_slots_outside_of_the_pool_are_skipped(triton_interpreter: None) -> None:
    assert_triton_is_the_reference(slots_T=torch.tensor([-1, 32, 3, 2**40, -(2**33)]))


def test_a_position_outside_of_the_cache_gives_nan_in_the_rotated_dims(triton_interpreter: None) -> None:
    positions = torch.tensor([0, NUM_POSITIONS, 1, -1, 2**40])
    slots = torch.arange(5)
    q, k_pages, v_pages = run("triton", positions=positions, slots_T=slots, dims=(24, 16, 24))
    inside = run("triton", positions=torch.zeros(5, dtype=torch.int64), slots_T=slots, dims=(24, 16, 24))
    k, v = k_pages.flatten(0, 1)[:5], v_pages.flatten(0, 1)[:5]
    for token, is_nan in enumerate([False, True, False, True, True]):
        assert q[token, :, :16].isnan().all() == is_nan and k[token, :, :16].isnan().all() == is_nan
    assert torch.equal(q[..., 16:], inside[0][..., 16:]) and torch.equal(v, inside[2].flatten(0, 1)[:5])


@pytest.mark.parametrize("row", ["triton", "eager", "reference"])
def test_no_tokens(triton_interpreter: None, row: str) -> None:
    q, k_pages, v_pages = run(row, tokens=0)
    assert q.shape == (0, 3, 16) and k_pages.isnan().all() and v_pages.isnan().all()


Q, K, PAGES = torch.zeros(5, 4, 16), torch.zeros(5, 2, 16), torch.zeros(6, 4, 2, 16)
CACHE, INDEX = torch.zeros(9, 16), torch.arange(5)


@pytest.mark.parametrize("row", ["triton", "eager", "reference"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"q_THD": Q.view(5, 64)}, r"q_THD of shape \(5, 64\): takes \[tokens, heads, head dim\]"),
        ({"q_THD": Q.double()}, "q_THD of torch.float64: takes float32, bfloat16, float16"),
        ({"q_THD": Q.half()}, r"k_THD is \(5, 2, 16\) of torch.float32: takes the tokens, head dim and dtype of q_THD"),
        ({"q_THD": Q[:4]}, r"k_THD is \(5, 2, 16\) .* which is \(4, 4, 16\)"),
        ({"q_THD": Q[..., :8]}, r"k_THD is \(5, 2, 16\) .* which is \(5, 4, 8\)"),
        ({"q_THD": Q.new_zeros(5, 16, 4).mT}, r"q_THD has strides \(64, 1, 4\): the last one has to be 1"),
        ({"v_THD": K[:, :1]}, r"v_pages of shape \(6, 4, 2, 16\): takes .* v_THD, which is \(5, 1, 16\)"),
        ({"slots_T": INDEX[:3]}, r"slots_T of shape \(3,\): takes \(5,\)"),
        ({"positions": INDEX.float()}, "positions of torch.float32: takes int64, int32"),
        ({"positions": INDEX[:4]}, r"positions of shape \(4,\): takes \(5,\)"),
        ({"positions": INDEX.expand(2, 5)}, r"positions of shape \(2, 5\): takes \(3, 5\)"),
        ({"positions": INDEX.expand(3, 5)}, r"positions of shape \(3, 5\) need axis_of_frequency"),
        (
            {"positions": INDEX.expand(3, 5), "axis_of_frequency": INDEX},
            r"axis_of_frequency of shape \(5,\): takes \(8,\)",
        ),
        ({"cos_sin_cache": CACHE.long()}, r"cos_sin_cache is \(9, 16\) of torch.int64"),
        ({"cos_sin_cache": CACHE[:, ::2]}, r"cos_sin_cache is .* strides \(16, 2\): takes \[positions, rotary dim\]"),
        ({"cos_sin_cache": CACHE[:, :7]}, "cos_sin_cache has 7 columns: takes an even number up to the head dim, 16"),
        ({"cos_sin_cache": CACHE[:, :0]}, "cos_sin_cache has 0 columns"),
        ({"cos_sin_cache": CACHE.repeat(1, 2)}, "cos_sin_cache has 32 columns"),
        ({"q_weight": torch.ones(8)}, r"q_weight is \(8,\) of torch.float32, strides \(1,\): takes \[16\] of float32"),
        ({"k_weight": torch.ones(16, dtype=torch.int32)}, r"k_weight is \(16,\) of torch.int32"),
        ({"k_weight": torch.ones(32)[::2]}, r"k_weight is \(16,\) of torch.float32, strides \(2,\)"),
    ],
)
def test_arguments_that_do_not_fit(triton_interpreter: None, row: str, bad: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q_THD": Q,
        "k_THD": K,
        "v_THD": K,
        "k_pages": PAGES,
        "v_pages": PAGES,
        "positions": INDEX,
        "cos_sin_cache": CACHE,
        "q_weight": None,
        "k_weight": None,
        "slots_T": INDEX,
        **bad,
    }
    slots = TokenSlots(slots_T=given.pop("slots_T"))
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_store_kv(**given, slots=slots, is_neox=True, eps=1e-6, forced=row)


PROBLEM = QKNormRopeStoreKVProblem(
    arch="sm90",
    qkv_dtype=torch.bfloat16,
    pool_dtype=torch.bfloat16,
    num_q_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rotary_dim=128,
    num_position_axes=1,
    normed=True,
)


@pytest.mark.parametrize(
    "cell",
    [
        {},
        {"arch": "sm100", "pool_dtype": FN},
        {"arch": "gfx942", "pool_dtype": torch.float8_e4m3fnuz},
        {"arch": "gfx950", "head_dim": 256, "rotary_dim": 64, "num_position_axes": 3, "pool_dtype": FN},
        {"num_q_heads": 128, "num_kv_heads": 1, "qkv_dtype": HALF, "head_dim": 80, "rotary_dim": 80},
    ],
)
def test_cells_that_a_gpu_has_to_serve(cell: dict[str, Any]) -> None:
    assert TABLE.choose(dataclasses.replace(PROBLEM, **cell)).name == "triton"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"pool_dtype": torch.float8_e4m3fnuz}, "float8_e4m3fnuz on sm90: it is the FP8 of gfx942 alone"),
        ({"qkv_dtype": torch.float64}, "keys and values of torch.float64: takes float32, bfloat16, float16"),
        ({"head_dim": 576}, "head dim 576: takes up to 512, a head has to fit a few registers"),
        ({"rotary_dim": 7}, "rotary dim 7 of head dim 128: has to be even and no larger"),
        ({"num_position_axes": 2}, "2 position axes: takes 1, or 3 (time, height, width)"),
        ({"arch": "cpu"}, "runs on GPUs; on cpu only interpreted: TRITON_INTERPRET=1, and forced by name"),
    ],
)
def test_every_reason(cell: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoKernelError) as error:
        TABLE.choose(dataclasses.replace(PROBLEM, **cell, forced="triton"), "triton")
    assert reason in str(error.value)
