"""Loading by the table: any order, KV scales, and every loud end. Real models are loaded by the end-to-end tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atom_plugin.configs import load_spec
from atom_plugin.weights import WeightError, load_checkpoint, set_kv_scale

MOE = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Return the tensors of the tiny MoE."""
    return load_file(MOE / "model.safetensors")


@pytest.fixture
def small() -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield a module with an embedding and a final norm, and the table of just these."""
    from atom_plugin.weights import CheckpointTable

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = torch.nn.Embedding(4, 2)
    model.model.norm = torch.nn.LayerNorm(2, bias=False)
    model.lm_head = model.model.embed_tokens
    table = CheckpointTable(None)
    table.embedding(4, 2, tied=True)
    table.vector("model.norm.weight", 2)
    yield model, table


def complete() -> dict[str, torch.Tensor]:
    """Return a checkpoint that fills ``small``."""
    return {"model.embed_tokens.weight": torch.arange(8.0).view(4, 2), "model.norm.weight": torch.tensor([3.0, 4.0])}


def test_any_order(small: tuple[torch.nn.Module, Any]) -> None:
    """Every order fills the same parameters."""
    model, table = small
    items = list(complete().items())
    random.Random(0).shuffle(items)
    load_checkpoint(model, items, table)
    torch.testing.assert_close(model.model.embed_tokens.weight.data, complete()["model.embed_tokens.weight"])
    torch.testing.assert_close(model.model.norm.weight.data, complete()["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "1 missing tensors: model.norm.weight"),
        ({"model.extra.weight": torch.zeros(1)}, "no place for: model.extra.weight"),
        ({"model.norm.weight": torch.zeros(3)}, "model.norm.weight is [3], the config says [2]"),
        (
            {"model.norm.weight": torch.ones(2, dtype=torch.int8)},
            "model.norm.weight is torch.int8; accepted: torch.bfloat16",
        ),
        ({"lm_head.weight": torch.zeros(4, 2)}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_loud(small: tuple[torch.nn.Module, Any], change: dict[str, Any], message: str) -> None:
    """Missing, unknown, misshapen, and a tied head that is another tensor."""
    model, table = small
    tensors = {name: tensor for name, tensor in {**complete(), **change}.items() if tensor is not None}
    with pytest.raises(WeightError) as error:
        load_checkpoint(model, tensors.items(), table)
    assert message in str(error.value)


def test_twice(small: tuple[torch.nn.Module, Any]) -> None:
    """The same name in two files."""
    model, table = small
    with pytest.raises(WeightError, match=r"model\.norm\.weight is given twice"):
        load_checkpoint(model, [*complete().items(), ("model.norm.weight", torch.zeros(2))], table)


def test_a_parameter_outside_the_table(small: tuple[torch.nn.Module, Any]) -> None:
    """A parameter that no row fills is our fault, and loud all the same."""
    model, table = small
    model.forgotten = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(WeightError, match="1 parameters that no row of the weight table fills: forgotten"):
        load_checkpoint(model, complete().items(), table)


def test_kv_scale_has_a_tensor_and_a_float() -> None:
    """Backends read either; a scale that is no positive number is refused."""
    layer = torch.nn.Module()
    layer.layer_id = 0
    set_kv_scale(layer, "k", 0.5)
    assert layer.k_scale_float == 0.5 and layer.k_scale.item() == 0.5 and layer.k_scale.dtype == torch.float32
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WeightError, match="v_scale of layer 0 is"):
            set_kv_scale(layer, "v", bad)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"model.attn.k_scale": 0.5}, "KV scales for some layers only; missing: v_scale of model.attn"),
        (
            {"model.attn.k_scale": 0.5, "model.k_proj.k_scale": 0.25, "model.attn.v_scale": 1.0},
            "k_scale of model.attn is given",
        ),
    ],
)
def test_kv_scales_are_all_there_and_agree(
    small: tuple[torch.nn.Module, Any], scales: dict[str, float], message: str
) -> None:
    """k without v, and two spellings that differ."""
    model, table = with_attention(small)
    tensors = {**complete(), **{name: torch.tensor(value) for name, value in scales.items()}}
    with pytest.raises(WeightError) as error:
        load_checkpoint(model, tensors.items(), table)
    assert message in str(error.value)


def test_kv_scales_stay_while_the_model_serves(small: tuple[torch.nn.Module, Any]) -> None:
    """A second load with other scales is refused: the cache was written with the first ones."""
    model, table = with_attention(small)
    first = {**complete(), "model.attn.k_scale": torch.tensor(0.5), "model.attn.v_scale": torch.tensor(2.0)}
    load_checkpoint(model, first.items(), table)
    assert (model.model.attn.k_scale_float, model.model.attn.v_scale_float) == (0.5, 2.0)
    load_checkpoint(model, first.items(), table)
    with pytest.raises(WeightError, match=r"k_scale of model\.attn was 0\.5 when the cache was written; restart"):
        load_checkpoint(model, {**first, "model.attn.k_scale": torch.tensor(0.25)}.items(), table)


def with_attention(small: tuple[torch.nn.Module, Any]) -> tuple[torch.nn.Module, Any]:
    """Return ``small`` with one attention layer that can have scales."""
    model, table = small
    model.model.attn = torch.nn.Module()
    model.model.attn.layer_id = 0
    for part in ("k", "v"):
        table.kv_scales |= {
            f"model.attn.{part}_scale": ("model.attn", part),
            f"model.{part}_proj.{part}_scale": ("model.attn", part),
        }
    return model, table


def test_all_names_of_the_real_checkpoint(weights: dict[str, torch.Tensor]) -> None:
    """The table of the tiny MoE has exactly the names of the file."""
    from atom_plugin.models.qwen3_moe import Qwen3MoeForCausalLM

    assert set(Qwen3MoeForCausalLM.checkpoint_table(load_spec(MOE)).entries) == set(weights)
