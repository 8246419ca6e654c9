"""Quantised Kimi-K2 checkpoints reach SGLang's own quantised layers: what is built, and what is loaded into it.

The layers do not run on a CPU; that they are the ones whose tensors the weight table names does not need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from transformers import DeepseekV3Config

from atom_plugin.models.kimi_k2 import KimiK2ForCausalLM, KimiK25ForConditionalGeneration
from tests.configs import fixtures
from tests.models import latent_world, tiny_kimi

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with latent_world.one_process():
        yield


def build(model_class: type[KimiK2ForCausalLM], quantization: dict[str, Any], **changes: Any) -> KimiK2ForCausalLM:
    """Return a model of a config that says ``quantization``, in bf16 as SGLang builds it."""
    config = tiny_kimi.make_config(quantization_config=quantization, **changes)
    config.model_type, config.architectures = "kimi_k2", ["DeepseekV3ForCausalLM"]
    if model_class is KimiK25ForConditionalGeneration:
        text, config = config, DeepseekV3Config()
        config.model_type, config.architectures = "kimi_k25", ["KimiK25ForConditionalGeneration"]
        config = Outer(text)
    raw = {**quantization, "packed_modules_mapping": model_class.packed_modules_mapping}
    quant_class = Fp8Config if quantization["quant_method"] == "fp8" else CompressedTensorsConfig
    torch.set_default_dtype(torch.bfloat16)
    try:
        return model_class(config, quant_class.from_config(raw))
    finally:
        torch.set_default_dtype(torch.float32)


class Outer:
    """A multimodal config, as far as a model reads it."""

    def __init__(self, text: DeepseekV3Config) -> None:
        self.text = text

    def get_text_config(self) -> DeepseekV3Config:
        """Return the config of the language model."""
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "tie_word_embeddings": False,
            "text_config": self.text,
        }


def checkpoint(model: KimiK2ForCausalLM) -> dict[str, torch.Tensor]:
    """Return random tensors of every name, shape and dtype that the table has."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, row in (table := type(model).checkpoint_table(model.spec)).entries.items():
        (dtype, *_) = table.dtypes(name) or ()
        if dtype == torch.int32:
            tensors[name] = torch.randint(0, 2**31 - 1, row.shape, dtype=dtype, generator=generator)
        else:
            tensors[name] = torch.randn(row.shape, generator=generator).to(dtype)
    return tensors


@pytest.mark.parametrize("model_class", [KimiK2ForCausalLM, KimiK25ForConditionalGeneration])
@pytest.mark.parametrize("published", ["moonshotai--Kimi-K2-Thinking", "moonshotai--Kimi-K2.5"])
def test_int4_experts(published: str, model_class: type[KimiK2ForCausalLM]) -> None:
    """Routed experts alone are INT4, under either name of the text model, and SGLang's loader gets every tensor."""
    config = fixtures.read(published)
    quantization = config.get("text_config", config)["quantization_config"]
    model = build(model_class, quantization, moe_intermediate_size=64)
    tensors = checkpoint(model)
    model.load_weights(tensors.items())
    experts = model.model.layers[1].mlp.experts
    prefix = f"{model.checkpoint_prefix}model.layers.1.mlp.experts"
    packed = experts.w13_weight_packed[3].t()
    assert torch.equal(packed[:64], tensors[f"{prefix}.3.gate_proj.weight_packed"])
    assert torch.equal(packed[64:], tensors[f"{prefix}.3.up_proj.weight_packed"])
    assert torch.equal(experts.w2_weight_scale[15].t(), tensors[f"{prefix}.15.down_proj.weight_scale"])
    assert_spec_agrees(model)


def test_fp8_blocks() -> None:
    """Codes and scales of every linear layer but kv_b_proj, whose product is loaded."""
    model = build(KimiK2ForCausalLM, FP8, q_lora_rank=128, intermediate_size=128, moe_intermediate_size=128)
    tensors = checkpoint(model)
    model.load_weights(tensors.items())
    attention, prefix = model.model.layers[2].self_attn, "model.layers.2.self_attn"
    both = attention.fused_qkv_a_proj_with_mqa
    assert torch.equal(both.weight[128:], tensors[f"{prefix}.kv_a_proj_with_mqa.weight"])
    assert torch.equal(both.weight_scale_inv[1:], tensors[f"{prefix}.kv_a_proj_with_mqa.weight_scale_inv"].float())
    scale = tensors[f"{prefix}.kv_b_proj.weight_scale_inv"][0, 0].float()
    product = tensors[f"{prefix}.kv_b_proj.weight"][:128].float() * scale
    assert torch.equal(attention.kv_b_proj.weight[:128], product.bfloat16())
    assert model.model.layers[1].mlp.experts.w13_weight.dtype == torch.float8_e4m3fn
    assert_spec_agrees(model)


def assert_spec_agrees(model: KimiK2ForCausalLM) -> None:
    """Assert that SGLang quantises exactly the layers that our spec says are quantised."""
    compared = 0
    for name, module in model.named_modules():
        method = vars(module).get("quant_method")
        if (
            method is None
            or not name.startswith("model.layers")
            or name.endswith(("kv_b_proj", "attn_mha", "attn_mqa"))
        ):
            continue
        assert ("Unquantized" not in type(method).__name__) == model.spec.quantization.covers(name), name
        compared += 1
    assert compared >= 3 * 3
