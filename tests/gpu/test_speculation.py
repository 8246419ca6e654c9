"""EAGLE with a chain of three on a GPU, graphs on: the greedy tokens of the same launch without speculation.

bf16 rounds a batch of verified tokens in other places than one of single tokens, so answers may part where two tokens
are nearly as likely. transformers' fp32 model judges: given all before it, a token is off that is more than ``TIE``
below the likeliest one. Where an answer parts from the one without speculation neither token may be off but in ``FEW``
of the answers (an expert that bf16 routes the other way), and of all tokens hardly more may be off than without.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.eagle_draft import make_draft
from tests.plugin_folder import make_plugin

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = {"moe": EXAMPLES / "tiny-qwen3-moe", "dense": EXAMPLES / "tiny-qwen3"}
#: Difference of logprobs, in nats: bf16 logits of 16 to 32 are 0.125 apart.
TIE = 0.25
FEW = 0.02
NEW_TOKENS = 48
#: Engines that start at once, all on one GPU.
AT_ONCE = 4
COMMON = {
    "dtype": "bfloat16", "mem_fraction_static": 0.4, "max_total_tokens": 65536, "max_running_requests": 48,
    "log_level": "info", "decode_log_interval": 1, "cuda_graph_backend_prefill": "disabled", "model_impl": "atom",
}  # fmt: skip
CHAIN = {
    "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    "speculative_draft_attention_backend": "triton",
}  # fmt: skip
#: Engine -> (checkpoint, algorithm or None, flags).
ENGINES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "moe plain": ("moe", None, {}),
    "dense plain": ("dense", None, {}),
    "moe page 1": ("moe", "EAGLE", {}),
    "moe page 64": ("moe", "EAGLE", {"page_size": 64}),
    "dense page 1": ("dense", "EAGLE", {}),
    "dense page 64": ("dense", "EAGLE", {"page_size": 64, "cuda_graph_backend_prefill": None}),
    "moe EAGLE-3": ("moe", "EAGLE3", {}),
    "moe on fa3": (
        "moe", "EAGLE", {"attention_backend": "fa3", "speculative_draft_attention_backend": "fa3"},
    ),
    "SGLang's moe": ("moe", "EAGLE", {"model_impl": "sglang", "attention_backend": "atom"}),
    "SGLang's moe on fa3": ("moe", "EAGLE", {"model_impl": "sglang", "attention_backend": "fa3"}),
    "SGLang's moe, EAGLE-3 on fa3": ("moe", "EAGLE3", {"model_impl": "sglang", "attention_backend": "fa3"}),
}  # fmt: skip
SPECULATES = [name for name, (_, algorithm, _) in ENGINES.items() if algorithm]
#: Engines whose acceptance is compared: ours, and SGLang's model on SGLang's backend with the same draft.
COMPARED = {"moe page 1": "SGLang's moe on fa3", "moe EAGLE-3": "SGLang's moe, EAGLE-3 on fa3"}
OURS = [name for name in SPECULATES if name not in COMPARED.values()]


@functools.cache
def problems() -> list[tuple[list[int], list[int]]]:
    """Return (question, question and worked answer) of every held-out problem; both checkpoints have one tokenizer."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(FOLDERS["moe"]).encode
    lines = [json.loads(line) for line in (FOLDERS["moe"] / "heldout.jsonl").read_text().splitlines()]
    prompts = [f"Question: {one['question']}\nAnswer:" for one in lines]
    return [(encode(prompt), encode(f"{prompt} {one['answer']}")) for prompt, one in zip(prompts, lines, strict=True)]


def batches() -> list[list[list[int]]]:
    """Return batches of 1, 1, 3, 17 and 40 prompts: one token, questions, cut ones of odd lengths; some come twice."""
    questions = [question for question, _ in problems()[:40]]
    cut = [question[: 2 + 3 * index] for index, question in enumerate(questions[:17])]
    return [[questions[0][:1]], [questions[0]], [questions[1], questions[2][:1], questions[3][:33]], cut, questions]


def plugin_path(drafts: dict[tuple[str, str], Path]) -> str:
    """Return a PYTHONPATH with the plugin that lets a GPU speculate, kept beside the drafts."""
    site = make_plugin(next(iter(drafts.values())).parent / "site", "gpu_speculation", "speculation_plugin:register")
    return os.pathsep.join([str(site), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def answers(name: str, drafts: dict[tuple[str, str], Path], port: int) -> tuple[list[Any], str]:
    """Run one engine in a process of its own and return (its answers, a batch each, what it printed)."""
    checkpoint, algorithm, flags = ENGINES[name]
    engine = {"model_path": str(FOLDERS[checkpoint]), "port": port, "nccl_port": port + 5, **COMMON}
    if algorithm:
        engine |= {**CHAIN, "speculative_algorithm": algorithm}
        engine["speculative_draft_model_path"] = str(drafts[checkpoint, algorithm])
    body = {"engine": engine | flags, "batches": batches(), "new_tokens": NEW_TOKENS, "tail": problems()[50][0]}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_answers.py"))],
        input=json.dumps(body),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": plugin_path(drafts)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    log = ran.stdout + ran.stderr
    assert "RESULT" in ran.stdout, f"{name}: {log[-8000:]}"
    return json.loads(ran.stdout.rsplit("RESULT", 1)[1]), log


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[tuple[list[Any], str]]]]:
    """Start every engine that a selected test looks at, a few at once."""
    base = tmp_path_factory.mktemp("drafts")
    fitted = [solved for _, solved in problems()[100:180]]
    wanted = {name for item in request.session.items for name in needed(item)}
    drafts = {}
    for checkpoint, algorithm, _ in (ENGINES[name] for name in wanted):
        if algorithm and (checkpoint, algorithm) not in drafts:
            folder = base / f"{checkpoint}-{algorithm}"
            make_draft(FOLDERS[checkpoint], folder, algorithm, fitted)
            drafts[checkpoint, algorithm] = folder
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            name: pool.submit(answers, name, drafts, 31000 + 20 * index)
            for index, name in enumerate(ENGINES)
            if name in wanted
        }


def needed(item: pytest.Item) -> set[str]:
    """Return the engines that a test of this module looks at, and none for another module's."""
    if item.path != Path(__file__):
        return set()
    assert isinstance(item, pytest.Function)
    if not hasattr(item, "callspec"):
        return {"moe plain", *COMPARED, *COMPARED.values()}
    name = item.callspec.params["name"]
    return {name, f"{ENGINES[name][0]} plain"}


@functools.cache
def oracle(checkpoint: str) -> Any:
    """Return the checkpoint in transformers, in fp32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDERS[checkpoint], dtype=torch.float32).eval()


def gaps(checkpoint: str, answer: dict[str, Any]) -> torch.Tensor:
    """Return [tokens of the answer]: how far, in nats, fp32 finds each below the likeliest one, given all before it."""
    return gaps_of(checkpoint, tuple(answer["ids"]), tuple(answer["tokens"]))


@functools.cache
@torch.no_grad()
def gaps_of(checkpoint: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    """Return ``gaps`` of one answer; most come several times."""
    given = oracle(checkpoint)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return given.max(-1).values - given.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def accept_length(found: list[Any]) -> float:
    """Return the new tokens of a verified chain, its bonus token included, over all answers."""
    flat = [answer for batch in found for answer in batch]
    return sum(len(answer["tokens"]) for answer in flat) / sum(answer["steps"] for answer in flat)


@pytest.mark.parametrize("name", OURS)
def test_tokens_of_the_launch_without_speculation(name: str, runs: dict[str, Any]) -> None:
    """All batches and their continuations; equal but for near-ties, as the module's docstring says."""
    checkpoint = ENGINES[name][0]
    found, plain = runs[name].result()[0], runs[f"{checkpoint} plain"].result()[0]
    parted, compared, all_gaps, all_plain = [], 0, [], []
    for batch, batch_plain in zip(found, plain, strict=True):
        for answer, expected in zip(batch, batch_plain, strict=True):
            assert len(answer["tokens"]) == len(expected["tokens"]) == NEW_TOKENS
            all_gaps.append(gaps(checkpoint, answer))
            all_plain.append(gaps(checkpoint, expected))
            if answer["ids"] != expected["ids"]:
                continue  # the continuation of answers that part is another prompt
            compared += 1
            pairs = zip(answer["tokens"], expected["tokens"], strict=True)
            first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                parted.append(max(float(all_gaps[-1][first]), float(all_plain[-1][first])))
    spoken, without = torch.cat(all_gaps), torch.cat(all_plain)
    print(
        f"\n{name}: {compared - len(parted)} of {compared} answers of {NEW_TOKENS} tokens equal; the others part at "
        f"tokens at most {max(parted, default=0):.3f} below the likeliest; off are {(spoken > TIE).sum()} of "
        f"{len(spoken)} tokens, without speculation {(without > TIE).sum()}, furthest {spoken.max():.3f} and "
        f"{without.max():.3f}; accept length {accept_length(found):.2f}"
    )
    assert sum(one > TIE for one in parted) <= FEW * compared
    assert (spoken > TIE).sum() <= (without > TIE).sum() + 0.001 * len(spoken)
    assert len(parted) <= 0.2 * compared


def test_a_wrong_token_would_be_off(runs: dict[str, Any]) -> None:
    """One token of each answer replaced by the one before it, as a chain that is a place late would have it."""
    answers = [answer for batch in runs["moe plain"].result()[0] for answer in batch]
    changed = [answer for answer in answers if answer["tokens"][5] != answer["tokens"][6]]
    for answer in changed:
        tokens = answer["tokens"][:6] + answer["tokens"][5:6] + answer["tokens"][7:]
        answer["off"] = float(gaps("moe", {**answer, "tokens": tokens})[6])
    assert len(changed) > 50
    assert sum(answer["off"] > TIE for answer in changed) > 0.95 * len(changed)


@pytest.mark.parametrize("name", OURS)
def test_drafts_are_accepted_now_and_then(name: str, runs: dict[str, Any]) -> None:
    """The fitted drafts are right about half of the time: both the accepting and the refusing verify have run."""
    assert 1.2 < accept_length(runs[name].result()[0]) < 3.5


@pytest.mark.parametrize("name", OURS)
def test_verified_tokens_are_read_again(name: str, runs: dict[str, Any]) -> None:
    """The continuations find the answers of the batch before in the cache, and not only its prompts."""
    page = ENGINES[name][2].get("page_size", 1)
    before, continued = runs[name].result()[0][-2:]
    for answer, continuation in zip(before, continued, strict=True):
        kept = len(answer["ids"]) + NEW_TOKENS - 6  # the last chain may not be
        assert continuation["cached"] >= kept // page * page
        assert continuation["cached"] % page == 0


@pytest.mark.parametrize("name", OURS)
def test_graphs_were_on(name: str, runs: dict[str, Any]) -> None:
    """Verify and draft are captured, and no decode step ran without a graph."""
    log = runs[name].result()[1]
    steps = re.findall(r"Decode batch.*cuda graph: (True|False)", log)
    assert steps and set(steps) == {"True"}
    assert "Capture target verify CUDA graph end" in log and "Capture draft decode CUDA graph end" in log
    if ENGINES[name][2].get("model_impl") != "sglang":
        assert "is SGLang's own, sglang.srt.models.llama_eagle" in log and "is atom_plugin.models.qwen3" in log
    if ENGINES[name][2].get("attention_backend", "atom") == "atom":
        assert "The attention backend atom on sm90: paged_attention=triton" in log


def test_as_many_are_accepted_as_with_sglangs_model(runs: dict[str, Any]) -> None:
    """A draft that got hidden states of other tokens, or of other layers, would be right less often."""
    for ours, theirs in COMPARED.items():
        length, expected = accept_length(runs[ours].result()[0]), accept_length(runs[theirs].result()[0])
        print(f"\naccept length: {ours} {length:.3f}, {theirs} {expected:.3f}")
        assert length == pytest.approx(expected, abs=0.05)
