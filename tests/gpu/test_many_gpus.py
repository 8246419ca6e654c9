"""Our model on our backend on two GPUs, under decode and prefill graphs: the logprobs of one GPU.

Without a GPU a dry run: two processes over gloo.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engine import ON_GPU
from tests.gpu.modes import Run, assert_near, assert_ran, engine_of, job, root

__all__ = ["root"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, and one is here"),
]

LAUNCHES: dict[str, dict[str, Any]] = {
    "TP 2": {"tp_size": 2},
    "TP 2, EP 2": {"tp_size": 2, "ep_size": 2},
    "attention DP 2, EP 2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
}
GRAPHS = {"cuda_graph_backend_prefill": "breakable"}
#: Mean absolute difference of logprobs that summing in another order makes in bf16.
MEAN = 0.05


def ours(checkpoint: str, launch: dict[str, Any], folder: Path) -> Run:
    """Return our model on our backend, with all graphs."""
    asked = replace(job(checkpoint), cached=())  # under attention DP a prefix may be cached on the other rank
    run = engine_of(asked, {"model_impl": "atom", **GRAPHS, **launch}, folder)
    assert "atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM" in run.log
    return run


@pytest.mark.parametrize("checkpoint", ["moe", "small"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_gpus(checkpoint: str, launch: str, root: Path) -> None:
    """Shards of heads, of the width of experts or of the experts, and requests that are split: the same numbers."""
    run = ours(checkpoint, LAUNCHES[launch], root)
    assert_ran(run, DECODE_graph=True)
    assert_near(run, ours(checkpoint, {}, root), MEAN, f"{checkpoint}, {launch}")
