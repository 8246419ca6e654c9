"""Parameters and bytes that ``explain`` works out: against transformers, checkpoints and SGLang's own pools."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from atom_plugin.configs import load_spec, raw_config
from atom_plugin.explain.plan import Plan
from atom_plugin.explain.sizes import kv_bytes_a_token, weights_of

REPO = Path(__file__).parents[2]
CONFIGS = REPO / "tests" / "fixtures" / "hf_configs"
K2, THINKING = "moonshotai--Kimi-K2-Instruct", "moonshotai--Kimi-K2-Thinking"
FP8 = "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8"
MODELS = ("Qwen--Qwen3-0.6B", "Qwen--Qwen3-8B", "Qwen--Qwen3-30B-A3B", "Qwen--Qwen3-Coder-480B-A35B-Instruct", FP8, K2)


def spec_of(name: str) -> Any:
    return load_spec(CONFIGS / f"{name}.json")


def plan(**values: Any) -> Plan:
    return Plan(**{"arch": "gfx950", **values})


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """transformers' own model of each config, on the meta device."""
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    kind = values.pop("model_type")
    config_class = transformers.DeepseekV3Config if kind == "kimi_k2" else transformers.AutoConfig
    config = config_class.from_dict(values) if kind == "kimi_k2" else transformers.AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [buffer for part, buffer in model.named_buffers() if part.endswith("e_score_correction_bias")]
    theirs = sum(one.numel() for one in (*model.parameters(), *biases))
    assert weights_of(spec_of(name), plan()).sum.total == theirs


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe", "tiny-kimi-k2"])
def test_parameters_are_those_of_the_checkpoints(name: str) -> None:
    """The headers of the safetensors files; a tied head that is in the file as well counts once."""
    folder = REPO / "examples" / name
    spec = load_spec(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    stored = sum(
        math.prod(shape) for key, shape in shapes.items() if not (spec.tie_word_embeddings and key == "lm_head")
    )
    assert weights_of(spec, plan()).sum.total == stored


@pytest.mark.parametrize(
    ("name", "total", "active", "digits"),
    [
        ("Qwen--Qwen3-8B", 8.2e9, 8.2e9, 1),
        ("Qwen--Qwen3-30B-A3B", 30.5e9, 3.3e9, 1),
        (FP8, 235e9, 22e9, 0),
        ("Qwen--Qwen3-Coder-480B-A35B-Instruct", 480e9, 35e9, 0),
        (K2, 1000e9, 32e9, None),
    ],
)
def test_parameters_are_those_of_the_model_cards(name: str, total: float, active: float, digits: int | None) -> None:
    """To the digits that the cards give; Kimi's, "1T" and "32B", leave the embedding out and round."""
    found = weights_of(spec_of(name), plan()).sum
    if digits is None:
        assert found.total == pytest.approx(total, rel=0.03) and found.active == pytest.approx(active, rel=0.03)
        return
    assert round(found.total / 1e9, digits) == pytest.approx(total / 1e9, abs=0.11)
    assert found.active / 1e9 == pytest.approx(active / 1e9, abs=0.5)


@pytest.mark.parametrize("name", [FP8, THINKING, "Qwen--Qwen3-30B-A3B"])
def test_bytes_of_one_rank_are_those_of_the_checkpoint(name: str) -> None:
    """The weight table, which a complete checkpoint has to fit: dtypes and scales; kv_b_proj is loaded as bfloat16."""
    from atom_plugin.models.kimi_k2 import KimiK2ForCausalLM
    from atom_plugin.models.qwen3_moe import Qwen3MoeForCausalLM

    spec = spec_of(name)
    table = (KimiK2ForCausalLM if name == THINKING else Qwen3MoeForCausalLM).checkpoint_table(spec)
    sizes = {torch.float8_e4m3fn: 1, torch.int32: 4}
    stored = 0
    for entry, row in table.entries.items():
        if not row.optional and not entry.endswith("weight_shape"):
            wide = entry.endswith(("weight_scale_inv", "e_score_correction_bias"))
            stored += math.prod(row.shape) * (4 if wide else sizes.get(table.dtypes(entry)[0], 2))
    assert weights_of(spec, plan()).sum.bytes_on_rank == stored


@pytest.mark.parametrize("name", ["Qwen--Qwen3-30B-A3B", K2])
@pytest.mark.parametrize("ranks", [{"tp": 4}, {"tp": 4, "ep": 4}, {"tp": 4, "ep": 2, "dp": 2}])
def test_ranks_hold_the_whole_model_between_them(name: str, ranks: dict[str, int]) -> None:
    """Experts once; what every rank has whole as often as there are ranks, or replicas of attention."""
    kinds = weights_of(spec_of(name), plan(**ranks)).kinds
    times = {"norms": 4, "router": 4, "embedding": ranks.get("dp", 1)}
    if name != K2:
        times["attention"] = ranks.get("dp", 1)
    for kind in kinds.keys() - ({"attention"} if name == K2 else set()):
        assert 4 * kinds[kind].on_rank == times.get(kind, 1) * kinds[kind].total, kind


def test_kv_heads_are_replicated_and_vocabularies_padded() -> None:
    spec = spec_of("Qwen--Qwen3-30B-A3B")  # 4 KV heads
    two, eight = (weights_of(spec, plan(tp=tp, ep=tp)).kinds["attention"].on_rank for tp in (2, 8))
    kv = 48 * 2 * 128 * 2048
    assert two == 48 * 2 * 2048 * 32 * 128 // 2 + 2 * kv and eight == 48 * 2 * 2048 * 32 * 128 // 8 + kv
    odd = weights_of(load_spec(raw_config(str(REPO / "examples" / "tiny-qwen3-moe"), None)[1]), plan(tp=2)).kinds
    assert odd["embedding"].on_rank * 2 >= odd["embedding"].total


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("tp", [1, 8])
def test_bytes_of_the_kv_cache_are_those_of_sglangs_pool(kv_cache_dtype: str, tp: int) -> None:
    """The size that SGLang's own pools report for 64 slots and a page of dump."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    how = {"size": 48, "page_size": 16, "device": "cpu", "enable_memory_saver": False}
    for name in ("Qwen--Qwen3-30B-A3B", K2):
        spec, planned = spec_of(name), plan(tp=tp, kv_cache_dtype=kv_cache_dtype)
        how |= {"dtype": planned.pool_dtype, "layer_num": spec.num_hidden_layers}
        if name == K2:
            pool = MLATokenToKVPool(**how, kv_lora_rank=spec.kv_lora_rank, qk_rope_head_dim=spec.qk_rope_head_dim)
            theirs = pool.get_kv_size_bytes()
        else:
            pool = MHATokenToKVPool(**how, head_num=max(1, spec.num_key_value_heads // tp), head_dim=spec.head_dim)
            theirs = sum(pool.get_kv_size_bytes())
        assert kv_bytes_a_token(spec, planned) * 64 == theirs, name


def test_kda_layers_take_nothing_a_token() -> None:
    spec = spec_of("moonshotai--Kimi-K3")
    attending = spec.num_hidden_layers - len(spec.kda_layers)
    assert 0 < attending < spec.num_hidden_layers
    assert kv_bytes_a_token(spec, plan(tp=8, kv_cache_dtype="fp8_e4m3")) == attending * (512 + 64)
