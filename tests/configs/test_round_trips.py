"""Loaded by the transformers that is here, saved and loaded again: the spec of the published file, or a loud refusal.

What a version loses or rewrites on the way is stated here, and never becomes a default of ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import PretrainedConfig

from atom_plugin.configs import ConfigError, DecoderSpec, load_spec
from atom_plugin.configs.fields import GENERIC_FIELDS, NOT_COMPUTED
from tests.configs import fixtures
from tests.configs.goldens import GOLDENS
from tests.configs.transformers_classes import SINCE, missing, own_class, type_of

HERE = Version(transformers.__version__)
IS_4 = Version("5") > HERE
#: transformers 4 knows rope_theta alone: its classes leave rope_parameters lying and add their default beside it.
NEW_FORM_IN_4 = "field 'rope_theta' is 10000.0: it contradicts rope_parameters with rope_theta"
#: Fields that say nothing about the forward pass where they are left out.
NEUTRAL = (GENERIC_FIELDS | NOT_COMPUTED.keys()) - {"model_type"}
#: Fields that transformers 5 writes under another name.
RESPELLED = {"torch_dtype": "dtype", "rope_scaling": "rope_parameters"}
KIMI_K2 = ["moonshotai--Kimi-K2-Instruct", "moonshotai--Kimi-K2-Thinking"]
KNOWN = [name for name in fixtures.understood() if own_class(type_of(name)) is not None]
UNKNOWN = [name for name in fixtures.understood() if name not in KNOWN]


def golden(name: str) -> DecoderSpec:
    """Return the spec of a model, in whichever form."""
    return GOLDENS[name.removesuffix(".v5")]


def plain(values: dict[str, Any]) -> PretrainedConfig:
    """Return transformers' base class with ``values``: from_dict needs what only the classes of models have."""
    config = PretrainedConfig()
    for field, value in values.items():
        setattr(config, field, value)
    return config


def saved(config: PretrainedConfig, folder: Path) -> dict[str, Any]:
    """Save ``config`` and return what the file holds."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def specs(forms: dict[str, Any], overrides: dict[str, str] | None = None) -> dict[str, DecoderSpec]:
    """Return the spec of each form."""
    return {way: load_spec(form, overrides=overrides) for way, form in forms.items()}


def refusals(forms: dict[str, Any], overrides: dict[str, str] | None = None) -> dict[str, str]:
    """Return the message with which each form is refused; a form that is not refused fails."""
    messages = {}
    for way, form in forms.items():
        with pytest.raises(ConfigError) as error:
            load_spec(form, overrides=overrides)
        messages[way] = str(error.value)
    return messages


@pytest.mark.parametrize("model_type", SINCE)
def test_which_classes_this_version_has(model_type: str) -> None:
    """A family that transformers gains or loses moves the tests below from one way to the other, and is said here."""
    since = SINCE[model_type]
    assert (own_class(model_type) is not None) == (since is not None and Version(since) <= HERE)
    assert (model_type in missing()) == (model_type != "deepseek_v3" and own_class(model_type) is None)


@pytest.mark.parametrize("name", KNOWN)
def test_a_class_of_transformers(name: str, tmp_path: Path) -> None:
    """From the object, its dict, the file that it saves and the object that is loaded from that."""
    config_class = own_class(type_of(name))
    assert config_class is not None
    config = config_class.from_pretrained(fixtures.path(name))
    config.save_pretrained(tmp_path)
    again = config_class.from_pretrained(tmp_path)
    forms = {"object": config, "dict": config.to_dict(), "file": tmp_path, "again": again}
    if IS_4 and name.endswith(".v5"):
        messages = refusals(forms)
        assert all(NEW_FORM_IN_4 in message for message in messages.values()), messages
    else:
        assert specs(forms) == dict.fromkeys(forms, golden(name))


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_family_without_a_class(name: str, tmp_path: Path) -> None:
    """The base class keeps every field but the model_type, which is the class's: refused until an override gives it."""
    values = fixtures.read(name)
    config = plain(values)
    assert load_spec(config) == golden(name)
    stated = {"model_type": values["model_type"]}
    as_dict = config.to_dict()
    assert as_dict["model_type"] == ""
    assert f"{values['architectures'][0]} with model_type ''" in refusals({"dict": as_dict})["dict"]
    assert load_spec(as_dict, overrides=stated) == golden(name)
    if not IS_4 and "max_length" in values:  # a Kimi-K2-Thinking was saved with its generation defaults
        with pytest.raises(ValueError, match="generation parameters are set in the model config"):
            config.save_pretrained(tmp_path)
        return
    held = saved(config, tmp_path)
    lost = {field for field in values if field not in held and RESPELLED.get(field) not in held}
    assert lost - NEUTRAL == {"model_type"}
    assert "field 'model_type' is absent: it is required, as str" in refusals({"file": tmp_path})["file"]
    assert load_spec(tmp_path, overrides=stated) == golden(name)


def test_a_tied_head_that_a_save_drops(tmp_path: Path) -> None:
    """transformers 4 takes a tied head for every config's default, and leaves it out: it is not guessed."""
    name = "Qwen--Qwen3-0.6B"
    stated = {"model_type": "qwen3"}
    held = saved(plain(fixtures.read(name)), tmp_path)
    assert ("tie_word_embeddings" in held) != IS_4
    if IS_4:
        message = refusals({"file": tmp_path}, stated)["file"]
        assert "field 'tie_word_embeddings' is absent: it is required, as bool" in message
    else:
        assert load_spec(tmp_path, overrides=stated) == golden(name)


@pytest.mark.parametrize("name", KIMI_K2)
def test_a_kimi_k2_saved_as_deepseek_v3(name: str, tmp_path: Path) -> None:
    """Its layers are DeepSeek-V3's, and so is the model_type that is saved: refused with the override that helps."""
    config_class = own_class("deepseek_v3")
    assert config_class is not None
    config = config_class.from_dict(fixtures.read(name))
    assert load_spec(config) == golden(name)  # the object still says kimi_k2
    assert saved(config, tmp_path)["model_type"] == "deepseek_v3"
    forms = {"dict": config.to_dict(), "file": tmp_path, "again": config_class.from_pretrained(tmp_path)}
    for message in refusals(forms).values():
        assert "architecture DeepseekV3ForCausalLM with model_type 'deepseek_v3' is not one" in message
        assert """add --json-model-override-args '{"model_type": "kimi_k2"}'""" in message
    assert specs(forms, fixtures.OVERRIDE) == dict.fromkeys(forms, golden(name))


@pytest.mark.parametrize("name", fixtures.NEED_OVERRIDE)
def test_a_kimi_k2_in_the_form_of_transformers_5(name: str, tmp_path: Path) -> None:
    """Loaded and saved once more: the same refusal, and in transformers 4 no override mends the base that it adds."""
    config_class = own_class("deepseek_v3")
    assert config_class is not None
    config = config_class.from_pretrained(fixtures.path(name))
    config.save_pretrained(tmp_path)
    forms = {"object": config, "dict": config.to_dict(), "file": tmp_path}
    assert all("""'{"model_type": "kimi_k2"}'""" in message for message in refusals(forms).values())
    if IS_4:
        messages = refusals(forms, fixtures.OVERRIDE)
        assert all(NEW_FORM_IN_4 in message for message in messages.values()), messages
    else:
        assert specs(forms, fixtures.OVERRIDE) == dict.fromkeys(forms, golden(name))


@pytest.mark.parametrize("name", KIMI_K2)
def test_auto_config_asks_for_remote_code(name: str) -> None:
    """Why a Kimi-K2 goes the other ways: without trust_remote_code AutoConfig refuses it, and nothing of it runs.

    In a process of its own: SGLang, where it is imported, makes kimi_k2 known to AutoConfig.
    """
    code = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(fixtures.path(name))!r})"
    ran = subprocess.run([sys.executable, "-c", code], input="n\n", capture_output=True, text=True)
    assert ran.returncode != 0 and "ValueError" in ran.stderr and "trust_remote_code" in ran.stderr, ran.stderr[-2000:]
