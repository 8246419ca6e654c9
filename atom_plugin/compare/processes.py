"""Processes that a comparison starts: each in a session of its own, watched, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from atom_plugin.compare.failure import MeasureError, last_error

POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
#: Signals that end a comparison in order, servers first.
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Command:
    """A command line with the environment variables that it adds, as a person would type it."""

    words: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.words])


@contextlib.contextmanager
def started(command: Command, log: Path, *, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in ``folder`` until the block ends, its output in ``log``; then end it and all that it started."""
    with log.open("wb") as out:
        # a session of its own: Ctrl-C at the terminal reaches only us, who then stop it in order
        process = subprocess.Popen(
            command.words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with _undisturbed():
                stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of ``started`` by SIGTERM, and by SIGKILL what is left of its session after STOP_SECONDS."""
    process.terminate()  # it alone: SGLang takes a child that ends first for a crash, and examines that
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_SECONDS)
    left = _family(process)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=STOP_SECONDS)
    process.wait(timeout=STOP_SECONDS)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of the session, which outlive their parents in it."""
    family = []
    for member in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(member.pid) == process.pid and member.status() != psutil.STATUS_ZOMBIE:
                family.append(member)
    return family


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back a second Ctrl-C while processes are being stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watched(Protocol):
    """What a command depends on while it runs, such as a server."""

    def check(self) -> None:
        """Raise MeasureError where it is gone."""

    def check_after_failure(self) -> None:
        """Raise MeasureError where it is gone or about to be, which then is what the command failed by."""


def run_watched(
    command: Command, log: Path, *, folder: Path, watched: Watched | None, show: Callable[[str], None]
) -> None:
    """Run a command to its end; MeasureError with the log's last error where it fails.

    ``watched`` is checked all the while; ``show`` gets the last line of the log.
    """
    with started(command, log, folder=folder) as process:
        while process.poll() is None:
            if watched is not None:
                watched.check()
            show(last_line(log))
            time.sleep(POLL_SECONDS)
    if process.returncode != 0:
        if watched is not None:
            watched.check_after_failure()
        raise MeasureError(f"{last_error(log)}\n(exit status {process.returncode}; the whole log: {log})")


def last_line(log: Path) -> str:
    """Return what was last written to a log, a line of a progress bar included."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
