"""Statistics of two variants on the same problems: paired, since their errors are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

CONFIDENCE = 0.95
RESAMPLES = 20_000
SEED = 20_000


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two variants' outcomes: counts of problems, shares (0 to 1), and the candidate's share less the baseline's.

    ``only_baseline``: problems that the baseline alone has right. ``p``: McNemar's, exact. ``low`` and ``high``: the
    bootstrap interval of ``difference`` (CONFIDENCE), never narrower than disagreements that were not seen may be.
    """

    problems: int
    baseline: float
    candidate: float
    only_baseline: int
    only_candidate: int
    difference: float
    low: float
    high: float
    p: float


def compare(baseline: Sequence[int], candidate: Sequence[int]) -> Paired:
    """Return the statistics of two lists of outcomes (1 right, 0 wrong) of the same problems in the same order."""
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"{len(baseline)} and {len(candidate)} outcomes cannot be paired")
    pairs = list(zip(baseline, candidate, strict=True))
    total, lost, won = len(pairs), pairs.count((1, 0)), pairs.count((0, 1))
    difference = (won - lost) / total
    low, high = _bootstrap(total, lost, won)
    # of `total` problems none may have disagreed and a share up to this still would: a bootstrap cannot know
    unseen = binomtest(0, total).proportion_ci(2 * CONFIDENCE - 1).high
    return Paired(
        problems=total,
        baseline=sum(baseline) / total,
        candidate=sum(candidate) / total,
        only_baseline=lost,
        only_candidate=won,
        difference=difference,
        low=min(low, difference - unseen),
        high=max(high, difference + unseen),
        p=float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0,
    )


def _bootstrap(total: int, lost: int, won: int) -> tuple[float, float]:
    """Return the percentile interval of (won - lost) / total over resampled problems."""
    shares = [lost / total, won / total, (total - lost - won) / total]
    drawn = np.random.default_rng(SEED).multinomial(total, shares, size=RESAMPLES)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile((drawn[:, 1] - drawn[:, 0]) / total, [tail, 100 - tail])
    return float(low), float(high)


def interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval (CONFIDENCE) of one variant's share, for plots; never compared with another's."""
    found = binomtest(right, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)
