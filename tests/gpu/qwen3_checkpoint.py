"""Random Qwen3-MoE checkpoints with peaky attention, in bf16 and in FP8 blocks, one file a layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Rows and columns of a block that shares a scale.
BLOCK = 128
TINY = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
QUANTIZATION = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
_INDEX = "model.safetensors.index.json"


def small_config(*, fp8: bool) -> dict[str, Any]:
    """Return the config of four layers of 16 experts, which any machine makes in seconds."""
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text()) | {
        "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 16,
        "moe_intermediate_size": 256, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 4,
        "num_experts_per_tok": 4, "dtype": "bfloat16",
    }  # fmt: skip
    return config | ({"quantization_config": QUANTIZATION} if fp8 else {})


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 weight, fp32 scale a block of 128 x 128): weight = quantised * scale."""
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, device=weight.device)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448.0
    quantized = (blocks / scale[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scale


def make_qwen3_moe(folder: Path, config: Mapping[str, Any], *, device: str = "cpu") -> None:
    """Write a checkpoint of ``config`` whose weights are drawn on ``device``.

    With a ``quantization_config`` projections and experts are FP8 blocks, else bf16; both hold the same numbers, but
    for their rounding. Norms of q and k multiply by 2, so that scores spread by 4 and a token attends to few others.
    """
    torch.manual_seed(0)
    hidden, head_dim, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    ends = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, device=device).bfloat16(),
        "lm_head.weight": (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    folder.mkdir()
    places = _write(folder, "ends", ends)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors: dict[str, torch.Tensor] = {}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden).bfloat16()
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = torch.full((head_dim,), 2.0).bfloat16()
        tensors |= _projections(prefix, config, device)
        places |= _write(folder, f"layer{layer}", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _projections(prefix: str, config: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Return the drawn weights of one layer."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    is_fp8 = "quantization_config" in config
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        weight = torch.randn(rows, columns, device=device) / columns**0.5
        if is_fp8:
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantize(weight)
        else:
            tensors[f"{name}.weight"] = weight.bfloat16()

    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        linear(f"{prefix}.self_attn.{name}_proj", rows * head_dim, hidden)
    linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim)
    tensors[f"{prefix}.mlp.gate.weight"] = torch.randn(experts, hidden, device=device).bfloat16()
    for expert in range(experts):
        for name in ("gate_proj", "up_proj"):
            linear(f"{prefix}.mlp.experts.{expert}.{name}", width, hidden)
        linear(f"{prefix}.mlp.experts.{expert}.down_proj", hidden, width)
    return tensors


def _write(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write one file and return where each of its tensors is."""
    path = folder / f"model-{name}.safetensors"
    save_file({one: tensor.cpu() for one, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return dict.fromkeys(tensors, path.name)
