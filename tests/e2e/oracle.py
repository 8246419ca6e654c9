"""Logprobs and greedy answers by Hugging Face transformers, the oracle that we did not write."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKPOINTS = {
    "moe": EXAMPLES / "tiny-qwen3-moe",
    "dense": EXAMPLES / "tiny-qwen3",
    "kimi": EXAMPLES / "tiny-kimi-k2",
}


@functools.cache
def problems(count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` held-out word problems."""
    lines = (CHECKPOINTS["moe"] / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


@functools.cache
def tokenizer(checkpoint: str) -> Any:
    """Return the checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(CHECKPOINTS[checkpoint])


@functools.cache
def model(checkpoint: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the checkpoint in transformers, eager attention."""
    folder = CHECKPOINTS[checkpoint]
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config_of(folder), dtype=dtype, attn_implementation="eager"
    ).eval()


def config_of(folder: Path) -> Any:
    """Return transformers' config; it finds the experts of a Kimi-K2 by the model_type deepseek_v3 alone."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "kimi_k2":
        return AutoConfig.from_pretrained(folder)
    config = DeepseekV3Config.from_pretrained(folder)
    config.model_type = DeepseekV3Config.model_type
    return config


@torch.no_grad()
def forward(checkpoint: str, sequences: Sequence[Sequence[int]], **kwargs: Any) -> Any:
    """Yield transformers' output for each sequence by itself, so that padding cannot matter."""
    for ids in sequences:
        yield model(checkpoint)(torch.tensor([list(ids)]), **kwargs)


def logprobs(checkpoint: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return, teacher-forced in fp32, the logprob of each token of each sequence but the first."""
    return [
        out.logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(list(ids)[1:])[:, None])[:, 0].tolist()
        for ids, out in zip(sequences, forward(checkpoint, sequences), strict=True)
    ]


def router_margins(checkpoint: str, ids: Sequence[int], top_k: int) -> torch.Tensor:
    """Return [layers, tokens]: by how much the last taken expert's probability exceeds the first one left out."""
    (out,) = forward(checkpoint, [ids], output_router_logits=True)
    ranked = torch.stack(out.router_logits).softmax(-1).sort(-1, descending=True).values
    return ranked[..., top_k - 1] - ranked[..., top_k]
