"""Published configs: one hand-checked spec a model from both of its forms, or the exact refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom_plugin.configs import FAMILIES, SERVED, ConfigError, load_served_spec, load_spec, raw_config
from tests.configs import fixtures
from tests.configs.goldens import GOLDENS

HAVE = (
    "It has: Qwen3ForCausalLM (model_type qwen3), Qwen3MoeForCausalLM (model_type qwen3_moe), "
    "DeepseekV3ForCausalLM (model_type kimi_k2), KimiK25ForConditionalGeneration (model_type kimi_k25). "
)
DROP = "Drop `--model-impl atom` to serve it with SGLang's own model."
DEEPSEEK = (
    "architecture DeepseekV3ForCausalLM with model_type 'deepseek_v3' is not one that atom-plugin has. "
    + HAVE
    + "It is "
    "DeepSeek-V3's, and also what transformers 5 writes into a Kimi-K2 that it saves: if this is a Kimi-K2, add "
    """--json-model-override-args '{"model_type": "kimi_k2"}'. """ + DROP
)
LLAMA4 = (
    "architecture Llama4ForConditionalGeneration with model_type 'llama4' is not one that atom-plugin has. "
    + HAVE
    + DROP
)
REFUSALS = {
    "Inferact--Kimi-K3-DSpark": (
        "architecture K3DSparkModel with model_type 'k3_dspark' is not one that atom-plugin has. "
        + HAVE
        + "It is a draft for speculative decoding and no model of its own. "
        + DROP
    ),
    "RedHatAI--Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": LLAMA4,
    "RedHatAI--Llama-4-Scout-17B-16E-Instruct-FP8-dynamic.v5": LLAMA4,
    "deepseek-ai--DeepSeek-V3": DEEPSEEK,
    "deepseek-ai--DeepSeek-V3.v5": DEEPSEEK,
    "moonshotai--Kimi-K2-Instruct.v5": DEEPSEEK,
    "moonshotai--Kimi-K2-Thinking.v5": DEEPSEEK,
}


def test_every_file_is_expected() -> None:
    """A file is either understood, with a golden, or refused, with a message; and every family has a file."""
    assert {name.removesuffix(".v5") for name in fixtures.understood()} == GOLDENS.keys()
    assert set(fixtures.refused()) == REFUSALS.keys()
    found = {(fixtures.read(name)["architectures"][0], fixtures.read(name)["model_type"]) for name in GOLDENS}
    assert found == FAMILIES.keys() and found > SERVED


@pytest.mark.parametrize("name", fixtures.understood())
def test_golden(name: str) -> None:
    """The same spec from the published form and the one that transformers 5 saves, path and mapping alike."""
    golden = GOLDENS[name.removesuffix(".v5")]
    assert load_spec(fixtures.path(name)) == golden
    assert load_spec(fixtures.read(name)) == golden
    assert hash(golden) == hash(load_spec(str(fixtures.path(name))))


@pytest.mark.parametrize("name", fixtures.refused())
def test_refused_by_name(name: str) -> None:
    """The message says what it is, what we have and the way out."""
    with pytest.raises(ConfigError) as error:
        load_spec(fixtures.path(name))
    assert str(error.value) == f"{fixtures.path(name)}: {REFUSALS[name]}"


@pytest.mark.parametrize("name", fixtures.NEED_OVERRIDE)
def test_resaved_kimi_k2_with_the_override_of_its_refusal(name: str) -> None:
    """The override that the message names, as a launch parses it, gives the spec of the published file."""
    override = json.loads(REFUSALS[name].split("--json-model-override-args '")[1].split("'")[0])
    assert override == fixtures.OVERRIDE
    assert load_spec(fixtures.path(name), overrides=override) == GOLDENS[name.removesuffix(".v5")]


@pytest.mark.parametrize("name", fixtures.understood())
def test_served_or_refused_at_launch(name: str) -> None:
    """What has a model is served; what can only be read is refused with a message that says so."""
    values = fixtures.read(name)
    if (values["architectures"][0], values["model_type"]) in SERVED:
        assert load_served_spec(fixtures.path(name)) == GOLDENS[name.removesuffix(".v5")]
        return
    with pytest.raises(ConfigError) as error:
        load_served_spec(fixtures.path(name))
    assert str(error.value) == (
        f"{fixtures.path(name)}: atom-plugin reads configs of {values['architectures'][0]} with model_type "
        f"{values['model_type']!r}, but has no model for it yet. {HAVE}{DROP}"
    )


def test_nothing_remote_runs(tmp_path: Path) -> None:
    """Kimi-K2's file names remote code; it is read without, from a folder that holds the code and as a launch does."""
    name = "moonshotai--Kimi-K2-Instruct"
    assert fixtures.read(name)["auto_map"]["AutoConfig"] == "configuration_deepseek.DeepseekV3Config"
    (tmp_path / "config.json").write_text(json.dumps(fixtures.read(name)))
    (tmp_path / "configuration_deepseek.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit('remote code ran')\n"
    )
    assert load_spec(tmp_path) == GOLDENS[name]
    source, raw = raw_config(str(tmp_path), None)
    assert source == f"{tmp_path}/config.json" and load_spec(raw, source=source) == GOLDENS[name]
    assert not (tmp_path / "ran").exists()
