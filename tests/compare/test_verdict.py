"""The words: same, worse, better, cannot tell; and the exit status that follows."""

from __future__ import annotations

import math

import pytest

from atom_plugin.compare import paired, verdict
from atom_plugin.compare.agreement import Comparison, Spread
from atom_plugin.compare.speed import Cell, CellSpeed


def word(both: int, lost: int, won: int, neither: int, *, margin: float = 2, cut: float = 0.0) -> tuple[str, str]:
    found = paired.compare(
        [1] * (both + lost) + [0] * (won + neither), [1] * both + [0] * lost + [1] * won + [0] * neither
    )
    one = verdict.of_accuracy("accuracy", found, names=("sglang", "atom"), margin=margin, cut=cut)
    return one.word, one.reason


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((200, 0, 0, 0), verdict.SAME),
        ((1200, 10, 12, 97), verdict.SAME),
        ((150, 30, 2, 18), verdict.WORSE),
        ((150, 2, 30, 18), verdict.BETTER),
        ((0, 200, 0, 0), verdict.WORSE),
        # 40 problems, none of which disagree: up to 7 in a hundred may
        ((40, 0, 0, 0), verdict.CANNOT_TELL),
        # 10 apart of 200, evenly: the interval is wider than the margin
        ((180, 5, 5, 10), verdict.CANNOT_TELL),
    ],
)
def test_accuracy(counts: tuple[int, int, int, int], expected: str) -> None:
    assert word(*counts)[0] == expected


def test_a_small_loss_that_is_certain_is_worse_within_any_margin() -> None:
    assert word(10_000, 40, 10, 0, margin=5)[0] == verdict.WORSE


def test_a_wide_interval_says_how_many_problems_would_do() -> None:
    what, why = word(180, 5, 5, 10)
    assert what == verdict.CANNOT_TELL and "with N=200 the interval is wider than +-2 points" in why
    assert "about 500 problems would do" in why or "about 600 problems would do" in why


def test_a_baseline_that_answers_nothing_shows_nothing() -> None:
    what, why = word(0, 0, 0, 200)
    assert what == verdict.CANNOT_TELL and "too few right for a loss to show" in why


def test_answers_that_were_cut_off_make_no_same() -> None:
    what, why = word(200, 0, 0, 0, cut=0.05)
    assert what == verdict.CANNOT_TELL and "5.0% of the baseline's answers were cut off: raise --max-tokens" in why
    assert word(150, 30, 2, 18, cut=0.05)[0] == verdict.WORSE
    assert word(200, 0, 0, 0, cut=0.005)[0] == verdict.SAME


def spread(mean: float) -> Spread:
    return Spread(tokens=100, mean=mean, p99=mean, largest=9.0)


@pytest.mark.parametrize("error", [0.3, math.nan])
@pytest.mark.parametrize("broken", ["prompts", "answers", "decoded", None])
def test_agreement_is_judged_by_each_mean_and_not_by_single_differences(broken: str | None, error: float) -> None:
    means = {name: spread(error if name == broken else 0.02) for name in ("prompts", "answers", "decoded")}
    found = Comparison(**means, noise=spread(0.02), kl_mean=0.001, kl_largest=3.0, first_differs=[None, 3])
    one = verdict.of_agreement(found, bound=0.1)
    assert one.word == (verdict.WORSE if broken else verdict.SAME)
    assert "1 of 2 greedy answers part" in one.reason


def cell(ratio: float, low: float, high: float, concurrency: int = 1) -> CellSpeed:
    none: dict[str, float] = {}
    return CellSpeed(
        cell=Cell(64, 16, concurrency), prompts=4, baseline=none, candidate=none, ratio=ratio, low=low, high=high
    )


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([cell(1.3, 1.2, 1.4), cell(1.1, 1.05, 1.2, 8)], verdict.BETTER),
        ([cell(1.0, 0.97, 1.03)], verdict.SAME),
        ([cell(0.8, 0.78, 0.82)], verdict.WORSE),
        # one cell that is slower is worse, whatever the others gain
        ([cell(2.0, 1.9, 2.1), cell(0.8, 0.75, 0.85, 64)], verdict.WORSE),
        ([cell(1.1, 0.8, 1.4)], verdict.CANNOT_TELL),
        # one good repeat does not hide a cell that lost in its median
        ([cell(2.0, 1.9, 2.1), cell(0.7, 0.6, 0.96, 64)], verdict.CANNOT_TELL),
        # faster for certain, but by less than the margin
        ([cell(1.02, 1.01, 1.03)], verdict.SAME),
    ],
)
def test_speed(cells: list[CellSpeed], expected: str) -> None:
    assert verdict.of_speed(cells, margin=5).word == expected


def test_a_slower_cell_is_named() -> None:
    one = verdict.of_speed([cell(2.0, 1.9, 2.1), cell(0.8, 0.75, 0.85, 64)], margin=5)
    assert "slower at 64/16 tokens, concurrency 64" in one.reason


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["same", "better"], 0),
        (["same", "cannot tell"], 2),
        (["cannot tell", "worse", "better"], 1),
    ],
)
def test_exit_status(words: list[str], status: int) -> None:
    assert verdict.exit_status([verdict.Verdict("x", word, "") for word in words]) == status
