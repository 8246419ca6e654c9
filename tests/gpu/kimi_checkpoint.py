"""Random Kimi-K2 checkpoints of four layers with latent rows of the published size, in bf16, block FP8 and INT4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM

from tests.gpu.qwen3_checkpoint import BLOCK, quantize

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf_configs"
PUBLISHED = {"bf16": "Kimi-K2-Instruct", "fp8": "Kimi-K2-Instruct", "int4": "Kimi-K2-Thinking"}
LAYERS, HIDDEN, HEADS, Q_RANK, EXPERTS, WIDTH, VOCAB, GROUP = 4, 1024, 8, 512, 16, 256, 2048, 32
Weights = Literal["bf16", "fp8", "int4"]


def config_of(weights: Weights) -> dict[str, Any]:
    """Return the published config with fewer and narrower layers."""
    config: dict[str, Any] = json.loads((FIXTURES / f"moonshotai--{PUBLISHED[weights]}.json").read_text())
    config.pop("auto_map")
    if weights == "bf16":
        config.pop("quantization_config")
    return config | {
        "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK, "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": WIDTH,
        "intermediate_size": 1024, "vocab_size": VOCAB, "max_position_embeddings": 16384, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return compressed-tensors' three tensors of a weight in INT4: groups of 32 columns, eight numbers an int32."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(dim=-1).clamp(min=1e-12) / 7.0
    numbers = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7).view(rows, columns).int() + 8
    shifts = 4 * torch.arange(8, dtype=torch.int64)
    words = (numbers.view(rows, columns // 8, 8).long() << shifts).sum(dim=-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": words, "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor(weight.shape)}


def unpacked(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return in fp32 what the three tensors of ``packed`` stand for."""
    rows, columns = parts["weight_shape"].tolist()
    numbers = (parts["weight_packed"].unsqueeze(-1) >> (4 * torch.arange(8, dtype=torch.int32))) & 15
    groups = (numbers.view(rows, columns // GROUP, GROUP) - 8).float() * parts["weight_scale"].float().unsqueeze(-1)
    return groups.view(rows, columns)


def widened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights in fp32: what its quantised numbers and scales stand for."""
    wide: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if part == "weight_packed":
            parts = {one: tensors[f"{base}.{one}"] for one in ("weight_packed", "weight_scale", "weight_shape")}
            wide[f"{base}.weight"] = unpacked(parts)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{base}.weight_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            wide[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif part in ("weight", "e_score_correction_bias"):
            wide[name] = tensor.float()
    return wide


def oracle_of(folder: Path) -> DeepseekV3ForCausalLM:
    """Return transformers' model in fp32 with the weights that a checkpoint of ``make_kimi`` stands for."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    wide = folder.with_name(f"{folder.name}-fp32")
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3", "torch_dtype": "float32"}))
    save_file(widened(load_file(folder / "model.safetensors")), wide / "model.safetensors", metadata={"format": "pt"})
    model, report = DeepseekV3ForCausalLM.from_pretrained(
        wide, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return model.eval()


@torch.no_grad()
def scores_of(oracle: DeepseekV3ForCausalLM, ids: list[int], first: int) -> list[float]:
    """Return the logprobs of the tokens from place ``first`` on, each after all before it."""
    given = torch.tensor([ids], device=oracle.device)
    logprobs = oracle(given).logits[0, :-1].log_softmax(-1)
    scores: list[float] = logprobs.gather(1, given[0, 1:, None])[first - 1 :, 0].tolist()
    return scores


def make_kimi(folder: Path, weights: Weights) -> None:
    """Write one whose attention is peaky; the three kinds hold the same numbers, but for their rounding."""
    torch.manual_seed(0)
    config = config_of(weights)
    rank, rope, nope, v_dim = (
        config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weight = gain * torch.randn(rows, columns) / columns**0.5
        if weights == "fp8":
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantize(weight)
        elif weights == "int4" and ".mlp.experts." in name:
            tensors.update({f"{name}.{part}": value for part, value in packed(weight).items()})
        else:
            tensors[f"{name}.weight"] = weight.bfloat16()

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, HIDDEN)
        linear(f"{name}.up_proj", width, HIDDEN)
        linear(f"{name}.down_proj", HIDDEN, width)

    tensors["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN).bfloat16()
    tensors["lm_head.weight"] = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).bfloat16()
    tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        for name, size in (
            (f"{prefix}.input_layernorm", HIDDEN), (f"{prefix}.post_attention_layernorm", HIDDEN),
            (f"{attention}.q_a_layernorm", Q_RANK), (f"{attention}.kv_a_layernorm", rank),
        ):  # fmt: skip
            tensors[f"{name}.weight"] = (0.8 + 0.4 * torch.rand(size)).bfloat16()
        linear(f"{attention}.q_a_proj", Q_RANK, HIDDEN)
        linear(f"{attention}.q_b_proj", HEADS * (nope + rope), Q_RANK, gain=2.0)
        linear(f"{attention}.kv_a_proj_with_mqa", rank + rope, HIDDEN, gain=1.5)
        linear(f"{attention}.kv_b_proj", HEADS * (nope + v_dim), rank)
        linear(f"{attention}.o_proj", HIDDEN, HEADS * v_dim)
        if layer < config["first_k_dense_replace"]:
            mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        tensors[f"{prefix}.mlp.gate.weight"] = (torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5).bfloat16()
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = 0.1 * torch.randn(EXPERTS)
        for expert in range(EXPERTS):
            mlp(f"{prefix}.mlp.experts.{expert}", WIDTH)
        mlp(f"{prefix}.mlp.shared_experts", WIDTH)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
