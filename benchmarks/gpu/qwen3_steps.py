"""Decode steps and prefills of Qwen3-30B-A3B's shape on one GPU: ours on ours beside SGLang's on its default backend.

    python benchmarks/gpu/qwen3_steps.py [--fp8] [--layers 48] [--kernels]

Weights are drawn. Both run in processes of their own, one after the other, through SGLang's model runner without its
scheduler. A decode row: microseconds of the replayed graph, and of a step on the clock, from Python, waiting for the
GPU. The limit of a decode step is the bytes that it reads at least over 4,400 GB/s: attention and head, the experts
that tokens reach on average when each draws its 8 of 128 alike, and keys and values. A prefill's limit is its
multiplications over 800 TFLOP/s. ``--kernels`` prints the time of each kernel. Writes
benchmarks/results/qwen3_steps.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from steps import FIXTURES, READ_BYTES_PER_S, VARIANTS, measure, print_kernels, print_row, write_results

DECODE = [[batch, 1024] for batch in (1, 4, 16, 64, 128)]
PREFILL = [[1, 1024], [1, 8192], [16, 1024]]
FLOPS_PER_S = 8e14


def shape(layers: int, *, fp8: bool) -> dict[str, Any]:
    """Return the config; the FP8 release has the blocks of the 235B one."""
    config: dict[str, Any] = json.loads((FIXTURES / "Qwen--Qwen3-30B-A3B.json").read_text())
    if fp8:
        larger = json.loads((FIXTURES / "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8.json").read_text())
        config["quantization_config"] = larger["quantization_config"]
    return config | {"num_hidden_layers": layers}


def sizes(config: dict[str, Any]) -> tuple[int, int]:
    """Return the parameters of (a layer's attention and router, one expert)."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * dim * (2 * heads + 2 * kv_heads) + hidden * config["num_experts"]
    return attention, 3 * hidden * config["moe_intermediate_size"]


def decode_limit_us(config: dict[str, Any], batch: int, context: int, weight_bytes: int, kv_bytes: int = 2) -> float:
    """Return the microseconds that one step's reads take."""
    attention, expert = sizes(config)
    experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    reached = experts * (1 - (1 - top_k / experts) ** batch)
    layer = weight_bytes * (attention + reached * expert)
    layer += 2 * kv_bytes * batch * context * config["num_key_value_heads"] * config["head_dim"]
    head = 2 * config["hidden_size"] * config["vocab_size"]
    return 1e6 * (config["num_hidden_layers"] * layer + head) / READ_BYTES_PER_S


def prefill_limit_us(config: dict[str, Any], batch: int, context: int, weight_bytes: int) -> float:
    """Return the microseconds that the multiplications of a prefill take, causal attention among them."""
    attention, expert = sizes(config)
    tokens = batch * context
    pairs = 2 * tokens * context / 2 * config["num_attention_heads"] * config["head_dim"]
    layer = tokens * (attention + config["num_experts_per_tok"] * expert) * 2 / weight_bytes + pairs
    return 1e6 * 2 * config["num_hidden_layers"] * layer / FLOPS_PER_S


def side_by_side(
    ours: dict[str, Any], theirs: dict[str, Any], what: str, limit_us: float, *clocks: str
) -> dict[str, Any]:
    """Return and print one cell of both; ``ratio`` is how much faster we are by the first of ``clocks``."""
    row: dict[str, Any] = {"what": what, "batch": ours["batch"], "context": ours["context"], "limit_us": limit_us}
    for clock in clocks:
        row |= {f"atom_{clock}": ours[clock], f"sglang_{clock}": theirs[clock]}
    row["ratio"] = theirs[clocks[0]] / ours[clocks[0]]
    print_row(row)
    return row


def main() -> None:
    """Measure both and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8", action="store_true", help="Qwen3-30B-A3B-FP8's shape: weights in FP8 blocks")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--kernels", action="store_true", help="print the kernels of some cells")
    arguments = parser.parse_args()
    config = shape(arguments.layers, fp8=arguments.fp8)
    weight_bytes = 1 if arguments.fp8 else 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = {
            "model_path": folder, "max_total_tokens": 300_000, "cuda_graph_backend_prefill": "disabled",
            "cuda_graph_bs_decode": [batch for batch, _ in DECODE], "cuda_graph_max_bs_decode": 128,
        }  # fmt: skip
        job = {"cells": DECODE, "prefill": PREFILL, "vocab_size": config["vocab_size"], "profile": DECODE[::3]}
        found = {variant: measure(variant, engine, **job) for variant in VARIANTS}
    rows = []
    for ours, theirs in zip(found["atom"]["decode"], found["sglang"]["decode"], strict=True):
        limit = decode_limit_us(config, ours["batch"], ours["context"], weight_bytes)
        rows.append(side_by_side(ours, theirs, "decode", limit, "graph_us", "step_us"))
    for ours, theirs in zip(found["atom"]["prefill"], found["sglang"]["prefill"], strict=True):
        limit = prefill_limit_us(config, ours["batch"], ours["context"], weight_bytes)
        rows.append(side_by_side(ours, theirs, "prefill", limit, "step_us"))
    peak = {variant: figures["peak_gib"] for variant, figures in found.items()}
    print(f"peak GiB of tensors: {peak}")
    if arguments.kernels:
        for variant, figures in found.items():
            print_kernels(figures["decode"], f"{variant}, decode")
            print_kernels(figures["prefill"], f"{variant}, prefill")
    kernels = {variant: [*figures["decode"], *figures["prefill"]] for variant, figures in found.items()}
    write_results("qwen3_steps", rows, peak_gib=peak, kernels=kernels)


if __name__ == "__main__":
    main()
