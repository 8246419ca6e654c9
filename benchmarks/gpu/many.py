"""Serving on all GPUs of one machine: ours beside SGLang's own model, by launches that fit their number, in one table.

    PYTHONPATH=. python benchmarks/gpu/many.py --work FOLDER [--gpus N]

Two GPUs: Qwen3-30B-A3B's shape in bf16 under TP 2, TP 2 with EP 2, and attention DP 2 with EP 2, at concurrency 1, 16
and 64, 1,024 tokens in and 256 out. Four or eight: Qwen3-235B-A22B-Instruct-2507-FP8's shape as its recipe launches it,
TP and EP over all, FP8 KV, pages of 1,024, with graphs and without, at concurrency 4 to 128, 1,024 in and out. Weights
are drawn. Each launch is one run of ``serving.py``, which says how it measures; the same command again goes on where it
was cut. Writes benchmarks/results/many_NxGPU.json, whose rows say their ``launch``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steps import FIXTURES, RESULTS, write_results

HERE = Path(__file__).parent
RECIPE_CONFIG = FIXTURES / "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8.json"


@dataclass(frozen=True)
class Launch:
    """One comparison: what is served, its cells, and the launch flags of both variants."""

    name: str
    flags: tuple[str, ...]
    lengths: str
    concurrencies: tuple[int, ...]
    config: Path | None = None


def launches(gpus: int) -> list[Launch]:
    """Return what is measured on ``gpus`` GPUs."""
    size = str(gpus)
    tp, ep = ("--tp-size", size), ("--ep-size", size)
    if gpus == 2:
        dp = ("--dp-size", size, "--enable-dp-attention")
        small = partial(Launch, lengths="1024/256", concurrencies=(1, 16, 64))
        return [small("TP 2", tp), small("TP 2, EP 2", (*tp, *ep)), small("attention DP 2, EP 2", (*tp, *dp, *ep))]
    if gpus not in (4, 8):
        sys.exit(f"{gpus} GPUs: launches are here for 2, 4 and 8")
    recipe = (*tp, *ep, "--kv-cache-dtype", "fp8_e4m3", "--page-size", "1024")
    whole = partial(Launch, lengths="1024/1024", concurrencies=(4, 16, 64, 128), config=RECIPE_CONFIG)
    return [
        whole(f"TP {size}, EP {size}, graphs", recipe),
        whole(f"TP {size}, EP {size}, no graphs", (*recipe, "--disable-cuda-graph")),
    ]


def measure(launch: Launch, work: Path, gpus: int) -> dict[str, object]:
    """Run one comparison in ``work`` and return its results; ends the program where it did not come to its end."""
    work.mkdir(parents=True, exist_ok=True)
    out = work / "serving.json"
    words = [sys.executable, str(HERE / "serving.py"), "--work", str(work), "--out", str(out)]
    words += ["--lengths", launch.lengths, "--concurrencies", *map(str, launch.concurrencies)]
    words += ["--gpus", str(gpus)]
    if launch.config is not None:
        words += ["--config", str(launch.config), "--fp8"]
    status = subprocess.run([*words, "--", *launch.flags]).returncode
    if status:
        sys.exit(f"{launch.name}: serving.py ended with {status}; the same command goes on in {work}")
    found: dict[str, object] = json.loads(out.read_text())
    return found


def main() -> None:
    """Measure every launch and write them down."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where a cut run goes on")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="default: all that are here")
    arguments = parser.parse_args()
    rows = []
    for launch in launches(arguments.gpus):
        print(f"\n{launch.name}", flush=True)
        folder = launch.name.replace(", ", "-").replace(" ", "").lower()
        found = measure(launch, arguments.work / folder, arguments.gpus)
        assert isinstance(found["rows"], list)
        rows += [{"launch": launch.name, **row} for row in found["rows"]]
    write_results("many", rows, out=RESULTS / f"many_{arguments.gpus}xGPU.json", gpus=arguments.gpus)


if __name__ == "__main__":
    main()
