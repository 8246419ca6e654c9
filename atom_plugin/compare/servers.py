"""The servers of a comparison: launched one at a time, or already running somewhere."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from atom_plugin.compare.failure import MeasureError, last_error
from atom_plugin.compare.processes import POLL_SECONDS, Command, last_line, started
from atom_plugin.recipe import Recipe

HOST = "127.0.0.1"
#: What SGLang may take to end after a scheduler has crashed; it looks at the crash first.
END_SECONDS = 30.0
#: Launch flags that a comparison sets itself, and what sets them.
OURS = {"--model-path": "--model", "--model": "--model", "--port": "--port", "--host": "nothing: it is loopback"}


@dataclass(frozen=True)
class Server:
    """A server that answers at ``url``; ``process`` and ``log`` where we launched it."""

    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def check(self) -> None:
        """Raise MeasureError where the server that we launched has ended."""
        if self.process is not None and self.log is not None and self.process.poll() is not None:
            raise MeasureError(
                f"the server {self.name} ended (exit status {self.process.returncode}). Its log says:\n"
                f"{last_error(self.log)}\n(the whole log: {self.log})"
            )

    def ask(self, path: str, body: dict[str, Any] | None = None, *, seconds: float = 600) -> Any:
        """Return the JSON of one request; MeasureError where there is none."""
        method = "GET" if body is None else "POST"
        try:
            answer = requests.request(method, self.url + path, json=body, timeout=seconds)
        except requests.RequestException as error:
            self.check_after_failure()
            raise MeasureError(f"the server {self.name} does not answer {self.url}{path}: {error}") from error
        if answer.status_code != 200:
            self.check()
            raise MeasureError(
                f"the server {self.name} answers {self.url}{path} with {answer.status_code}: {answer.text[:500]}"
            )
        return answer.json()

    def model(self) -> str:
        """Return the name that requests of the OpenAI kind have to give."""
        return str(self.ask("/v1/models")["data"][0]["id"])

    def check_after_failure(self) -> None:
        """Raise as ``check`` does for a server that no longer answers, after the time that it takes to be gone."""
        if _is_up(self.url):
            return
        deadline = time.monotonic() + END_SECONDS
        while self.process is not None and time.monotonic() < deadline:
            self.check()
            time.sleep(POLL_SECONDS)
        raise MeasureError(f"the server {self.name} no longer answers {self.url}/health")


def why_not_flags(recipe: Recipe) -> str:
    """Return what is wrong with the launch flags, "" where nothing is."""
    flags = [*recipe.shared, *(flag for variant in recipe.variants.values() for flag in variant.flags)]
    for flag, after in itertools.pairwise([*flags, ""]):
        name, _, value = flag.partition("=")
        if name == "--log-level" and (value or after) not in ("info", "debug"):
            return f"--log-level {value or after}: a server says which model it serves at info or debug"
        if name in OURS:
            return f"{name} is among the launch flags, but compare sets it; use {OURS[name]}"
    return ""


def launch_command(recipe: Recipe, name: str, port: int) -> Command:
    """Return the command that serves variant ``name``."""
    variant = recipe.variants[name]
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", recipe.model, "--host", HOST]
    words += ["--port", str(port), *recipe.shared, *variant.flags]
    return Command(tuple(words), {**recipe.environment, **variant.environment})


def choose_port(wanted: int | None) -> int:
    """Return ``wanted``, or a port that is free; MeasureError where ``wanted`` is taken."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, wanted or 0))
        except OverflowError as error:
            raise MeasureError(f"--port {wanted}: 1 to 65535 is accepted") from error
        except OSError as error:
            raise MeasureError(
                f"port {wanted} is taken ({error.strerror}): stop what listens there, give another --port, or none"
            ) from error
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serve(
    command: Command, *, name: str, port: int, folder: Path, start_seconds: float, show: Callable[[str], None]
) -> Iterator[Server]:
    """Run a server until the block ends, its log in ``folder``.

    Raises MeasureError when it ends while it starts, or does not answer /health within ``start_seconds``.
    """
    log = folder / f"server-{1 + len(list(folder.glob('server-*.log')))}.log"
    with started(command, log, folder=Path.cwd()) as process:  # flags may name files beside the user
        server = Server(name, f"http://{HOST}:{port}", process, log)
        deadline = time.monotonic() + start_seconds
        while not _is_up(server.url):
            server.check()
            if time.monotonic() > deadline:
                raise MeasureError(
                    f"the server {name} did not answer within {start_seconds:.0f} s (--start-timeout). Its log ends:\n"
                    f"{last_error(log)}\n(the whole log: {log})"
                )
            show(last_line(log))
            time.sleep(POLL_SECONDS)
        yield server


def reach_loopback_directly() -> None:
    """Keep this process and those that it starts from asking a proxy of the environment for what is on loopback."""
    before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""  # the first is what others read first
    if before.strip() != "*":
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, [before, HOST, "localhost"]))


def running(name: str, url: str) -> Server:
    """Return the server that already runs at ``url``; MeasureError where it does not answer."""
    if not _is_up(url):
        raise MeasureError(
            f"the server {name}: {url}/health does not answer with 200; is an SGLang server running there?"
        )
    return Server(name, url)


def _is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False
