"""``atom-plugin compare`` with real servers: the same, the worse, and what ends a comparison before its report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from server import CPU_FLAGS, LOCK

from tests.plugin_folder import make_plugin

REPO = Path(__file__).parents[2]
MODEL = REPO / "examples" / "tiny-qwen3-moe"
FLAGS = (*CPU_FLAGS, "--max-total-tokens", "16384")
SHORT = ("--num-fewshot", "0", "--max-tokens", "128", "--concurrency", "16", "--prompts", "8", "--new-tokens", "64")


@pytest.fixture(autouse=True)
def one_server() -> Iterator[None]:
    """Take the lock that everything here takes which starts a server; compare itself does not."""
    with FileLock(str(LOCK)):
        yield


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 generated problems that the checkpoint was not trained on."""
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    made = subprocess.run(
        [sys.executable, REPO / "examples" / "word_problems.py"], capture_output=True, text=True, check=True
    )
    path.write_text("".join(f"{line}\n" for line in made.stdout.splitlines()[:200]))
    return path


def start(out: Path, *words: str, flags: tuple[str, ...] = (), model: Path = MODEL) -> subprocess.Popen[str]:
    """Start the command."""
    command = [sys.executable, "-m", "atom_plugin.cli", "compare", "--out", str(out), "--model", str(model), *words]
    return subprocess.Popen(
        [*command, "--", *FLAGS, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        preexec_fn=hear_interrupts,
    )


def hear_interrupts() -> None:
    """Undo what a shell does to the children of a job in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr, after a look that no server of it is left."""
    out, error = process.communicate(timeout=900)
    print(out, error)
    assert not servers_on(process.args)
    return process.returncode, out, error


def servers_on(words: Any) -> list[psutil.Process]:
    """Return the servers that a compare with this --out has launched."""
    model = words[words.index("--model") + 1]
    family = psutil.process_iter(["cmdline"])
    return [one for one in family if {"sglang.launch_server", model} <= set(one.info["cmdline"] or [])]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Return what ``condition`` gives once it gives something."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("waited for ten minutes")


@pytest.mark.slow
def test_sglang_and_atom_are_the_same(tmp_path: Path, problems: Path) -> None:
    """Both implementations on 200 problems: same, every file, and nothing to do for a second run."""
    out = tmp_path / "out"
    words = ("--dataset", str(problems), *SHORT)
    # two shared cores: the speed part has to run, its verdict is only kept from being "worse" or "cannot tell"
    words = (*words, "--lengths", "32/8", "--concurrencies", "2", "--repeats", "2", "--speed-margin", "95")
    status, said, _ = ended(start(out, *words))
    assert status == 0, said
    report = json.loads((out / "report.json").read_text())
    assert [one["word"] for one in report["verdicts"][:2]] == ["same", "same"]
    assert report["verdicts"][2]["word"] in ("same", "better")
    assert len(report["accuracy"]) == 2 and {one["problems"] for one in report["accuracy"]} == {200}
    assert all(min(one["baseline"], one["candidate"]) > 0.9 for one in report["accuracy"])
    assert report["servers"]["atom"]["model_impl"] == "atom" and report["agreement"]["answers"]["tokens"] > 200
    assert len(report["rows"]) == 1 and report["rows"][0]["ratio"] > 0
    names = {str(path.relative_to(out)) for path in out.rglob("*")}
    wanted = {"report.md", "accuracy.png", "throughput_latency.png"}
    for name in ("sglang", "atom"):
        wanted |= {f"{name}/{part}" for part in ("server-1.log", "accuracy-lm-eval.samples.jsonl", "agreement.json")}
    assert wanted <= names
    status, said, _ = ended(start(out, *words))
    assert status == 0 and said.count("finished before") == 2 * 4  # accuracy, agreement and two runs of speed
    status, _, error = ended(start(out, *words, "--num-fewshot", "1"))
    assert status == 2 and "num_fewshot: it has 0, asked is 1" in error


def test_a_server_that_refuses_to_start(tmp_path: Path, problems: Path) -> None:
    """The reason is the server's own, and nothing is left."""
    status, _, error = ended(
        start(tmp_path / "out", "--dataset", str(problems), "--variant", "one=--model-impl atom", "--variant",
              "two=--model-impl sglang", flags=("--kv-cache-dtype", "fp8_e5m2"))
    )  # fmt: skip
    assert status == 2 and error.startswith("atom-plugin compare: the server one ended (exit status 1)")
    assert "--kv-cache-dtype fp8_e5m2: use one of auto" in error


@pytest.mark.slow
def test_a_death_and_an_interrupt_lose_no_finished_part(tmp_path: Path, problems: Path) -> None:
    """A server that is killed and a Ctrl-C end the command in order; the next run goes on from what was finished."""
    out = tmp_path / "out"
    words = ("--dataset", str(problems), *SHORT, "--limit", "4", "--harness", "lm-eval", "sglang")
    words = (*words, "--parts", "accuracy", "agreement", "--prompts", "200")
    words = (*words, "--variant", "one=--model-impl atom", "--variant", "two=--model-impl atom --page-size 16")
    finished = out / "one" / "accuracy-sglang.json"
    process = start(out, *words)
    wait_for(finished.exists, process)
    (server,) = servers_on(process.args)
    family = server.children(recursive=True)
    server.send_signal(signal.SIGKILL)
    status, _, error = ended(process)
    assert family and not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert status == 2 and error.startswith("atom-plugin compare: one: ")
    assert "the server one ended (exit status -9)" in error and "freeze_gc" not in error
    few_shot = json.loads(finished.read_text())
    assert few_shot["outcomes"] == [1] * 4 and few_shot["accuracy"] == 1 and few_shot["output_throughput"] > 0
    kept = finished.stat().st_mtime_ns
    process = start(out, *words)
    wait_for(lambda: (out / "one" / "server-2.log").exists() and servers_on(process.args), process)
    wait_for(lambda: servers_on(process.args)[0].children(recursive=True), process)
    family = servers_on(process.args)[0].children(recursive=True)
    process.send_signal(signal.SIGINT)
    status, said, error = ended(process)
    assert family and not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert status == 2 and "interrupted; no server is left" in error
    assert "one: accuracy, SGLang's few-shot benchmark: finished before" in said and said.count("few-shot") == 1
    assert finished.stat().st_mtime_ns == kept


@pytest.mark.slow
def test_another_rope_base_is_worse(tmp_path: Path, problems: Path) -> None:
    """The same weights with keys turned by another base."""
    override = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    broken = f"broken=--model-impl atom --json-model-override-args '{override}'"
    assert_worse(tmp_path / "out", problems, MODEL, "--variant", "right=--model-impl atom", "--variant", broken)


@pytest.mark.slow
def test_kv_scales_that_attention_ignores_are_worse(tmp_path: Path, problems: Path) -> None:
    """An FP8 cache that is written with the checkpoint's scales and read without them."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    for layer in range(4):
        for part, scale in (("k", 0.25), ("v", 0.0625)):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(scale)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    site = make_plugin(tmp_path / "site", "ignored_scales", "ignored_scales:register")
    (site / "ignored_scales.py").write_text(IGNORED_SCALES)
    recipe = tmp_path / "recipe.toml"
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    flags = ["--model-impl", "atom", "--kv-cache-dtype", "fp8_e4m3"]
    recipe.write_text(
        f"title = 'FP8 cache'\nmodel = '{model}'\n[variants.right]\nflags = {flags}\n"
        f"[variants.broken]\nflags = {flags}\nenvironment = {{ PYTHONPATH = '{path}' }}\n[accuracy]\n[agreement]\n"
    )
    assert_worse(tmp_path / "out", problems, model, str(recipe))


IGNORED_SCALES = """
def register():
    from atom_plugin.attention.tables import LayerKernels

    chosen, ones = LayerKernels.attend, {"k_scale": 1.0, "v_scale": 1.0}
    LayerKernels.attend = lambda self, key: lambda *a, **k: chosen(self, key)(*a, **{**k, **ones})
"""


def assert_worse(out: Path, problems: Path, model: Path, *words: str) -> None:
    """Run accuracy and agreement, which have to say worse with exit status 1, and the baseline to be right."""
    words = (*words, "--dataset", str(problems), *SHORT, "--limit", "60", "--parts", "accuracy", "agreement")
    status, said, _ = ended(start(out, *words, model=model))
    report = json.loads((out / "report.json").read_text())
    assert status == 1 and [one["word"] for one in report["verdicts"]] == ["worse", "worse"], said
    assert report["accuracy"][0]["baseline"] > 0.9 and report["accuracy"][0]["candidate"] < 0.9
