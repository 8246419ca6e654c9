"""Serving of Qwen3-30B-A3B's shape on one GPU: `atom-plugin compare`'s speed part, SGLang's own model and then ours.

    PYTHONPATH=. python benchmarks/gpu/serving.py --work FOLDER [--fp8] [--lengths 1024/256 1024/1024]
        [--concurrencies 1 4 16 64 128] [-- more launch flags of both]

Weights are drawn (``--load-format dummy``), both servers have the same KV pool and SGLang's defaults else. The same
command again goes on where it was cut, in --work. ``ratio`` is output throughput, atom's over SGLang's. The limit of a
decode step is the bytes that it reads at least over 4,400 GB/s, see ``qwen3_steps.py``, at half of the answer;
``limit_share`` is it over the mean time of an output token, prefills of other requests included. It counts the experts
of tokens that each draw theirs alike; drawn weights repeat themselves, and may reach fewer. Peak memory is what
nvidia-smi says of the whole GPU while a server runs. Writes benchmarks/results/serving_SHAPE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen3_steps import decode_limit_us, shape
from steps import REPO, RESULTS, VARIANTS, gpu_gib, print_row, write_results

TINY = REPO / "examples" / "tiny-qwen3-moe"
#: More than 128 requests of 2,048 tokens hold.
KV_TOKENS = 300_000
POLL_SECONDS = 1.0


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Write what a server of drawn weights needs: the config, and a tokenizer, which shows most answers as nothing.

    A folder that is there is left alone, as a comparison goes on only with the same files.
    """
    if folder.is_dir():
        if json.loads((folder / "config.json").read_text()) != config:
            sys.exit(f"{folder} holds another model: give another --work")
        return
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, partial)
    partial.rename(folder)


def compare_command(arguments: argparse.Namespace) -> list[str]:
    """Return the comparison."""
    words = [sys.executable, "-m", "atom_plugin.cli", "compare", "--model", str(arguments.work / "model")]
    words += ["--out", str(arguments.work / "compare"), "--parts", "speed", "--lengths", *arguments.lengths]
    words += ["--concurrencies", *map(str, arguments.concurrencies), "--repeats", str(arguments.repeats)]
    words += ["--prompts-per-slot", str(arguments.prompts_per_slot), "--", "--load-format", "dummy"]
    return [*words, "--max-total-tokens", str(KV_TOKENS), *arguments.flags]


def run_compare(arguments: argparse.Namespace) -> dict[str, float]:
    """Run the comparison to its end and return the peak GiB of each server, also of earlier calls in the folder."""
    kept = arguments.work / "peak.json"
    peak: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    start = time.time()
    # DeepGEMM compiles the shapes that come in the warm-up, not all that could: ten minutes and more
    environment = {**os.environ, "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
    process = subprocess.Popen(compare_command(arguments), env=environment)
    try:
        while process.poll() is None:
            used = gpu_gib()
            running = serving_now(arguments.work / "compare", start)
            if used is not None and running is not None and used > peak.get(running, 0.0):
                peak[running] = used
                kept.write_text(json.dumps(peak))
            time.sleep(POLL_SECONDS)
    finally:  # a comparison that is told to end stops its server first
        process.terminate()
        process.wait()
    report = arguments.work / "compare" / "report.json"
    if not report.is_file() or report.stat().st_mtime < start:
        sys.exit(f"the comparison wrote no report (exit status {process.returncode}); it goes on in {arguments.work}")
    return peak


def serving_now(folder: Path, start: float) -> str | None:
    """Return which variant the comparison launched last, None where it has launched none since ``start``."""
    launched = {path.stat().st_mtime: name for name in VARIANTS if (path := folder / name / "command.txt").is_file()}
    latest = max(launched, default=0.0)
    return launched[latest] if latest > start else None


def rows_of(
    report: dict[str, Any], config: dict[str, Any], *, weight_bytes: int, kv_bytes: int, gpus: int
) -> Iterator[dict[str, Any]]:
    """Yield the cells of a comparison with their limits, which ``gpus`` share."""
    for cell in report["rows"]:
        context = cell["Input_Tokens"] + cell["Output_Tokens"] // 2
        limit_ms = decode_limit_us(config, cell["Max_Concurrency"], context, weight_bytes, kv_bytes) / 1e3 / gpus
        shares = {name: limit_ms / cell[name]["Mean_TPOT_ms"] for name in VARIANTS}
        yield {**cell, "limit_ms": limit_ms, "limit_share": shares}


def main() -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where a cut run goes on")
    parser.add_argument("--fp8", action="store_true", help="weights in FP8 blocks")
    parser.add_argument("--config", type=Path, help="a config.json of another Qwen3-MoE's shape")
    parser.add_argument("--lengths", nargs="+", default=["1024/256"])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompts-per-slot", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=1, help="that share the weights, by flags after --")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/serving_SHAPE.json")
    parser.add_argument("flags", nargs="*", help="of both launches, after --")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    config = json.loads(arguments.config.read_text()) if arguments.config else shape(48, fp8=arguments.fp8)
    name = arguments.config.parent.name if arguments.config else f"qwen3-30b-a3b-{'fp8' if arguments.fp8 else 'bf16'}"
    make_model(arguments.work / "model", config)
    peak = run_compare(arguments)
    report = json.loads((arguments.work / "compare" / "report.json").read_text())
    kv_bytes = 1 if "fp8_e4m3" in arguments.flags else 2
    rows = list(rows_of(report, config, weight_bytes=1 if arguments.fp8 else 2, kv_bytes=kv_bytes, gpus=arguments.gpus))
    for row in rows:
        told = {key: row[key] for key in ("Input_Tokens", "Output_Tokens", "Max_Concurrency", "ratio", "limit_ms")}
        for variant in VARIANTS:
            told |= {f"{variant} {key}": value for key, value in row[variant].items()}
            told[f"{variant} limit_share"] = row["limit_share"][variant]
        print_row(told)
    more = {"peak_gib": peak, "servers": report["servers"], "verdicts": report["verdicts"]}
    out = arguments.out or RESULTS / f"serving_{name}.json"
    write_results("serving", rows, out=out, settings=report["settings"], **more)
    print(f"peak GiB: {peak}; {out}")


if __name__ == "__main__":
    main()
