"""``atom-plugin explain``: the choices of a launch, for a machine that is not here, from a config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atom_plugin import cli
from atom_plugin.attention.tables import LayerKernels, LayerProblems
from atom_plugin.cli import ARCHS
from atom_plugin.configs import load_spec
from atom_plugin.explain import Plan, explain, outlines_of
from atom_plugin.ops import few_token_experts, paged_attention, qk_norm_rope_store_kv, store_kv

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_configs"
MOE, BIG = CONFIGS / "Qwen--Qwen3-30B-A3B.json", CONFIGS / "Qwen--Qwen3-235B-A22B-FP8.json"


def rows(plan: Plan, model: Path = MOE) -> dict[str, str | None]:
    return {choice.mode.removeprefix("paged_attention "): choice.row for choice in explain(load_spec(model), plan)}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(arch="cpu"), {"qk_norm_rope_store_kv": "eager", "decode": "eager", "extend in a graph": "eager"}),
        (Plan(arch="sm90"), {"qk_norm_rope_store_kv": "triton", "decode in a graph": "triton", "extend": "triton"}),
        (
            Plan(arch="gfx942", page_size=16),
            {"store_kv": "aiter_reshape_and_cache_flash", "decode in a graph": "aiter_unified_attention"},
        ),
        (Plan(arch="gfx942"), {"decode": "aiter_paged_attention_ragged", "extend": "aiter_mha_batch_prefill"}),
        (Plan(arch="gfx942", aiter="here"), {"decode": "triton", "extend": "triton", "store_kv": "triton"}),
        (Plan(arch="gfx942", dtype="float32"), {"decode": "triton", "extend": "triton"}),
    ],
    ids=["cpu", "sm90", "gfx942 pages of 16", "gfx942", "gfx942 without AITER", "gfx942 float32"],
)
def test_rows_by_machine(plan: Plan, expected: dict[str, str]) -> None:
    found = rows(plan)
    assert {mode: found[mode] for mode in expected} == expected


def test_the_choice_is_that_of_a_launch() -> None:
    spec = load_spec(MOE)
    (outline,) = outlines_of(spec, 2)
    how = {"arch": "cpu", "q_dtype": torch.bfloat16, "pool_dtype": torch.float8_e4m3fn, "page_size": 64}
    kernels = LayerKernels(LayerProblems(layer=outline, **how))
    kernels.resolve(captured=True, has_sinks=False)
    found = rows(Plan(arch="cpu", tp=2, kv_cache_dtype="fp8_e4m3", page_size=64))
    assert kernels.rows["paged_attention decode in a graph"] == found["decode in a graph"]
    assert kernels.rows["paged_attention extend in a graph"] == found["extend in a graph"]
    assert kernels.rows["qk_norm_rope_store_kv"] == found["qk_norm_rope_store_kv"]
    assert kernels.rows["store_kv"] == found["store_kv"]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_is_chosen_or_refused_with_a_reason(arch: str) -> None:
    for choice in explain(load_spec(BIG), Plan(arch=arch, tp=8, kv_cache_dtype="fp8_e4m3", page_size=16)):
        tables = (paged_attention.TABLE, qk_norm_rope_store_kv.TABLE, store_kv.TABLE, few_token_experts.TABLE)
        (table,) = (table for table in tables if choice.mode.split()[0] == table.op)
        names = table.names()
        assert choice.row in names
        assert set(names[: names.index(choice.row)]) <= choice.refused.keys()
        assert all(choice.refused.values())


def test_a_forced_row_is_the_only_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "paged_attention=triton")
    assert rows(Plan(arch="gfx942", page_size=16))["decode"] == "triton"
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "paged_attention=aiter_unified_attention")
    (decode, _) = (
        choice for choice in explain(load_spec(MOE), Plan(arch="sm90", query_len=1)) if "decode" in choice.mode
    )
    assert decode.row is None and decode.refused.keys() == {"aiter_unified_attention"}


def test_query_length_picks_the_phase() -> None:
    assert {"decode", "decode in a graph"} <= rows(Plan(arch="cpu", query_len=1)).keys()
    assert not {"extend", "extend in a graph"} & rows(Plan(arch="cpu", query_len=1)).keys()
    assert not {"decode", "decode in a graph"} & rows(Plan(arch="cpu", query_len=8)).keys()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ("--tp", "8", "--ep", "8")
    assert cli.main(["explain", str(BIG), "--arch", "gfx942", *ranks, "--page-size", "16"]) == 0
    text = capsys.readouterr().out
    assert "layers 0 to 93 have 8 query and 1 KV heads of 128 a rank" in text
    assert "paged_attention decode in a graph     aiter_unified_attention" in text
    assert "      not " not in text
    assert cli.main(["explain", str(BIG), "--arch", "gfx942", *ranks, "--why"]) == 0
    assert "not aiter_unified_attention: page size 1: takes powers of two from 16" in capsys.readouterr().out
    assert cli.main(["explain", str(MOE), "--arch", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["choices"][0]["row"] == "eager"
    assert told["model_class"] == "atom_plugin.models.qwen3_moe:Qwen3MoeForCausalLM"


def test_what_a_launch_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """The reasons of a launch, exit status 1, and no numbers of a model that cannot be split so."""
    assert cli.main(["explain", str(BIG), "--arch", "gfx942", "--tp", "8", "--memory", "192"]) == 1
    text = capsys.readouterr().out
    assert "REFUSED by --model-impl atom: moe_intermediate_size 1536 is not divisible by 8 ranks into whole FP8" in text
    assert "not counted: the launch is refused" in text and "not known: weights are not counted" in text
    assert cli.main(["explain", str(BIG), "--arch", "cpu", "--tp", "1"]) == 1
    assert "the checkpoint is block FP8, and SGLang's MoE and linear layers read no scales" in capsys.readouterr().out


def test_a_model_that_is_sglangs_own(capsys: pytest.CaptureFixture[str]) -> None:
    k3 = str(CONFIGS / "moonshotai--Kimi-K3.json")
    assert cli.main(["explain", k3, "--arch", "gfx950", "--tp", "8", "--memory", "288"]) == 0
    text = capsys.readouterr().out
    assert "not counted: models/ has no model for it" in text and "not known: weights are not counted" in text


def test_tokens_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", str(MOE), "--arch", "sm90", "--page-size", "64", "--mem-fraction-static", "0.9"]
    assert cli.main([*command, "--memory", "80", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    left = 0.9 * 80 * 2**30 - 2 * 30_532_122_624
    assert left - 64 * 98_304 < told["tokens_that_fit"] * 98_304 <= left
    assert told["tokens_that_fit"] % 64 == 0
    assert cli.main([*command, "--memory", "60"]) == 0
    assert "NONE: the weights do not fit in 60 GiB x 0.9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((str(MOE), "--tp", "3"), "--tp 3 does not divide 32 query heads and 4 KV heads"),
        ((str(MOE), "--tp", "0"), "--tp 0 does not divide 32 query heads and 4 KV heads"),
        ((str(MOE), "--query-len", "0"), "--query-len 0: takes 1 for decode, or more"),
        ((str(MOE), "--page-size", "3"), "--page-size 3: use a power of two"),
        ((str(MOE), "--tp", "4", "--ep", "3"), "--ep 3 does not divide --tp 4"),
        ((str(MOE), "--tp", "4", "--dp", "0"), "--dp 0 does not divide --tp 4"),
        ((str(MOE), "--memory", "0"), "--memory 0.0: takes GiB of one device"),
        ((str(MOE), "--memory", "inf"), "--memory inf: takes GiB of one device"),
        ((str(MOE), "--mem-fraction-static", "1.5"), "--mem-fraction-static 1.5: takes a share between 0 and 1"),
        ((str(MOE), "--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype fp8_e5m2: use one of"),
        ((str(CONFIGS / "deepseek-ai--DeepSeek-V3.json"),), "with model_type 'deepseek_v3' is not one that"),
        (
            (str(CONFIGS / "Qwen--Qwen3.5-27B.json"),),
            "reads configs of Qwen3_5ForConditionalGeneration with model_type 'qwen3_5', but has no model for it yet",
        ),
        (("/nowhere",), "/nowhere: cannot be read as a config"),
    ],
)
def test_what_cannot_be_explained(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *arguments, "--arch", "gfx942"]) == 2
    assert message in capsys.readouterr().err


def test_an_arch_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(MOE)]) == 2
    assert "--arch is required: gfx942, gfx950, sm90, cpu" in capsys.readouterr().err


def test_a_plan_without_graphs_has_no_captured_modes() -> None:
    assert not [mode for mode in rows(Plan(arch="gfx942", graphs=False)) if "graph" in mode]


@pytest.mark.parametrize("text", ["[]", '["Qwen3ForCausalLM"]', "7", "null"])
def test_json_that_is_no_config(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["explain", str(tmp_path), "--arch", "gfx942"]) == 2
    assert f"atom-plugin explain: {tmp_path}/config.json: cannot be read as a config" in capsys.readouterr().err
