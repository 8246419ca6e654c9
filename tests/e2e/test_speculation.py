"""Servers that speculate: SGLang's EAGLE worker over our model and backend, greedy tokens are those of transformers.

On a CPU the draft runs on SGLang's Triton attention, interpreted, and the target verifies in a decode graph of
``tests/cpu_graph``. fp32, so that nothing is a near-tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import checks
import oracle
import pytest
import torch
from server import Server, serve

from tests.cpu_graph.harness import cpu_graph_env, read_report
from tests.eagle_draft import make_draft
from tests.plugin_folder import make_plugin

pytestmark = pytest.mark.slow
NEW_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One launch; ``page_size`` in tokens."""

    checkpoint: str
    algorithm: str
    page_size: int = 1


CASES = {
    "moe": Case("moe", "EAGLE"),
    "dense, EAGLE-3, pages of 16": Case("dense", "EAGLE3", page_size=16),
}


@dataclass(frozen=True)
class Speculating:
    """A server, what it was launched with, and the environment of its graphs."""

    server: Server
    case: Case
    env: dict[str, str]


@pytest.fixture(scope="module", params=CASES)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculating]:
    """Fit a draft and serve with it."""
    pytest.importorskip("triton", reason="Triton is not installed, so no draft ran")
    case, base = CASES[request.param], tmp_path_factory.mktemp("speculation")
    target = oracle.CHECKPOINTS[case.checkpoint]
    make_draft(target, base / "draft", case.algorithm, checks.solved(case.checkpoint, 60)[20:])
    env = cpu_graph_env(base / "site")
    make_plugin(base / "site", "eagle_on_a_cpu", "eagle_plugin:register")
    flags = (
        "--model-impl", "atom", "--dtype", "float32", "--page-size", str(case.page_size),
        "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4",
        "--speculative-algorithm", case.algorithm, "--speculative-draft-model-path", str(base / "draft"),
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
        "--speculative-draft-attention-backend", "triton",
    )  # fmt: skip
    how = {"env": {**env, "TRITON_INTERPRET": "1"}, "max_total_tokens": 4096}
    with serve(target, *flags, folder=base / "server", **how) as server:
        yield Speculating(server, case, env)


def ask(server: Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the answers to a batch."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.generate(input_ids=prompts, sampling_params=sampling)


def assert_greedy(checkpoint: str, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    """Given all before it, every token of every answer is the likeliest one of transformers' model."""
    sequences = [ids + answer["output_ids"] for ids, answer in zip(prompts, answers, strict=True)]
    for ids, answer, out in zip(prompts, answers, oracle.forward(checkpoint, sequences), strict=True):
        assert len(answer["output_ids"]) == NEW_TOKENS
        given = out.logits[0, len(ids) - 1 : -1].log_softmax(-1)
        chosen = given.gather(-1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
        assert float((given.max(-1).values - chosen).max()) < 1e-3, f"prompt of {len(ids)} tokens"


def prompts_of(checkpoint: str) -> list[list[int]]:
    """Return five prompts, more than the server runs at once: questions, one of them cut, and one token."""
    questions = [list(ids) for ids in checks.prompts(checkpoint, 3)]
    return [questions[0][:1], questions[0], questions[1], questions[2][:17], questions[2]]


def test_greedy_tokens(running: Speculating) -> None:
    """Batches of one and of more than run at once, requests that come one by one, and cached ones read again."""
    server, checkpoint = running.server, running.case.checkpoint
    prompts = prompts_of(checkpoint)
    together = ask(server, prompts)
    assert_greedy(checkpoint, prompts, together)
    with ThreadPoolExecutor(2) as pool:
        alone = [one for (one,) in pool.map(lambda ids: ask(server, [ids]), prompts[:2])]
    assert_greedy(checkpoint, prompts[:2], alone)
    again = [ids + answer["output_ids"] + prompts[2] for ids, answer in zip(prompts, together, strict=True)][2:]
    continued = ask(server, again)
    assert_greedy(checkpoint, again, continued)
    page = running.case.page_size
    for ids, answer in zip(prompts[2:], continued, strict=True):
        verified = len(ids) + NEW_TOKENS - 6  # the last chain may not be kept
        assert answer["meta_info"]["cached_tokens"] >= verified // page * page


def test_drafts_are_accepted_now_and_then(running: Speculating) -> None:
    """The fitted drafts are right about half of the time; hidden states of other tokens would leave few."""
    answers = ask(running.server, prompts_of(running.case.checkpoint)[1:])
    length = len(answers) * NEW_TOKENS / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    print(f"\naccept length {length:.2f}")
    assert 1.3 < length < 3.5


def test_our_target_and_sglangs_draft(running: Speculating) -> None:
    """The log says which classes run; every verify ran in a graph that reads what it was captured with."""
    log = running.server.log.read_text()
    draft = {"EAGLE": "llama_eagle.LlamaForCausalLMEagle", "EAGLE3": "llama_eagle3.LlamaForCausalLMEagle3"}
    assert "ForCausalLM is atom_plugin.models.qwen3" in log
    assert f"is SGLang's own, sglang.srt.models.{draft[running.case.algorithm]}" in log
    ask(running.server, prompts_of(running.case.checkpoint))
    report = read_report(running.env)
    assert report.captured and report.num_replays > 5
    assert report.moved == []
