"""Decode graphs on the CPU serve the tokens of the eager run, and two planted faults are caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cpu_graph.harness import REPORT, GraphReport, cpu_graph_env, read_report

pytestmark = pytest.mark.e2e

RUNS = {"eager": "atom", "graph": "atom", "live": "planted_live", "frozen": "planted_frozen"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Qwen3 whose weights are large enough that its tokens depend on every key."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[list[int]], GraphReport]]:
    """Return tokens and graph report of each of RUNS, from engines started one after another."""
    return serve(checkpoint, RUNS, tmp_path_factory.mktemp("site"))


def serve(checkpoint: Path, runs: dict[str, str], site: Path) -> dict[str, tuple[list[list[int]], GraphReport]]:
    """Return tokens and graph report of each of ``runs`` (name -> backend); the run named eager captures nothing."""
    env = cpu_graph_env(site)
    reports = {name: None if name == "eager" else f"{env[REPORT]}.{name}" for name in runs}
    with FileLock(str(Path(tempfile.gettempdir()) / "one_server.lock")):
        done = subprocess.run(
            [
                sys.executable,
                str(Path(__file__).with_name("greedy_tokens.py")),
                str(checkpoint),
                json.dumps([[backend, reports[name]] for name, backend in runs.items()]),
            ],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-6000:]
    tokens = json.loads(done.stdout.splitlines()[-1])
    return {name: (tokens[i], read_report({REPORT: reports[name] or ""})) for i, name in enumerate(runs)}


Served = dict[str, tuple[list[list[int]], GraphReport]]


def test_graph_serves_the_eager_tokens(served: Served) -> None:
    tokens, report = served["graph"]
    assert len(report.captured) == 4
    assert report.num_replays >= 20
    assert tokens == served["eager"][0]


def test_replay_reads_what_was_captured(served: Served) -> None:
    """Nothing moved; only the CPU's attention row, which looks at lengths on the host, reads in other shapes."""
    report = served["graph"][1]
    assert report.moved == []
    assert all("ops/paged_attention" in what for what in report.resized)


def test_eager_run_has_no_graph(served: Served) -> None:
    assert served["eager"][1] == GraphReport(captured=[], num_replays=0, moved=[], resized=[])


def test_backend_that_reads_live_tensors_is_caught(served: Served) -> None:
    """Its tokens are right here, where the closure sees the new tensors; a real graph would not."""
    tokens, report = served["live"]
    assert tokens == served["eager"][0]
    assert report.moved


def test_backend_that_freezes_lengths_is_caught(served: Served) -> None:
    tokens, report = served["frozen"]
    assert report.num_replays >= 20
    assert tokens != served["eager"][0]


def test_latent_attention_in_a_graph(tmp_path: Path) -> None:
    """SGLang's own class on a pool of latent rows: the eager tokens, and no address that moves."""
    kimi = Path(__file__).parents[2] / "examples" / "tiny-kimi-k2"
    served = serve(kimi, {"eager": "atom", "graph": "atom"}, tmp_path)
    tokens, report = served["graph"]
    assert tokens == served["eager"][0]
    assert len(report.captured) == 4 and report.num_replays >= 20
    assert report.moved == []
    assert all("ops/mla_attention" in what or "ops/paged_attention" in what for what in report.resized)
