"""McNemar's test and the bootstrap on paired outcomes, against figures worked out otherwise."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from scipy.stats import bootstrap

from atom_plugin.compare import paired


def outcomes(both: int, lost: int, won: int, neither: int) -> tuple[list[int], list[int]]:
    return [1] * (both + lost) + [0] * (won + neither), [1] * both + [0] * lost + [1] * won + [0] * neither


def test_counts_and_mcnemar_are_those_of_the_binomial() -> None:
    found = paired.compare(*outcomes(170, 15, 5, 10))
    assert (found.problems, found.only_baseline, found.only_candidate) == (200, 15, 5)
    assert (found.baseline, found.candidate) == (0.925, 0.875)
    assert found.difference == pytest.approx(-0.05)
    assert found.p == pytest.approx(2 * sum(comb(20, k) for k in range(6)) / 2**20)


def test_interval_is_that_of_scipys_bootstrap_over_problems() -> None:
    baseline, candidate = outcomes(900, 60, 40, 319)
    found = paired.compare(baseline, candidate)
    differences = np.array(candidate) - np.array(baseline)
    theirs = bootstrap((differences,), np.mean, method="percentile", n_resamples=5000, batch=500).confidence_interval
    assert found.low == pytest.approx(theirs.low, abs=0.0015)
    assert found.high == pytest.approx(theirs.high, abs=0.0015)


def test_seeded() -> None:
    assert paired.compare(*outcomes(80, 9, 7, 4)) == paired.compare(*outcomes(80, 9, 7, 4))


@pytest.mark.parametrize("total", [50, 200, 1319])
def test_no_disagreement_is_no_certainty(total: int) -> None:
    """N problems without a disagreement leave room for a rate of which N show none one time in twenty: 3 / N."""
    found = paired.compare([1] * total, [1] * total)
    assert found.p == 1 and found.difference == 0
    assert found.high == pytest.approx(1 - 0.05 ** (1 / total)) and found.low == -found.high
    assert (1 - found.high) ** total == pytest.approx(0.05)


def test_lists_that_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="3 and 2 outcomes cannot be paired"):
        paired.compare([1, 1, 0], [1, 0])
    with pytest.raises(ValueError, match="0 and 0 outcomes"):
        paired.compare([], [])
