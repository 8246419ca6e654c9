"""quantization_config -> how a checkpoint's linear layers are stored, in the names of our modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from atom_plugin.configs.experts import EXPERTS
from atom_plugin.configs.fields import Fields

EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")
#: More experts than any layer has: a pattern has to say the same of all of them.
MOST_EXPERTS = 1024
#: Our modules that hold several linear layers of a checkpoint, which are quantised alike or refused.
FUSED = {
    "experts": tuple(f"experts.0.{name}" for name in EXPERT_LAYERS),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
#: Checkpoint prefix -> ours: a multimodal checkpoint keeps its text model under a name that ours does not have.
TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
#: Modules of a multimodal checkpoint or of its draft layers, which the text model does not have.
NOT_TEXT = ("vision_tower", "mm_projector", "model.visual", "visual", "mtp")
#: What no name of ours has in it: where the above does not start a whole entry, the entry means something else.
ONLY_MULTIMODAL = ("language_model", "vision_tower", "mm_projector", "visual", "mtp")

#: Of a layer ``model.layers.N``: what holds several linear layers of a checkpoint in any of our families.
FUSED_OF_LAYER = (
    "self_attn.qkv_proj",
    "self_attn.fused_qkv_a_proj_with_mqa",
    "mlp.gate_up_proj",
    "mlp.shared_experts.gate_up_proj",
    "mlp.experts",
)
FULL_NAME = re.compile(r"lm_head|model(\.[A-Za-z0-9_]+)*")
TENSOR = re.compile(r"\.(weight|bias|weight_scale\w*|weight_packed)$")
LAYER = re.compile(r"model\.layers\.(\d+)(?=\.|$)")
ESCAPED_DOT = r"\."
ONE_EXPERT = re.compile(r"\bexperts\\?\.(\d|\\d|\[)")


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which linear layers are stored in a format, and which are left alone.

    ``unquantized`` holds full names of our modules, each for itself and all inside of it, and ``re:`` patterns that
    match from the start of a name. The name of one that holds several layers means all of them.
    """

    unquantized: frozenset[str]

    #: What a config has to say to mean this format, for messages; and modules that the format never covers.
    stated_as: ClassVar[str]
    never: ClassVar[frozenset[str]]

    def covers(self, module: str) -> bool:
        """Return whether ``module`` is stored in this format: a linear layer, or one of ours that holds several.

        Raises ValueError where only some of those that it holds are.
        """
        return self.covers_with(module, experts=MOST_EXPERTS)

    def covers_with(self, module: str, *, experts: int) -> bool:
        """Return ``covers``, and raise what it raises, where a layer has ``experts`` experts."""
        parent, _, leaf = module.rpartition(".")
        held = FUSED.get(leaf, ())
        if leaf == "experts" and _patterns(self.unquantized):
            held = tuple(f"experts.{index}.{name}" for index in range(experts) for name in EXPERT_LAYERS)
        parts = [f"{parent}.{part}" if parent else part for part in held] or [module]
        verdicts = {part: self._covers_one(part) for part in parts}
        if len(set(verdicts.values())) > 1:
            some = [next(part for part, verdict in verdicts.items() if verdict is one) for one in (True, False)]
            raise ValueError(
                f"{module} is quantised in part, which no kernel of ours can run: {some[0]} is, {some[1]} is not"
            )
        return verdicts[parts[0]]

    def _covers_one(self, module: str) -> bool:
        parent, _, leaf = module.rpartition(".")
        if leaf in self.never:
            return False
        names = [module, *(f"{parent}.{fused}" for fused, parts in FUSED.items() if leaf in parts)]
        return not any(self._is_listed(name) for name in names)

    def _is_listed(self, module: str) -> bool:
        parts = module.split(".")
        containers = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return not containers.isdisjoint(self.unquantized) or any(
            pattern.match(module) for pattern in _patterns(self.unquantized)
        )


@functools.lru_cache(maxsize=64)
def _patterns(unquantized: frozenset[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(name[3:]) for name in sorted(unquantized) if name.startswith("re:"))


@dataclass(frozen=True, kw_only=True)
class BlockFp8(Quantization):
    """FP8 e4m3 weights with one fp32 ``weight_scale_inv`` per block, activations quantised at run time.

    ``block`` is (rows, columns) of a weight ``[out_features, in_features]``.
    """

    block: tuple[int, int]

    stated_as: ClassVar = "quant_method 'fp8' with weight_block_size [128, 128]"
    never: ClassVar = frozenset({"lm_head", "gate", "embed_tokens"})


@dataclass(frozen=True, kw_only=True)
class PackedInt4(Quantization):
    """Symmetric INT4 weights, eight to an int32, one scale per ``group_size`` columns; activations stay as they are."""

    group_size: int

    stated_as: ClassVar = "quant_method 'compressed-tensors' with format 'pack-quantized' (INT4, W4A16)"
    never: ClassVar = frozenset({"gate", "embed_tokens"})  # no Linear layers, and those are the format's only target


@dataclass(frozen=True, kw_only=True)
class PackedMxfp4(Quantization):
    """MXFP4 weights: FP4 e2m1, two to a byte, one e8m0 scale per 32 columns; activations stay as they are."""

    #: Linear layers that Kimi-K3's list leaves out and that SGLang's kimi_k3.py builds without quantisation
    UNLISTED: ClassVar = {
        "mlp_res_proj",
        "output_attn_res_proj",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        "self_attention_res_proj",
    }

    stated_as: ClassVar = "quant_method 'compressed-tensors' with format 'mxfp4-pack-quantized'"
    never: ClassVar = PackedInt4.never | UNLISTED


def read_quantization(fields: Fields, kinds: tuple[type[Quantization], ...]) -> Quantization | None:
    """Return the quantisation of ``fields``, None for none; raise ConfigError for any that is not one of ``kinds``."""
    if not fields.has("quantization_config"):
        return None
    raw = fields.nested("quantization_config")
    stated = (str(raw.optional("quant_method")), str(raw.optional("format")))
    kind = {
        ("fp8", "None"): BlockFp8,
        ("compressed-tensors", "pack-quantized"): PackedInt4,
        ("compressed-tensors", "mxfp4-pack-quantized"): PackedMxfp4,
    }.get(stated)
    if kind not in kinds:
        raise _refused(fields, kinds)
    if kind is BlockFp8:
        stored: Quantization = _block_fp8(fields, raw, kinds)
    else:
        stored = _packed_int4(raw) if kind is PackedInt4 else _packed_mxfp4(raw)
    layers = fields.positive("num_hidden_layers")
    for name in stored.unquantized:
        layer = LAYER.match(name)
        if layer and (layer[1] != str(int(layer[1])) or int(layer[1]) >= layers):
            raise fields.error("quantization_config", f"it names {name!r}, and layers are called 0 to {layers - 1}")
    experts = fields.positive(*EXPERTS) if any(fields.has(name) for name in EXPERTS) else 1
    problem = _why_not_whole(stored, layers, min(experts, MOST_EXPERTS))
    if problem:
        raise fields.error("quantization_config", problem)
    return stored


@functools.lru_cache(maxsize=64)
def _why_not_whole(stored: Quantization, layers: int, experts: int) -> str:
    """Return why a layer has a module that is quantised in part, or "".

    Patterns are asked for every expert of the last layer and for one of the others, which ``covers`` does not trust:
    all of all layers would take seconds.
    """
    for name in FUSED_OF_LAYER:
        for layer in range(layers):
            try:
                stored.covers_with(f"model.layers.{layer}.{name}", experts=experts if layer == layers - 1 else 1)
            except ValueError as error:
                return str(error)
    return ""


def _refused(fields: Fields, kinds: tuple[type[Quantization], ...]) -> Exception:
    accepted = ", or ".join(["none", *(kind.stated_as for kind in kinds)])
    return fields.error(
        "quantization_config",
        f"accepted: {accepted}; drop `--model-impl atom` to serve this checkpoint with SGLang's own model",
    )


def _block_fp8(fields: Fields, raw: Fields, kinds: tuple[type[Quantization], ...]) -> BlockFp8:
    if raw.optional("weight_block_size") != [128, 128]:
        raise _refused(fields, kinds)
    raw.only("activation_scheme", (None, "dynamic"))
    raw.only("fmt", (None, "e4m3"))
    raw.only("scale_fmt", (None, "float"))  # this and the next three as transformers 5 writes them
    raw.only("expert_dtype", (None, "fp8"))
    raw.only("dequantize", (None, False))
    raw.only("modules_to_convert", (None, []))
    listed = {name: _listed(raw, name) for name in ("modules_to_not_convert", "ignored_layers") if raw.has(name)}
    if len(set(listed.values())) > 1:
        raise fields.error("quantization_config", "modules_to_not_convert and ignored_layers contradict each other")
    raw.refuse_unknown()
    return BlockFp8(block=(128, 128), unquantized=next(iter(listed.values()), frozenset()))


#: What compressed-tensors writes about weights of either packed format, and what each has of its own.
PACKED: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "strategy": ("group",),
    "symmetric": (True,),
    "dynamic": (False,),
    "actorder": (None,),
    "block_structure": (None,),
    "zp_dtype": (None,),
}
INT4 = {**PACKED, "type": ("int",), "scale_dtype": (None,)}
MXFP4 = {**PACKED, "type": ("float",), "group_size": (32,), "scale_dtype": ("torch.uint8",)}


def _packed_int4(raw: Fields) -> PackedInt4:
    weights = _group_weights(raw, INT4)
    group_size = weights.positive("group_size")
    weights.refuse_unknown()
    return PackedInt4(group_size=group_size, unquantized=_listed(raw, "ignore"))


def _packed_mxfp4(raw: Fields) -> PackedMxfp4:
    _group_weights(raw, MXFP4).refuse_unknown()
    return PackedMxfp4(unquantized=_listed(raw, "ignore"))


def _group_weights(raw: Fields, accepted: dict[str, tuple[Any, ...]]) -> Fields:
    """Return the weights of the one group of layers, whose fields must be those ``accepted``."""
    raw.exactly(("quantization_status",), "compressed")
    for name in ("kv_cache_scheme", "global_compression_ratio"):
        raw.only(name, (None,))
    for name in ("sparsity_config", "transform_config"):
        raw.only(name, (None, {}))
    raw.require("ignore", list)
    raw.reads("version")
    groups = raw.nested("config_groups")
    if len(groups.names()) != 1:
        raise raw.error("config_groups", "one group of layers is accepted")
    group = groups.nested(groups.names()[0])
    group.only("targets", (["Linear"],))
    group.only("input_activations", (None,))
    group.only("output_activations", (None,))
    group.only("format", (None, raw.optional("format")))
    weights = group.nested("weights")
    for name, values in accepted.items():
        weights.only(name, values)
    weights.reads("observer", "observer_kwargs")
    for each in (raw, group):
        each.refuse_unknown()
    return weights


def _listed(raw: Fields, name: str) -> frozenset[str]:
    """Return the modules of list ``name`` in our spelling, without those that the text model does not have."""
    if not raw.has(name):
        return frozenset()
    names = raw.require(name, list)
    if not all(isinstance(one, str) for one in names):
        raise raw.error(name, "a list of module names is required")
    plain = [one if one.startswith("re:") else one.rstrip(".") for one in names]
    ours = {_our_spelling(one) for one in plain if not _is_not_text(one)}
    for one in sorted(ours):
        problem = _why_not_entry(one)
        if problem:
            raise raw.error(name, f"{one!r} {problem}")
    return frozenset(ours)


def _why_not_entry(one: str) -> str:
    """Return why ``one``, in our spelling, names no module of ours or not one alone, or ""."""
    is_pattern = one.startswith("re:")
    if not (one.startswith(("re:model", "re:lm_head", "re:.*")) if is_pattern else FULL_NAME.fullmatch(one)):
        return "is no full module name (model..., lm_head) and no pattern (re:.*...)"
    if TENSOR.search(one):
        return "is the name of a tensor, and that of a module is required"
    if ONE_EXPERT.search(one):
        return "names single experts, and those of a layer are stored alike"
    if is_pattern and not _compiles(one[3:]):
        return "is no regular expression"
    words = [word for word in ONLY_MULTIMODAL if word in one]
    if words:
        return (
            f"has {words[0]} in it, which no module of the text model has: name those of the text model by themselves"
        )
    return ""


def _is_not_text(name: str) -> bool:
    if name.startswith("re:") and "|" in name:  # which may go on with modules of the text model
        return False
    return _starts_with(name.removeprefix("re:").removeprefix(".*"), NOT_TEXT)


def _starts_with(name: str, prefixes: Iterable[str]) -> bool:
    plain = name.replace(ESCAPED_DOT, ".")
    return any(plain == prefix or plain.startswith((f"{prefix}.", f"{prefix}*")) for prefix in prefixes)


def _our_spelling(name: str) -> str:
    head, rest = ("re:", name[3:]) if name.startswith("re:") else ("", name)
    for prefix, ours in TEXT_PREFIXES.items():
        for spelled in (prefix, prefix.replace(".", ESCAPED_DOT)):
            if rest.startswith(spelled):
                return head + ours + rest[len(spelled) :]
    return name


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
