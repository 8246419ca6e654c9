"""The speed part: SGLang's serving benchmark over a grid of lengths and concurrencies, every cell several times."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom_plugin.compare.failure import MeasureError
from atom_plugin.compare.processes import Command, run_watched
from atom_plugin.compare.progress import Show
from atom_plugin.compare.servers import Server
from atom_plugin.recipe import Speed

#: Of a result: what the tables show.
LATENCIES = {"Mean_TTFT_ms": "mean_ttft_ms", "Mean_TPOT_ms": "mean_tpot_ms"}
THROUGHPUTS = {"Output_Throughput": "output_throughput", "Total_Throughput": "total_throughput"}
#: Of a result: lists with an entry a request, which the raw file keeps.
_DETAILS = ("server_info", "input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")


@dataclass(frozen=True, order=True)
class Cell:
    """A point of the grid; lengths in tokens."""

    input_len: int
    output_len: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len} tokens, concurrency {self.concurrency}"

    def part(self, repeat: int) -> str:
        """Return the name of its result."""
        return f"speed-{self.input_len}-{self.output_len}-{self.concurrency}-{repeat}"


def cells(settings: Speed) -> list[Cell]:
    """Return the grid."""
    return [Cell(*lengths, concurrency) for lengths in settings.lengths for concurrency in settings.concurrency]


def runs(settings: Speed) -> Iterator[tuple[Cell, int]]:
    """Yield every cell once before any comes again, so that a drift of the machine does not fall on one of them."""
    for repeat in range(settings.repeats):
        for cell in cells(settings):
            yield cell, repeat


def num_prompts(settings: Speed, cell: Cell) -> int:
    """Return how many requests a run of ``cell`` sends."""
    return settings.prompts_per_slot * cell.concurrency


def command(settings: Speed, cell: Cell, repeat: int, *, server: Server, output: Path) -> Command:
    """Return the benchmark's command line: token ids of exact lengths, no hub, an emptied prefix cache."""
    tokenizer = str(server.ask("/server_info")["tokenizer_path"])
    if Path(tokenizer).exists():  # relative to where the server was launched, and the benchmark runs elsewhere
        tokenizer = str(Path(tokenizer).resolve())
    words = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", server.url]
    words += ["--model", server.model(), "--tokenizer", tokenizer, "--dataset-name", "random-ids", "--tokenize-prompt"]
    words += ["--random-input-len", str(cell.input_len), "--random-output-len", str(cell.output_len)]
    words += ["--random-range-ratio", "1", "--num-prompts", str(num_prompts(settings, cell))]
    words += ["--max-concurrency", str(cell.concurrency), "--seed", str(repeat), "--flush-cache"]
    words += ["--output-details", "--output-file", str(output)]
    return Command(tuple(words), {})


def measure(server: Server, asked: Command, output: Path, *, prompts: int, show: Show) -> dict[str, Any]:
    """Run the benchmark beside ``server`` and return its figures; MeasureError where a request failed."""
    output.unlink(missing_ok=True)  # it appends
    run_watched(asked, output.with_suffix(".log"), folder=output.parent, watched=server, show=show)
    result = json.loads(output.read_text())
    if result["completed"] != prompts:
        reasons = sorted({error.strip().splitlines()[-1] for error in result["errors"] if error.strip()})
        raise MeasureError(f"{prompts - result['completed']} of {prompts} requests failed: {'; '.join(reasons)[:1000]}")
    return {"command": str(asked), **{name: value for name, value in result.items() if name not in _DETAILS}}


@dataclass(frozen=True, kw_only=True)
class CellSpeed:
    """A cell of both variants: medians of the repeats, and ``ratio`` candidate / baseline of output throughput.

    ``low`` and ``high``: the least and the greatest that the ratio can be between any two repeats.
    """

    cell: Cell
    prompts: int
    baseline: dict[str, float]
    candidate: dict[str, float]
    ratio: float
    low: float
    high: float


def compare(
    settings: Speed, baseline: Mapping[str, Mapping[str, float]], candidate: Mapping[str, Mapping[str, float]]
) -> list[CellSpeed]:
    """Return every cell of two variants, whose results are given by part."""
    found = []
    for cell in cells(settings):
        parts = [cell.part(repeat) for repeat in range(settings.repeats)]
        sides = [[results[part] for part in parts] for results in (baseline, candidate)]
        medians = [
            {
                shown: statistics.median(one[name] for one in side)
                for shown, name in {**LATENCIES, **THROUGHPUTS}.items()
            }
            for side in sides
        ]
        rates = [[one["output_throughput"] for one in side] for side in sides]
        found.append(
            CellSpeed(
                cell=cell,
                prompts=num_prompts(settings, cell),
                baseline=medians[0],
                candidate=medians[1],
                ratio=medians[1]["Output_Throughput"] / medians[0]["Output_Throughput"],
                low=min(rates[1]) / max(rates[0]),
                high=max(rates[1]) / min(rates[0]),
            )
        )
    return found
