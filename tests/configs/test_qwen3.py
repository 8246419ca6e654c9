"""Qwen3 and Qwen3-MoE: spellings, rope, dense layers, and nothing missing or odd passes in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atom_plugin.configs import ConfigError, RopeSpec, load_spec
from tests.configs import fixtures

PLAIN = RopeSpec(theta=1e6, rope_type="default", scaling=(), rotary_dim=128, sections=None)


def config(**changes: Any) -> dict[str, Any]:
    """Return Qwen3-30B-A3B's published config with changes; None takes a field out."""
    values = {**fixtures.read("Qwen--Qwen3-30B-A3B"), **changes}
    return {name: value for name, value in values.items() if name not in changes or changes[name] is not None}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, PLAIN),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
            replace(PLAIN, theta=5e6),
        ),
        ({"rope_parameters": {"rope_type": "default"}}, PLAIN),
        (
            {"rope_scaling": {**YARN, "type": "yarn"}},
            replace(PLAIN, rope_type="yarn", scaling=(("factor", 4.0), ("original_max_position_embeddings", 32768))),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            replace(PLAIN, rope_type="linear", scaling=(("factor", 2.0),)),
        ),
        ({"rope_scaling": {}}, PLAIN),
    ],
)
def test_rope(changes: dict[str, Any], rope: RopeSpec) -> None:
    """rope_theta and rope_scaling, rope_parameters, both, and the older key ``type``."""
    assert load_spec(config(**changes)).rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": None}, "field 'rope_theta' is absent"),
        ({"rope_theta": None, "rope_parameters": YARN}, "give rope_theta in the override as well"),
        ({"rope_parameters": {"rope_theta": 5e6}}, "field 'rope_theta' is 1000000.0: it contradicts rope_parameters"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope type 'su' is not known"),
        ({"rope_scaling": {"factor": 2.0}}, "a factor without a rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "missing ['original_max_position_embeddings']"),
        ({"rope_scaling": {**YARN, "beta_quick": 1}}, "unknown ['beta_quick']"),
        ({"rope_scaling": "yarn"}, "a mapping is required"),
        ({"partial_rotary_factor": 0.5}, "field 'partial_rotary_factor' is 0.5: accepted: None, 1.0"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "all of a head turns"),
        ({"final_logit_softcapping": 30.0}, "our model does not compute this"),
        ({"n_shared_experts": 1}, "field 'n_shared_experts' is 1"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "its factor must be at least 1"),
        ({"rope_scaling": {**YARN, "factor": float("nan")}}, "its factor must be a finite number"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "its beta_fast must be a finite number greater than zero"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 512}}, "is less than 40960 positions"),
        ({"rope_theta": float("inf")}, "field 'rope_theta' is inf: a finite number is required"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a finite number"),
        ({"rms_norm_eps": 1000.0}, "field 'rms_norm_eps' is 1000.0: it must lie between"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "a list of names is required"),
        ({"architectures": [["Qwen3MoeForCausalLM"]]}, "a list of names is required"),
        ({"is_causal": False, "swiglu_limit": 7}, "unknown fields (is_causal, swiglu_limit)"),
        ({"num_experts": None}, "field 'num_experts' is absent: it is required, as int"),
        ({"num_local_experts": 64}, "field 'num_experts' is 128: it contradicts 'num_local_experts' = 64"),
        ({"hidden_size": "2048"}, "field 'hidden_size' is '2048': int is required"),
        ({"hidden_size": 0}, "it must be greater than zero"),
        ({"num_key_value_heads": 5}, "it must divide num_attention_heads = 32"),
        ({"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": None}, "field 'head_dim' is absent"),
        ({"hidden_act": "gelu"}, "field 'hidden_act' is 'gelu': accepted: 'silu'"),
        ({"num_experts_per_tok": 129}, "it must be at most num_experts = 128"),
        ({"mlp_only_layers": [48]}, "layer indices below 48 are required"),
        ({"norm_topk_prob": None}, "field 'norm_topk_prob' is absent"),
        ({"norm_topk_prob": None, "norm_topk_probs": True}, "is 'norm_topk_probs' a misspelling of it?"),
        ({"tie_word_embedding": False}, "unknown field; did you mean 'tie_word_embeddings'?"),
        ({"layer_types": ["sliding_attention"] * 48}, "accepted: full_attention in every layer"),
        ({"use_sliding_window": True}, "field 'use_sliding_window' is True"),
        ({"quantization_config": {"quant_method": "awq"}}, "accepted: none, or quant_method 'fp8'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size [128, 128]",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    """One error that names the field, its value and what is accepted."""
    with pytest.raises(ConfigError) as error:
        load_spec(config(**changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "num_experts",
        "num_experts_per_tok",
        "decoder_sparse_step",
        "moe_intermediate_size",
        "norm_topk_prob",
        "hidden_act",
        "model_type",
        "architectures",
    ],
)
def test_no_required_field_has_a_default(name: str) -> None:
    """Taking out any of them is an error that names it."""
    with pytest.raises(ConfigError, match=f"{name}|absent"):
        load_spec(config(**{name: None}))


YARN_FILE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("form", ["", ".v5"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_documented_yarn_override(form: str, name: str) -> None:
    """The override of the model card, over both forms of a file, is the same as the file with it."""
    spec = load_spec(fixtures.path(f"Qwen--Qwen3-30B-A3B{form}"), overrides={name: YARN_FILE})
    assert spec.rope == load_spec(config(rope_scaling=YARN_FILE)).rope


@pytest.mark.parametrize(
    "other",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {**YARN_FILE, "beta_fast": 16.0},
        {**YARN_FILE, "rope_type": "linear"},
        {"rope_type": "default"},
        {"rope_theta": 1e6},
    ],
)
def test_two_forms_that_differ(other: dict[str, Any]) -> None:
    """What one form has and the other lacks is a contradiction, and is not put together from both."""
    for forms in ((other, YARN_FILE), (YARN_FILE, other)):
        with pytest.raises(ConfigError, match=r"field 'rope_parameters' is .*: it contradicts 'rope_scaling' = "):
            load_spec(config(rope_parameters=forms[0], rope_scaling=forms[1]))


def test_two_forms_that_agree() -> None:
    """The spelling of the type, nulls and the base, which the older form keeps beside, are no difference."""
    old = {"type": "yarn", **{key: value for key, value in YARN_FILE.items() if key != "rope_type"}}
    both = config(rope_parameters={**YARN_FILE, "rope_theta": 1e6, "mscale": None}, rope_scaling=old)
    assert load_spec(both).rope == load_spec(config(rope_scaling=YARN_FILE)).rope
    with pytest.raises(ConfigError, match="it contradicts 'rope_scaling'"):
        load_spec(config(rope_parameters={**YARN_FILE, "rope_theta": 1e6}, rope_scaling={**YARN_FILE, "rope_theta": 2}))


OLD_YARN = config(rope_scaling=YARN_FILE)
NEW_YARN = config(rope_theta=None, rope_parameters={**YARN_FILE, "rope_theta": 1e6, "mscale": 0.7})


@pytest.mark.parametrize("values", [OLD_YARN, NEW_YARN], ids=["old", "new"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_an_override_of_the_rope_type(values: dict[str, Any], name: str) -> None:
    """What only the replaced type has goes with it."""
    assert load_spec(values, overrides={name: {"rope_type": "default"}}).rope == PLAIN
    linear = load_spec(values, overrides={name: {"type": "linear", "factor": 2.0}}).rope
    assert linear == replace(PLAIN, rope_type="linear", scaling=(("factor", 2.0),))
    with pytest.raises(ConfigError, match="unknown \\['factor'\\]"):
        load_spec(values, overrides={name: {"rope_type": "default", "factor": 2.0}})
    with pytest.raises(ConfigError, match="rope type 'yarns' is not known"):
        load_spec(values, overrides={name: {"rope_type": "yarns"}})


@pytest.mark.parametrize("values", [OLD_YARN, NEW_YARN, config()], ids=["old", "new", "plain"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("nothing", [None, {}])
def test_an_override_by_nothing(values: dict[str, Any], name: str, nothing: Any) -> None:
    """SGLang 0.5.23 loses the base at null and keeps yarn at {}: neither is taken for no scaling."""
    with pytest.raises(ConfigError, match=f"^overrides: '{name}' is .*give {{'{name}': {{'rope_type': 'default'}}}}"):
        load_spec(values, overrides={name: nothing})


@pytest.mark.parametrize("values", [OLD_YARN, NEW_YARN], ids=["old", "new"])
def test_an_override_of_the_base(values: dict[str, Any]) -> None:
    """It takes the place of the base wherever the file keeps it, and leaves an odd value to be refused."""
    for overrides in ({"rope_theta": 5e6}, {"rope_scaling": {"rope_theta": 5e6}}):
        assert load_spec(values, overrides=overrides).rope == replace(load_spec(values).rope, theta=5e6)
    with pytest.raises(ConfigError, match=r"field 'rope_theta' is .*: it contradicts rope_parameters"):
        load_spec(values, overrides={"rope_theta": 5e6, "rope_parameters": {"rope_theta": 1e6}})
    with pytest.raises(ConfigError, match="field 'rope_scaling' is 'yarn': a mapping is required"):
        load_spec(config(rope_scaling="yarn"), overrides={"rope_theta": 5e6})


@pytest.mark.parametrize("overrides", [[], "rope", 7, False])
def test_overrides_that_are_no_mapping(overrides: Any) -> None:
    """Nor is an empty list taken for none."""
    with pytest.raises(ConfigError, match=r"^overrides: a mapping is required, not "):
        load_spec(config(), overrides=overrides)


def test_an_override_by_the_other_name_of_top_k() -> None:
    """It replaces the value, whichever name the file has."""
    assert vars(load_spec(config(), overrides={"num_experts_per_token": 4}))["num_experts_per_tok"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 127}, "field 'head_dim' is 127: rope turns pairs of elements"),
        (
            {"rope_scaling": {**YARN_FILE, "original_max_position_embeddings": 32768.0}},
            "its original_max_position_embeddings must be an integer",
        ),
        (
            {"rope_scaling": {**YARN_FILE, "original_max_position_embeddings": 40961}},
            "its original_max_position_embeddings is more than the 40960 positions",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 65536,
                }
            },
            "its original_max_position_embeddings is more than the 40960 positions",
        ),
        ({"rope_scaling": {**YARN_FILE, 7: 1, "x": 1}}, "unknown [7, 'x']"),
    ],
)
def test_a_rope_that_no_model_has(changes: dict[str, Any], message: str) -> None:
    """Sizes that do not fit the head or the context; transformers warns of most, and computes something."""
    with pytest.raises(ConfigError) as error:
        load_spec(config(**changes))
    assert message in str(error.value)


def test_an_override_of_what_is_no_mapping() -> None:
    """It takes the place of an odd value, as SGLang lets it."""
    assert load_spec(config(rope_scaling="yarn"), overrides={"rope_scaling": YARN_FILE}).rope.rope_type == "yarn"


def test_an_override_that_is_no_mapping() -> None:
    """It is refused by name, like the same value in a file."""
    with pytest.raises(ConfigError, match="field 'rope_scaling' is 'yarn': a mapping is required"):
        load_spec(fixtures.path("Qwen--Qwen3-30B-A3B"), overrides={"rope_scaling": "yarn"})


def test_an_object_in_which_sglang_left_the_older_key() -> None:
    """SGLang writes ``type`` beside rope_type, and an override changes only the latter."""
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(fixtures.path("Qwen--Qwen3-30B-A3B"))
    loaded.rope_parameters = {"rope_theta": 1e6, "type": "default", **YARN_FILE}
    assert load_spec(loaded).rope.rope_type == "yarn"


def test_dense_layers() -> None:
    """mlp_only_layers and decoder_sparse_step, as transformers counts them."""
    assert load_spec(config(mlp_only_layers=[0, 3])).dense_layers == {0, 3}
    assert load_spec(config(decoder_sparse_step=2)).dense_layers == frozenset(range(0, 48, 2))
