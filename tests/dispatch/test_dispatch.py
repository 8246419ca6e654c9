"""A table picks its first row that can run; a refusal names the problem and every row's reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atom_plugin.dispatch import Kernel, NoKernelError, Table, Tolerance


@dataclass(frozen=True)
class Problem:
    size: int


def _row(name: str, reasons: list[str], loaded: list[str] | None = None) -> Kernel[Problem]:
    def load() -> Any:
        if loaded is not None:
            loaded.append(name)
        return lambda: name

    return Kernel(name, lambda problem: reasons, load, {torch.float32: Tolerance(rtol=0.0, atol=0.0)})


def test_the_first_row_that_can_run_is_chosen_and_nothing_is_loaded() -> None:
    loaded: list[str] = []
    table = Table("op", [_row("fast", ["too small"], loaded), _row("plain", [], loaded), _row("slow", [], loaded)])
    assert table.choose(Problem(3)).name == "plain"
    assert loaded == []
    assert table.choose(Problem(3)).load()() == "plain"


def test_a_forced_row_is_chosen_past_a_better_one() -> None:
    table = Table("op", [_row("fast", []), _row("slow", [])])
    assert table.choose(Problem(3), forced="slow").name == "slow"


def test_a_forced_row_takes_the_same_check() -> None:
    table = Table("op", [_row("fast", ["too small"]), _row("slow", [])])
    with pytest.raises(NoKernelError, match=r"no kernel of op \(forced: fast\) can run Problem\(size=3\)") as error:
        table.choose(Problem(3), forced="fast")
    assert "too small" in str(error.value)
    assert "slow" not in str(error.value)


def test_an_unknown_forced_row_is_an_error_that_lists_the_rows() -> None:
    table = Table("op", [_row("fast", []), _row("slow", [])])
    with pytest.raises(ValueError, match=re.escape("op has no row 'fats'; its rows are: fast, slow")):
        table.choose(Problem(3), forced="fats")


def test_when_every_row_refuses_the_error_holds_the_problem_and_every_reason() -> None:
    table = Table("op", [_row("fast", ["too small", "no GPU"]), _row("slow", ["asleep"])])
    with pytest.raises(NoKernelError) as error:
        table.choose(Problem(3))
    assert str(error.value) == (
        "no kernel of op can run Problem(size=3)\n  fast:\n    - too small\n    - no GPU\n  slow:\n    - asleep"
    )


def test_a_bug_in_why_not_is_not_taken_for_a_refusal() -> None:
    def broken(problem: Problem) -> list[str]:
        raise KeyError("typo")

    table = Table("op", [Kernel("fast", broken, lambda: print, {}), _row("slow", [])])
    with pytest.raises(KeyError, match="typo"):
        table.choose(Problem(3))


def test_two_rows_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two rows of op have the same name: fast, fast"):
        Table("op", [_row("fast", []), _row("fast", [])])
