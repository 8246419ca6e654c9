"""Decode on a CPU: our model on our backend against SGLang's model on torch_native, bf16, the committed checkpoint.

    python benchmarks/cpu_decode.py [--rounds 5] [--out FILE.json]

Starts the two variants in turn, ``--rounds`` times each, and prints medians of the attention time of a decode step and
of output tokens a second for every (batch, context), with ratios, beside the limit of memory: the bytes of
K and V that a step reads over the bandwidth of a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = HERE.parent / "examples" / "tiny-qwen3-moe"
VARIANTS: dict[str, dict[str, str]] = {
    "sglang x torch_native": {"model_impl": "sglang", "attention_backend": "torch_native"},
    "atom x atom": {"model_impl": "atom", "attention_backend": "atom"},
}
CELLS = [(batch, context) for batch in (1, 8, 32) for context in (256, 1024)]
NEW_TOKENS = 64


def bytes_of_kv(batch: int, context: int) -> int:
    """Return the bytes of K and V that one decode step reads, all layers."""
    config = json.loads((MODEL / "config.json").read_text())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    return batch * context * per_token


def copy_bandwidth() -> float:
    """Return bytes a second of a copy that does not fit any cache, reads and writes both counted."""
    import torch

    source = torch.empty(512 << 20, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)
    start = time.perf_counter()
    for _ in range(5):
        target.copy_(source)
    return 5 * 2 * source.numel() / (time.perf_counter() - start)


def child(flags: dict[str, str]) -> None:
    """Run one engine over all cells and print {cell: [attention seconds a step, tokens a second]}."""
    import sglang

    timer = Path(os.environ["STEP_TIMER_FILE"])
    draw = random.Random(0)
    engine = sglang.Engine(
        model_path=str(MODEL), device="cpu", dtype="bfloat16", max_total_tokens=40960, mem_fraction_static=0.2, **flags
    )
    found = {}
    for batch, context in CELLS:
        ids = [[draw.randrange(2, 700) for _ in range(context - NEW_TOKENS // 2)] for _ in range(batch)]
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
        engine.generate(input_ids=ids, sampling_params={**sampling, "max_new_tokens": 2})  # prefills the radix cache
        timer.write_text("")
        start = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params=sampling)
        seconds = time.perf_counter() - start
        steps = [line.split() for line in timer.read_text().splitlines()]
        attention = [float(spent) for size, spent, _ in steps if int(size) == batch]
        found[f"{batch}x{context}"] = [statistics.median(attention), batch * NEW_TOKENS / seconds]
    print("FOUND" + json.dumps(found), flush=True)
    engine.shutdown()


def run(flags: dict[str, str]) -> dict[str, list[float]]:
    """Run one variant once in a process of its own, with the timer plugged in."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "step_timer-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: step-timer\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nstep_timer = step_timer:register\n")
        path = os.pathsep.join([folder, str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        ran = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(flags)],
            env={**os.environ, "PYTHONPATH": path, "STEP_TIMER_FILE": f"{folder}/steps", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    if "FOUND" not in ran.stdout:
        raise RuntimeError(f"{flags} failed:\n{ran.stderr[-3000:]}")
    return json.loads(ran.stdout.rsplit("FOUND", 1)[1])


def table(runs: dict[str, list[dict[str, list[float]]]], bandwidth: float) -> str:
    """Return the medians and ratios as a Markdown table."""
    own, ours = VARIANTS
    lines = [
        f"| batch x context | attention ms/step, {own} | {ours} | ratio | memory limit ms "
        f"| tokens/s, {own} | {ours} | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch, context in CELLS:
        cell = f"{batch}x{context}"
        (a_own, t_own), (a_ours, t_ours) = (
            [statistics.median(one[cell][index] for one in runs[name]) for index in (0, 1)] for name in (own, ours)
        )
        limit = 1e3 * bytes_of_kv(batch, context) / bandwidth
        lines.append(
            f"| {batch} x {context} | {1e3 * a_own:.2f} | {1e3 * a_ours:.2f} | {a_own / a_ours:.2f} | {limit:.3f} "
            f"| {t_own:.0f} | {t_ours:.0f} | {t_ours / t_own:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Alternate the variants and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return
    bandwidth: Any = copy_bandwidth()
    runs: dict[str, list[dict[str, list[float]]]] = {name: [] for name in VARIANTS}
    for number in range(arguments.rounds):
        for name, flags in VARIANTS.items():
            runs[name].append(run(flags))
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
    print(f"{os.cpu_count()} cores, copy bandwidth {bandwidth / 1e9:.1f} GB/s, medians of {arguments.rounds} rounds\n")
    print(table(runs, bandwidth))
    if arguments.out:
        arguments.out.write_text(json.dumps({"bandwidth": bandwidth, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
