"""Decode steps of Kimi-K2's shape on one rank of eight: our model on our backend beside SGLang's on its default one.

    python benchmarks/gpu/kimi_decode.py [--heads 8 12] [--weights bf16 fp8] [--kernels]

Weights are drawn, 4 layers (the first dense, three with 384 experts): 8 heads are K2's 64 under TP 8, 12 are Kimi-K3's
96. The widths of MLP, experts and vocabulary are those of one rank too. Both run with decode graphs, one after the
other, in processes of their own. A row: microseconds of the replayed graph, which is what a step takes where the layers
are many enough to hide Python, and of a step on the clock, from Python, waiting for the GPU. The limit is the bytes
that a step has to read at least, over 4,400 GB/s: the weights of all that is dense and of the experts of one token, as
nobody counts how many experts a batch reaches, and the latents. Writes benchmarks/results/kimi_decode.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from steps import FIXTURES, READ_BYTES_PER_S, VARIANTS, measure, print_kernels, print_row, write_results

CONFIG = FIXTURES / "moonshotai--Kimi-K2-Instruct.json"
RANKS, LAYERS = 8, 4
CELLS = [[batch, context] for context in (1024, 8192) for batch in (1, 16, 64)]


def rank_config(heads: int, fp8: bool) -> dict[str, Any]:
    """Return Kimi-K2's config cut to what one rank of eight holds of four layers."""
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": heads}
    for name in ("moe_intermediate_size", "intermediate_size", "vocab_size"):
        config[name] //= RANKS
    config.pop("auto_map", None)
    if not fp8:
        config.pop("quantization_config")
    return config


def limit_us(config: dict[str, Any], batch: int, context: int, fp8: bool) -> float:
    """Return the microseconds that reading weights and latents once takes; FP8 leaves ``kv_b`` and the head in bf16."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    q_dim = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    v_dim = heads * config["v_head_dim"]
    attention = hidden * (config["q_lora_rank"] + latent) + config["q_lora_rank"] * q_dim + v_dim * hidden
    expert = 3 * hidden * config["moe_intermediate_size"]
    experts, reached = config["n_routed_experts"], config["num_experts_per_tok"]
    moe_layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    by_width = config["num_hidden_layers"] * attention + 3 * hidden * config["intermediate_size"]
    by_width += moe_layers * (reached + config["n_shared_experts"]) * expert
    up = heads * config["kv_lora_rank"] * (config["qk_nope_head_dim"] + config["v_head_dim"])
    others = config["num_hidden_layers"] * up + moe_layers * hidden * experts + hidden * config["vocab_size"]
    latents = config["num_hidden_layers"] * batch * context * latent
    return 1e6 * (by_width * (1 if fp8 else 2) + 2 * (others + latents)) / READ_BYTES_PER_S


def engine_flags(folder: Path) -> dict[str, Any]:
    """Return what both are launched with."""
    return {
        "model_path": str(folder), "max_total_tokens": 600_000, "cuda_graph_bs_decode": sorted({b for b, _ in CELLS}),
        "cuda_graph_max_bs_decode": max(b for b, _ in CELLS), "cuda_graph_backend_prefill": "disabled",
    }  # fmt: skip


def table(heads: int, fp8: bool, rows: dict[str, list[dict[str, Any]]], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Print the cells of one shape side by side and return them; ``ratio`` is how much faster our graph is."""
    cells = []
    for ours, theirs in zip(rows["atom"], rows["sglang"], strict=True):
        limit = limit_us(config, ours["batch"], ours["context"], fp8)
        cells.append(
            {
                "heads": heads, "weights": "fp8" if fp8 else "bf16", "batch": ours["batch"],
                "context": ours["context"], "limit_us": limit, "atom_graph_us": ours["graph_us"],
                "sglang_graph_us": theirs["graph_us"], "ratio": theirs["graph_us"] / ours["graph_us"],
                "atom_step_us": ours["step_us"], "sglang_step_us": theirs["step_us"],
                "step_ratio": theirs["step_us"] / ours["step_us"],
            }
        )  # fmt: skip
        print_row(cells[-1])
    return cells


def main() -> None:
    """Measure the shapes that were asked for and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 12])
    parser.add_argument("--weights", nargs="+", choices=("bf16", "fp8"), default=["bf16"])
    parser.add_argument("--kernels", action="store_true", help="print the kernels of batch 1 and 64 at context 1,024")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for heads in arguments.heads:
        for weights in arguments.weights:
            fp8 = weights == "fp8"
            with tempfile.TemporaryDirectory() as made:
                config = rank_config(heads, fp8)
                (Path(made) / "config.json").write_text(json.dumps(config))
                profile = [[1, 1024], [64, 1024]] if arguments.kernels else []
                job = {"cells": CELLS, "vocab_size": config["vocab_size"], "profile": profile}
                rows = {one: measure(one, engine_flags(Path(made)), **job)["decode"] for one in VARIANTS}
            found += table(heads, fp8, rows, config)
            for variant, own in rows.items():
                print_kernels(own, variant)
    write_results("kimi_decode", found)


if __name__ == "__main__":
    main()
