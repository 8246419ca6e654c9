"""One virtual environment a transformers version, without torch: the config tests run in each.

They are built from pip alone into .cache/ and kept. ``atom_plugin.configs`` needs neither torch nor SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REPO = Path(__file__).parents[1]
CACHE = REPO / ".cache" / "transformers"
TESTS = "tests/configs"
#: The oldest supported one, those that SGLang pins between 0.5.17 and 0.5.23, and one between.
VERSIONS = ("4.57.6", "5.6.0", "5.12.1", "5.19.0")
BESIDE = ("pytest>=8", "hypothesis>=6", "packaging")
#: Files of TESTS that need torch or SGLang; `make test` runs them with both.
NEED_TORCH = ("test_rope_numerics.py", "test_sglang_objects.py")


def newest() -> str:
    """Return the newest transformers that pip would install here; raise CalledProcessError where it cannot ask."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps"]
    asked = subprocess.run([*command, "--report", "-", "transformers"], stdout=subprocess.PIPE, text=True, check=True)
    (found,) = json.loads(asked.stdout)["install"]
    return str(found["metadata"]["version"])


def numbered(word: str) -> list[str]:
    """Return the versions that ``oldest``, ``newest``, ``all`` or a number stands for, none twice; tells the newest.

    Where pip cannot ask for the newest, ``newest`` stays what it is, and fails when it is run.
    """
    if word not in ("newest", "all"):
        return [VERSIONS[0] if word == "oldest" else word]
    try:
        found = newest()
    except subprocess.CalledProcessError as error:
        print(f"the newest transformers cannot be asked for: {error}", flush=True)
        found = "newest"
    print(f"the newest transformers on the package index is {found}", flush=True)
    if word == "all" and found in VERSIONS:
        print(f"{found} is one of {', '.join(VERSIONS)}, and runs once", flush=True)
    return list(dict.fromkeys([*(VERSIONS if word == "all" else ()), found]))


def python_of(version: str) -> str:
    """Return the interpreter of the environment with transformers ``version``; builds it at its first use."""
    folder = CACHE / f"{version}-python{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not (folder / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        subprocess.run([*pip, f"transformers=={version}", *BESIDE], check=True)
        (folder / "installed").touch()
    return str(python)


def run(version: str) -> tuple[int, str]:
    """Run the config tests with transformers ``version``; return (exit status, what ran and what did not)."""
    python = python_of(version)
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
    probe = (
        "import importlib.util, transformers; from tests.configs.transformers_classes import missing; "
        "print(transformers.__version__, bool(importlib.util.find_spec('torch')), ','.join(missing()))"
    )
    probed = subprocess.run([python, "-c", probe], cwd=REPO, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found, has_torch, missing = probed.stdout.strip().splitlines()[-1].split(" ")
    if found != version or has_torch != "False":
        return 1, f"wanted transformers {version} without torch, found {found} and torch: {has_torch}"
    absent = [name for name in NEED_TORCH if not (REPO / TESTS / name).is_file()]
    if absent:
        return 1, f"NEED_TORCH names what is not there: {', '.join(absent)}"
    report = CACHE / f"{version}.xml"
    report.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", TESTS]
    command += [f"--ignore={TESTS}/{name}" for name in NEED_TORCH]
    print("+", python, *command, flush=True)
    status = subprocess.run([python, *command], cwd=REPO, env=env).returncode
    if not report.is_file():
        return status or 1, "pytest wrote no report"
    return status, f"{counts(report)}; {in_words(missing)}; left to `make test`: {', '.join(NEED_TORCH)}"


def counts(report: Path) -> str:
    """Return the counts of a JUnit report in words."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, bad, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return f"{total - bad - skipped} passed, {bad} failed, {skipped} skipped"


def in_words(missing: str) -> str:
    """Return how the families were read whose model_types (comma-separated) AutoConfig does not have."""
    if not missing:
        return "AutoConfig has every model_type"
    return f"AutoConfig lacks {missing.replace(',', ', ')}: read from dicts and a plain PretrainedConfig"
