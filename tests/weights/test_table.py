"""The weight table: complete checkpoints pass, everything missing, unknown, misshapen or doubled is named."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atom_plugin.checkpoint_files import checkpoint_problems, folder_of
from atom_plugin.configs import BlockFp8, load_spec
from atom_plugin.models.qwen3 import Qwen3ForCausalLM
from atom_plugin.models.qwen3_moe import Qwen3MoeForCausalLM
from atom_plugin.weights import CheckpointTable, Shape

EXAMPLES = Path(__file__).parents[2] / "examples"
MOE, DENSE = EXAMPLES / "tiny-qwen3-moe", EXAMPLES / "tiny-qwen3"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts"


def shapes(folder: Path) -> dict[str, Shape]:
    """Return the tensors of a checkpoint by name."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def table() -> CheckpointTable:
    """Return the table of the tiny MoE."""
    return Qwen3MoeForCausalLM.checkpoint_table(load_spec(MOE))


@pytest.mark.parametrize(("folder", "model"), [(MOE, Qwen3MoeForCausalLM), (DENSE, Qwen3ForCausalLM)])
def test_committed_checkpoints_are_complete(folder: Path, model: type[Qwen3ForCausalLM]) -> None:
    """Both committed checkpoints fit their config, file headers and all."""
    assert checkpoint_problems(folder, model.checkpoint_table(load_spec(folder))) == []


def test_a_missing_expert_is_named() -> None:
    """Layer and expert are in the message."""
    present = shapes(MOE)
    del present[EXPERT]
    assert table().problems(present) == [f"1 missing tensors: {EXPERT}"]


def test_unknown_and_misshapen() -> None:
    """Each kind has its own line, with both shapes."""
    present = {**shapes(MOE), "model.layers.9.self_attn.q_proj.weight": (256, 128), EXPERT: (128, 384)}
    assert table().problems(present) == [
        "1 tensors that the model has no place for: model.layers.9.self_attn.q_proj.weight",
        f"1 wrong shapes: {EXPERT} is [128, 384], the config says [384, 128]",
    ]


def test_experts_stacked_by_transformers_5() -> None:
    """Two stacked tensors stand for the 24 of a layer, and not beside them."""
    present = {name: shape for name, shape in shapes(MOE).items() if not name.startswith(f"{EXPERTS}.")}
    present |= {f"{EXPERTS}.gate_up_proj": (8, 768, 128), f"{EXPERTS}.down_proj": (8, 128, 384)}
    assert table().problems(present) == []
    doubled = {**present, f"{EXPERTS}.7.up_proj.weight": (384, 128)}
    assert table().problems(doubled) == [f"1 tensors given twice: {EXPERTS}.7.up_proj.weight"]
    halved = {**present, f"{EXPERTS}.gate_up_proj": (8, 128, 768)}
    assert "the config says [8, 768, 128]" in table().problems(halved)[0]


def test_stacked_experts_are_split_as_transformers_multiplies_them() -> None:
    """Rows 0..width of gate_up are the gate: the order of transformers' chunk(2)."""
    stacked = torch.arange(8 * 768 * 128, dtype=torch.float32).view(8, 768, 128)
    parts = dict(table().stacked[f"{EXPERTS}.gate_up_proj"].split(stacked))
    gate, up = stacked[5].chunk(2, dim=0)
    torch.testing.assert_close(parts[f"{EXPERTS}.5.gate_proj.weight"], gate)
    torch.testing.assert_close(parts[f"{EXPERTS}.5.up_proj.weight"], up)


def test_a_tied_head_may_be_in_the_file() -> None:
    """The dense twin has one tensor for both; a second copy is allowed, a missing embedding is not."""
    dense = Qwen3ForCausalLM.checkpoint_table(load_spec(DENSE))
    present = shapes(DENSE)
    assert "lm_head.weight" not in present
    assert dense.problems({**present, "lm_head.weight": present["model.embed_tokens.weight"]}) == []
    del present["model.embed_tokens.weight"]
    assert dense.problems(present) == ["1 missing tensors: model.embed_tokens.weight"]


def test_block_fp8_adds_a_scale_beside_each_covered_weight() -> None:
    """Scales are [rows / 128, columns / 128] rounded up; router, norms and embedding have none."""
    spec = dataclasses.replace(
        load_spec(MOE),
        quantization=BlockFp8(block=(128, 128), unquantized=frozenset({"model.layers.0.self_attn.o_proj"})),
    )
    rows = Qwen3MoeForCausalLM.checkpoint_table(spec).entries
    assert rows[f"{EXPERTS}.0.up_proj.weight_scale_inv"].shape == (3, 1)
    assert rows[f"{EXPERTS}.0.up_proj.weight_scale_inv"].into[0].param == f"{EXPERTS}.w13_weight_scale_inv"
    assert rows["model.layers.0.self_attn.q_proj.weight_scale_inv"].into[0].shard == "q"
    assert "model.layers.0.self_attn.o_proj.weight_scale_inv" not in rows
    assert "model.layers.0.mlp.gate.weight_scale_inv" not in rows
    assert "lm_head.weight_scale_inv" not in rows


def test_kv_scales_have_a_place_in_both_spellings() -> None:
    """A calibrated FP8 KV cache, as scalars or as one element."""
    names = ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.attn.v_scale")
    assert table().problems({**shapes(MOE), names[0]: (), names[1]: (1,)}) == []
    assert "k_scale is [2]" in table().problems({**shapes(MOE), names[0]: (2,)})[0]


def test_folder_of_a_repo_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repo that is not on this machine has no folder yet; a local path is itself."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert folder_of("nobody/nothing", None) is None
    assert folder_of(str(MOE), None) == MOE


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_dtype_that_is_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Codes without scales are not weights: the header says so."""
    tensors = load_file(MOE / "model.safetensors")
    tensors[EXPERT] = tensors[EXPERT].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    (problem,) = checkpoint_problems(tmp_path, table())
    assert EXPERT in problem and "accepted: torch.bfloat16, torch.float16, torch.float32" in problem


def test_a_tensor_in_two_files_and_no_file_at_all(tmp_path: Path) -> None:
    """Neither passes in silence; a damaged index and a broken link are named."""
    (problem,) = checkpoint_problems(tmp_path, table())
    assert "holds no *.safetensors that can be loaded" in problem
    for name in ("a", "b"):
        shutil.copy(MOE / "model.safetensors", tmp_path / f"{name}.safetensors")
    assert "is in another file as well" in checkpoint_problems(tmp_path, table())[0]
    (tmp_path / "b.safetensors").unlink()
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "gone")
    assert "b.safetensors cannot be read" in checkpoint_problems(tmp_path, table())[0]
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "is not a safetensors index" in checkpoint_problems(tmp_path, table())[0]
