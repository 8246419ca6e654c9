"""Every Triton kernel of ours compiles for AMD: no spills, LDS that the chip has, matrix instructions for dots."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "amd_machine_code.md"
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}


@pytest.fixture(scope="module")
def lines() -> list[list[str]]:
    """Return the cells of the table as this Triton compiles it, in a process where nothing is interpreted."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ops.machine_code"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return cells(ran.stdout)


def cells(text: str) -> list[list[str]]:
    """Return the rows of a Markdown table that begin with a chip."""
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("| gfx")]


def test_spills_and_lds(lines: list[list[str]]) -> None:
    assert {line[0] for line in lines} == LDS_BYTES.keys()
    for chip, op, call, kernel, _, spills, lds, matrix_instructions, has_dot in lines:
        where = f"{kernel} of {op}, {call}, on {chip}"
        assert int(spills) == 0, f"{where}: {spills} spilled registers"
        assert int(lds.replace(",", "")) <= LDS_BYTES[chip], f"{where}: {lds} bytes of LDS"
        assert (int(matrix_instructions) > 0) == (has_dot == "yes"), f"{where}: {matrix_instructions} for dots"


def test_every_kernel_module_is_compiled(lines: list[list[str]]) -> None:
    modules = {path.parent.name for path in (ROOT / "atom_plugin" / "ops").glob("*/kernel.py")}
    assert {line[1] for line in lines} == modules


def test_the_committed_table_lists_every_kernel(lines: list[list[str]]) -> None:
    text = TABLE.read_text()
    committed = cells(text)
    assert [line[:4] for line in committed] == [line[:4] for line in lines]
    if f"Triton {triton.__version__} " in text:
        assert committed == lines
