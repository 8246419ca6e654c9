"""The committed signatures are those of the sources that they were made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atom_plugin import aiter_lib
from tests.aiter.make_signatures import SIGNATURES, as_json, signatures_in
from tests.aiter.wheel import unpacked


def test_of_the_wheel() -> None:
    assert as_json(signatures_in(unpacked() / "aiter")) == (SIGNATURES / "wheel.json").read_text()


@pytest.mark.slow
def test_of_main() -> None:
    folder = os.environ.get("AITER_MAIN")
    if folder is None:
        pytest.skip("AITER_MAIN names no checkout of ROCm/aiter (e4048607), so main.json was NOT compared")
    assert as_json(signatures_in(Path(folder) / "aiter")) == (SIGNATURES / "main.json").read_text()


@pytest.mark.parametrize("version", aiter_lib.VERSIONS)
def test_hold_every_function_that_a_row_calls(version: aiter_lib.Version) -> None:
    paths = [f"{modules[version]}.{name}" for name, modules in aiter_lib.MODULES.items() if version in modules]
    assert set(paths) <= set(aiter_lib.signatures(version))


def test_parameters_are_read_without_running_the_file(tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(
        "raise RuntimeError('ROCm version file not found')\n"
        "def f(x): ...\n"
        "@decorated(1)\n"
        "def f(a: int, /, b: 'Tensor | None' = None, *rest, c, d=(-1, -1), **more) -> None: ...\n"
    )
    assert aiter_lib.parameters_in(file, "f") == ["a", "b=None", "c", "d=(-1, -1)", "*rest", "**more"]
    assert aiter_lib.parameters_in(file, "g") is None
    assert aiter_lib.parameters_in(tmp_path / "absent.py", "f") is None
