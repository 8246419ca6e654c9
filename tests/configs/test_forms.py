"""One loader for every form of a config: file, mapping, transformers object, remote-code class, ModelConfig."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, PretrainedConfig

from atom_plugin.configs import ConfigError, load_spec, raw_config
from tests.configs import fixtures
from tests.configs.goldens import GOLDENS

QWEN3 = [name for name in fixtures.understood() if name.startswith("Qwen--Qwen3-")]


class RemoteConfig:
    """A config class as remote code has them: whatever is given becomes an attribute, nested configs are objects."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, RemoteConfig(**value) if name == "text_config" else value)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes, nested objects as they are."""
        return dict(vars(self))


@pytest.mark.parametrize("name", fixtures.understood())
def test_remote_code_class_and_model_config(name: str) -> None:
    """An object with to_dict, its text_config another object, and an object that keeps it as hf_config."""
    config = RemoteConfig(**fixtures.read(name))
    golden = GOLDENS[name.removesuffix(".v5")]
    before = copy.deepcopy(fixtures.read(name))
    assert load_spec(config) == golden
    assert load_spec(SimpleNamespace(hf_config=config, hf_text_config=None)) == golden
    after = {key: vars(value) if isinstance(value, RemoteConfig) else value for key, value in vars(config).items()}
    assert after == before


@pytest.mark.parametrize("name", fixtures.understood())
def test_mapping_with_a_text_config_object(name: str) -> None:
    """A mapping may hold a nested object as well."""
    values = fixtures.read(name)
    if "text_config" in values:
        values["text_config"] = RemoteConfig(**values["text_config"])
    assert load_spec(values) == GOLDENS[name.removesuffix(".v5")]


@pytest.mark.parametrize("name", fixtures.understood())
def test_the_mapping_stays_as_it_is(name: str) -> None:
    """Nested values included, with overrides and without."""
    values = fixtures.read(name)
    changes: dict[str, Any] = {"rms_norm_eps": 1e-4}
    overrides = {"text_config": changes} if "text_config" in values else changes
    assert load_spec(values, overrides=overrides) == replace(load_spec(values), rms_norm_eps=1e-4)
    assert overrides in ({"text_config": {"rms_norm_eps": 1e-4}}, {"rms_norm_eps": 1e-4})
    assert values == fixtures.read(name)


@pytest.mark.parametrize("name", fixtures.understood())
def test_plain_pretrained_config(name: str) -> None:
    """transformers' base class takes any fields, whatever families this version knows; it is not changed."""
    config = PretrainedConfig()
    for field, value in fixtures.read(name).items():
        setattr(config, field, value)
    before = copy.deepcopy(vars(config))
    assert load_spec(config) == GOLDENS[name.removesuffix(".v5")]
    assert vars(config) == before


@pytest.mark.parametrize("name", QWEN3)
def test_transformers_own_class(name: str) -> None:
    """Every supported version has the classes of Qwen3; the object is not changed.

    Classes of transformers 4 do not understand a file of transformers 5: they leave rope_parameters alone, put their
    default of 10,000 in rope_theta, and would turn heads by that. The contradiction is an error, not a guess.
    """
    loaded = AutoConfig.from_pretrained(fixtures.path(name))
    before = copy.deepcopy(vars(loaded))
    if name.endswith(".v5") and transformers.__version__.startswith("4."):
        with pytest.raises(ConfigError, match=r"field 'rope_theta' is 10000\.0: it contradicts rope_parameters"):
            load_spec(loaded)
    else:
        assert load_spec(loaded) == GOLDENS[name.removesuffix(".v5")]
    assert vars(loaded) == before


def test_an_override_of_model_type_that_to_dict_forgets() -> None:
    """transformers writes the model_type of the class; --json-model-override-args sets that of the object."""
    values = {**fixtures.read("moonshotai--Kimi-K2-Instruct"), "model_type": "deepseek_v3"}
    loaded = AutoConfig.for_model(values.pop("model_type"), **values)
    assert loaded.to_dict()["model_type"] == "deepseek_v3"
    with pytest.raises(ConfigError, match=r"^hf_config: .* 'deepseek_v3' is not one"):
        load_spec(loaded)
    loaded.model_type = "kimi_k2"
    assert loaded.to_dict()["model_type"] == "deepseek_v3"
    assert load_spec(loaded) == GOLDENS["moonshotai--Kimi-K2-Instruct"]


@pytest.mark.parametrize(
    ("name", "overrides", "field", "value"),
    [
        ("Qwen--Qwen3-8B", {"dtype": "float16"}, "dtype", "float16"),
        ("Qwen--Qwen3-8B.v5", {"torch_dtype": "float16"}, "dtype", "float16"),
        ("Qwen--Qwen3-30B-A3B.v5", {"num_experts": 64}, "num_experts", 64),
        ("moonshotai--Kimi-K2.5", {"text_config": {"num_hidden_layers": 2}}, "num_hidden_layers", 2),
    ],
)
def test_overrides(name: str, overrides: dict[str, Any], field: str, value: Any) -> None:
    """Under any of a field's names, and merged into a nested config."""
    assert vars(load_spec(fixtures.path(name), overrides=overrides))[field] == value


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "rope_theta"])
def test_a_rope_override_beside_the_text_model(name: str) -> None:
    """It would change nothing: the message says where it belongs."""
    with pytest.raises(
        ConfigError, match=f"^overrides: '{name}' belongs .* give {{'text_config': {{'{name}': \\.\\.\\.}}}}"
    ):
        load_spec(fixtures.path("moonshotai--Kimi-K2.5"), overrides={name: {"rope_type": "default"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read as a config"),
        ("{", "cannot be read as a config"),
        ("[1, 2]", "cannot be read as a config: it holds a list, no mapping"),
        ('"qwen3"', "cannot be read as a config: it holds a str, no mapping"),
        ("null", "cannot be read as a config: it holds a NoneType, no mapping"),
    ],
)
def test_a_file_that_is_none(text: str | None, message: str, tmp_path: Path) -> None:
    """Absent, damaged, or JSON of another kind: the message names the path."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_spec(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {message}")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A binary file is no config either."""
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as a config"):
        load_spec(tmp_path)


def test_an_object_that_is_no_config() -> None:
    """Not a silent empty one."""
    with pytest.raises(ConfigError, match="SimpleNamespace is no config: a path, a mapping"):
        load_spec(SimpleNamespace(hidden_size=1))


class Odd:
    """An object with a to_dict that returns ``stated``."""

    def __init__(self, stated: Any) -> None:
        self.stated = stated

    def to_dict(self) -> Any:
        return self.stated


class Bare:
    """Without any __dict__."""

    __slots__ = ()

    def to_dict(self) -> Any:
        return fixtures.read("Qwen--Qwen3-8B")


def endless() -> list[Any]:
    """Return a mapping, an object and a ModelConfig that contain themselves."""
    mapping: dict[str, Any] = fixtures.read("Qwen--Qwen3-8B")
    mapping["rope_scaling"] = mapping
    holder = SimpleNamespace()
    holder.hf_config = holder
    return [mapping, Odd(mapping), holder]


@pytest.mark.parametrize("config", endless(), ids=["mapping", "object", "holder"])
def test_what_contains_itself(config: Any) -> None:
    """One message, and no RecursionError."""
    with pytest.raises(ConfigError, match="is no config: it contains itself, or nests too deep"):
        load_spec(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Odd(None), "Odd is no config: its to_dict returns None, no mapping"),
        (Odd([1]), "Odd is no config: its to_dict returns [1], no mapping"),
        (PretrainedConfig, "is no config but a class: an object of it is required"),
        (SimpleNamespace(hf_config=None), "NoneType is no config"),
        ({7: 1, "model_type": "qwen3"}, "config: field 7: the name of a field must be text"),
        ("x" * 5000, "cannot be read as a config"),
        ("a\0b", "cannot be read as a config"),
    ],
)
def test_no_other_error(config: Any, message: str) -> None:
    """Whatever is passed in, it is a ConfigError."""
    with pytest.raises(ConfigError) as error:
        load_spec(config)
    assert message in str(error.value)


def test_names_that_are_no_text() -> None:
    """At any level, and in overrides."""
    values = fixtures.read("Qwen--Qwen3-8B")
    for given, overrides in (
        ({**values, "quantization_config": {"quant_method": "fp8", 7: 1}}, None),
        (values, {7: 1}),
    ):
        with pytest.raises(ConfigError, match="7: the name of a field must be text"):
            load_spec(given, overrides=overrides)


def test_an_object_without_a_dict() -> None:
    """Its to_dict is enough."""
    assert load_spec(Bare()) == GOLDENS["Qwen--Qwen3-8B"]


@pytest.mark.parametrize("name", fixtures.understood())
def test_more_layers_than_any_model(name: str) -> None:
    """Refused before anything is made for each of them."""
    overrides: dict[str, Any] = {"num_hidden_layers": 10**8}
    overrides = {"text_config": overrides} if "text_config" in fixtures.read(name) else overrides
    with pytest.raises(ConfigError, match=r"num_hidden_layers' is 100000000: it must be at most 1000"):
        load_spec(fixtures.path(name), overrides=overrides)


@pytest.mark.parametrize("read", [load_spec, lambda folder: raw_config(str(folder), None)], ids=["load", "launch"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "cannot be read as a config"),
        ('{"a": ' * 700 + "1" + "}" * 700, "cannot be read as a config: it nests too deep"),
        ('{"hidden_size": 1, "hidden_size": 2}', "it has 'hidden_size' twice"),
        ('{"text_config": {"a": 1, "a": 1}}', "it has 'a' twice"),
    ],
    ids=["deep", "deep and closed", "twice", "twice inside"],
)
def test_a_file_that_says_two_things(read: Any, text: str, message: str, tmp_path: Path) -> None:
    """JSON keeps the last of two equal names, and a launch must not."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("read", [load_spec, lambda folder: raw_config(str(folder), None)], ids=["load", "launch"])
def test_a_checkpoint_of_modelopt(read: Any, tmp_path: Path) -> None:
    """Its quantisation is in a file of its own; with a quantization_config that one decides."""
    values = fixtures.read("Qwen--Qwen3-30B-A3B")
    (tmp_path / "hf_quant_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(values))
    for path in (tmp_path, tmp_path / "config.json") if read is load_spec else (tmp_path,):
        with pytest.raises(ConfigError, match=r"hf_quant_config\.json beside it says how ModelOpt has quantised"):
            read(path)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": fp8}))
    read(tmp_path)


def test_raw_config_of_a_launch(tmp_path: Path) -> None:
    """What a launch reads before any class: the file as it is, or an error that names the place."""
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as a config"):
        raw_config(str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"no config\.json can be read"):
        raw_config(str(tmp_path / "nowhere"), None)
    (tmp_path / "config.json").write_text(json.dumps(fixtures.read("Qwen--Qwen3-8B")))
    source, raw = raw_config(str(tmp_path), None)
    raw.pop("_commit_hash", None)  # some versions say where in a repo it was
    assert (source, raw) == (f"{tmp_path}/config.json", fixtures.read("Qwen--Qwen3-8B"))
