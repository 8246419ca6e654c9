"""The config objects that SGLang builds, without remote code, give the spec of the file. Needs SGLang."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers_utils import get_config

from atom_plugin.configs import ConfigError, load_spec
from tests.configs import fixtures
from tests.configs.goldens import GOLDENS


def folder_of(name: str, tmp_path: Path) -> str:
    """Return a folder that holds the config and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(fixtures.read(name)))
    return str(tmp_path)


@pytest.mark.parametrize("name", fixtures.understood())
def test_config_object(name: str, tmp_path: Path) -> None:
    """SGLang's own classes add defaults and spread the text model's fields; the spec is that of the file."""
    config = get_config(folder_of(name, tmp_path), trust_remote_code=False)
    before = copy.deepcopy(config.to_dict())
    assert load_spec(config) == GOLDENS[name.removesuffix(".v5")]
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "name",
    [
        "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8",
        "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8.v5",
        "moonshotai--Kimi-K2-Instruct",
        "moonshotai--Kimi-K2-Thinking",
        "moonshotai--Kimi-K2.5",
    ],
)
def test_config_object_of_a_quantised_model(name: str, tmp_path: Path) -> None:
    """What a model class gets from SGLang 0.5.17, whose get_quant_config writes into what it reads."""
    config = get_config(folder_of(name, tmp_path), trust_remote_code=False)
    text = config if hasattr(config, "quantization_config") else config.text_config
    text.quantization_config |= {"packed_modules_mapping": {"qkv_proj": ["q_proj"]}, "hf_config": config}
    assert load_spec(config) == GOLDENS[name.removesuffix(".v5")]
    assert text.quantization_config["hf_config"] is config


@pytest.mark.parametrize("name", fixtures.NEED_OVERRIDE)
def test_resaved_kimi_k2(name: str, tmp_path: Path) -> None:
    """With the override of the refusal."""
    folder = folder_of(name, tmp_path)
    config = get_config(folder, trust_remote_code=False, model_override_args=fixtures.OVERRIDE)
    assert load_spec(config) == GOLDENS[name.removesuffix(".v5")]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("Qwen--Qwen3-30B-A3B", {}),
        ("moonshotai--Kimi-K2-Instruct", {}),
        ("moonshotai--Kimi-K2-Instruct.v5", fixtures.OVERRIDE),
        ("moonshotai--Kimi-Linear-48B-A3B-Instruct", {}),
    ],
)
def test_model_config(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """A launch's ModelConfig, whose hf_config is what a model class gets."""
    model_config = ModelConfig(
        folder_of(name, tmp_path), trust_remote_code=False, model_override_args=json.dumps(overrides)
    )
    assert load_spec(model_config) == load_spec(model_config.hf_config) == GOLDENS[name.removesuffix(".v5")]


@pytest.mark.parametrize("form", ["", ".v5"])
def test_an_override_of_yarn_by_no_scaling(form: str, tmp_path: Path) -> None:
    """SGLang leaves what yarn has in the object, and ``type``: both are read as the override says."""
    values = fixtures.read(f"Qwen--Qwen3-30B-A3B{form}")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    values["rope_parameters" if form else "rope_scaling"] = {**(values.get("rope_parameters") or {}), **yarn}
    (tmp_path / "config.json").write_text(json.dumps(values))
    overrides = {"rope_scaling": {"rope_type": "default"}}
    config = get_config(str(tmp_path), trust_remote_code=False, model_override_args=overrides)
    assert config.rope_parameters["factor"] == 4.0
    golden = GOLDENS["Qwen--Qwen3-30B-A3B"]
    assert load_spec(config) == load_spec(tmp_path, overrides=overrides) == golden


@pytest.mark.parametrize("name", ["Qwen--Qwen3-30B-A3B", "Qwen--Qwen3-30B-A3B.v5"])
def test_an_override_of_the_base(name: str, tmp_path: Path) -> None:
    """Inside of rope SGLang takes it; beside it SGLang leaves it without effect, and the object is refused."""
    folder = folder_of(name, tmp_path)
    inside, beside = {"rope_scaling": {"rope_theta": 5e6}}, {"rope_theta": 5e6}
    config = get_config(folder, trust_remote_code=False, model_override_args=inside)
    assert load_spec(config) == load_spec(folder, overrides=inside) == load_spec(folder, overrides=beside)
    assert vars(load_spec(config))["rope"].theta == 5e6
    with pytest.raises(ConfigError, match=r"SGLang takes an override of it as {'rope_scaling': {'rope_theta'"):
        load_spec(get_config(folder, trust_remote_code=False, model_override_args=beside))
