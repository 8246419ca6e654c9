"""The parts of `make test`: runs each named part, prints its minutes, and what did not run and why.

Parts: lint, unit (no server), e2e (real servers), slow (further modes), host:VERSION (kits, backend tests and one
server on another SGLang, from its wheel unpacked into .cache/ and put on the path in front of the installed one) and
host-whole:VERSION (the same and all that depends on SGLang's version).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

REPO = Path(__file__).parents[1]
CACHE = REPO / ".cache" / "hosts"
#: What an older SGLang needs in front of the installed environment: the versions that it pins and cannot do without.
HOSTS = {"0.5.17": ("transformers==5.12.1", "tokenizers==0.22.2"), "0.5.21": ()}
#: What runs against another host: kits and backend, and one server. ``host-whole:`` adds what starts many processes.
HOST_TESTS = ("tests/attention",)
HOST_WHOLE = ("tests/register", "tests/platform", "tests/cpu_graph", "tests/e2e/test_refusals.py")
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


def unpacked(version: str) -> list[Path]:
    """Return the folders that put SGLang ``version`` in front; downloads and unpacks its wheels once."""
    folders = []
    for requirement in (*HOSTS[version], f"sglang=={version}"):
        folder = CACHE / requirement.replace("==", "-")
        if not folder.is_dir():
            wheels = CACHE / "wheels" / folder.name
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), requirement], check=True
            )
            (wheel,) = wheels.glob("*.whl")
            partial = folder.with_suffix(".partial")
            zipfile.ZipFile(wheel).extractall(partial)
            partial.rename(folder)
        folders.append(folder)
    return folders


def host(version: str, *, whole: bool) -> int:
    """Kits, backend tests and one server on another SGLang; ``whole``: registration, platform and refusals as well."""
    env = {"PYTHONPATH": os.pathsep.join(map(str, unpacked(version)))}
    found = subprocess.run(
        [sys.executable, "-c", "import sglang; print(sglang.__version__)"], env={**os.environ, **env}, text=True,
        capture_output=True, check=True,
    ).stdout.split()[-1]  # fmt: skip
    if found != version:
        print(f"wanted SGLang {version} on the path, found {found}")
        return 1
    status = pytest(*HOST_TESTS, *TWO_AT_ONCE, env={**env, **ONE_THREAD}) | pytest(*HOST_SERVER, env=env)
    return status | pytest(*HOST_WHOLE, env=env) if whole else status


def part(name: str) -> int:
    """Run one part and return its exit status."""
    kind, _, version = name.partition(":")
    if version:
        return host(version, whole=kind == "host-whole")
    not_here = "not gpu and not rocm"
    return {
        "lint": lint,
        "unit": lambda: pytest("tests", *TWO_AT_ONCE, "-m", f"{not_here} and not e2e and not slow", env=ONE_THREAD),
        "e2e": lambda: pytest("tests", "-m", f"{not_here} and e2e and not slow"),
        "slow": lambda: pytest("tests", "-m", f"{not_here} and slow"),
    }[name]()


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
    for name in names:
        start = time.monotonic()
        status = part(name)
        failed |= status
        rows.append((name, "ok" if status == 0 else f"FAILED ({status})", (time.monotonic() - start) / 60))
    print("\npart            minutes  outcome")
    for name, outcome, minutes in rows:
        print(f"{name:<15} {minutes:7.1f}  {outcome}")
    print("not run: " + "; ".join(f"{count} tests marked {marker}: {why}" for marker, count, why in left_out(names)))
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
