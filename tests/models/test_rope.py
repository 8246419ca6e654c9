"""The cosines and sines that our models use are transformers', for every rope that the configs let through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from atom_plugin.configs import RopeSpec
from atom_plugin.layers.rope import make_rope

HEAD_DIM, ORIGINAL = 64, 4096
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, own betas": {
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}
POSITIONS = torch.tensor([0, 1, 63, 4095, 4096, 12345])


@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin(name: str) -> None:
    """At positions 0, 63, 4,095 and beyond the original length."""
    rope_type, scaling = name.split(",")[0], SCALINGS[name]
    spec = RopeSpec(theta=1e6, rope_type=rope_type, scaling=tuple(sorted(scaling.items())))
    torch.set_default_dtype(torch.float32)
    cache = make_rope(spec, head_dim=HEAD_DIM, max_position=16384).cos_sin_cache[POSITIONS]
    config = Qwen3Config(
        head_dim=HEAD_DIM,
        max_position_embeddings=ORIGINAL * 4,
        rope_parameters={"rope_theta": 1e6, "rope_type": rope_type, **scaling},
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1), POSITIONS[None])
    half = HEAD_DIM // 2
    torch.testing.assert_close(cache[:, :half], cos[0, :, :half], atol=2e-3, rtol=0)
    torch.testing.assert_close(cache[:, half:], sin[0, :, :half], atol=2e-3, rtol=0)
