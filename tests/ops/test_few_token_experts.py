"""Every row of few_token_experts computes what reference.py defines, which is what transformers' Qwen3-MoE does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from atom_plugin.ops.few_token_experts import TABLE, FewTokenExpertsProblem
from atom_plugin.ops.few_token_experts.reference import few_token_experts as reference
from tests.ops.poison import poison_empty

#: (tokens, hidden_size, intermediate_size, experts, top_k)
SHAPES = [(1, 64, 32, 8, 2), (4, 72, 40, 16, 8), (3, 130, 7, 5, 5), (2, 2560, 2100, 2, 1)]


def make_call(
    tokens: int, hidden: int, width: int, experts: int, top_k: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return a call whose tokens are rows of wider ones, and the last of whose places are empty."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    if tokens > 1:
        ids[-1] = -1  # a padded token of a graph
    return {
        "hidden_TD": (2 * torch.randn(tokens, hidden + 8)).to(dtype)[:, 8:],
        "weights_TK": torch.rand(tokens, top_k),
        "ids_TK": ids,
        "w13_EFD": (torch.randn(experts, 2 * width, hidden) / hidden**0.5).to(dtype),
        "w2_EDI": (torch.randn(experts, hidden, width) / width**0.5).to(dtype),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("triton_interpreter")
def test_triton(shape: tuple[int, int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_plugin.ops.few_token_experts.kernel import few_token_experts

    call = make_call(*shape, dtype)
    expected = reference(**call)
    assert expected.abs().max() > 0.1
    poison_empty(monkeypatch)
    tolerance = TABLE.kernels[0].tolerance[dtype]
    found = few_token_experts(**call)
    assert found.shape == expected.shape and found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    if shape[0] > 1:
        assert torch.equal(found[-1], torch.zeros_like(found[-1]))
    alone = {name: call[name][:1] for name in ("hidden_TD", "weights_TK", "ids_TK")}
    assert torch.equal(few_token_experts(**{**call, **alone}), found[:1])


def test_the_reference_is_transformers_block() -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    )
    block = Qwen3MoeSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(5, 32)
    scores = (x @ block.gate.weight.T).softmax(-1)
    weights, ids = scores.topk(3)
    with torch.no_grad():
        expected = block(x.unsqueeze(0))
        expected = (expected[0] if isinstance(expected, tuple) else expected).squeeze(0)
        found = reference(
            x, weights / weights.sum(-1, keepdim=True), ids, block.experts.gate_up_proj, block.experts.down_proj
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_plain_goes_through_sglangs_layer() -> None:
    """And a CPU always does."""
    problem = FewTokenExpertsProblem(
        arch="sm90", dtype=torch.bfloat16, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8
    )
    assert TABLE.choose(problem).name == "sglang"
    problem = replace(problem, forced="triton")
    assert TABLE.choose(problem, "triton").name == "triton"
    for other in ({"arch": "cpu"}, {"why_not_plain": ("they are in FP8",)}, {"dtype": torch.float64}):
        assert TABLE.choose(replace(problem, **other)).name == "sglang"
