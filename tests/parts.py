"""The parts of `make test`: runs each named part, prints its minutes, and what did not run and why.

Parts: lint, unit (no server), e2e (real servers), slow (further modes), sglang-names (our uses of SGLang against the
wheels of its releases), host:VERSION (kits, backend tests and one server on one SGLang release, from its wheel unpacked
into .cache/ and put on the path in front of the installed one), host-whole:VERSION (the same and all that depends on
SGLang's version) and transformers:VERSION (the config tests with that transformers and without torch; VERSION is a
number, oldest, newest or all).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import transformers_venvs
from wheels import DownloadError, unpacked

REPO = Path(__file__).parents[1]
#: What an older SGLang needs in front of the installed environment: the versions that it pins and cannot do without.
HOSTS = {"0.5.17": ("transformers==5.12.1", "tokenizers==0.22.2"), "0.5.21": (), "0.5.23": ()}
#: What runs against another host: kits and backend, and one server. ``host-whole:`` adds what starts many processes.
HOST_TESTS = ("tests/attention",)
HOST_WHOLE = (
    "tests/register",
    "tests/platform",
    "tests/cpu_graph",
    "tests/e2e/test_refusals.py",
    "tests/e2e/test_kimi_on_triton.py",
)
HOST_SERVER = ("tests/e2e/test_corners.py", "-k", "moe-atom-atom")
#: Two processes at once, each on one thread: these tests are many short processes, and importing SGLang is most of it.
TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(*command: str, env: dict[str, str] | None = None) -> int:
    """Run a command of this environment in the repository and return its exit status."""
    print("+", " ".join(command), flush=True)
    return subprocess.run([sys.executable, *command], cwd=REPO, env={**os.environ, **(env or {})}).returncode


def pytest(*arguments: str, env: dict[str, str] | None = None) -> int:
    """Run pytest."""
    return run("-m", "pytest", "-q", "--durations=8", *arguments, env=env)


def lint() -> int:
    """ruff and mypy."""
    return run("-m", "ruff", "format", "--check", ".") | run("-m", "ruff", "check", ".") | run("-m", "mypy")


def host(version: str, *, whole: bool) -> int:
    """Kits, backend tests and one server on another SGLang; ``whole``: those of ``HOST_WHOLE`` as well."""
    folders = [unpacked(requirement) for requirement in (*HOSTS[version], f"sglang=={version}")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))}
    found = subprocess.run(
        [sys.executable, "-c", "import sglang; print(sglang.__version__)"], env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, check=True,
    ).stdout.split()[-1]  # fmt: skip
    if found != version:
        print(f"wanted SGLang {version} on the path, found {found}")
        return 1
    status = pytest(*HOST_TESTS, *TWO_AT_ONCE, env={**env, **ONE_THREAD}) | pytest(*HOST_SERVER, env=env)
    return status | pytest(*HOST_WHOLE, env=env) if whole else status


def part(name: str) -> tuple[int, str]:
    """Run one part; return its exit status and what there is to say about it beside that.

    What a part cannot prepare (a download, an environment) fails that part, and the others still run.
    """
    try:
        return run_part(name)
    except (subprocess.CalledProcessError, DownloadError) as error:
        return 1, str(error)


def run_part(name: str) -> tuple[int, str]:
    """Run one part as ``part`` does, and raise what it could not prepare."""
    kind, _, version = name.partition(":")
    if kind == "transformers":
        return transformers_venvs.run(version)
    if version:
        return host(version, whole=kind == "host-whole"), ""
    not_here = "not gpu and not rocm"
    status = {
        "lint": lint,
        "unit": lambda: pytest("tests", *TWO_AT_ONCE, "-m", f"{not_here} and not e2e and not slow", env=ONE_THREAD),
        "e2e": lambda: pytest("tests", "-m", f"{not_here} and e2e and not slow"),
        "slow": lambda: pytest("tests", "-m", f"{not_here} and slow"),
        "sglang-names": lambda: pytest("tests/host"),
    }[name]()
    return status, ""


def numbered(names: list[str]) -> list[str]:
    """Return ``names`` with transformers:oldest, :newest and :all turned into a part a version, none twice."""
    parts = []
    for name in names:
        kind, _, word = name.partition(":")
        parts += [f"{kind}:{one}" for one in transformers_venvs.numbered(word)] if kind == "transformers" else [name]
    return list(dict.fromkeys(parts))


def install_minutes() -> list[tuple[str, str, float]]:
    """Return how long the installation of this environment took, where the Makefile noted it."""
    venv = Path(sys.prefix)
    if not (venv / "installed").is_file():
        return []
    began, ended = (int((venv / name).read_text()) for name in ("install-began", "installed"))
    return [("install", "ok (when it was made)", (ended - began) / 60)]


def left_out(names: list[str]) -> list[tuple[str, int, str]]:
    """Return (marker, number of tests, reason) of what none of ``names`` ran."""
    reasons = {"gpu": "they need an NVIDIA or AMD GPU", "rocm": "they need an AMD GPU with ROCm and AITER"}
    if "slow" not in names:
        reasons["slow"] = "`make test-all` runs them"
    rows = []
    for marker, why in reasons.items():
        command = [sys.executable, "-m", "pytest", "tests", "-q", "--collect-only", "-m", marker]
        listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout
        rows.append((marker, sum("::" in line for line in listed.splitlines()), why))
    return rows


def main(names: list[str]) -> int:
    """Run the parts in order; every part runs, and one that failed makes the whole fail."""
    rows = install_minutes()
    failed = 0
    for name in numbered(names):
        start = time.monotonic()
        status, note = part(name)
        failed |= status
        outcome = ("ok" if status == 0 else f"FAILED ({status})") + (f": {note}" if note else "")
        rows.append((name, outcome, (time.monotonic() - start) / 60))
    print("\npart                 minutes  outcome")
    for name, outcome, minutes in rows:
        print(f"{name:<20} {minutes:7.1f}  {outcome}")
    print("not run: " + "; ".join(f"{count} tests marked {marker}: {why}" for marker, count, why in left_out(names)))
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
