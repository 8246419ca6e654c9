"""The rotary tables and softmax scales that the models use are transformers' own, for every published config.

Needs torch and SGLang: the tables come out of the call that the models make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, DeepseekV3Config, PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as apply_qwen35
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from atom_plugin.configs import DecoderSpec, KimiK2Spec, KimiLinearSpec, load_spec
from atom_plugin.layers.rope import make_rope, why_not_rope
from tests.configs import fixtures

#: Within a context, at its end, and beyond the length that yarn stretches (4,096 in a Kimi-K2).
POSITIONS = [0, 1, 63, 4095, 4096, 20000, 40959]
TURNING = [name for name in fixtures.understood() if not name.startswith(("moonshotai--Kimi-K3", "moonshotai--Kimi-L"))]
KIMI_K2 = [name for name in TURNING if "Kimi" in name]
QWEN35 = [name for name in TURNING if "Qwen3.5" in name]


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)


def transformers_config(name: str) -> PretrainedConfig:
    """Return transformers' config of the text model; it has no class for kimi_k2, whose layers are DeepSeek-V3's."""
    values = fixtures.read(name)
    if values["model_type"] == "kimi_k2":
        return DeepseekV3Config.from_dict(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return config.get_text_config()


def transformers_rotary(config: PretrainedConfig) -> Any:
    """Return transformers' rotary module of a text model."""
    return {
        "qwen3": Qwen3RotaryEmbedding,
        "qwen3_moe": Qwen3MoeRotaryEmbedding,
        "qwen3_5_text": Qwen3_5TextRotaryEmbedding,
        "qwen3_5_moe_text": Qwen3_5TextRotaryEmbedding,
        "deepseek_v3": DeepseekV3RotaryEmbedding,
    }[type(config).model_type](config)


def our_table(spec: DecoderSpec) -> torch.Tensor:
    """Return [positions, rotary_dim] of the module that the model of ``spec`` turns heads with."""
    is_kimi = isinstance(spec, KimiK2Spec)
    head_dim = spec.qk_rope_head_dim if is_kimi else vars(spec)["head_dim"]
    rotary = make_rope(
        vars(spec)["rope"], head_dim=head_dim, max_position=spec.max_position_embeddings, is_neox=not is_kimi
    )
    assert rotary.is_neox_style is not is_kimi
    return rotary.cos_sin_cache


@pytest.mark.parametrize("name", TURNING)
def test_tables(name: str) -> None:
    """Cosines and sines of each frequency, and the inverse frequencies themselves where positions are large."""
    spec, config = load_spec(fixtures.path(name)), transformers_config(name)
    assert why_not_rope(vars(spec)["rope"]) == []
    positions = torch.tensor([*POSITIONS, spec.max_position_embeddings - 1])
    rotary = transformers_rotary(config)
    assert rotary.attention_scaling == vars(spec)["rope"].cos_sin_scale
    cos, sin = rotary(torch.zeros(1, 1, dtype=torch.float64), positions[None])
    half = vars(spec)["rope"].rotary_dim // 2
    cache = our_table(spec)
    assert cache.shape == (spec.max_position_embeddings, 2 * half) and rotary.inv_freq.shape == (half,)
    ours = cache[positions].double()
    # fp32 angles of some 1e5 carry an error of 1e-2 in either library; up to 41k positions it is 4e-3
    tolerance = torch.tensor([5e-3] * len(POSITIONS) + [4e-2])[:, None].expand(-1, half)
    assert ((ours[:, :half] - cos[0, :, :half]).abs() <= tolerance).all()
    assert ((ours[:, half:] - sin[0, :, :half]).abs() <= tolerance).all()
    # at position 1 the angle is the inverse frequency, which a sine keeps to the last bits
    angle = torch.atan2(ours[1, half:], ours[1, :half])
    torch.testing.assert_close(angle, rotary.inv_freq.double(), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", KIMI_K2)
def test_softmax_scale_of_kimi_k2(name: str) -> None:
    """yarn's magnitude squared times the inverse root of a head, as transformers' attention has it."""
    spec, config = load_spec(fixtures.path(name)), transformers_config(name)
    assert isinstance(spec, KimiK2Spec)
    with torch.device("meta"):
        attention = DeepseekV3Attention(config, layer_idx=0)
    assert spec.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert spec.softmax_scale > 1.8 * spec.qk_head_dim**-0.5  # mscale does come in: (0.1 ln 32 + 1) ** 2 = 1.81


@pytest.mark.parametrize("name", [name for name in fixtures.understood() if "Kimi-Linear" in name])
def test_softmax_scale_of_kimi_linear(name: str) -> None:
    """Nothing turns, so there is no yarn."""
    spec, config = load_spec(fixtures.path(name)), transformers_config(name)
    assert isinstance(spec, KimiLinearSpec)
    with torch.device("meta"):
        attention = KimiLinearAttention(config, layer_idx=3)
    assert spec.softmax_scale == attention.scaling


@pytest.mark.parametrize("name", QWEN35)
def test_sections_of_qwen35(name: str) -> None:
    """With different positions of time, height and width, heads turn as transformers turns them."""
    spec, config = load_spec(fixtures.path(name)), transformers_config(name)
    rotary = make_rope(vars(spec)["rope"], head_dim=vars(spec)["head_dim"], max_position=spec.max_position_embeddings)
    positions = torch.tensor([[5, 6, 700], [0, 63, 41], [9, 2, 300]])
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(3, heads * config.head_dim, generator=generator) for heads in (4, 2))
    ours = rotary.forward_native(positions, query.clone(), key.clone())
    cos, sin = transformers_rotary(config)(query, positions[:, None])
    heads = [x.view(1, 3, -1, config.head_dim).transpose(1, 2) for x in (query, key)]
    theirs = [x.transpose(1, 2).reshape(3, -1) for x in apply_qwen35(*heads, cos, sin)]
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.reshape(3, -1), their, atol=1e-3, rtol=0)
    assert not torch.allclose(ours[0].reshape(3, -1), query)
