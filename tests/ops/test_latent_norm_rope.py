"""Every row of latent_norm_rope computes what reference.py defines, which is what transformers' DeepseekV3 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, apply_rotary_pos_emb_interleave

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.latent_norm_rope import TABLE, LatentNormRopeProblem, latent_norm_rope

EPS = 1e-6
POSITIONS = 300


def make_call(tokens: int, heads: int, rank: int, rope_dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the arguments of a call as a layer makes it: parts of wider rows, and memory of NaN to write to."""
    nope = 24
    query = torch.randn(tokens, heads, nope + rope_dim).to(dtype)
    projected = (2 * torch.randn(tokens, 40 + rank + rope_dim)).to(dtype)
    absorbed = torch.full((tokens, heads, rank + rope_dim), float("nan")).to(dtype)
    angles = torch.arange(POSITIONS)[:, None] * 1e4 ** (-torch.arange(0, rope_dim, 2) / rope_dim)
    return {
        "q_rope_THR": query[..., nope:],
        "kv_TD": projected[:, 40:],
        "out_THR": absorbed[..., rank:],
        "positions_T": torch.randint(POSITIONS, (tokens,)),
        "cos_sin_cache": 1.5 * torch.cat([angles.cos(), angles.sin()], dim=1),
        "kv_weight_C": torch.rand(rank).to(dtype) + 0.5,
        "eps": EPS,
    }


def assert_defined(row: str, call: dict[str, Any]) -> None:
    """Assert that ``row`` gives what the reference gives, beside its queries and in their place."""
    tolerance = next(kernel for kernel in TABLE.kernels if kernel.name == row).tolerance[call["kv_TD"].dtype]
    near = {"rtol": tolerance.rtol, "atol": tolerance.atol}
    given = call["q_rope_THR"].clone(), call["kv_TD"].clone()
    expected = latent_norm_rope(**call, forced="reference")
    expected_q = call["out_THR"].clone()
    call["out_THR"].fill_(float("nan"))
    rows = latent_norm_rope(**call, forced=row)
    assert rows.shape == (len(call["kv_TD"]), 1, call["kv_TD"].shape[1]) and rows.dtype == call["kv_TD"].dtype
    torch.testing.assert_close(rows, expected, **near)
    torch.testing.assert_close(call["out_THR"], expected_q, **near)
    assert torch.equal(call["q_rope_THR"], given[0]) and torch.equal(call["kv_TD"], given[1])
    assert torch.equal(latent_norm_rope(**{**call, "out_THR": call["q_rope_THR"]}, forced=row), rows)
    assert torch.equal(call["q_rope_THR"], call["out_THR"])


SHAPES = [(1, 1, 16, 2), (5, 8, 64, 64), (3, 12, 96, 6), (7, 40, 24, 16), (2, 128, 512, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eager(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    assert_defined("eager", make_call(*shape, dtype))


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    assert_defined("triton", make_call(*shape, dtype))


def test_no_tokens() -> None:
    assert latent_norm_rope(**make_call(0, 4, 16, 8)).shape == (0, 1, 24)


def test_transformers() -> None:
    """transformers moves the even columns in front of the odd ones, of queries and keys alike, and turns halves."""
    call = make_call(11, 3, 16, 8)
    rows = latent_norm_rope(**call, forced="reference")
    norm = DeepseekV3RMSNorm(16, eps=EPS)
    norm.weight.data.copy_(call["kv_weight_C"])
    torch.testing.assert_close(rows[:, 0, :16], norm(call["kv_TD"][:, :16]), rtol=1e-6, atol=1e-6)
    cos, sin = (x.repeat(1, 2)[None] for x in call["cos_sin_cache"][call["positions_T"]].chunk(2, dim=1))
    query, key = call["q_rope_THR"].transpose(0, 1)[None], call["kv_TD"][:, 16:][None, None]
    turned_q, turned_k = apply_rotary_pos_emb_interleave(query, key, cos, sin)
    for ours, theirs in (
        (call["out_THR"], turned_q[0].transpose(0, 1)),
        (rows[:, :, 16:], turned_k[0].transpose(0, 1)),
    ):
        torch.testing.assert_close(torch.cat([ours[..., 0::2], ours[..., 1::2]], dim=-1), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("triton_interpreter")
def test_a_position_past_the_cache_is_nan() -> None:
    call = make_call(2, 1, 16, 8)
    call["positions_T"] = torch.tensor([POSITIONS, 3])
    rows = latent_norm_rope(**call, forced="triton")
    assert rows[0, 0, 16:].isnan().all() and call["out_THR"][0].isnan().all()
    assert not rows[1].isnan().any() and not call["out_THR"][1].isnan().any() and not rows[0, 0, :16].isnan().any()


BAD = {
    "out": ({"out_THR": torch.zeros(5, 2, 4)}, "q_rope_THR is (5, 2, 8) of torch.float32, out_THR (5, 2, 4)"),
    "kv": ({"kv_TD": torch.zeros(5, 23)}, "kv_TD is (5, 23) of torch.float32: takes (5, 24)"),
    "dtype": ({"kv_TD": torch.zeros(5, 24).half()}, "kv_TD is (5, 24) of torch.float16: takes (5, 24)"),
    "cache": ({"cos_sin_cache": torch.zeros(9, 4)}, "cos_sin_cache is (9, 4): takes [positions, 8]"),
    "positions": ({"positions_T": torch.zeros(5)}, "positions_T is (5,) of torch.float32: takes (5,) of int64, int32"),
    "stride": ({"kv_TD": torch.zeros(24, 5).t()}, "kv_TD has strides (1, 5): the last one has to be 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_said(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError) as error:
        latent_norm_rope(**{**make_call(5, 2, 16, 8), **change})
    assert message in str(error.value)


def test_no_row_for_an_odd_number_of_columns() -> None:
    with pytest.raises(NoKernelError, match="7 columns to rotate: takes pairs"):
        TABLE.choose(
            LatentNormRopeProblem(arch="sm90", dtype=torch.bfloat16, num_heads=8, kv_lora_rank=512, rope_dim=7)
        )


def test_pytorch_does_not_run_on_a_gpu_unless_it_is_forced() -> None:
    problem = {"dtype": torch.bfloat16, "num_heads": 8, "kv_lora_rank": 512, "rope_dim": 64}
    for arch in ("sm90", "gfx942", "gfx950"):
        assert TABLE.choose(LatentNormRopeProblem(arch=arch, **problem)).name == "triton"
        assert TABLE.choose(LatentNormRopeProblem(arch=arch, **problem, forced="eager"), "eager").name == "eager"
    assert TABLE.choose(LatentNormRopeProblem(arch="cpu", **problem)).name == "eager"
