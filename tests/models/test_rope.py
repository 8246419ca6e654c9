"""Cosines and sines of make_rope are transformers', for every rope that it takes; and it refuses the others by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from atom_plugin.configs import RopeSpec
from atom_plugin.layers.rope import make_rope, why_not_rope

HEAD_DIM, ORIGINAL = 64, 4096
YARN = {"factor": 8.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, own betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "yarn, not truncated": {**YARN, "truncate": False},
}
REFUSED: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.5},
}
POSITIONS = torch.tensor([0, 1, 63, 4095, 4096, 12345])


def spec_of(name: str, scaling: dict[str, Any]) -> RopeSpec:
    """Return the spec of a rope over whole heads."""
    pairs = tuple(sorted(scaling.items()))
    return RopeSpec(theta=1e6, rope_type=name.split(",")[0], scaling=pairs, rotary_dim=HEAD_DIM, sections=None)


def transformers_table(name: str, scaling: dict[str, Any]) -> torch.Tensor:
    """Return transformers' cosines and sines at POSITIONS, of each frequency once."""
    config = Qwen3Config(
        head_dim=HEAD_DIM,
        max_position_embeddings=ORIGINAL * 4,
        rope_parameters={"rope_theta": 1e6, "rope_type": name.split(",")[0], **scaling},
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1), POSITIONS[None])
    return torch.cat([cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]], dim=-1)


@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin(name: str) -> None:
    """At positions 0, 63, 4,095 and beyond the original length."""
    torch.set_default_dtype(torch.float32)
    spec = spec_of(name, SCALINGS[name])
    cache = make_rope(spec, head_dim=HEAD_DIM, max_position=16384).cos_sin_cache[POSITIONS]
    torch.testing.assert_close(cache, transformers_table(name, SCALINGS[name]), atol=2e-3, rtol=0)
    assert cache[0, 0] == pytest.approx(spec.cos_sin_scale)


@pytest.mark.parametrize("name", REFUSED)
def test_what_sglang_computes_in_another_way(name: str) -> None:
    """Refused by name, and with good reason: get_rope's table is not transformers'; once it is, let it through."""
    torch.set_default_dtype(torch.float32)
    spec = spec_of(name, REFUSED[name])
    word = name.split(", ")[-1]
    assert len(why_not_rope(spec)) == 1 and word in why_not_rope(spec)[0]
    with pytest.raises(ValueError, match=f"{word}.* is not served"):
        make_rope(spec, head_dim=HEAD_DIM, max_position=16384)
    scaling = {"rope_type": spec.rope_type, **REFUSED[name]}
    cache = get_rope(HEAD_DIM, HEAD_DIM, 16384, 1e6, rope_scaling=scaling).cos_sin_cache[POSITIONS]
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(cache, transformers_table(name, REFUSED[name]), atol=2e-3, rtol=0)
