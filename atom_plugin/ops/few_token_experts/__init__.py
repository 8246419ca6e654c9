"""The experts of a decode step of few tokens: without sorting tokens by expert, and without a sum of their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops.triton_rows import why_not_triton

#: Why SGLang's layer may not hold the weights as a checkpoint does.
QUANTISED = "their weights are quantised: takes those of the dtype of the tokens"
SPLIT = "experts are split over EP ranks: takes all experts of a layer, or a part of the width of each"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Steps of more tokens go through SGLang's layer: there experts are shared, and reading each once wins.
MOST_TOKENS = 4
#: The row that is SGLang's layer, whatever it runs.
SGLANG = "sglang"


@dataclass(frozen=True, kw_only=True)
class FewTokenExpertsProblem:
    """What a row has to know to say whether it can run. ``forced``: the row that a person asked for by name.

    ``intermediate_size``: what this rank holds of each expert's. ``why_not_plain``: why SGLang's layer does not hold
    the weights as they are in a checkpoint, () where it does.
    """

    arch: str
    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    why_not_plain: tuple[str, ...] = ()
    forced: str | None = None


class FewTokenExperts(Protocol):
    """What every row is called with: SGLang's layer of experts, the tokens, and its routing of them."""

    def __call__(self, experts: Any, hidden_TD: torch.Tensor, routing: Any) -> torch.Tensor: ...


def _why_not_triton(problem: FewTokenExpertsProblem) -> list[str]:
    reasons = why_not_triton(problem.arch, "triton", problem.forced, (problem.dtype,))
    if problem.forced != "triton":
        reasons.append("runs only when forced by name: it has not been measured on a GPU")
    if problem.dtype not in DTYPES:
        reasons.append(f"tokens and weights of {problem.dtype}: takes float32, bfloat16, float16")
    return reasons + list(problem.why_not_plain)


def _load_triton() -> FewTokenExperts:
    from atom_plugin.ops.few_token_experts.kernel import few_token_experts as row

    def run(experts: Any, hidden_TD: torch.Tensor, routing: Any) -> torch.Tensor:
        return row(hidden_TD, routing.topk_weights, routing.topk_ids, experts.w13_weight, experts.w2_weight)

    return run


def _load_sglang() -> FewTokenExperts:
    def run(experts: Any, hidden_TD: torch.Tensor, routing: Any) -> torch.Tensor:
        out_TD: torch.Tensor = experts(hidden_TD, routing)
        return out_TD

    return run


_TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-3),
    torch.float16: Tolerance(rtol=2e-3, atol=1e-3),
}

TABLE: Table[FewTokenExpertsProblem] = Table(
    "few_token_experts",
    [
        Kernel("triton", _why_not_triton, _load_triton, _TOLERANCE),
        Kernel(SGLANG, lambda _problem: [], _load_sglang, _TOLERANCE),
    ],
)
