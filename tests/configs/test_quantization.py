"""quantization_config: the formats that are read, exact refusals of the others, ignore lists in our module names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers import FineGrainedFP8Config

from atom_plugin.configs import BlockFp8, ConfigError, PackedInt4, PackedMxfp4, Quantization, load_spec
from tests.configs import fixtures

BASES = {
    "qwen3": "Qwen--Qwen3-30B-A3B",
    "kimi_k2": "moonshotai--Kimi-K2-Thinking",
    "kimi_linear": "moonshotai--Kimi-Linear-48B-A3B-Instruct",
}
ACCEPTED = {
    "qwen3": "accepted: none, or quant_method 'fp8' with weight_block_size [128, 128]; drop `--model-impl atom`",
    "kimi_k2": "accepted: none, or quant_method 'fp8' with weight_block_size [128, 128], or quant_method "
    "'compressed-tensors' with format 'pack-quantized' (INT4, W4A16); drop `--model-impl atom`",
    "kimi_linear": "accepted: none; drop `--model-impl atom`",
}


def fragment(name: str) -> dict[str, Any]:
    """Return a fragment as a whole quantization_config; where the source has layers' settings alone, as Quark's."""
    piece = {key: value for key, value in fixtures.fragments()[name].items() if key != "_source"}
    whole = piece.get("quantization_config", piece)
    return whole if "quant_method" in whole else {"quant_method": "quark", "global_quant_config": whole}


def quantization(base: str, config: dict[str, Any] | None) -> Quantization | None:
    """Return the quantisation of the model ``base`` with ``config``."""
    return load_spec({**fixtures.read(BASES[base]), "quantization_config": config}).quantization


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", [name for name in fixtures.fragments() if not name.startswith("_")])
def test_fragments_are_refused_by_name(name: str, base: str) -> None:
    """Quark (MXFP4, PTPC FP8) and per-channel FP8: what is there, what the family accepts, the way out."""
    config = fragment(name)
    with pytest.raises(ConfigError) as error:
        quantization(base, config)
    assert f"field 'quantization_config' is {config!r}: {ACCEPTED[base]}" in str(error.value)


def test_each_fragment_is_seen() -> None:
    """The list of fragments, so that a new one is looked at."""
    assert {name for name in fixtures.fragments() if not name.startswith("_")} == {
        "quark_mxfp4_export_layout",
        "quark_ptpc_fp8_vllm",
        "quark_ptpc_fp8_atom_test",
        "compressed_tensors_fp8_channel_token",
    }


@pytest.mark.parametrize("base", BASES)
def test_none(base: str) -> None:
    """Null is no quantisation."""
    assert quantization(base, None) is None


MOE, DENSE, ATTENTION = "model.layers.3.mlp", "model.layers.0.mlp", "model.layers.3.self_attn"


def covered(name: str, modules: list[str]) -> list[str]:
    """Return which of ``modules`` the published model ``name`` stores quantised."""
    stored = load_spec(fixtures.path(name)).quantization
    assert stored is not None
    return [module for module in modules if stored.covers(module)]


@pytest.mark.parametrize(
    "name", ["moonshotai--Kimi-K2-Thinking", "moonshotai--Kimi-K2.5", "moonshotai--Kimi-K2.5.v5", "moonshotai--Kimi-K3"]
)
def test_only_the_experts_of_a_packed_kimi(name: str) -> None:
    """INT4 and MXFP4: routed experts by any of our names, and nothing else."""
    experts = [f"{MOE}.experts", f"{MOE}.experts.0.gate_proj", f"{MOE}.experts.383.down_proj"]
    others = [
        *(f"{DENSE}.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")),
        *(f"{MOE}.shared_experts.{leaf}" for leaf in ("gate_proj", "down_proj", "gate_up_proj")),
        *(f"{ATTENTION}.{leaf}" for leaf in ("q_a_proj", "kv_b_proj", "o_proj", "fused_qkv_a_proj_with_mqa")),
        f"{MOE}.gate",
        "lm_head",
        "model.embed_tokens",
    ]
    assert covered(name, experts + others) == experts
    assert covered("moonshotai--Kimi-K3", ["model.layers.3.mlp.routed_expert_down_proj"]) == []


def test_all_linear_layers_of_block_fp8() -> None:
    """Projections and experts; not the router, head, embedding, nor what the list names."""
    stored = [f"{ATTENTION}.q_proj", f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj", f"{MOE}.experts"]
    others = [f"{MOE}.gate", "lm_head", "model.embed_tokens", "model.layers.3.input_layernorm"]
    assert covered("Qwen--Qwen3-235B-A22B-Instruct-2507-FP8", stored + others) == stored
    mla = [f"{ATTENTION}.fused_qkv_a_proj_with_mqa", f"{ATTENTION}.kv_b_proj", f"{MOE}.shared_experts.gate_up_proj"]
    assert covered("moonshotai--Kimi-K2-Instruct", [*mla, *others[:3]]) == mla


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def test_a_listed_container_holds_back_all_inside_of_it() -> None:
    """A name in the list means the module and what it contains, and not its neighbours of a longer name."""
    stored = quantization("qwen3", {**FP8, "modules_to_not_convert": [DENSE, "model.layers.1.mlp.gate"]})
    assert isinstance(stored, BlockFp8)
    assert not stored.covers(f"{DENSE}.gate_up_proj") and not stored.covers(f"{DENSE}.experts")
    assert stored.covers("model.layers.1.mlp.gate_proj") and stored.covers("model.layers.10.mlp.up_proj")


def test_a_module_that_is_quantised_in_part() -> None:
    """No kernel runs half of a fused module quantised; asking for it names the parts."""
    stored = BlockFp8(block=(128, 128), unquantized=frozenset({f"{ATTENTION}.q_proj"}))
    assert not stored.covers(f"{ATTENTION}.q_proj")
    with pytest.raises(ValueError, match=r"self_attn\.qkv_proj is quantised in part.*k_proj is, .*q_proj is not$"):
        stored.covers(f"{ATTENTION}.qkv_proj")


@pytest.mark.parametrize(
    ("base", "listed", "message"),
    [
        ("qwen3", ["model.layers.0.self_attn.q_proj"], r"0\.self_attn\.qkv_proj .*k_proj is, .*q_proj is not$"),
        ("qwen3", ["model.layers.47.mlp.up_proj"], r"47\.mlp\.gate_up_proj is quantised in part"),
        ("kimi_k2", ["model.layers.60.self_attn.q_a_proj"], r"60\.self_attn\.fused_qkv_a_proj_with_mqa is quantised"),
        ("kimi_k2", [r"re:.*shared_experts\.gate_proj"], r"0\.mlp\.shared_experts\.gate_up_proj is quantised in part"),
        ("kimi_k2", [r"re:.*experts\..*\.up_proj"], r"0\.mlp\.(shared_)?experts.* is quantised in part"),
        (
            "kimi_k2",
            [r"re:.*\.mlp\..*\.7\..*"],
            r"60\.mlp\.experts is quantised in part.*0\.gate_proj is, .*7\.gate_pr",
        ),
    ],
)
def test_a_layer_that_is_quantised_in_part(base: str, listed: list[str], message: str) -> None:
    """Refused where the config is read: nothing is built before."""
    with pytest.raises(ConfigError, match=message):
        quantization(base, {**FP8, "modules_to_not_convert": listed})


@pytest.mark.parametrize(
    ("listed", "parts"),
    [
        (f"{ATTENTION}.qkv_proj", ["q_proj", "k_proj", "v_proj", "qkv_proj"]),
        (r"re:.*self_attn\.qkv_proj", ["q_proj", "k_proj", "v_proj", "qkv_proj"]),
        (f"{ATTENTION}.fused_qkv_a_proj_with_mqa", ["q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"]),
    ],
)
def test_a_name_of_ours_means_all_its_parts(listed: str, parts: list[str]) -> None:
    """As SGLang reads it."""
    stored = quantization("kimi_k2", {**FP8, "modules_to_not_convert": [listed]})
    assert stored is not None and stored.covers(f"{ATTENTION}.o_proj")
    assert not any(stored.covers(f"{ATTENTION}.{part}") for part in parts)


def test_the_object_of_transformers() -> None:
    """Its quant_method is an enum, whose text is not its value."""
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    for given in (config, config.to_dict()):
        values = {**fixtures.read(BASES["qwen3"]), "quantization_config": given}
        assert load_spec(values).quantization == BlockFp8(block=(128, 128), unquantized=frozenset({"lm_head"}))


def test_a_long_list_is_read_at_once() -> None:
    """94 layers and 283 names; a dozen times what it takes."""
    values = fixtures.read("Qwen--Qwen3-235B-A22B-FP8")
    values["quantization_config"]["modules_to_not_convert"].append("model.norm")  # no other test has read this one
    start = time.perf_counter()
    load_spec(values)
    assert time.perf_counter() - start < 0.3


INT4 = fixtures.read(BASES["kimi_k2"])["quantization_config"]


@pytest.mark.parametrize(
    ("listed", "ours"),
    [
        (["language_model.lm_head", "language_model.model.layers.0.mlp"], ["lm_head", "model.layers.0.mlp"]),
        (["model.language_model.layers.0.mlp"], ["model.layers.0.mlp"]),
        ([r"re:language_model\.model\.layers\.0\..*"], [r"re:model\.layers\.0\..*"]),
        (["re:language_model.lm_head", "re:.*self_attn.*"], ["re:lm_head", "re:.*self_attn.*"]),
        (["model.layers.0.mlp.", "lm_head."], ["model.layers.0.mlp", "lm_head"]),
        (["vision_tower.blocks.0", "re:vision_tower.*", r"re:.*mm_projector\..*", "model.visual.merger", "mtp.fc"], []),
        ([], []),
    ],
)
def test_names_become_ours(listed: list[str], ours: list[str]) -> None:
    """The prefix of a multimodal checkpoint goes; what the text model does not have goes as well."""
    stored = quantization("kimi_k2", {**INT4, "ignore": listed})
    assert stored == PackedInt4(group_size=32, unquantized=frozenset(ours))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (["self_attn"], "'self_attn' is no full module name (model..., lm_head) and no pattern (re:.*...)"),
        (["re:self_attn"], "'re:self_attn' is no full module name"),
        (["Linear"], "'Linear' is no full module name"),
        (["re:.*("], "'re:.*(' is no regular expression"),
        (["model.layers.3.mlp.experts.7.up_proj"], "names single experts, and those of a layer are stored alike"),
        ([r"re:.*experts\.[0-7]\..*"], "names single experts"),
        (["model.layers.*.mlp"], "'model.layers.*.mlp' is no full module name"),
        (["model.layers.[0-3].mlp"], "'model.layers.[0-3].mlp' is no full module name"),
        (["model.layers.0.self_attn.q_proj.weight"], "q_proj.weight' is the name of a tensor"),
        (["lm_headx"], "'lm_headx' is no full module name"),
        (["modelx.layers"], "'modelx.layers' is no full module name"),
        (["model.layers.0.visual.mlp"], "has visual in it, which no module of the text model has"),
        (["model.layers.0.mtp"], "has mtp in it"),
        (["re:.*visual.*|.*self_attn.*"], "'re:.*visual.*|.*self_attn.*' has visual in it"),
        (["re:vision_tower.*|model.*"], "is no full module name"),
        (["re:.*language_model.layers.0.*"], "has language_model in it"),
        ([r"re:language_model\.model\..*|language_model\.lm_head"], "has language_model in it"),
        ([7], "a list of module names is required"),
        ("lm_head", "list is required"),
    ],
)
def test_names_that_cannot_be_mapped(listed: Any, message: str) -> None:
    """Rather than guess which modules are meant."""
    with pytest.raises(ConfigError) as error:
        quantization("kimi_k2", {**INT4, "ignore": listed})
    assert "'quantization_config.ignore'" in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", ["model.layers.61.mlp", "model.layers.00.mlp", "model.layers.610"])
def test_layers_that_the_model_does_not_have(name: str) -> None:
    """An entry that means no layer was meant for one."""
    with pytest.raises(ConfigError, match=f"it names '{name}', and layers are called 0 to 60"):
        quantization("kimi_k2", {**INT4, "ignore": [name]})


def int4(**changes: Any) -> dict[str, Any]:
    """Return Kimi-K2-Thinking's quantisation with other settings of its weights."""
    (group,) = INT4["config_groups"].values()
    return {**INT4, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


WEIGHTS = "quantization_config.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (int4(num_bits=8), f"field '{WEIGHTS}.num_bits' is 8: accepted: 4"),
        (int4(symmetric=False), f"field '{WEIGHTS}.symmetric' is False: accepted: True"),
        (int4(actorder="group"), f"field '{WEIGHTS}.actorder' is 'group': accepted: None"),
        (int4(type="float"), f"field '{WEIGHTS}.type' is 'float': accepted: 'int'"),
        (int4(group_size=None), f"field '{WEIGHTS}.group_size' is None: it is required, as int"),
        (int4(dynamik=False), f"field '{WEIGHTS}.dynamik' is False: unknown field; did you mean 'dynamic'?"),
        ({**INT4, "config_groups": {}}, "field 'quantization_config.config_groups' is {}: one group of layers"),
        ({**INT4, "config_groups": None}, "field 'quantization_config.config_groups' is None: it is required"),
        (
            {**INT4, "kv_cache_scheme": {"num_bits": 8}},
            "field 'quantization_config.kv_cache_scheme' is {'num_bits': 8}",
        ),
        ({**INT4, "quantization_status": "frozen"}, "is 'frozen': accepted: 'compressed'"),
        ({**INT4, "ignore": None}, "field 'quantization_config.ignore' is None: it is required, as list"),
        ({**INT4, "format": {}}, "field 'quantization_config' is"),
        (
            {**FP8, "activation_scheme": "static"},
            "'quantization_config.activation_scheme' is 'static': accepted: None, 'dy",
        ),
        ({**FP8, "fmt": "e5m2"}, "field 'quantization_config.fmt' is 'e5m2': accepted: None, 'e4m3'"),
        ({**FP8, "scale_fmt": "ue8m0"}, "field 'quantization_config.scale_fmt' is 'ue8m0': accepted: None, 'float'"),
        ({**FP8, "expert_dtype": "fp4"}, "field 'quantization_config.expert_dtype' is 'fp4': accepted: None, 'fp8'"),
        ({**FP8, "dequantize": True}, "field 'quantization_config.dequantize' is True: accepted: None, False"),
        ({**FP8, "modules_to_convert": ["lm_head"]}, "quantization_config.modules_to_convert' is ['lm_head']"),
        ({**FP8, "scale_fmts": 1}, "field 'quantization_config.scale_fmts' is 1: unknown field; did you mean"),
        ({**FP8, "modules_to_not_convert": ["lm_head"], "ignored_layers": ["model.norm"]}, "contradict each other"),
        ({**FP8, "weight_block_size": [64, 64]}, "with weight_block_size [128, 128]"),
        ("fp8", "field 'quantization_config' is 'fp8': a mapping is required"),
    ],
)
def test_refused(config: Any, message: str) -> None:
    """One error with the path of the field, its value and what is accepted."""
    with pytest.raises(ConfigError) as error:
        quantization("kimi_k2", config)
    assert message in str(error.value)


@pytest.mark.parametrize("level", ["outer", "inner", "both", "different"])
def test_either_level(level: str) -> None:
    """A multimodal config holds it for itself, for its text model, or twice; two different ones are refused."""
    values = fixtures.read("moonshotai--Kimi-K3")
    stored = values["text_config"].pop("quantization_config")
    if level != "inner":
        values["quantization_config"] = stored if level != "different" else {**stored, "ignore": []}
    if level != "outer":
        values["text_config"]["quantization_config"] = stored
    if level == "different":
        with pytest.raises(ConfigError, match=r"field 'quantization_config' is .*: it contradicts 'text_config\.quant"):
            load_spec(values)
    else:
        assert isinstance(load_spec(values).quantization, PackedMxfp4)
