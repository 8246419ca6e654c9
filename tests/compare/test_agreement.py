"""Agreement of two variants' records, and a KL divergence over the likeliest tokens that is never too large."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from atom_plugin.compare import agreement, verdict
from atom_plugin.recipe import Agreement


def record(answer: list[int], forced: list[float], decoded: list[float]) -> dict[str, Any]:
    """A prompt of three tokens, and an answer."""
    top = [[[math.log(0.6), 1], [math.log(0.4), 2]] for _ in forced]
    return {"prompt": [5, 6, 7], "answer": answer, "decoded": decoded, "forced": forced, "top": top}


def test_each_part_is_counted_where_it_belongs() -> None:
    baseline = [record([1, 2, 3], [-1, -2, -0.5, -0.5, -0.5], [-0.5, -0.5, -0.6]), record([4], [-1, -1, -1], [-1])]
    candidate = [record([1, 9, 3], [-1, -2.5, -0.5, -0.6, -0.5], [-0.7, -0.1, -0.1]), record([4], [-1, -1, -1], [-1])]
    found = agreement.compare(baseline, candidate)
    assert (found.prompts.tokens, found.answers.tokens, found.decoded.tokens, found.noise.tokens) == (4, 4, 3, 4)
    assert found.prompts.mean == pytest.approx(0.5 / 4) and found.prompts.largest == pytest.approx(0.5)
    assert found.answers.mean == pytest.approx(0.1 / 4)
    assert found.decoded.largest == pytest.approx(math.log(1 / 0.4) - 0.1)  # 9 is not listed: at most as likely as 2
    assert found.noise.largest == pytest.approx(0.1)
    assert found.first_differs == [1, None]
    assert found.kl_largest == 0


@pytest.mark.parametrize(
    ("token", "logprob", "word"), [(2, math.log(0.41), "same"), (77, math.log(0.99), "worse"), (77, math.nan, "worse")]
)
def test_decoding_that_is_broken_after_a_right_prefill(token: int, logprob: float, word: str) -> None:
    """The first token of an answer is that of the prefill: it says nothing of decoding."""
    one = record([1, 1, 1], [-0.5] * 5, [-0.5] * 3)
    other = record([1, token, 5], [-0.5] * 5, [-0.5, logprob, -0.5])
    assert verdict.of_agreement(agreement.compare([one] * 9, [other] * 9), bound=0.1).word == word


def test_an_answer_that_ends_earlier_differs_there() -> None:
    found = agreement.compare([record([1, 2], [-1] * 4, [-1] * 2)], [record([1], [-1] * 4, [-1])])
    assert found.first_differs == [1]


def likeliest(logits: np.ndarray, k: int) -> list[list[float]]:
    logprobs = torch.log_softmax(torch.tensor(logits), 0)
    return [[float(logprobs[i]), int(i)] for i in torch.topk(logprobs, k).indices]


@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
def test_kl_of_all_tokens_is_torchs_and_of_fewer_no_larger(scale: float) -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=50) * 2
    other = one + rng.normal(size=50) * scale
    logs = [torch.log_softmax(torch.tensor(x), 0) for x in (other, one)]
    whole = float(torch.nn.functional.kl_div(logs[0], logs[1], reduction="sum", log_target=True))
    assert agreement.kl_top(likeliest(one, 50), likeliest(other, 50)) == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for k in (1, 3, 10, 30):
        part = agreement.kl_top(likeliest(one, k), likeliest(other, k))
        assert 0 <= part <= whole + 1e-9
    assert agreement.kl_top(likeliest(one, 10), likeliest(one, 10)) == pytest.approx(0, abs=1e-9)


def test_kl_is_no_larger_where_the_candidate_does_not_list_a_token() -> None:
    """Both have 0.3, 0.1 and the rest; only the candidate's second likeliest, 0.3 of its rest, is another token."""
    baseline = [[math.log(0.3), 1], [math.log(0.1), 2]]
    candidate = [[math.log(0.3), 1], [math.log(0.3), 9]]
    assert agreement.kl_top(baseline, candidate) == 0


def test_kl_of_tokens_that_the_candidate_all_but_excludes_and_of_no_numbers() -> None:
    baseline = [[math.log(0.5), 1], [math.log(0.25), 2]]
    found = agreement.kl_top(baseline, [[0.0, 1], [-800.0, 2]])
    assert found == pytest.approx(0.5 * math.log(0.5) + 0.25 * (math.log(0.25) + 800) + 0.25 * math.log(0.25e6))
    assert math.isnan(agreement.kl_top(baseline, [[math.nan, 1], [-800.0, 2]]))


def test_a_logprob_that_is_no_number_makes_the_mean_none() -> None:
    """SGLang's JSON has null for NaN."""
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [None, 3, None]]}}
    answer["meta_info"]["input_top_logprobs"] = [None, [[-0.5, 2, None]], [[None, 3, None]]]

    class Stub:
        def ask(self, path: str, body: Any) -> Any:
            return answer

    forced = agreement._forced(Stub(), [1, 2, 3], Agreement())
    assert forced["forced"][0] == -0.5 and math.isnan(forced["forced"][1])
    assert math.isnan(agreement._spread([0.0, forced["forced"][1]]).mean)
