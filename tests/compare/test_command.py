"""What is known to fail before a launch is one message and exit status 2, for the whole command line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MODEL = REPO / "examples" / "tiny-qwen3-moe"
PROBLEMS = MODEL / "heldout.jsonl"
#: As where nothing answers, without the retries.
NO_HUB = {"HF_HUB_OFFLINE": "1"}


def compare(tmp_path: Path, *words: str, program: str = "", env: dict[str, str] | None = None) -> str:
    """Run ``atom-plugin compare``, which has to end with 2 and one message; return the message."""
    run = f"import sys\n{program}\nfrom atom_plugin import cli\nsys.exit(cli.main())"
    ran = subprocess.run(
        [sys.executable, "-c", run, "compare", "--out", str(tmp_path / "out"), *words],
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert ran.stderr.startswith("atom-plugin compare: ") and "Traceback" not in ran.stderr, ran.stderr
    return ran.stderr


def test_a_missing_model(tmp_path: Path) -> None:
    said = compare(tmp_path, "--model", str(tmp_path / "absent"), "--dataset", str(PROBLEMS))
    assert f"there is no folder {tmp_path / 'absent'}" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "has no config.json" in compare(tmp_path, "--model", str(tmp_path), "--dataset", str(PROBLEMS))


def test_a_model_that_the_hub_does_not_give(tmp_path: Path) -> None:
    said = compare(tmp_path, "--model", "org/absent", "--parts", "speed", env=NO_HUB)
    assert "org/absent is no folder here, and the hub does not give it" in said


def test_problems_that_the_hub_does_not_give(tmp_path: Path) -> None:
    said = compare(tmp_path, "--model", str(MODEL), "--parts", "accuracy", env=NO_HUB)
    assert "GSM8K (openai/gsm8k) cannot be had from the hub; --dataset FILE.jsonl" in said
    assert "ConnectionError" in said


def test_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(PROBLEMS.read_text() + '{"question": "How many?"}\n')
    said = compare(tmp_path, "--model", str(MODEL), "--dataset", str(path))
    assert f"{path}:501: answer is None" in said


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    said = compare(tmp_path, "--model", str(MODEL), "--parts", "speed")
    assert "File exists" in said and str(tmp_path / "out") in said


def test_a_home_of_nobody(tmp_path: Path) -> None:
    said = compare(tmp_path, "--model", "~no-such-user/model", "--parts", "speed")
    assert "there is no folder ~no-such-user/model" in said


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = compare(tmp_path, "--model", str(MODEL), "--dataset", str(PROBLEMS), "--port", port)
    assert f"port {port} is taken" in said


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("lm_eval", (), "lm-eval"),
        ("sglang", ("--parts", "speed"), "sglang"),
    ],
)
def test_what_is_not_installed(tmp_path: Path, module: str, words: tuple[str, ...], name: str) -> None:
    said = compare(
        tmp_path, "--model", str(MODEL), "--dataset", str(PROBLEMS), *words, program=f"sys.modules[{module!r}] = None"
    )
    assert f"{name} cannot be imported here: pip install 'atom-plugin[compare]'" in said


def test_lm_eval_is_not_needed_where_it_is_not_asked(tmp_path: Path) -> None:
    said = compare(
        tmp_path, "--model", str(tmp_path / "absent"), "--parts", "speed", program="sys.modules['lm_eval'] = None"
    )
    assert "there is no folder" in said


def test_the_command_line_needs_nothing_of_compare_for_the_rest() -> None:
    """doctor has to say what is missing: the parser imports neither torch nor what compare brings."""
    program = "import sys; from atom_plugin import cli; print(sorted({m.split('.')[0] for m in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not [name for name in ("torch", "rich", "scipy", "matplotlib", "requests") if f"'{name}'" in ran.stdout]


def test_a_fault_of_our_own_is_not_worse(tmp_path: Path) -> None:
    """Exit status 1 is a verdict; a traceback is none."""
    planted = "from atom_plugin.compare import arguments\narguments.run = lambda *_: 1 / 0"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{planted}\nfrom atom_plugin import cli\nsys.exit(cli.main())", "compare",
         "--out", str(tmp_path), "--model", str(MODEL)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 2, ran.stderr
    assert "ZeroDivisionError" in ran.stderr and "a fault of compare itself; nothing was judged" in ran.stderr
