"""The MLA launches as an NVIDIA H200 would run them: they compile, fit, do not spill, and wait before they read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops.sm90_code import before_the_wait

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 << 10
#: Faster on an H200 with a few registers spilled than any launch without (``mla_attention/config.py``).
SPILLS = {"12 heads, verify 8, FP8": 200}


@pytest.fixture(scope="module")
def launches() -> list[dict[str, Any]]:
    """Return every launch, compiled in a process where nothing is interpreted."""
    ran = subprocess.run([sys.executable, "-m", "tests.ops.sm90_code"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_spills_and_shared_memory(launches: list[dict[str, Any]]) -> None:
    assert {launch["kernel"] for launch in launches} == {"_split_kernel", "_reduce_kernel"}
    for launch in launches:
        may_spill = SPILLS.get(launch["call"], 0) if launch["kernel"] == "_split_kernel" else 0
        assert launch["stack"] <= may_spill and launch["shared"] <= SHARED_BYTES, launch


def test_an_early_reduction_reads_the_bounds_alone_before_it_waits(launches: list[dict[str, Any]]) -> None:
    """And the splits, which it waits for, are launched as usual: what came before them is done."""
    reductions = [launch for launch in launches if launch["kernel"] == "_reduce_kernel"]
    assert reductions and all(launch["launch_pdl"] for launch in reductions)
    assert all(launch["early"] == {"loads": 3, "stores": 0, "returns": 0} for launch in reductions), reductions
    splits = [launch for launch in launches if launch["kernel"] == "_split_kernel"]
    assert all(launch["launches_dependents"] and not launch["launch_pdl"] for launch in splits)
    assert all(launch["early"] is None for launch in splits)


def test_what_counts_as_early() -> None:
    """A read of a partial result or a return before the wait would be seen."""
    assert before_the_wait("ld.global.b32 a; ret; griddepcontrol.wait; ld.global.b32 b;") == {
        "loads": 1, "stores": 0, "returns": 1,
    }  # fmt: skip
    assert before_the_wait("ld.global.b32 a; ret;") is None
