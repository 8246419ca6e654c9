"""q/k norm, rope and store: eager equals reference.py, and both equal the formulas of Hugging Face's Qwen3."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.qk_norm_rope_store_kv import TABLE, QKNormRopeStoreKVProblem, qk_norm_rope_store_kv

TOLERANCE = next(kernel for kernel in TABLE.kernels if kernel.name == "eager").tolerance
EPS = 1e-6


def rope_cache(rotary_dim: int, num_positions: int = 128) -> torch.Tensor:
    angles = torch.arange(num_positions)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def run(row: str, dtype: torch.dtype = torch.float32, *, rotary_dim: int = 16, **changes: Any) -> list[torch.Tensor]:
    """Return [q, k_pages, v_pages] after the op, on q, k and v that are slices of one projection, as in a model."""
    torch.manual_seed(3)
    qkv = torch.randn(7, (4 + 2 + 2) * 16).to(dtype)
    given = qkv.clone()
    k_pages, v_pages = torch.zeros(8, 4, 2, 16).to(dtype), torch.zeros(8, 4, 2, 16).to(dtype)
    arguments: dict[str, Any] = {
        "positions": torch.tensor([0, 1, 2, 50, 51, 127, 7]),
        "cos_sin_cache": rope_cache(rotary_dim),
        "is_neox": True,
        "q_weight": torch.rand(16).to(dtype) + 0.5,
        "k_weight": torch.rand(16).to(dtype) + 0.5,
        "eps": EPS,
        **changes,
    }
    q = qk_norm_rope_store_kv(
        qkv[:, :64].view(7, 4, 16),
        qkv[:, 64:96].view(7, 2, 16),
        qkv[:, 96:].view(7, 2, 16),
        k_pages,
        v_pages,
        TokenSlots(slots_T=torch.tensor([9, 10, 11, 30, 31, 4, 12])),
        forced=row,
        **arguments,
    )
    assert torch.equal(qkv, given), "the op changed its arguments"
    return [q, k_pages, v_pages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("normed", [True, False])
def test_eager_is_the_reference(dtype: torch.dtype, is_neox: bool, rotary_dim: int, normed: bool) -> None:
    changes: dict[str, Any] = {} if normed else {"q_weight": None, "k_weight": None}
    actual = run("eager", dtype, rotary_dim=rotary_dim, is_neox=is_neox, **changes)
    expected = run("reference", dtype, rotary_dim=rotary_dim, is_neox=is_neox, **changes)
    for name, ours, theirs in zip(("q", "k", "v"), actual, expected, strict=True):
        assert ours.dtype == dtype, name
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype].rtol, atol=TOLERANCE[dtype].atol)


@pytest.mark.parametrize("row", ["eager", "reference"])
def test_a_row_is_what_qwen3_does(row: str) -> None:
    weight = torch.rand(16) + 0.5
    q, k_pages, _ = run(row, q_weight=weight, k_weight=weight)
    torch.manual_seed(3)
    qkv = torch.randn(7, 128)
    cos, sin = rope_cache(16)[torch.tensor([0, 1, 2, 50, 51, 127, 7])].chunk(2, dim=-1)
    cos, sin = (torch.cat([half, half], dim=-1)[:, None] for half in (cos, sin))

    def finished(x: torch.Tensor) -> torch.Tensor:
        x = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    torch.testing.assert_close(q, finished(qkv[:, :64].view(7, 4, 16)), rtol=1e-5, atol=1e-5)
    stored = k_pages.flatten(0, 1)[torch.tensor([9, 10, 11, 30, 31, 4, 12])]
    torch.testing.assert_close(stored, finished(qkv[:, 64:96].view(7, 2, 16)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ["eager", "reference"])
def test_three_position_axes(row: str) -> None:
    """Equal rows are plain rope; each frequency follows its own axis when they differ."""
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
    positions = torch.tensor([0, 1, 2, 50, 51, 127, 7])
    same = run(row, positions=positions.expand(3, 7), axis_of_frequency=axes)
    for ours, plain in zip(same, run(row), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    three = torch.stack([positions, positions + 0, (positions + 3) % 128])
    q, _, _ = run(row, positions=three, axis_of_frequency=axes)
    by_axis = [run(row, positions=three[axis])[0] for axis in range(3)]
    for frequency, axis in enumerate(axes.tolist()):
        for dim in (frequency, frequency + 8):
            torch.testing.assert_close(q[..., dim], by_axis[axis][..., dim], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(q, by_axis[0])


def test_three_position_axes_need_to_know_whose_frequency_is_whose() -> None:
    with pytest.raises(ValueError, match=r"positions of shape \(3, 7\) need axis_of_frequency"):
        run("eager", positions=torch.zeros(3, 7, dtype=torch.int64))


PROBLEM = QKNormRopeStoreKVProblem(
    arch="cpu",
    qkv_dtype=torch.bfloat16,
    pool_dtype=torch.float8_e4m3fn,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    num_position_axes=1,
    normed=True,
)


@pytest.mark.parametrize("cell", [{}, {"rotary_dim": 16, "num_position_axes": 3}, {"pool_dtype": torch.float16}])
def test_cells_that_a_cpu_has_to_serve(cell: dict[str, Any]) -> None:
    assert TABLE.choose(dataclasses.replace(PROBLEM, **cell)).name == "eager"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"rotary_dim": 7}, "rotary dim 7 of head dim 64: has to be even and no larger"),
        ({"rotary_dim": 128}, "rotary dim 128 of head dim 64: has to be even and no larger"),
        ({"num_position_axes": 2}, "2 position axes: takes 1, or 3 (time, height, width)"),
        ({"arch": "gfx942", "rotary_dim": 7}, "runs on gfx942 only when forced by name: it is PyTorch for CPUs"),
        ({"arch": "gfx942", "rotary_dim": 7}, "runs only when forced by name: it is the slow definition"),
    ],
)
def test_every_reason(cell: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoKernelError) as error:
        TABLE.choose(dataclasses.replace(PROBLEM, **cell))
    assert reason in str(error.value)
