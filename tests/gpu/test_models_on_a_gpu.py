"""Our model classes and our backend on a GPU, beside SGLang's own on the same weights: bf16, graphs, block FP8."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

MOE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
DENSE = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
BLOCK = 128
PROBE = Path(__file__).parents[1] / "e2e"


def run_engine(
    folder: Path,
    ids: list[list[int]],
    flags: dict[str, Any],
    env: dict[str, str] | None = None,
    *,
    tails: Sequence[dict[str, Any]] = (),
) -> Any:
    """Run one engine in a process of its own and return (its result or None, what it printed).

    ``tails``: {"cached": length of a prefix that is sent alone first, "ids": the prefix and what follows}.
    """
    engine = {
        "mem_fraction_static": 0.5, "max_total_tokens": 65536, "log_level": "info",
        "cuda_graph_backend_prefill": "disabled", **flags,
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_logprobs.py"))],
        input=json.dumps(
            {"engine": {"model_path": str(folder), **engine}, "ids": ids, "new_tokens": 24, "tails": list(tails)}
        ),
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=500,
    )
    log = ran.stdout + ran.stderr
    return (json.loads(ran.stdout.rsplit("RESULT", 1)[1]) if "RESULT" in ran.stdout else None), log


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 weight, fp32 scale a block of 128 x 128): weight = quantised * scale."""
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448.0
    quantized = (blocks / scale[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scale


def make_block_fp8(folder: Path) -> None:
    """Write a random 4-layer Qwen3-MoE with peaky attention whose projections and experts are block FP8."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    hidden, heads, kv_heads, head_dim, experts, width, vocab = 512, 8, 2, 128, 16, 256, 2048
    config = json.loads((MOE / "config.json").read_text()) | {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "num_experts": experts, "moe_intermediate_size": width, "intermediate_size": 1024, "vocab_size": vocab,
        "num_hidden_layers": 4, "num_experts_per_tok": 4, "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantize(
            torch.randn(rows, columns) / columns**0.5
        )

    tensors["model.embed_tokens.weight"] = torch.randn(vocab, hidden).bfloat16()
    tensors["lm_head.weight"] = (torch.randn(vocab, hidden) / hidden**0.5).bfloat16()
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden).bfloat16()
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{prefix}.self_attn.{name}_proj", rows * head_dim, hidden)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = torch.full((head_dim,), 2.0).bfloat16()
        tensors[f"{prefix}.mlp.gate.weight"] = torch.randn(experts, hidden).bfloat16()
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                linear(f"{prefix}.mlp.experts.{expert}.{name}", width, hidden)
            linear(f"{prefix}.mlp.experts.{expert}.down_proj", hidden, width)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


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
    make_block_fp8(folder)
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
