"""few_token_experts on a GPU is what reference.py computes on the CPU, in a graph as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom_plugin.ops.few_token_experts import MOST_TOKENS, TABLE
from atom_plugin.ops.few_token_experts.kernel import few_token_experts
from atom_plugin.ops.few_token_experts.reference import few_token_experts as reference
from tests.ops.test_few_token_experts import SHAPES, make_call

pytestmark = pytest.mark.gpu

#: Qwen3-30B-A3B's and Kimi-K2's experts, the latter as one rank of eight has them, fewer of each.
PUBLISHED = [(1, 2048, 768, 16, 8), (MOST_TOKENS, 2048, 768, 16, 8), (2, 7168, 256, 12, 8)]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that a row's result is within its tolerance."""
    near = TABLE.kernels[0].tolerance[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=near.rtol, atol=near.atol)


@pytest.mark.parametrize("shape", [*SHAPES, *PUBLISHED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_reference(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    call = make_call(*shape, dtype)
    expected = reference(**call)
    given = {name: tensor.cuda() for name, tensor in call.items()}
    given["hidden_TD"] = torch.cat([given["hidden_TD"]] * 2, dim=1)[:, : shape[1]]  # a part of a wider row
    found = few_token_experts(**given)
    assert_near(found, expected)
    first = {name: given[name][:1] for name in ("hidden_TD", "weights_TK", "ids_TK")}
    assert torch.equal(few_token_experts(**{**given, **first}), found[:1]), "a token's result depends on others"


def test_a_graph_reads_new_tokens_and_their_experts() -> None:
    torch.manual_seed(0)
    call, other = (make_call(MOST_TOKENS, 256, 96, 16, 8, torch.bfloat16) for _ in range(2))
    given: dict[str, Any] = {name: tensor.cuda() for name, tensor in call.items()}
    few_token_experts(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = few_token_experts(**given)
    for name in ("hidden_TD", "weights_TK", "ids_TK"):
        given[name].copy_(other[name])
    graph.replay()
    assert_near(found, reference(**{**call, **{n: other[n] for n in ("hidden_TD", "weights_TK", "ids_TK")}}))
