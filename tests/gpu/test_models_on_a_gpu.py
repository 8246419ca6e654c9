"""Our model classes and our backend on a GPU, beside SGLang's own on the same weights: bf16, graphs, block FP8."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.engine import run_engine
from tests.gpu.qwen3_checkpoint import make_qwen3_moe, small_config

pytestmark = pytest.mark.gpu

MOE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
DENSE = Path(__file__).parents[2] / "examples" / "tiny-qwen3"


def random_ids(vocab: int) -> list[list[int]]:
    """Return 16 sequences of odd lengths."""
    draw = random.Random(0)
    return [[draw.randrange(2, vocab) for _ in range(length)] for length in range(3, 200, 13)]


def solved_problems() -> list[list[int]]:
    """Return 32 held-out problems with answers: on random ids bf16 logits of 16 to 32 are 0.125 apart."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(MOE).encode  # both checkpoints have the same tokenizer
    problems = [json.loads(line) for line in (MOE / "heldout.jsonl").read_text().splitlines()[:32]]
    return [encode(f"Question: {one['question']}\nAnswer: {one['answer']}") for one in problems]


def compare(folder: Path, ids: list[list[int]], flags: dict[str, Any]) -> tuple[list[float], float, str]:
    """Return (absolute differences of scored logprobs, share of equal greedy tokens, atom's log)."""
    theirs, log = run_engine(folder, ids, {**flags, "model_impl": "sglang"})
    assert theirs is not None, log[-5000:]
    ours, log = run_engine(folder, ids, {**flags, "model_impl": "atom", "attention_backend": "fa3"})
    assert ours is not None, log[-5000:]
    found = [
        abs(a - b)
        for mine, other in zip(ours["scored"], theirs["scored"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    equal = [a == b for x, y in zip(ours["tokens"], theirs["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
    return found, sum(equal) / len(equal), log


def figures(found: list[float]) -> str:
    """Return count, mean, 99th percentile and maximum in words."""
    ranked = sorted(found)
    p99 = ranked[int(0.99 * (len(ranked) - 1))]
    return f"{len(found)} tokens: mean {sum(found) / len(found):.2e} p99 {p99:.2e} max {ranked[-1]:.2e}"


def test_block_fp8(tmp_path: Path) -> None:
    """A block-FP8 checkpoint: SGLang's quantised layers in our model, the logprobs of SGLang's model."""
    folder = tmp_path / "fp8"
    make_qwen3_moe(folder, small_config(fp8=True))
    found, equal, log = compare(folder, random_ids(2048), {"skip_tokenizer_init": True, "attention_backend": "fa3"})
    print(f"\nblock FP8, fa3, graphs on: {figures(found)}; equal greedy tokens {equal:.3f}")
    assert "atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM" in log
    assert sum(found) / len(found) < 0.02


@pytest.mark.parametrize("folder", [MOE, DENSE], ids=["moe", "dense"])
def test_bf16_with_graphs(folder: Path) -> None:
    """The trained checkpoints in bf16 under CUDA graphs: the logprobs and tokens of SGLang's model."""
    found, equal, log = compare(folder, solved_problems(), {"attention_backend": "fa3", "dtype": "bfloat16"})
    print(f"\n{folder.name} bf16, fa3, graphs on: {figures(found)}; equal greedy tokens {equal:.3f}")
    assert "atom_plugin.models.qwen3" in log
    assert sum(found) / len(found) < 0.05


@pytest.mark.parametrize("prefill_graphs", ["disabled", None], ids=["decode graphs", "all graphs"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_our_model_on_our_backend(prefill_graphs: str | None, kv_cache_dtype: str) -> None:
    """Norm, rope and store in the backend, under graphs: the logprobs and tokens of SGLang's model on FA3."""
    ids = solved_problems()
    common = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    theirs, log = run_engine(MOE, ids, {**common, "attention_backend": "fa3", "model_impl": "sglang"})
    assert theirs is not None, log[-5000:]
    ours, log = run_engine(MOE, ids, {**common, "model_impl": "atom", "cuda_graph_backend_prefill": prefill_graphs})
    assert ours is not None, log[-5000:]
    assert "The attention backend atom on sm90: paged_attention=triton, qk_norm_rope_store_kv=triton" in log
    found = [
        abs(a - b) for x, y in zip(ours["scored"], theirs["scored"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    equal = [a == b for x, y in zip(ours["tokens"], theirs["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
    print(f"\natom x atom, KV {kv_cache_dtype}, prefill graphs {prefill_graphs}: {figures(found)}", end="; ")
    print(f"equal greedy tokens {sum(equal) / len(equal):.3f}")
    assert sum(found) / len(found) < (0.05 if kv_cache_dtype == "auto" else 0.1)


def test_the_eager_row_forced_by_name() -> None:
    """Forced by name it runs on a GPU, without graphs: the logprobs of SGLang's model and backend."""
    ids = solved_problems()
    forced = "paged_attention=eager,store_kv=eager,qk_norm_rope_store_kv=eager"
    theirs, log = run_engine(MOE, ids, {"attention_backend": "fa3", "model_impl": "sglang", "dtype": "bfloat16"})
    assert theirs is not None, log[-5000:]
    flags = {"model_impl": "atom", "dtype": "bfloat16", "disable_cuda_graph": True}
    ours, log = run_engine(MOE, ids, flags, {"ATOM_PLUGIN_KERNELS": forced})
    assert ours is not None, log[-5000:]
    found = [
        abs(a - b) for x, y in zip(ours["scored"], theirs["scored"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    print(f"\neager rows forced, bf16: {figures(found)}")
    assert sum(found) / len(found) < 0.05
