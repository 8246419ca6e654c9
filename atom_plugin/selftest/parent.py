"""Runs cells one after the other, each in a process of its own, since a bad call of AITER's ends the whole process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from atom_plugin.selftest.cells import Cell

#: Seconds a row may take: AITER compiles its kernels at their first call.
TIME_LIMIT = 600.0
#: Lines of a failed process's output that are kept, which end with Python's error or the library's.
_LAST_LINES = 12
_AFTER_KILL = 30.0

Verdict = Literal["ok", "wrong", "aborted", "hung", "could not run"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one cell. ``detail``: in words, "" for an ok one; ``output``: the last lines of its process.

    ``error``: the largest; ``share``: the largest as a share of the tolerance; None where the row gave no answer.
    """

    cell: Cell
    verdict: Verdict
    detail: str
    seconds: float
    error: float | None = None
    share: float | None = None
    output: tuple[str, ...] = ()


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that no row is left behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    heard = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(cells: Sequence[Cell], time_limit: float = TIME_LIMIT) -> Iterator[Outcome]:
    """Yield the outcome of every cell, in order; ``time_limit``: seconds a cell."""
    for cell in cells:
        yield run_one(cell, time_limit)


def run_one(cell: Cell, time_limit: float) -> Outcome:
    """Run ``cell`` in a process of its own and return what came of it; the process is gone when this returns."""
    if cell.row is None:
        why = "no row of the table runs this: " + "; ".join(cell.refused)
        return Outcome(cell=cell, verdict="could not run", detail=why, seconds=0.0)
    with tempfile.TemporaryDirectory(prefix="atom-plugin-selftest-") as name:
        folder = Path(name)
        cell_file, result, log = folder / "cell.json", folder / "result.json", folder / "log"
        cell_file.write_text(cell.to_json())
        began = time.monotonic()
        status = _wait(
            [sys.executable, "-m", "atom_plugin.selftest.child", str(cell_file), str(result)], log, time_limit
        )
        seconds = time.monotonic() - began
        output = tuple(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        found = json.loads(result.read_text()) if status == 0 and result.is_file() else None
    return _outcome(cell, status, found, seconds, output, time_limit)


def _wait(command: list[str], log: Path, time_limit: float) -> int | None:
    """Return the exit status of ``command``, negative for a signal, None where the time limit ended it."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        try:
            return process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # its group is its own: compilers that it started end with it, also where Ctrl-C ends us
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                # one that waits for a GPU which hangs does not end, and the rows after it are to run
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_AFTER_KILL)


def _outcome(
    cell: Cell,
    status: int | None,
    found: list[dict[str, Any]] | None,
    seconds: float,
    output: tuple[str, ...],
    time_limit: float,
) -> Outcome:
    if status is None:
        detail = f"no answer within {time_limit:g} seconds"
        return Outcome(cell=cell, verdict="hung", detail=detail, seconds=seconds, output=output)
    if status < 0:
        name = signal.strsignal(-status) or "a signal of its own"
        return Outcome(
            cell=cell, verdict="aborted", detail=f"by signal {-status} ({name})", seconds=seconds, output=output
        )
    if found is None:
        said = next((line for line in reversed(output) if line.strip()), "it wrote nothing")
        detail = f"exit status {status}: {said}"
        return Outcome(cell=cell, verdict="could not run", detail=detail, seconds=seconds, output=output)
    wrong = [one for one in found if not one["share"] <= 1]
    error, share = (max((one[name] for one in found), default=0.0) for name in ("error", "share"))
    detail = "; ".join(one["what"] for one in wrong)
    return Outcome(
        cell=cell, verdict="wrong" if wrong else "ok", detail=detail, seconds=seconds, error=error, share=share
    )


HEADER = f"{'verdict':<14}{'row':<48}{'mode':<30}{'problem':<34}{'error':>9}{'of tol.':>8}{'s':>7}"


def as_line(outcome: Outcome) -> str:
    """Return an outcome as a line of the table, with lines under it that say what is wrong."""
    cell = outcome.cell
    row = f"{cell.op}={cell.row or 'none'}"
    mode = cell.mode.removeprefix(cell.op).strip() or "every"
    error = "" if outcome.error is None else f"{outcome.error:.2g}"
    share = "" if outcome.share is None else f"{outcome.share:.2f}"
    line = f"{outcome.verdict:<14}{row:<48}{mode:<30}{cell.title():<34}{error:>9}{share:>8}{outcome.seconds:>7.1f}"
    if outcome.verdict == "ok":
        return line
    under = [outcome.detail, *(f"| {said}" for said in outcome.output)]
    return "\n".join([line, *(f"      {said}" for said in under)])


def as_values(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values for JSON, which has no infinity: None stands for it."""
    numbers = {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in (("error", outcome.error), ("share_of_tolerance", outcome.share))
    }
    cell = outcome.cell
    return {
        "op": cell.op,
        "row": cell.row,
        "mode": cell.mode,
        "problem": cell.title(),
        "verdict": outcome.verdict,
        "detail": outcome.detail,
        "output": list(outcome.output),
        "seconds": round(outcome.seconds, 2),
        **numbers,
    }
