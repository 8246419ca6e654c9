"""The experts of few tokens, ours and SGLang's fused MoE, on a GPU, side by side in one run.

    python benchmarks/few_token_experts.py

Qwen3-30B-A3B's experts (2,048 x 768, 128 of them, 8 a token) in bf16, drawn; microseconds in replayed graphs. Calls
rotate over several layers' weights, so that none is in the L2. The limit is the bytes of the experts that the tokens
reach, each read once, over the bandwidth that is measured first.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from atom_plugin.ops.few_token_experts.kernel import few_token_experts
from benchmarks.gpu_timing import graph_us, read_bandwidth

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 2048, 768, 128, 8, 6
TOKENS = (1, 2, 3, 4, 6, 8)


def main() -> None:
    """Measure and print a table."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    bandwidth = read_bandwidth()
    made = {"dtype": torch.bfloat16, "device": "cuda"}
    w13 = [torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, **made) / HIDDEN**0.5 for _ in range(LAYERS)]
    w2 = [torch.randn(EXPERTS, HIDDEN, WIDTH, **made) / WIDTH**0.5 for _ in range(LAYERS)]
    config = MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=EXPERTS, inplace=False)
    print("| tokens | limit us | ours us | GB/s | SGLang us | ours is faster by | largest difference |")
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, **made)
        weights, ids = torch.randn(tokens, EXPERTS, device="cuda").softmax(-1).topk(TOP_K)
        routing = StandardTopKOutput(weights, ids.int(), torch.empty(0, device="cuda"))
        size = 2 * 3 * HIDDEN * WIDTH * len(ids.unique())
        layers = list(zip(w13, w2, strict=True))
        ours = graph_us([partial(few_token_experts, x, weights, routing.topk_ids, *layer) for layer in layers])
        theirs = graph_us([partial(fused_experts, x, *layer, routing, config) for layer in layers])
        found = few_token_experts(x, weights, routing.topk_ids, w13[0], w2[0])
        apart = (found - fused_experts(x, w13[0], w2[0], routing, config)).abs().max().item()
        print(
            f"| {tokens} | {1e6 * size / bandwidth:.1f} | {ours:.1f} | {1e-3 * size / ours:,.0f} | {theirs:.1f} | "
            f"{theirs / ours:.2f} | {apart:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
