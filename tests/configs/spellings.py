"""Random valid configs of every family, each in the spelling of its publisher and as transformers 5 spells it.

``Case.required`` are the fields that no config may lack, by their path; ``Case.expected`` what the spec must say.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.configs import fixtures

Draw = Callable[[st.SearchStrategy[Any]], Any]
Values = dict[str, Any]
Path = tuple[str, ...]

SMALL = st.integers(1, 12)
WIDTH = st.integers(1, 64).map(lambda n: 16 * n)
DTYPE = st.sampled_from(["bfloat16", "float16", "float32"])
EPS = st.sampled_from([1e-6, 1e-5, 0.001])
THETA = st.sampled_from([10000, 50000.0, 1000000, 1e7])


@dataclass(frozen=True)
class Case:
    """One model as ``old`` (published) and ``new`` (transformers 5) spell it."""

    old: Values
    new: Values
    expected: Values
    required: tuple[Path, ...]


def draw_scaling(draw: Draw, longest: int) -> Values:
    """Return the rope parameters beside theta of a random type, () for the default one."""
    factor = draw(st.sampled_from([2, 4.0, 8.0]))
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]))
    original = {"original_max_position_embeddings": longest}
    if kind == "default":
        return {}
    if kind == "llama3":
        return {"rope_type": kind, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    extras = {"beta_fast": 32, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.2}
    kept = draw(st.sets(st.sampled_from(sorted(extras))))
    return {"rope_type": kind, "factor": factor, **original, **{name: extras[name] for name in kept}}


def rope_forms(draw: Draw, longest: int) -> tuple[Values, Values, Values]:
    """Return (fields of the old form, fields of the new one, what the RopeSpec must say)."""
    theta, scaling = draw(THETA), draw_scaling(draw, longest)
    kind = scaling.get("rope_type", "default")
    older = draw(st.sampled_from(["type", "rope_type"]))
    old = {older if name == "rope_type" else name: value for name, value in scaling.items()}
    says = {
        "theta": float(theta),
        "rope_type": kind,
        "scaling": tuple(sorted((name, value) for name, value in scaling.items() if name != "rope_type"))
        if kind not in ("default",)
        else (),
    }
    new = {"rope_parameters": {**scaling, "rope_type": kind, "rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": old or None}, new, says


def same_named(values: Values, *names: str) -> Values:
    """Return those fields of ``values``, which a spec calls alike."""
    return {name: values[name] for name in names}


def without(values: Values, *names: str) -> Values:
    """Return a deep copy of ``values`` without ``names``."""
    return copy.deepcopy({name: value for name, value in values.items() if name not in names})


COMMON = [
    "architectures",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
]


def draw_decoder(draw: Draw) -> Values:
    """Return random values of the fields that every decoder has."""
    return {
        "num_hidden_layers": draw(SMALL),
        "hidden_size": draw(WIDTH),
        "num_attention_heads": 4 * draw(SMALL),
        "vocab_size": draw(st.integers(1, 200000)),
        "max_position_embeddings": draw(st.sampled_from([4096, 40960])),
        "rms_norm_eps": draw(EPS),
        "tie_word_embeddings": draw(st.booleans()),
    }


def paths(names: list[str], inside: str | None = None) -> tuple[Path, ...]:
    """Return ``names`` as paths, but for those of the whole config ``inside`` a nested one."""
    whole = ("architectures", "model_type", "tie_word_embeddings")
    return tuple((name,) if inside is None or name in whole else (inside, name) for name in names)


@st.composite
def qwen3(draw: Draw) -> Case:
    """Return a dense Qwen3 or, as often, a Qwen3-MoE."""
    moe = draw(st.booleans())
    common = draw_decoder(draw)
    changes = {**common, "num_key_value_heads": draw(st.sampled_from([1, 2, 4])), "head_dim": draw(WIDTH)}
    changes |= {"intermediate_size": draw(WIDTH), "attention_bias": draw(st.booleans())}
    if moe:
        experts = draw(SMALL)
        changes |= {"num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
        changes |= {"moe_intermediate_size": draw(WIDTH), "norm_topk_prob": draw(st.booleans())}
    dtype = draw(DTYPE)
    old_rope, new_rope, rope = rope_forms(draw, common["max_position_embeddings"])
    base = without(fixtures.read("Qwen--Qwen3-30B-A3B" if moe else "Qwen--Qwen3-8B"), "torch_dtype", "rope_scaling")
    base |= changes
    new = {**without(base, "rope_theta"), **new_rope, "dtype": dtype, "pad_token_id": None}
    if moe:
        new["num_local_experts"] = new.pop("num_experts")
    else:
        new["layer_types"] = ["full_attention"] * common["num_hidden_layers"]
    of_moe = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"]
    names = [*COMMON, "num_key_value_heads", "intermediate_size", "rope_theta", *(of_moe if moe else ["head_dim"])]
    expected = {**changes, "dtype": dtype, "rope": {**rope, "rotary_dim": changes["head_dim"], "sections": None}}
    return Case({**base, **old_rope, "torch_dtype": dtype}, new, expected, paths(names))


LATENT = [
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "routed_scaling_factor",
]


def draw_latent(draw: Draw) -> Values:
    """Return random values of the fields of MLA and of the experts that all Kimis spell alike."""
    heads = 4 * draw(SMALL)
    layers = draw(st.integers(2, 12))
    return {
        **draw_decoder(draw),
        **{name: draw(WIDTH) for name in LATENT[:-1]},
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5, 3])),
    }


@st.composite
def kimi_k2(draw: Draw) -> Case:
    """Return a Kimi-K2 or, as often, a Kimi-K2.5."""
    nested = draw(st.booleans())
    changes, groups, of_group, dtype = draw_latent(draw), draw(SMALL), 1 + draw(SMALL), draw(DTYPE)
    experts = groups * of_group
    top_k, shared = draw(st.integers(1, experts)), draw(SMALL)
    taken = draw(st.integers(-(-top_k // of_group), groups))
    old_rope, new_rope, rope = rope_forms(draw, changes["max_position_embeddings"])
    spelled = {"n_routed_experts": experts, "num_experts_per_tok": top_k, "n_shared_experts": shared}
    spelled |= {"n_group": groups, "topk_group": taken}
    whole = fixtures.read("moonshotai--Kimi-K2.5" if nested else "moonshotai--Kimi-K2-Instruct")
    text = without(whole.get("text_config", whole), "torch_dtype", "dtype", "rope_scaling", "rope_theta")
    text |= {**changes, **spelled}
    old = {**text, **old_rope, "dtype" if nested else "torch_dtype": dtype}
    new = {**text, **new_rope, "dtype": dtype, "head_dim": changes["qk_rope_head_dim"], "rope_interleave": True}
    new |= {"qk_head_dim": changes["qk_nope_head_dim"] + changes["qk_rope_head_dim"], "output_router_logits": False}
    new["rope_parameters"]["type"] = new["rope_parameters"]["rope_type"]
    if nested:
        outer = {**without(whole, "text_config", "dtype"), "tie_word_embeddings": changes["tie_word_embeddings"]}
        old = {**outer, "dtype": dtype, "text_config": without(old, "tie_word_embeddings")}
        new = {**outer, "text_config": {**new, "model_type": "deepseek_v3"}}
    names = [*COMMON, *LATENT, *spelled, "num_key_value_heads", "first_k_dense_replace", "norm_topk_prob", "rope_theta"]
    names += ["topk_method", "scoring_func", "moe_layer_freq"]
    expected = {
        **same_named(changes, *LATENT, *COMMON[2:9]),
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_shared_experts": shared,
        "num_expert_groups": groups,
        "num_groups_per_token": taken,
        "dense_layers": frozenset(range(changes["first_k_dense_replace"])),
        "dtype": dtype,
        "rope": {**rope, "rotary_dim": changes["qk_rope_head_dim"], "sections": None},
    }
    return Case(old, new, expected, paths(names, "text_config" if nested else None))


@st.composite
def kimi_linear(draw: Draw) -> Case:
    """Return a Kimi-Linear or, as often, a Kimi-K3, which transformers has no class for but may save all the same."""
    nested = draw(st.booleans())
    changes, experts, dtype = draw_latent(draw), draw(SMALL), draw(DTYPE)
    top_k, shared, layers = draw(st.integers(1, experts)), draw(SMALL), changes["num_hidden_layers"]
    linear = draw(st.sets(st.integers(1, layers)))
    spelled = {"num_experts": experts, "num_experts_per_token": top_k, "num_shared_experts": shared}
    whole = fixtures.read("moonshotai--Kimi-K3" if nested else "moonshotai--Kimi-Linear-48B-A3B-Instruct")
    text = without(whole.get("text_config", whole), "dtype")
    kda = {**text["linear_attn_config"], "num_heads": draw(SMALL), "head_dim": draw(WIDTH)}
    kda |= {"kda_layers": sorted(linear), "full_attn_layers": sorted(set(range(1, layers + 1)) - linear)}
    first = changes["first_k_dense_replace"]
    text |= {**changes, **spelled, "linear_attn_config": kda, "dtype": dtype}
    longest = "max_position_embeddings" if nested else "model_max_length"
    if not nested:
        text[longest] = text.pop("max_position_embeddings")
    new = {
        **text,
        "layer_types": ["linear_attention" if i in linear else "full_attention" for i in range(1, layers + 1)],
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "linear_num_heads": kda["num_heads"],
        "linear_head_dim": kda["head_dim"],
        "linear_conv_kernel_dim": kda["short_conv_kernel_size"],
        "num_local_experts": experts,
        "rope_parameters": None,
    }
    old = text
    if nested:
        outer = {**without(whole, "text_config"), "tie_word_embeddings": changes["tie_word_embeddings"], "dtype": dtype}
        old = {**outer, "text_config": without(text, "tie_word_embeddings", "dtype")}
        new = {**outer, "text_config": new, "quantization_config": text["quantization_config"]}
    names = [name for name in (*COMMON, *LATENT, *spelled) if name != "max_position_embeddings"]
    names += [longest, "num_key_value_heads", "first_k_dense_replace", "moe_renormalize", "moe_router_activation_func"]
    names += ["mla_use_nope", "use_grouped_topk", "num_expert_group", "topk_group", "linear_attn_config"]
    of_k3 = "activation_situ_beta activation_situ_linear_beta attn_res_block_size latent_moe_use_norm "
    names += (of_k3 + "mla_use_output_gate routed_expert_hidden_size").split() if nested else []
    inside: Path = ("text_config", "linear_attn_config") if nested else ("linear_attn_config",)
    of_kda = ["num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"]
    of_kda += ["gate_lower_bound", "use_full_rank_gate"] if nested else []
    expected = {
        **same_named(changes, *LATENT, *COMMON[2:9]),
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_shared_experts": shared,
        "dense_layers": frozenset(range(first)),
        "dtype": dtype,
        "rope": None,
        "kda_layers": frozenset(index - 1 for index in linear),
        "kda_num_heads": kda["num_heads"],
        "kda_head_dim": kda["head_dim"],
    }
    required = (*paths(names, "text_config" if nested else None), *((*inside, name) for name in of_kda))
    return Case(old, new, expected, required)


@st.composite
def qwen35(draw: Draw) -> Case:
    """Return a dense Qwen3.5 or, as often, a Qwen3.5-MoE; the second form spells rope as transformers 4 did."""
    moe = draw(st.booleans())
    common, keys, dtype = draw_decoder(draw), draw(SMALL), draw(DTYPE)
    changes = {**without(common, "tie_word_embeddings"), "num_key_value_heads": draw(st.sampled_from([1, 2, 4]))}
    sections = draw(st.lists(SMALL, min_size=3, max_size=3))
    changes |= {"head_dim": 8 * sum(sections), "linear_num_key_heads": keys}
    changes |= {"linear_num_value_heads": keys * draw(SMALL), "attention_bias": draw(st.booleans())}
    changes |= {name: draw(WIDTH) for name in ("linear_key_head_dim", "linear_value_head_dim")}
    changes |= {"linear_conv_kernel_dim": draw(SMALL)}
    if moe:
        experts = draw(SMALL)
        changes |= {"num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
        changes |= {name: draw(WIDTH) for name in ("moe_intermediate_size", "shared_expert_intermediate_size")}
    else:
        changes |= {"intermediate_size": draw(WIDTH)}
    interval, theta = draw(SMALL), draw(THETA)
    types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(common["num_hidden_layers"])]
    whole = fixtures.read("Qwen--Qwen3.5-35B-A3B" if moe else "Qwen--Qwen3.5-27B")
    text = {**without(whole["text_config"], "dtype", "rope_parameters", "layer_types"), **changes}
    text["full_attention_interval"] = interval
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": sections}
    outer = {**without(whole, "text_config"), "tie_word_embeddings": common["tie_word_embeddings"]}
    parameters = {**rope, "rope_theta": theta, "partial_rotary_factor": 0.25}
    old = {**outer, "text_config": {**text, "dtype": dtype, "rope_parameters": parameters, "layer_types": types}}
    beside = {"rope_theta": theta, "rope_scaling": rope, "partial_rotary_factor": 0.25, "torch_dtype": dtype}
    new = {**outer, "text_config": {**text, **beside, "tie_word_embeddings": common["tie_word_embeddings"]}}
    names = [*COMMON, *changes, "mamba_ssm_dtype", "attn_output_gate"]
    required = dict.fromkeys(paths(names, "text_config"))
    inside = ("text_config", "rope_parameters")
    required |= dict.fromkeys((*inside, name) for name in parameters if name != "rope_type")
    expected = {
        **changes,
        **same_named(common, "tie_word_embeddings"),
        "dtype": dtype,
        "linear_layers": frozenset(i for i, kind in enumerate(types) if kind == "linear_attention"),
        "rope": {
            "theta": float(theta),
            "rope_type": "default",
            "scaling": (),
            "rotary_dim": 2 * sum(sections),
            "sections": tuple(sections),
        },
    }
    return Case(old, new, expected, tuple(required))


FAMILIES = {"qwen3": qwen3(), "kimi_k2": kimi_k2(), "kimi_linear": kimi_linear(), "qwen3_5": qwen35()}
