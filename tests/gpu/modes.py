"""Checkpoints, launches and comparisons of the tests of a server's modes; every engine runs once for all of them.

Results are kept as JSON in the folder that ATOM_TEST_RUNS names, which several pytest processes may share: each engine
is then started by the first that asks for it. Without it they live as long as pytest's temporary folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from atom_plugin.compare import software
from tests.gpu.engine import ON_GPU, probe_environment, run_engine, steps_of
from tests.gpu.qwen3_checkpoint import make_qwen3_moe, small_config
from tests.gpu.test_models_on_a_gpu import MOE, figures, random_ids, solved_problems

RUNS = "ATOM_TEST_RUNS"
#: Prefixes that are cached before a tail is scored.
_CACHED = (1, 15, 16, 17, 63, 64, 65, 127, 200, 1023, 1024, 1025)
#: Tokens that the breakable prefill graphs are captured for; SGLang replays one for half as many and more.
_PREFILL_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
Differences = list[float]


@dataclass(frozen=True)
class Job:
    """A checkpoint and what is asked of it: see ``engine_logprobs.py`` for the names."""

    name: str
    make: Callable[[Path], Path]
    ids: list[list[int]]
    continued: list[list[int]]
    whole: list[int]
    flags: Mapping[str, Any]
    cached: Sequence[int] = _CACHED

    @property
    def tails(self) -> list[dict[str, Any]]:
        """One sequence after cached prefixes of it."""
        return [{"cached": cached, "ids": self.whole} for cached in self.cached]


@dataclass(frozen=True)
class Run:
    """What an engine answered, logged and counted."""

    answers: dict[str, Any]
    log: str
    probe: dict[str, Any]


def small(fp8: bool, folder: Path) -> Path:
    """Return the random checkpoint of four small layers, made in ``folder``."""
    made = folder / ("small-fp8" if fp8 else "small-bf16")
    make_qwen3_moe(made, small_config(fp8=fp8))
    return made


@functools.cache
def job(name: str) -> Job:
    """Return the trained checkpoint ``moe``, or the random one of peaky attention ``small``."""
    draw = random.Random(1)
    if name == "small":
        ids = random_ids(2048)
        return Job(
            name, functools.partial(small, False), ids, ids, [draw.randrange(2, 2048) for _ in range(1300)],
            {"skip_tokenizer_init": True},
        )  # fmt: skip
    solved = solved_problems()
    whole = [token for one in solved[:16] for token in one]
    # in the middle of a question the trained model is not sure of the next word
    fragments = [ids[: 9 + index % 17] for index, ids in enumerate(solved[:16])]
    return Job(name, lambda folder: MOE, solved, fragments, whole, {})


def engine_of(asked: Job, flags: Mapping[str, Any], root: Path) -> Run:
    """Return the run of ``asked`` with the launch ``flags``; ``root`` is used where ATOM_TEST_RUNS is not set."""
    folder = Path(os.environ.get(RUNS, root)).absolute()
    launch = {"dtype": "bfloat16", "cuda_graph_max_bs_decode": 32, "cuda_graph_bs_prefill": _PREFILL_SIZES}
    launch |= {**asked.flags, **flags}
    versions = software.versions()
    if launch["model_impl"] != "atom":  # a reference that our sources do not change
        versions.pop("atom-plugin sources")
    depends_on = [vars(asked) | {"make": None}, launch, versions, software.exported(), ON_GPU]
    what = json.dumps(depends_on, sort_keys=True)
    kept = folder / f"{asked.name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if not kept.is_file():
            checkpoint = _checkpoint(asked, folder)
            partial = kept.with_suffix(".partial")
            partial.write_text(json.dumps(vars(_start(asked, checkpoint, launch))))
            partial.replace(kept)
    return Run(**json.loads(kept.read_text()))


def _checkpoint(asked: Job, folder: Path) -> Path:
    """Return the checkpoint, made once for all processes."""
    with FileLock(folder / f"{asked.name}.lock"):
        note = folder / f"{asked.name}.path"
        if not note.is_file():
            # a folder of its own: what an earlier process left half written is no checkpoint
            note.write_text(str(asked.make(Path(tempfile.mkdtemp(dir=folder)))))
        return Path(note.read_text())


def _start(asked: Job, checkpoint: Path, launch: Mapping[str, Any]) -> Run:
    """Run the engine."""
    with tempfile.TemporaryDirectory() as made:
        answers, log = run_engine(
            checkpoint, asked.ids, launch, probe_environment(Path(made)), tails=asked.tails,
            more={"continued": asked.continued, "repeated": asked.continued[9]},
        )  # fmt: skip
        assert answers is not None, log[-6000:]
        return Run(answers, log, steps_of(Path(made)))


def apart(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Differences:
    """Return the absolute differences of logprobs, one a token; both must hold the same tokens."""
    return [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]


def mean(found: Differences) -> float:
    """Return the mean."""
    return sum(found) / len(found)


def partings(base: Mapping[str, Any], tokens: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each answer that parts from ``base``'s, how much likelier base's token was to it, in nats.

    Infinite where the other token was not among the five likeliest.
    """
    gaps = []
    for mine, others, likeliest in zip(base["tokens"], tokens, base["likeliest"], strict=True):
        at = next((i for i, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b), None)
        if at is not None:
            listed = {token: logprob for logprob, token in likeliest[at]}
            gaps.append(listed[mine[at]] - listed.get(others[at], float("-inf")))
    return gaps


def decoded_apart(base: Mapping[str, Any], other: Mapping[str, Any]) -> Differences:
    """Return the differences of what both gave to the greedy tokens that they have in common."""
    found = []
    for index, (mine, others) in enumerate(zip(base["tokens"], other["tokens"], strict=True)):
        same = next((i for i, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b), len(mine))
        found += apart([base["decoded"][index][:same]], [other["decoded"][index][:same]])
    return found


def assert_near(ours: Run, other: Run, bound: float, what: str) -> None:
    """Assert that scored sequences, tails after cached prefixes and decode steps differ by ``bound`` in the mean."""
    parts = {
        "scored": apart(ours.answers["scored"], other.answers["scored"]),
        "tails": apart(ours.answers["tails"], other.answers["tails"]),
        "decoded": decoded_apart(other.answers, ours.answers),
    }
    if not other.answers["tails"]:
        del parts["tails"]
    for part, found in parts.items():
        assert found, f"{what}, {part}: no greedy answer begins with the same token"
        print(f"\n{what}, {part}: {figures(found)}", end="")
    print()
    too_far = {part: mean(found) for part, found in parts.items() if not mean(found) < bound}
    assert not too_far, f"{what}: {too_far}, the bound of the mean is {bound}"


def assert_same_tokens(ours: Run, eager: Run, near_tie: float, what: str) -> None:
    """Assert that greedy answers are those of ``eager`` until two tokens are within ``near_tie`` nats."""
    for part in ("tokens", "plain"):
        gaps = partings(eager.answers, ours.answers[part])
        print(f"{what}, {part}: {len(gaps)} of {len(ours.answers[part])} answers part, at gaps of", sorted(gaps))
        assert all(gap < near_tie for gap in gaps), f"{what}, {part}: {gaps}, a near-tie is {near_tie} nats"


def assert_ran(run: Run, **wanted: bool) -> None:
    """Assert which steps a run had, or had not: ``DECODE_graph=True`` and so on; without a GPU there are no graphs."""
    print(f"steps {run.probe['steps']}, largest {run.probe['largest']}")
    for key, is_there in wanted.items():
        step = key.replace("_", " ")
        if ON_GPU or not step.endswith("graph"):
            assert (run.probe["steps"].get(step, 0) > 0) == is_there, (step, run.probe["steps"])


def logged_prefills(run: Run) -> dict[str, int]:
    """Return how often SGLang logged a prefill batch with a graph and without one."""
    return {one: len(re.findall(rf"Prefill batch.*(?:cuda|cpu) graph: {one}", run.log)) for one in ("True", "False")}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of runs that nobody else shares."""
    return tmp_path_factory.mktemp("runs")
