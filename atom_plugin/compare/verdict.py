"""What follows from the figures: "same", "worse", "better" or "cannot tell", by rules that the report states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from atom_plugin.compare.agreement import Comparison
from atom_plugin.compare.paired import Paired
from atom_plugin.compare.speed import CellSpeed

SAME, WORSE, BETTER, CANNOT_TELL = "same", "worse", "better", "cannot tell"
SIGNIFICANT = 0.05
#: Of the baseline's answers: with more of them cut off, what the benchmark scores is the token limit.
CUT_SHARE = 0.01

RULES = """\
* **accuracy**, on the problems both variants answered: `worse` or `better` where McNemar's exact test gives p < 0.05;
  `same` where the 95% bootstrap interval of the difference lies within the margin of +-{margin:g} points; otherwise
  `cannot tell`. A bootstrap knows nothing of disagreements that N problems did not show, so the interval reaches at
  least 1 - 0.05^(1/N) to either side. `cannot tell`, instead of `same` or `better`, also where the baseline has no more
  than the margin right (there is nothing to lose) or more than 1% of its answers were cut off at the token limit, which
  SGLang's few-shot benchmark does not tell.
* **agreement**: `same` where the mean absolute difference of logprobs is at most {bound:g} nats on prompts, on answers
  and in decoding to the first token that differs, itself included; otherwise `worse`. Single large differences and
  greedy answers that part are normal in 16 bits (two tokens, or two experts, that are nearly as likely).
* **speed**, of output throughput: `worse` where some cell is slower by more than {speed_margin:g}% between any two
  repeats, or all cells together (geometric mean) are; `better` where all together are faster by more than that in the
  median and faster between any two repeats; `same` where they are within it between any two; otherwise, and where a
  cell is slower by more than that in its median, `cannot tell`.
* Exit status: 1 where any verdict is `worse`, else 2 where any is `cannot tell`, else 0."""


@dataclass(frozen=True)
class Verdict:
    """The ``word`` on one ``subject``, and its reason in one line."""

    subject: str
    word: str
    reason: str


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """Return 1 where anything is worse, else 2 where anything could not be told, else 0."""
    words = {verdict.word for verdict in verdicts}
    return 1 if WORSE in words else 2 if CANNOT_TELL in words else 0


def of_accuracy(subject: str, found: Paired, *, names: tuple[str, str], margin: float, cut: float = 0.0) -> Verdict:
    """Return the verdict on accuracy.

    ``names``: baseline, candidate; ``margin`` in points; ``cut``: the share of the baseline's answers cut off.
    """
    baseline, candidate = names
    figures = (
        f"{candidate} {100 * found.candidate:.1f}%, {baseline} {100 * found.baseline:.1f}% of N={found.problems}, "
        f"difference {100 * found.difference:+.1f} points ({100 * found.low:+.1f} to {100 * found.high:+.1f}), "
        f"{found.only_baseline} problems lost and {found.only_candidate} won, McNemar p = {found.p:.2g}"
    )
    word, why = _accuracy_word(found, margin / 100, cut)
    return Verdict(subject, word, f"{figures}{why}")


def _accuracy_word(found: Paired, margin: float, cut: float) -> tuple[str, str]:
    """Return the word, and what is to be said beside the figures."""
    significant = found.p < SIGNIFICANT
    if significant and found.difference < 0:
        return WORSE, ""
    if found.baseline <= margin:
        return CANNOT_TELL, "; the baseline has too few right for a loss to show"
    if cut > CUT_SHARE:
        return CANNOT_TELL, f"; {100 * cut:.1f}% of the baseline's answers were cut off: raise --max-tokens"
    if significant:
        return BETTER, ""
    if -margin < found.low and found.high < margin:
        return SAME, ""
    return (
        CANNOT_TELL,
        f"; with N={found.problems} the interval is wider than +-{100 * margin:g} points{_enough(found, margin)}",
    )


def _enough(found: Paired, margin: float) -> str:
    """Return about how many problems would narrow the interval to the margin, if the difference stayed."""
    room = margin - abs(found.difference)
    if room <= 0:
        return ""
    needed = found.problems * ((found.high - found.low) / 2 / room) ** 2
    return f"; about {math.ceil(needed / 100) * 100} problems would do if the rates stayed"


def of_agreement(found: Comparison, *, bound: float) -> Verdict:
    """Return the verdict on agreement; ``bound`` in nats."""
    means = {"prompts": found.prompts, "answers": found.answers, "decoding": found.decoded}
    part = sum(first is not None for first in found.first_differs)
    figures = ", ".join(f"{name} {spread.mean:.2g}" for name, spread in means.items())
    reason = (
        f"mean logprob difference in nats: {figures} (bound {bound:g}; the baseline against itself "
        f"{found.noise.mean:.2g}), KL {found.kl_mean:.2g}; {part} of {len(found.first_differs)} greedy answers part"
    )
    # a mean that is NaN is not within any bound
    return Verdict("agreement", SAME if all(one.mean <= bound for one in means.values()) else WORSE, reason)


def of_speed(found: Sequence[CellSpeed], *, margin: float) -> Verdict:
    """Return the verdict on speed; ``margin`` in per cent of output throughput."""
    ratio, low, high = (
        geometric_mean(values) for values in zip(*((c.ratio, c.low, c.high) for c in found), strict=True)
    )
    slower = [str(one.cell) for one in found if one.high < 1 - margin / 100]
    reason = f"output throughput {ratio:.2f}x ({low:.2f} to {high:.2f}) over {len(found)} cells"
    if slower:
        return Verdict("speed", WORSE, f"{reason}; slower at {'; '.join(slower)}")
    if high < 1 - margin / 100:
        return Verdict("speed", WORSE, reason)
    lost = [str(one.cell) for one in found if one.ratio < 1 - margin / 100]
    if lost:
        return Verdict("speed", CANNOT_TELL, f"{reason}; slower in the median at {'; '.join(lost)}; repeat more often")
    if low > 1 and ratio > 1 + margin / 100:
        return Verdict("speed", BETTER, reason)
    if low > 1 - margin / 100 and high < 1 + margin / 100:
        return Verdict("speed", SAME, reason)
    return Verdict("speed", CANNOT_TELL, f"{reason}: the repeats differ by more than {margin:g}%; repeat more often")
