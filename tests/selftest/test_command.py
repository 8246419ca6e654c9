"""``atom-plugin doctor --selftest``: rows that abort, hang, raise or are wrong are told apart, and the others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from atom_plugin import cli
from atom_plugin.attention.tables import TABLES
from atom_plugin.selftest import command, parent
from atom_plugin.selftest.cells import PROBLEMS, Cell, standard_cells

REPO = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
RECIPE = """
title = "A tiny dense model on this machine"
model = "{model}"

[explain]
arch = "cpu"
dtype = "float32"
page_size = 16
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe for the tiny dense model."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=REPO / "examples" / "tiny-qwen3"))
    return path


#: The command without what the doctor says before it, which other tests hold.
PROGRAM = """
import sys
from atom_plugin import cli
cli.doctor.examine = list
sys.exit(cli.main(sys.argv[1:]))
"""


def doctor(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(REPO)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, "doctor", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def test_planted_rows_are_each_reported_and_the_others_run(recipe: Path) -> None:
    ran = doctor("--selftest", str(recipe), "--time-limit", "20", "--json", path=PLANTED)
    assert ran.returncode == 1, ran.stderr[-3000:]
    outcomes = {(one["op"], one["mode"]): one for one in json.loads(ran.stdout)["selftest"]}
    verdicts = {mode: (one["row"], one["verdict"]) for (_, mode), one in outcomes.items()}
    assert verdicts == {
        "store_kv": ("planted_nothing", "wrong"),
        "qk_norm_rope_store_kv": ("planted_raise", "could not run"),
        "paged_attention decode": ("planted_abort", "aborted"),
        "paged_attention extend": ("planted_hang", "hung"),
        "paged_attention decode in a graph": ("planted_wrong", "wrong"),
        "paged_attention extend in a graph": ("eager", "ok"),
    }
    details = {one["verdict"] + " " + one["row"]: one["detail"] for one in outcomes.values()}
    assert "signal 6" in details["aborted planted_abort"]
    assert "no answer within 20 seconds" in details["hung planted_hang"]
    assert "RuntimeError: get_device_arch: no such architecture" in details["could not run planted_raise"]
    assert "bytes differ" in details["wrong planted_nothing"]
    wrong = outcomes["paged_attention", "paged_attention decode in a graph"]
    assert wrong["error"] == pytest.approx(0.01, rel=0.01) and 1 < wrong["share_of_tolerance"] < 11
    aborted = outcomes["paged_attention", "paged_attention decode"]
    assert "Assertion `is_supported' failed." in aborted["output"]
    well = outcomes["paged_attention", "paged_attention extend in a graph"]
    assert 0 <= well["share_of_tolerance"] < 1 and well["seconds"] > 0


def test_the_table_of_a_machine_where_all_is_well(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setattr(cli.doctor, "examine", lambda: [cli.doctor.Finding("sglang", "0.5.23")])
    cells = command.recipe_cells(str(recipe), None, "cpu")
    assert len(cells) == 6
    monkeypatch.setattr(command, "recipe_cells", lambda *args: cells[2:3])
    assert cli.main(["doctor", "--selftest", str(recipe)]) == 0
    text = capsys.readouterr().out
    assert "ok    sglang: 0.5.23" in text and "self-test of 1 calls on cpu" in text
    assert "ok            paged_attention=eager" in text and text.endswith("self-test: 1 ok\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("page_size = 16", "page_size = 24"), "--page-size 24: use a power of two"),
        (("tiny-qwen3", "absent"), "absent: cannot be read as a config"),
        (("dtype =", "dtyp ="), "explain.dtyp: unknown key"),
        (("[explain]", "[speed]"), "unknown key"),
        (('[explain]\narch = "cpu"\ndtype = "float32"\npage_size = 16', ""), "[explain] is missing"),
    ],
)
def test_a_recipe_that_cannot_be_used(
    recipe: Path,
    change: tuple[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli.doctor, "examine", list)
    assert change[0] in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(*change))
    assert cli.main(["doctor", "--selftest", str(recipe)]) == 2
    assert message in capsys.readouterr().err


def test_a_mode_without_a_row_is_reported(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "store_kv=triton")
    cells = {cell.mode: cell for cell in command.recipe_cells(str(recipe), None, "cpu")}
    assert cells["store_kv"].row is None and cells["qk_norm_rope_store_kv"].row == "eager"
    outcome = parent.run_one(cells["store_kv"], 1.0)
    assert outcome.verdict == "could not run" and "runs on GPUs" in outcome.detail
    assert "could not run" in parent.as_line(outcome) and "store_kv=none" in parent.as_line(outcome)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """What a row has started ends with it: compilers, for one."""
    pids = tmp_path / "pid"
    code = "import subprocess as s, sys, time; open(sys.argv[1], 'w').write(str(s.Popen(['sleep', '99']).pid))"
    code += "; time.sleep(99)"
    assert parent._wait([sys.executable, "-c", code, str(pids)], tmp_path / "log", 4.0) is None
    deadline = time.monotonic() + 10
    while is_alive(int(pids.read_text())):
        assert time.monotonic() < deadline, "sleep outlived the row that started it"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_row_that_runs(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import sys; from pathlib import Path; from atom_plugin.selftest import parent\n"
        "with parent.ended_in_order(): parent._wait(['sleep', '99'], Path(sys.argv[1]), 60.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")], cwd=REPO)
    deadline = time.monotonic() + 60
    while not (rows := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)  # Popen returns once the row has been exec'ed; a signal inside of it would come before the try
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert not is_alive(rows[0].pid)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; nobody need have asked yet how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def values(error: float | None) -> dict[str, Any]:
    cell = standard_cells("cpu")[0]
    return parent.as_values(
        parent.Outcome(cell=cell, verdict="wrong", detail="", seconds=1.0, error=error, share=error)
    )


def test_json_has_no_infinity() -> None:
    assert values(float("inf"))["error"] is None and values(0.5)["error"] == 0.5


@pytest.mark.parametrize("arch", ["cpu", "sm90", "gfx942", "gfx950"])
def test_a_cell_reaches_its_process_as_it_is(arch: str) -> None:
    cells = standard_cells(arch)
    elsewhere = {"few_token_experts"} if arch == "cpu" else set()  # a CPU always runs SGLang's layer
    assert {cell.op for cell in cells} | elsewhere == set(PROBLEMS) == set(TABLES)
    assert [Cell.from_json(cell.to_json()) for cell in cells] == cells
