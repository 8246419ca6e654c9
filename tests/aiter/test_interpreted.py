"""AITER's own Triton kernels, run interpreted on this CPU through our rows, give what the reference gives.

Those of the wheel always; those of ROCm/aiter main where AITER_MAIN names a checkout of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aiter.interpreted import GROUPS
from tests.aiter.wheel import unpacked

REPO = Path(__file__).parents[2]
pytest.importorskip("triton", reason="Triton is not installed, so AITER's own kernels were NOT run")


def _run(folder: Path, group: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.aiter.interpreted", str(folder), group]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("group", GROUPS)
def test_the_wheel_s_kernels_give_what_the_reference_gives(group: str) -> None:
    assert f"AITER wheel: {group} ran" in _run(unpacked(), group)


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(set(GROUPS) - {"rope_cache"}))
def test_main_s_kernels_give_what_the_reference_gives(group: str) -> None:
    folder = os.environ.get("AITER_MAIN")
    if folder is None:
        pytest.skip("AITER_MAIN names no checkout of ROCm/aiter (e4048607), so main's kernels were NOT run")
    assert f"AITER main: {group} ran" in _run(Path(folder), group)
