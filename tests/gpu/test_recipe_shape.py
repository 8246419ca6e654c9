"""The recipe's model on one GPU: Qwen3-235B-A22B-Instruct-2507-FP8's shape cut to four layers, FP8 KV, pages of 1,024.

Random weights with peaky attention, in FP8 blocks (12 GB) and in bf16. The bf16 twin has 32 of the 128 experts, which
are 8 of 24 GB to write and to load three times. Without a GPU the layers are narrow too.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.engine import ON_GPU
from tests.gpu.modes import Job, Run, assert_near, assert_ran, assert_same_tokens, engine_of, root
from tests.gpu.qwen3_checkpoint import make_qwen3_moe

__all__ = ["root"]
pytestmark = pytest.mark.gpu

CONFIG = (
    Path(__file__).parents[1] / "fixtures" / "hf_configs" / "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8.json"
)  # fmt: skip
LAYERS = 4
RECIPE = {"kv_cache_dtype": "fp8_e4m3", "page_size": 1024}
ALL_GRAPHS = {"cuda_graph_backend_prefill": "breakable"}
NARROW = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 16, "vocab_size": 2048,
    "moe_intermediate_size": 256, "intermediate_size": 1024,
}  # fmt: skip
#: Mean absolute difference of logprobs from SGLang's model on FA3, which rounds queries to FP8 where the KV is FP8.
MEAN = 0.1
#: Nats between two tokens that rounding may swap.
NEAR_TIE = 1.0


def recipe_config(weights: str) -> dict[str, Any]:
    """Return the published config with four layers, its quantisation left out for ``bf16``."""
    config: dict[str, Any] = json.loads(CONFIG.read_text()) | {"num_hidden_layers": LAYERS}
    if weights == "bf16":
        config.pop("quantization_config")
        config["num_experts"] = 32
    return config if ON_GPU else config | NARROW


def make(weights: str, folder: Path) -> Path:
    """Return the checkpoint, made in ``folder``."""
    made = folder / f"recipe-{weights}"
    make_qwen3_moe(made, recipe_config(weights), device="cuda" if ON_GPU else "cpu")
    return made


@functools.cache
def recipe(weights: str) -> Job:
    """Return the checkpoint and sequences of odd lengths, two of them longer than a page."""
    draw, vocab = random.Random(0), recipe_config(weights)["vocab_size"]
    lengths = [*range(3, 200, 13), 1025, 2049]
    ids = [[draw.randrange(2, vocab) for _ in range(length)] for length in lengths]
    whole = [draw.randrange(2, vocab) for _ in range(1300)]
    flags = {"skip_tokenizer_init": True, "context_length": 8192, **RECIPE}
    return Job(f"recipe-{weights}", functools.partial(make, weights), ids, ids, whole, flags)


def ours(weights: str, mode: dict[str, Any], folder: Path) -> Run:
    """Return our model on our backend in a mode."""
    run = engine_of(recipe(weights), {"model_impl": "atom", **mode}, folder)
    assert "atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM" in run.log
    return run


def sglangs(weights: str, folder: Path) -> Run:
    """Return SGLang's own model on FA3 under decode graphs."""
    return engine_of(recipe(weights), {"model_impl": "sglang", "attention_backend": "fa3"}, folder)


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_without_graphs(weights: str, root: Path) -> None:
    """The logprobs of SGLang's model on SGLang's backend."""
    run = ours(weights, {"disable_cuda_graph": True}, root)
    assert_ran(run, EXTEND_eager=True, DECODE_eager=True, EXTEND_graph=False, DECODE_graph=False)
    assert_near(run, sglangs(weights, root), MEAN, f"recipe, {weights}, eager")


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_with_graphs(weights: str, root: Path) -> None:
    """Decode and prefill graphs: the same, and the tokens of our own eager run; each replayed prefill was fused."""
    run, what = ours(weights, ALL_GRAPHS, root), f"recipe, {weights}, all graphs"
    assert_ran(run, DECODE_graph=True, EXTEND_graph=True)
    assert_near(run, sglangs(weights, root), MEAN, what)
    eager = ours(weights, {"disable_cuda_graph": True}, root)
    assert_near(run, eager, MEAN, f"{what}, against our eager run")
    assert_same_tokens(run, eager, NEAR_TIE, what)
    assert run.probe["fused_in_replay"] == LAYERS * run.probe["prefill_replays"]
    assert run.probe["norms"] == 0 and run.probe["stores"] == 0
    assert not ON_GPU or run.probe["prefill_replays"] > 0
