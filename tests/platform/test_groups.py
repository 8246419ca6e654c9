"""Process groups on gloo: the rows make them work on this SGLang, and each one is needed."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom_plugin.cpu import install

ERRORS = {
    "GROUPS": "Expected a cuda device, but got: cpu",
    "GATHER": "Could not run 'sglang::reg_all_gather_into_tensor' with arguments from the 'CPU' backend",
    "SCATTER": "Could not run 'sglang::reg_reduce_scatter_tensor' with arguments from the 'CPU' backend",
}


def test_rows_are_needed_and_make_groups_work(run_python: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = run_python(str(Path(__file__).with_name("two_ranks.py")), port)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("with all") == [[0, 1], [3]]
    for name, error in found.items():
        if vars(install)[name].applies():
            assert error is not None, f"{name} is no longer needed"
            assert error.startswith(ERRORS[name])
        else:
            assert error is None


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_in_the_ledger(name: str) -> None:
    """The row tells what is seen without it."""
    why = vars(install)[name].why
    assert "custom op" in why or ERRORS[name] in why
