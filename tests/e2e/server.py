"""One real SGLang server at a time, on loopback: started as a user would, asked over HTTP, stopped by pid."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
from filelock import FileLock

from tests.plugin_folder import make_plugin

HERE = Path(__file__).parent
#: Shared by every test that starts a server, so that two pytest runs do not compete for the cores.
LOCK = Path(tempfile.gettempdir()) / "one_server.lock"
START_SECONDS = 240

CPU_FLAGS = ("--device", "cpu", "--mem-fraction-static", "0.2", "--skip-server-warmup", "--log-level", "info")


@dataclass
class Server:
    """A server that runs: ``url``, its ``log``, and what the probe wrote from inside each rank."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    probe: Path
    max_total_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)

    def ranks(self) -> list[dict[str, Any]]:
        """Return the probe's facts, one dict a rank."""
        return [json.loads(path.read_text()) for path in sorted(self.probe.glob("rank*.json"))]

    def generate(self, **body: Any) -> Any:
        """POST /generate and return the JSON; raises for any other status than 200."""
        answer = requests.post(f"{self.url}/generate", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def logprobs(self, sequences: Sequence[Sequence[int]], **sampling: Any) -> list[list[float]]:
        """Return, teacher-forced, the logprob of each token of each sequence but the first."""
        answers = self.generate(
            input_ids=[list(ids) for ids in sequences],
            sampling_params={"temperature": 0, "max_new_tokens": 1, **sampling},
            return_logprob=True,
            logprob_start_len=0,
        )
        return [[entry[0] for entry in one["meta_info"]["input_token_logprobs"]][1:] for one in answers]

    def flush(self) -> None:
        """Empty the radix cache."""
        for _ in range(50):
            if requests.post(f"{self.url}/flush_cache", timeout=30).status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the radix cache could not be emptied: requests are still running")


def environment(folder: Path, extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of a server with the probe installed."""
    site = make_plugin(folder / "site", "atom_test_probe", "probe:register")
    path = os.pathsep.join(
        filter(None, [str(site), str(HERE), extra.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH")])
    )
    return {**os.environ, "HF_HUB_OFFLINE": "1", "ATOM_TEST_PROBE": str(folder), **extra, "PYTHONPATH": path}


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def serve(
    model: Path | str,
    *flags: str,
    folder: Path,
    env: dict[str, str] | None = None,
    max_total_tokens: int = 16384,
    launcher: Sequence[str] = ("-m", "sglang.launch_server"),
) -> Iterator[Server]:
    """Run a server on ``model`` until the block ends; AssertionError with the log's tail when it does not come up."""
    folder.mkdir(parents=True, exist_ok=True)
    log, port = folder / "server.log", free_port()
    tokens = ("--max-total-tokens", str(max_total_tokens))
    command = [sys.executable, *launcher, "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with FileLock(str(LOCK)), log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *CPU_FLAGS, *tokens, *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(folder, env or {}),
        )
        server = Server(f"http://127.0.0.1:{port}", log, process, folder, max_total_tokens)
        try:
            wait_until_up(server)
            yield server
        finally:
            stop(process)


def wait_until_up(server: Server) -> None:
    """Return when /health answers; raise AssertionError when the process ends or START_SECONDS have passed."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if requests.get(f"{server.url}/health", timeout=2).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        except requests.Timeout:
            pass
        time.sleep(0.3)
    raise AssertionError(f"the server did not come up; {server.log} ends:\n{tail(server.log)}")


def tail(log: Path, characters: int = 6000) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-characters:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process that it started."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=20)
    process.wait(timeout=20)


def refuse(model: Path | str, *flags: str, folder: Path, env: dict[str, str] | None = None) -> str:
    """Launch a server that must not come up, and return all that it printed; raises AssertionError if it comes up."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with serve(model, *flags, folder=folder, env=env):
            pass
    except AssertionError:
        return (folder / "server.log").read_text(errors="replace")
    raise AssertionError("the server came up, but the launch should have been refused")
