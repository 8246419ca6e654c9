"""What every served configuration must show: logprobs as transformers', in prefill and in decode."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import oracle
from server import Server

from atom_plugin.configs import load_spec
from atom_plugin.explain import Plan
from atom_plugin.explain.sizes import kv_bytes_a_token, weights_of

Sequences = tuple[tuple[int, ...], ...]

#: fp32 against transformers' fp32, absolute difference of a logprob.
FP32_P999, FP32_MAX = 1e-4, 2e-3
MARGIN = 1e-5  # routers that separate two experts by less are near-ties, which summation order decides


@dataclass(frozen=True)
class Differences:
    """Absolute differences of logprobs, one a token."""

    values: np.ndarray

    def quantile(self, q: float) -> float:
        """Return the ``q`` quantile."""
        return float(np.quantile(self.values, q))

    @property
    def mean(self) -> float:
        """Return the mean."""
        return float(self.values.mean())

    @property
    def max(self) -> float:
        """Return the largest."""
        return float(self.values.max())

    def __str__(self) -> str:
        return f"{self.values.size} tokens: mean {self.mean:.2e} p99.9 {self.quantile(0.999):.2e} max {self.max:.2e}"


def differences(got: Sequence[Sequence[float]], want: Sequence[Sequence[float]]) -> Differences:
    """Return |got - want| of all tokens; raises AssertionError unless both hold the same, finite tokens."""
    assert [len(one) for one in got] == [len(one) for one in want]
    flat = np.concatenate([np.asarray(one, dtype=np.float64) for one in got])
    assert np.isfinite(flat).all(), "a logprob is not finite"
    return Differences(np.abs(flat - np.concatenate([np.asarray(one, dtype=np.float64) for one in want])))


def prompt(problem: dict[str, object]) -> str:
    """Return a problem as a prompt."""
    return f"Question: {problem['question']}\nAnswer:"


@functools.cache
def prompts(checkpoint: str, count: int) -> Sequences:
    """Return ``count`` held-out problems as token ids, without their answers."""
    encode = oracle.tokenizer(checkpoint).encode
    return tuple(tuple(encode(prompt(problem))) for problem in oracle.problems(count))


@functools.cache
def fragments(checkpoint: str, count: int) -> Sequences:
    """Return ``count`` held-out problems cut off somewhere in the question, at odd lengths."""
    return tuple(ids[: 9 + index % 17] for index, ids in enumerate(prompts(checkpoint, count)))


@functools.cache
def solved(checkpoint: str, count: int) -> Sequences:
    """Return ``count`` held-out problems with their answers as token ids."""
    encode = oracle.tokenizer(checkpoint).encode
    return tuple(tuple(encode(f"{prompt(problem)} {problem['answer']}")) for problem in oracle.problems(count))


@functools.cache
def joined(checkpoint: str, counts: tuple[int, ...]) -> Sequences:
    """Return few-shot prompts of so many solved problems each: long sequences of odd lengths."""
    parts, first, result = solved(checkpoint, sum(counts)), 0, []
    for count in counts:
        result.append(tuple(token for part in parts[first : first + count] for token in part))
        first += count
    return tuple(result)


@functools.cache
def want(checkpoint: str, sequences: Sequences) -> list[list[float]]:
    """Return transformers' logprobs of ``sequences``."""
    return oracle.logprobs(checkpoint, sequences)


def prefill_differences(server: Server, checkpoint: str, sequences: Sequences) -> Differences:
    """Return the differences of teacher-forced logprobs."""
    return differences(server.logprobs(sequences), want(checkpoint, sequences))


def decode(server: Server, prompts: Sequences, max_new_tokens: int, **sampling: object) -> list[dict[str, object]]:
    """Return greedy answers with logprobs, all requests sent at once."""
    return server.generate(
        input_ids=[list(ids) for ids in prompts],
        sampling_params={"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
        return_logprob=True,
        top_logprobs_num=5,
    )


def decode_differences(server: Server, checkpoint: str, prompts: Sequences, max_new_tokens: int) -> Differences:
    """Return the differences of what decode steps gave to their five likeliest tokens.

    Fragments of questions are continued: there the model was never trained and its distribution is broad, so that a
    wrong key shows. On an answer it is certain, and every logprob is 0.
    """
    answers = decode(server, prompts, max_new_tokens, ignore_eos=True)
    got, expected = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        new = [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert len(new) == max_new_tokens
        (out,) = oracle.forward(checkpoint, [(*ids, *new[:-1])])
        rows = out.logits[0, len(ids) - 1 :].log_softmax(-1)
        tops = answer["meta_info"]["output_top_logprobs"]
        got.append([entry[0] for top in tops for entry in top])
        expected.append([float(row[entry[1]]) for row, top in zip(rows, tops, strict=True) for entry in top])
    return differences(got, expected)


def assert_fp32(found: Differences, what: str) -> None:
    """Assert the fp32 bounds and print the figures."""
    print(f"{what}: {found}")
    assert found.quantile(0.999) <= FP32_P999, f"{what}: {found}"
    assert found.max <= FP32_MAX, f"{what}: {found}"


def assert_serves_as_transformers(server: Server, checkpoint: str, count: int = 24) -> None:
    """Assert fp32 logprobs: prefill cold and warm, long odd prompts, a cached prefix of any length, and decode."""
    server.flush()
    sequences = solved(checkpoint, count)
    assert_fp32(prefill_differences(server, checkpoint, sequences), "prefill")
    assert_fp32(prefill_differences(server, checkpoint, joined(checkpoint, (3, 7, 5))), "long prefill")
    assert_fp32(decode_differences(server, checkpoint, fragments(checkpoint, count), 24), "decode")
    assert_warm_equals_cold(server, checkpoint)


def assert_warm_equals_cold(server: Server, checkpoint: str) -> None:
    """Assert that suffixes after a cached prefix of 1, 63, 64, 65, 127 and 200 tokens have transformers' logprobs."""
    server.flush()
    (whole,) = joined(checkpoint, (16 if server.ranks()[0]["page_size"] >= 1024 else 4,))
    lengths = [length for length in (1, 63, 64, 65, 127, 200, 1023, 1024, 1025) if length < len(whole) - 2]
    expected = want(checkpoint, (whole,))[0]
    decode(server, (whole,), 1)  # fills the radix cache
    page = server.ranks()[0]["page_size"]
    for length in lengths:
        answer = server.generate(
            input_ids=list(whole),
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=length,
        )
        assert answer["meta_info"]["cached_tokens"] == length // page * page, "not all whole pages came from the cache"
        got = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
        assert_fp32(differences([got], [expected[length:]]), f"after a cached prefix of {length}")


def assert_serves_many_at_once(server: Server, checkpoint: str) -> None:
    """Assert decode logprobs under 16 concurrent clients of mixed lengths, one of which goes away half-way."""
    sequences = (*fragments(checkpoint, 12), *(ids[:-40] for ids in joined(checkpoint, (2, 5, 1, 8))))

    def ask(index: int) -> Differences:
        return decode_differences(server, checkpoint, (sequences[index],), 8 + 3 * index)

    with ThreadPoolExecutor(17) as pool:
        aborted = pool.submit(abort_half_way, server, sequences[0])
        found = list(pool.map(ask, range(len(sequences))))
    aborted.result()
    assert_fp32(Differences(np.concatenate([one.values for one in found])), "16 at once")


def abort_half_way(server: Server, ids: Sequence[int]) -> None:
    """Start a long answer, abort it by request id, and assert that it ended short."""
    import threading

    import requests

    answers: list[dict[str, object]] = []

    def ask() -> None:
        answers.append(
            server.generate(
                rid="to-abort",
                input_ids=list(ids),
                sampling_params={"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True},
            )
        )

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(100):
        requests.post(f"{server.url}/abort_request", json={"rid": "to-abort"}, timeout=30)
        thread.join(0.2)
        if not thread.is_alive():
            break
    assert not thread.is_alive() and answers[0]["meta_info"]["completion_tokens"] < 3000


def assert_holds_what_explain_says(server: Server, checkpoint: str, flags: Sequence[str]) -> None:
    """Every rank of an fp32 server of ours has as many parameters, and bytes in its pool, as `explain` works out."""
    given = dict(itertools.pairwise(flags))
    ranks = {name: int(given.get(f"--{name}-size", 1)) for name in ("tp", "ep", "dp")}
    plan = Plan(arch="cpu", dtype="float32", **ranks)
    spec = load_spec(oracle.CHECKPOINTS[checkpoint])
    weights = weights_of(spec, plan).sum
    for rank in server.ranks():
        found = rank["parameters"], rank["parameter_bytes"], rank["kv_bytes_a_slot"]
        assert found == (weights.on_rank, weights.bytes_on_rank, kv_bytes_a_token(spec, plan))
