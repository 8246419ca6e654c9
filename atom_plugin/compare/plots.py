"""The pictures of a report: accuracy with intervals, and throughput against latency."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, on machines without a screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from atom_plugin.compare import paired
from atom_plugin.compare.findings import Findings
from atom_plugin.compare.speed import CellSpeed

ACCURACY, SPEED = "accuracy.png", "throughput_latency.png"
COLOURS = ("#7f7f7f", "#d6604d")  # baseline, candidate
_DPI = 130


def draw(findings: Findings, folder: Path, *, margin: float) -> list[str]:
    """Write the pictures of what was measured and return their names; ``margin`` in points of accuracy."""
    drawn = []
    if findings.scores:
        _accuracy(findings, folder / ACCURACY, margin=margin)
        drawn.append(ACCURACY)
    if findings.speed:
        _speed(findings, folder / SPEED)
        drawn.append(SPEED)
    return drawn


def _accuracy(findings: Findings, path: Path, *, margin: float) -> None:
    """Left, each variant's accuracy; right, what is judged: the paired difference against the margin."""
    scores = findings.scores
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 1.6 + 0.7 * len(scores)), layout="constrained", sharey=True
    )
    for row, score in enumerate(scores):
        found = score.found
        for side, (name, share) in enumerate(zip(findings.names, (found.baseline, found.candidate), strict=True)):
            low, high = paired.interval(round(share * found.problems), found.problems)
            errors = [[100 * max(0.0, share - low)], [100 * max(0.0, high - share)]]
            left.errorbar(
                100 * share, row + 0.12 * (2 * side - 1), xerr=errors, fmt="o", capsize=3, color=COLOURS[side],
                label=name if row == 0 else None,
            )  # fmt: skip
        difference = 100 * found.difference
        errors = [[difference - 100 * found.low], [100 * found.high - difference]]
        right.errorbar(difference, row, xerr=errors, fmt="o", capsize=3, color="black")
    right.axvspan(-margin, margin, color="#4daf4a", alpha=0.15, label=f"margin of {margin:g} points")
    right.axvline(0, color="black", linewidth=0.8)
    left.set_yticks(range(len(scores)), [f"{score.name}\nN={score.found.problems}" for score in scores])
    left.set_ylim(len(scores) - 0.5, -0.5)
    left.set_xlabel("right answers, % (95% interval of each alone)")
    right.set_xlabel(f"{findings.names[1]} less {findings.names[0]}, points (95%, paired)")
    figure.suptitle("GSM8K accuracy")
    handles = [one for axes in (left, right) for one in zip(*axes.get_legend_handles_labels(), strict=True)]
    figure.legend(
        [handle for handle, _ in handles], [label for _, label in handles], loc="outside lower center", ncols=3
    )
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _speed(findings: Findings, path: Path) -> None:
    """Output throughput over the time of a token, a panel for each pair of lengths, a point for each concurrency."""
    lengths = list(dict.fromkeys((one.cell.input_len, one.cell.output_len) for one in findings.speed))
    figure, panels = plt.subplots(
        1, len(lengths), figsize=(1 + 4.6 * len(lengths), 4.5), squeeze=False, layout="constrained"
    )
    for axes, (input_len, output_len) in zip(panels[0], lengths, strict=True):
        chosen = [one for one in findings.speed if (one.cell.input_len, one.cell.output_len) == (input_len, output_len)]
        for side, name in enumerate(findings.names):
            _line(axes, chosen, side, name)
        axes.set_title(f"{input_len} tokens in, {output_len} out")
        axes.set_xlabel("mean time per output token, ms")
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("output throughput, tokens/s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle("Throughput against latency\nnumbers: concurrency; up and to the left is better", fontsize=11)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _line(axes: Axes, cells: list[CellSpeed], side: int, name: str) -> None:
    cells = sorted(cells, key=lambda one: one.cell.concurrency)
    figures = [(one.baseline, one.candidate)[side] for one in cells]
    x, y = [one["Mean_TPOT_ms"] for one in figures], [one["Output_Throughput"] for one in figures]
    axes.plot(x, y, marker="o", color=COLOURS[side], label=name)
    for cell, at_x, at_y in zip(cells, x, y, strict=True):
        offset = (6, -12) if side == 0 else (-6, 6)
        axes.annotate(
            str(cell.cell.concurrency), (at_x, at_y), xytext=offset, textcoords="offset points", color=COLOURS[side],
            ha="left" if side == 0 else "right",
        )  # fmt: skip
