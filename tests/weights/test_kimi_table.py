"""The weight table of Kimi-K2: published names and shapes, FP8 with its scales, INT4, Kimi-K2.5, and draft layers."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import nn

from atom_plugin.configs import BlockFp8, KimiK2Spec, load_spec
from atom_plugin.models.kimi_k2 import KimiK2ForCausalLM, KimiK25ForConditionalGeneration
from atom_plugin.weights import CheckpointTable, Shape, WeightError, dequantise, load_checkpoint
from tests.configs import fixtures

FP8, INT4 = "moonshotai--Kimi-K2-Instruct", "moonshotai--Kimi-K2-Thinking"
#: Layer 0, which is dense, of the published Kimi-K2-Instruct, as its index and headers have it.
DENSE_LAYER: dict[str, Shape] = {
    "input_layernorm.weight": (7168,),
    "mlp.down_proj.weight": (7168, 18432),
    "mlp.down_proj.weight_scale_inv": (56, 144),
    "mlp.gate_proj.weight": (18432, 7168),
    "mlp.gate_proj.weight_scale_inv": (144, 56),
    "mlp.up_proj.weight": (18432, 7168),
    "mlp.up_proj.weight_scale_inv": (144, 56),
    "post_attention_layernorm.weight": (7168,),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_proj_with_mqa.weight_scale_inv": (5, 56),
    "self_attn.kv_b_proj.weight": (16384, 512),
    "self_attn.kv_b_proj.weight_scale_inv": (128, 4),
    "self_attn.o_proj.weight": (7168, 8192),
    "self_attn.o_proj.weight_scale_inv": (56, 64),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_proj.weight_scale_inv": (12, 56),
    "self_attn.q_b_proj.weight": (12288, 1536),
    "self_attn.q_b_proj.weight_scale_inv": (96, 12),
}


def spec_of(name: str) -> Any:
    """Return the spec of a published config."""
    return load_spec(fixtures.path(name))


def small(**changes: Any) -> KimiK2Spec:
    """Return a spec of one dense layer whose widths no FP8 block ends with."""
    return dataclasses.replace(
        spec_of(FP8),
        hidden_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        q_lora_rank=256,
        kv_lora_rank=160,
        qk_nope_head_dim=40,
        qk_rope_head_dim=24,
        v_head_dim=56,
        intermediate_size=128,
        **changes,
    )


def in_layer(table: CheckpointTable, prefix: str) -> dict[str, Shape]:
    """Return name -> shape of the tensors below ``prefix``."""
    return {name.removeprefix(prefix): row.shape for name, row in table.entries.items() if name.startswith(prefix)}


def test_a_dense_layer_and_one_with_experts_as_published() -> None:
    """Every tensor and every shape; the router's two are not quantised."""
    table = KimiK2ForCausalLM.checkpoint_table(spec_of(FP8))
    assert in_layer(table, "model.layers.0.") == DENSE_LAYER
    layer = in_layer(table, "model.layers.60.")
    assert {name: shape for name, shape in layer.items() if name.startswith("self_attn")} == {
        name: shape for name, shape in DENSE_LAYER.items() if name.startswith("self_attn")
    }
    assert layer["mlp.gate.weight"] == (384, 7168)
    assert layer["mlp.gate.e_score_correction_bias"] == (384,)
    assert "mlp.gate.weight_scale_inv" not in layer
    assert layer["mlp.shared_experts.gate_proj.weight"] == (2048, 7168)
    assert layer["mlp.experts.383.down_proj.weight"] == (7168, 2048)
    assert layer["mlp.experts.383.down_proj.weight_scale_inv"] == (56, 16)
    assert len(layer) == 12 + 2 + 2 + 6 + 384 * 6
    assert table.entries["lm_head.weight"].shape == (163840, 7168) and "lm_head.weight_scale_inv" not in table.entries


def test_int4_experts_as_published() -> None:
    """Three tensors for each projection of a routed expert; all else as it is."""
    table = KimiK2ForCausalLM.checkpoint_table(spec_of(INT4))
    layer = in_layer(table, "model.layers.1.")
    up = {name: shape for name, shape in layer.items() if name.startswith("mlp.experts.7.up_proj")}
    assert up == {
        "mlp.experts.7.up_proj.weight_packed": (2048, 896),
        "mlp.experts.7.up_proj.weight_scale": (2048, 224),
        "mlp.experts.7.up_proj.weight_shape": (2,),
    }
    assert layer["self_attn.kv_b_proj.weight"] == (16384, 512)
    assert not [name for name in layer if "experts.7." not in name and "packed" in name and "mlp.experts" not in name]
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    assert table.dtypes(f"{name}_packed") == (torch.int32,)
    assert table.dtypes(f"{name}_shape") == (torch.int32, torch.int64)
    assert torch.bfloat16 in (table.dtypes(f"{name}_scale") or ())


def test_kimi_k25_has_a_prefix_and_a_half_that_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Our names begin after it, and vision is counted; one of our names without the prefix has no place."""
    table = KimiK25ForConditionalGeneration.checkpoint_table(spec_of("moonshotai--Kimi-K2.5"))
    assert all(name.startswith("language_model.") for name in table.entries)
    row = table.entries["language_model.model.layers.0.self_attn.q_b_proj.weight"]
    assert row.into[0].param == "model.layers.0.self_attn.q_b_proj.weight"
    present = {name: row.shape for name, row in table.entries.items()}
    assert table.problems({**present, "vision_tower.encoder.blocks.0.norm0.bias": (3,), "mm_projector.x": (1,)}) == []
    assert table.problems({**present, "model.norm.weight": (7168,)}) == [
        "1 tensors that the model has no place for: model.norm.weight"
    ]


def test_draft_layers_are_left_out_only_where_the_config_has_them(caplog: pytest.LogCaptureFixture) -> None:
    """Layer 61 of a config that says so is counted and logged; otherwise it has no place."""
    spec = small(quantization=None)
    drafts = {"model.layers.1.eh_proj.weight": torch.zeros(1), "model.layers.1.enorm.weight": torch.zeros(1)}
    for has_drafts in (True, False):
        table = KimiK2ForCausalLM.checkpoint_table(dataclasses.replace(spec, num_draft_layers=int(has_drafts)))
        model, tensors = complete(table)
        with caplog.at_level(logging.INFO):
            if has_drafts:
                load_checkpoint(model, {**tensors, **drafts}.items(), table)
                assert "2 tensors of the checkpoint are not loaded: the model has no part for multi-tok" in caplog.text
            else:
                with pytest.raises(WeightError, match=r"no place for: model\.layers\.1\."):
                    load_checkpoint(model, {**drafts, **tensors}.items(), table)
                caplog.clear()
                load_checkpoint(model, tensors.items(), table)
                assert "are not loaded" not in caplog.text


def complete(table: CheckpointTable) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a module with a parameter for each destination of ``table``, as NaN, and tensors that fill it."""
    rows: dict[str, list[Shape]] = {}
    for row in table.entries.values():
        for target in row.into:
            rows.setdefault(target.param, []).append(row.shape)
    model = nn.Module()
    for name, shapes in rows.items():
        owner = model
        for part in name.split(".")[:-1]:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        parameter = nn.Parameter(torch.full(whole, torch.nan), requires_grad=False)
        if "gate_up_proj" in name:
            parameter.weight_loader = load_half
        owner.register_parameter(name.rpartition(".")[2], parameter)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, row in table.entries.items():
        tensor = torch.randn(row.shape, generator=generator)
        (dtype, *_) = table.dtypes(name) or ()
        tensors[name] = tensor.to(dtype) if dtype == torch.float8_e4m3fn else tensor.abs() + 0.5
    return model, tensors


def load_half(parameter: nn.Parameter, tensor: torch.Tensor, shard: int) -> None:
    """Copy one of the two tensors of a merged layer, as SGLang's loader does."""
    parameter.data[shard * len(tensor) :][: len(tensor)].copy_(tensor)


@pytest.mark.parametrize("backwards", [False, True])
def test_fp8_attention_is_loaded(backwards: bool) -> None:
    """Both first projections in one parameter, codes and scales; kv_b_proj as the product, in either order of files."""
    spec = small(quantization=BlockFp8(block=(128, 128), unquantized=frozenset()))
    table = KimiK2ForCausalLM.checkpoint_table(spec)
    model, tensors = complete(table)
    items = list(tensors.items())
    load_checkpoint(model, reversed(items) if backwards else items, table)
    prefix = "model.layers.0.self_attn"
    loaded = dict(model.named_parameters())
    assert not [name for name, parameter in loaded.items() if parameter.isnan().any()]
    both = loaded[f"{prefix}.fused_qkv_a_proj_with_mqa.weight"]
    torch.testing.assert_close(both[:256], tensors[f"{prefix}.q_a_proj.weight"].float())
    torch.testing.assert_close(both[256:], tensors[f"{prefix}.kv_a_proj_with_mqa.weight"].float())
    scales = loaded[f"{prefix}.fused_qkv_a_proj_with_mqa.weight_scale_inv"]
    torch.testing.assert_close(scales[:2], tensors[f"{prefix}.q_a_proj.weight_scale_inv"])
    torch.testing.assert_close(scales[2:], tensors[f"{prefix}.kv_a_proj_with_mqa.weight_scale_inv"])
    weight, scale = (tensors[f"{prefix}.kv_b_proj.weight{end}"] for end in ("", "_scale_inv"))
    got = loaded[f"{prefix}.kv_b_proj.weight"]
    assert f"{prefix}.kv_b_proj.weight_scale_inv" not in loaded
    for row, column in ((0, 0), (127, 127), (128, 127), (191, 159), (130, 40)):
        assert got[row, column] == weight[row, column].float() * scale[row // 128, column // 128]


def test_a_scale_without_its_weight_is_missed() -> None:
    """Half of a pair is loaded nowhere, and named."""
    table = KimiK2ForCausalLM.checkpoint_table(small(quantization=BlockFp8(block=(128, 128), unquantized=frozenset())))
    model, tensors = complete(table)
    del tensors["model.layers.0.self_attn.kv_b_proj.weight"]
    with pytest.raises(WeightError, match=r"1 missing tensors: model\.layers\.0\.self_attn\.kv_b_proj\.weight"):
        load_checkpoint(model, tensors.items(), table)


def test_dequantise_covers_blocks_that_are_cut_off() -> None:
    """Blocks of 2 by 3 over 3 by 4."""
    weight = torch.ones(3, 4, dtype=torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert dequantise(weight, scales, (2, 3)).tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]
