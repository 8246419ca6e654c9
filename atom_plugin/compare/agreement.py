"""The agreement part: greedy tokens and teacher-forced logprobs of the same prompts, one request at a time.

One at a time, so that the batches of the two servers cannot differ. The baseline answers each prompt greedily; both
variants then give the logprob of every token of prompt and answer (one prefill), and the candidate its own answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atom_plugin.compare.dataset import Problem
from atom_plugin.compare.progress import Show
from atom_plugin.compare.servers import Server
from atom_plugin.recipe import Agreement

PART = "agreement"
#: What the sum of probabilities may be off by, from logprobs of fp32.
_ROUNDING = 1e-6

#: One prompt of one variant: see ``_answer`` and ``_forced`` for the keys.
Record = dict[str, Any]


def measure_baseline(server: Server, problems: Sequence[Problem], settings: Agreement, show: Show) -> list[Record]:
    """Return the baseline's greedy answer to each problem and the logprobs of both, teacher-forced."""
    records = []
    for index, problem in enumerate(problems):
        show(f"{index}/{len(problems)}")
        record = _answer(server, {"text": f"Question: {problem.question}\nAnswer:"}, settings)
        records.append({**record, **_forced(server, record["prompt"] + record["answer"], settings)})
    return records


def measure_candidate(server: Server, baseline: Sequence[Record], settings: Agreement, show: Show) -> list[Record]:
    """Return the candidate's own greedy answers, and its logprobs of the baseline's."""
    records = []
    for index, one in enumerate(baseline):
        show(f"{index}/{len(baseline)}")
        record = _answer(server, {"input_ids": one["prompt"]}, settings)
        records.append({**record, **_forced(server, one["prompt"] + one["answer"], settings)})
    return records


def _answer(server: Server, prompt: dict[str, Any], settings: Agreement) -> Record:
    """Return the token ids of prompt and greedy answer, and the logprobs of decoding it."""
    body = {
        **prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": settings.new_tokens},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    found = server.ask("/generate", body)["meta_info"]
    return {
        "prompt": [token for _, token, _ in found["input_token_logprobs"]],
        "answer": [token for _, token, _ in found["output_token_logprobs"]],
        "decoded": [_number(logprob) for logprob, _, _ in found["output_token_logprobs"]],
    }


def _forced(server: Server, tokens: list[int], settings: Agreement) -> Record:
    """Return, for each token but the first, its logprob and the likeliest tokens there as [logprob, id]."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": settings.top_k,
    }
    found = server.ask("/generate", body)["meta_info"]
    return {
        "forced": [_number(logprob) for logprob, _, _ in found["input_token_logprobs"][1:]],
        "top": [
            [[_number(logprob), token] for logprob, token, _ in likeliest]
            for likeliest in found["input_top_logprobs"][1:]
        ],
    }


def _number(logprob: float | None) -> float:
    """Return a logprob of an answer; NaN has no place in JSON, and comes as null."""
    return math.nan if logprob is None else logprob


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Differences of logprobs in nats: how many tokens, mean and 99th percentile of their absolute, and the largest."""

    tokens: int
    mean: float
    p99: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two variants' records compared; ``prompts`` and ``answers`` are teacher-forced.

    ``decoded``: the candidate's own greedy tokens against the baseline's, to the first that differs; of that one what
    the candidate gave it in decoding against what the baseline gives it in prefill.
    ``noise``: the baseline against itself, decoding against prefill of its answers. ``kl``: mean and largest
    KL divergence of the candidate from the baseline in nats, over the baseline's likeliest tokens and the rest as one.
    ``first_differs``: for each prompt the answer's first token that differs, None where none does.
    """

    prompts: Spread
    answers: Spread
    decoded: Spread
    noise: Spread
    kl_mean: float
    kl_largest: float
    first_differs: list[int | None]


def compare(baseline: Sequence[Record], candidate: Sequence[Record]) -> Comparison:
    """Return what two variants' records have in common."""
    prompts: list[float] = []
    answers: list[float] = []
    decoded: list[float] = []
    noise: list[float] = []
    divergence: list[float] = []
    first_differs: list[int | None] = []
    for one, other in zip(baseline, candidate, strict=True):
        split = len(one["prompt"]) - 1
        apart = [b - a for a, b in zip(one["forced"], other["forced"], strict=True)]
        prompts += apart[:split]
        answers += apart[split:]
        noise += [b - a for a, b in zip(one["forced"][split:], one["decoded"], strict=True)]
        same = _same_tokens(one["answer"], other["answer"])
        decoded += [b - a for a, b in zip(one["decoded"][:same], other["decoded"][:same], strict=True)]
        if same < min(len(one["answer"]), len(other["answer"])):
            decoded.append(_at_parting(other["decoded"][same], other["answer"][same], one["top"][split + same]))
        first_differs.append(None if same == len(one["answer"]) == len(other["answer"]) else same)
        divergence += [kl_top(a, b) for a, b in zip(one["top"], other["top"], strict=True)]
    return Comparison(
        prompts=_spread(prompts),
        answers=_spread(answers),
        decoded=_spread(decoded),
        noise=_spread(noise),
        kl_mean=float(np.mean(divergence)),
        kl_largest=max(divergence),
        first_differs=first_differs,
    )


def _same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two answers begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _at_parting(logprob: float, token: int, baseline: Sequence[Sequence[Any]]) -> float:
    """Return how much likelier the candidate has its own ``token`` than the baseline, whose likeliest are given.

    Small where two tokens are nearly as likely, and large where decoding is broken: all before it may come of prefill.
    A lower bound, where the baseline does not list the token.
    """
    listed = {one: its for its, one in baseline}
    apart = logprob - listed.get(token, min(listed.values()))
    return 0.0 if token not in listed and apart < 0 else apart


def _spread(differences: Sequence[float]) -> Spread:
    if not differences:
        return Spread(tokens=0, mean=0.0, p99=0.0, largest=0.0)
    sizes = np.abs(differences)
    return Spread(
        tokens=len(sizes),
        mean=float(sizes.mean()),
        p99=float(np.percentile(sizes, 99)),
        largest=float(sizes.max()),
    )


def kl_top(baseline: Sequence[Sequence[Any]], candidate: Sequence[Sequence[Any]]) -> float:
    """Return KL(baseline || candidate) in nats over the baseline's likeliest tokens, the rest being one more.

    A lower bound: a token that the candidate does not list is at most as likely as the last that it lists, and the
    rest at most as likely as what it leaves of the tokens that both list.
    """
    listed = {token: logprob for logprob, token in candidate}
    least = min(listed.values())
    in_both = sum(math.exp(listed[token]) for _, token in baseline if token in listed)
    p_rest, q_rest = 1 - sum(math.exp(logprob) for logprob, _ in baseline), max(_ROUNDING, 1 - in_both)
    # by logs: a candidate that gives a token e**-800 has a probability of 0.0
    found = sum(math.exp(logprob) * (logprob - listed.get(token, least)) for logprob, token in baseline)
    found += p_rest * math.log(p_rest / q_rest) if p_rest > 0 else 0.0
    return found if math.isnan(found) else max(0.0, found)
