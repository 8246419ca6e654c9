"""Checkpoint name -> parameter, written out per model; nothing unfilled, nothing unused.

The same table serves twice: before the launch it is compared with the headers of the safetensors files
(``checkpoint_files.py``), and in ``load_weights`` it says where each tensor goes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from atom_plugin import device
from atom_plugin.configs import BlockFp8, KimiK2Spec, PackedInt4, Quantization, Qwen3Spec

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)
#: What the tensors of a packed weight hold, by the end of their names.
PACKED = {".weight_packed": (torch.int32,), ".weight_shape": INTS, ".weight_scale": FLOATS}


class WeightError(ValueError):
    """A checkpoint that does not fit its config: every missing, unknown and misshapen tensor, by name."""


@dataclass(frozen=True)
class Destination:
    """A parameter, and for a parameter made of several tensors which part of it.

    ``shard`` (SGLang's name) of which ``expert``; or, where SGLang has no name for the parts, the ``first_row``.
    """

    param: str
    shard: str | int | None = None
    expert: int | None = None
    first_row: int | None = None


@dataclass(frozen=True)
class Entry:
    """One checkpoint tensor: its whole ``shape`` (not a rank's), where it goes, and whether it may be absent.

    ``block``: it is FP8 with a scale for each block of so many rows and columns, and is loaded as their product.
    """

    shape: Shape
    into: tuple[Destination, ...]
    optional: bool = False
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Stacked:
    """A tensor ``[num_experts, rows, columns]`` that holds several entries: (entry name, expert, first row, rows)."""

    shape: Shape
    parts: tuple[tuple[str, int, int, int], ...]

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the entries that ``tensor`` holds, as views."""
        for name, expert, first, rows in self.parts:
            yield name, tensor[expert, first : first + rows]


class CheckpointTable:
    """What a complete checkpoint holds. ``quantization`` adds a scale tensor beside each weight that it covers.

    ``prefix`` stands before each of our names in the checkpoint; entries have the checkpoint's names.
    """

    def __init__(self, quantization: Quantization | None, *, prefix: str = "") -> None:
        self.quantization = quantization
        self.prefix = prefix
        self.entries: dict[str, Entry] = {}
        self.left_out: dict[str, str] = {}
        self.made_by_sglang: set[str] = set()
        self.stacked: dict[str, Stacked] = {}
        self.kv_scales: dict[str, tuple[str, str]] = {}
        self.tied_head = False

    def vector(self, name: str, size: int, *, optional: bool = False) -> None:
        """Add a tensor ``[size]`` whose parameter has the same name."""
        self.entries[self.prefix + name] = Entry((size,), (Destination(name),), optional)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        """Add a tensor ``[rows, columns]`` that is never quantised, and whose parameter has the same name."""
        self.entries[self.prefix + name] = Entry((rows, columns), (Destination(name),))

    def leave_out(self, start: str, what: str) -> None:
        """Let tensors whose names begin with ``start`` be in the checkpoint: ``what`` the model does not have."""
        self.left_out[start] = what

    def what_is_left_out(self, name: str) -> str | None:
        """Return what a tensor is a part of that the model does not have, None for any other tensor."""
        return next((what for start, what in self.left_out.items() if name.startswith(start)), None)

    def embedding(self, vocab_size: int, hidden_size: int, *, tied: bool) -> None:
        """Add the embedding and the head; a tied head may be in the file as well and must then be the same tensor."""
        shape = (vocab_size, hidden_size)
        self.tied_head = tied
        both = (Destination(EMBEDDING), *([Destination(HEAD)] if tied else []))
        self.entries[self.prefix + EMBEDDING] = Entry(shape, both)
        self.entries[self.prefix + HEAD] = Entry(shape, () if tied else (Destination(HEAD),), optional=tied)

    def linear(
        self, name: str, rows: int, columns: int, *, into: Destination | None = None, bias: bool = False
    ) -> None:
        """Add linear layer ``name``, weight ``[rows, columns]``; ``into`` names the layer that holds it."""
        target = into or Destination(name)
        stored = self.quantization if self.quantization is not None and self.quantization.covers(name) else None
        if isinstance(stored, PackedInt4):
            self._tensor(f"{name}.weight_packed", (rows, columns // 8), target, "weight_packed")
            self._tensor(f"{name}.weight_scale", (rows, columns // stored.group_size), target, "weight_scale")
            self._tensor(f"{name}.weight_shape", (2,), target, "weight_shape")
        else:
            self._tensor(f"{name}.weight", (rows, columns), target, "weight")
        if isinstance(stored, BlockFp8):
            shape = _blocks(rows, columns, stored.block)
            if target.first_row is not None:
                target = replace(target, first_row=target.first_row // stored.block[0])
            self._tensor(f"{name}.weight_scale_inv", shape, target, "weight_scale_inv")
        if bias:
            self._tensor(f"{name}.bias", (rows,), target, "bias")

    def qk_norm_attention(self, prefix: str, spec: Qwen3Spec) -> None:
        """Add q/k/v/o projections, q/k norms and the KV scales that a checkpoint may carry."""
        query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        for shard, rows in (("q", query), ("k", key), ("v", key)):
            into = Destination(f"{prefix}.qkv_proj", shard)
            self.linear(f"{prefix}.{shard}_proj", rows, spec.hidden_size, into=into, bias=spec.attention_bias)
        self.linear(f"{prefix}.o_proj", spec.hidden_size, query, bias=spec.attention_bias)
        for name in ("q_norm", "k_norm"):
            self.vector(f"{prefix}.{name}.weight", spec.head_dim)
        for part in ("k", "v"):  # the spellings of FP8 checkpoints with a calibrated KV cache
            for name in (f"{prefix}.{part}_proj.{part}_scale", f"{prefix}.attn.{part}_scale"):
                self.kv_scales[name] = (f"{prefix}.attn", part)

    def latent_attention(self, prefix: str, spec: KimiK2Spec) -> None:
        """Add the projections and norms of MLA; ``kv_b_proj`` is loaded as what its FP8 blocks and scales say."""
        heads, nope = spec.num_attention_heads, spec.qk_nope_head_dim
        both = f"{prefix}.fused_qkv_a_proj_with_mqa"
        latent_dim = spec.kv_lora_rank + spec.qk_rope_head_dim
        parts = {"q_a_proj": (spec.q_lora_rank, 0), "kv_a_proj_with_mqa": (latent_dim, spec.q_lora_rank)}
        for name, (rows, first) in parts.items():
            self.linear(f"{prefix}.{name}", rows, spec.hidden_size, into=Destination(both, first_row=first))
        self.vector(f"{prefix}.q_a_layernorm.weight", spec.q_lora_rank)
        self.vector(f"{prefix}.kv_a_layernorm.weight", spec.kv_lora_rank)
        self.linear(f"{prefix}.q_b_proj", heads * spec.qk_head_dim, spec.q_lora_rank)
        self._dequantised(f"{prefix}.kv_b_proj", heads * (nope + spec.v_head_dim), spec.kv_lora_rank)
        self.linear(f"{prefix}.o_proj", spec.hidden_size, heads * spec.v_head_dim)

    def _dequantised(self, name: str, rows: int, columns: int) -> None:
        """Add linear layer ``name``, whose parameter is not quantised even where the checkpoint's tensor is FP8."""
        self.matrix(f"{name}.weight", rows, columns)
        if isinstance(self.quantization, BlockFp8) and self.quantization.covers(name):
            block, weight = self.quantization.block, f"{self.prefix}{name}.weight"
            self.entries[weight] = replace(self.entries[weight], block=block)
            self.entries[f"{weight}_scale_inv"] = Entry(_blocks(rows, columns, block), ())

    def gated_mlp(self, prefix: str, hidden_size: int, intermediate_size: int) -> None:
        """Add gate, up and down projections."""
        for index, name in enumerate(("gate_proj", "up_proj")):
            into = Destination(f"{prefix}.gate_up_proj", index)
            self.linear(f"{prefix}.{name}", intermediate_size, hidden_size, into=into)
        self.linear(f"{prefix}.down_proj", hidden_size, intermediate_size)

    def experts(self, prefix: str, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        """Add every expert's projections, and the two stacked tensors that may stand for them when not quantised."""
        width = intermediate_size
        for expert in range(num_experts):
            for name, shard in (("gate_proj", "w1"), ("up_proj", "w3")):
                into = Destination(f"{prefix}.w13", shard, expert)
                self.linear(f"{prefix}.{expert}.{name}", width, hidden_size, into=into)
            into = Destination(f"{prefix}.w2", "w2", expert)
            self.linear(f"{prefix}.{expert}.down_proj", hidden_size, width, into=into)
        if isinstance(self.quantization, PackedInt4):  # the order of columns, which these formats may change
            self.made_by_sglang |= {
                f"{prefix}.{part}_{name}" for part in ("w13", "w2") for name in ("weight_g_idx", "g_idx_sort_indices")
            }
        if self.quantization is None:
            prefix = self.prefix + prefix
            gate_up = [
                (f"{prefix}.{expert}.{name}.weight", expert, first, width)
                for expert in range(num_experts)
                for name, first in (("gate_proj", 0), ("up_proj", width))
            ]
            down = [(f"{prefix}.{expert}.down_proj.weight", expert, 0, hidden_size) for expert in range(num_experts)]
            self.stacked[f"{prefix}.gate_up_proj"] = Stacked((num_experts, 2 * width, hidden_size), tuple(gate_up))
            self.stacked[f"{prefix}.down_proj"] = Stacked((num_experts, hidden_size, width), tuple(down))

    def _tensor(self, name: str, shape: Shape, layer: Destination, kind: str) -> None:
        joint = "_" if layer.expert is not None else "."
        self.entries[self.prefix + name] = Entry(shape, (replace(layer, param=f"{layer.param}{joint}{kind}"),))

    def problems(self, present: dict[str, Shape]) -> list[str]:
        """Return what is wrong with a checkpoint of these tensors (name -> shape), one line a kind; empty: complete."""
        filled = [part[0] for name in present if name in self.stacked for part in self.stacked[name].parts]
        have = present.keys() | set(filled)
        kinds = {
            "missing tensors": [name for name, row in self.entries.items() if name not in have and not row.optional],
            "tensors that the model has no place for": sorted(
                name for name in present if self.shapes(name) is None and self.what_is_left_out(name) is None
            ),
            "wrong shapes": [
                f"{name} is {list(shape)}, the config says {' or '.join(str(list(one)) for one in expected)}"
                for name, shape in present.items()
                if (expected := self.shapes(name)) is not None and shape not in expected
            ],
            "tensors given twice": sorted(name for name in filled if name in present),
        }
        return [f"{len(names)} {kind}: {some_of(names)}" for kind, names in kinds.items() if names]

    def dtypes(self, name: str) -> tuple[torch.dtype, ...] | None:
        """Return the dtypes that tensor ``name`` may be stored in, None when it has no place."""
        if self.shapes(name) is None:
            return None
        if name.endswith(".weight") and f"{name}_scale_inv" in self.entries:
            return (torch.float8_e4m3fn,)
        return next((dtypes for end, dtypes in PACKED.items() if name.endswith(end)), FLOATS)

    def shapes(self, name: str) -> tuple[Shape, ...] | None:
        """Return the shapes that tensor ``name`` may have, None when it has no place."""
        if name in self.kv_scales:
            return ((), (1,))
        row = self.entries.get(name) or self.stacked.get(name)
        return (row.shape,) if row is not None else None


def _blocks(rows: int, columns: int, block: tuple[int, int]) -> Shape:
    return -(-rows // block[0]), -(-columns // block[1])


def some_of(names: list[str], most: int = 8) -> str:
    """Return the first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def load_checkpoint(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], table: CheckpointTable) -> None:
    """Copy ``weights`` (whole tensors, any order) into ``model``'s parameters by ``table``.

    Raises WeightError for a tensor that is unknown or misshapen as soon as it is met, and for all that is missing at
    the end. A tensor of another rank's expert counts as met. What the table leaves out is counted and logged.
    """
    params = dict(model.named_parameters())
    seen: dict[str, Shape] = {}
    filled: set[str] = set()
    heads: dict[str, torch.Tensor] = {}
    scales: dict[tuple[str, str], dict[str, float]] = {}
    left_out: Counter[str] = Counter()
    halves: dict[str, dict[str, torch.Tensor]] = {}
    embedding, head = table.prefix + EMBEDDING, table.prefix + HEAD
    for name, tensor in weights:
        if (what := table.what_is_left_out(name)) is not None:
            left_out[what] += 1
            continue
        _refuse(_problems_of_one(table, name, tensor, seen))
        seen[name] = tuple(tensor.shape)
        if name in (embedding, head):
            heads[name] = tensor
        if name in table.kv_scales:
            scales.setdefault(table.kv_scales[name], {})[name] = float(tensor)
            continue
        for entry_name, part_of_it in _entries_of(table, name, tensor, halves):
            for target in table.entries[entry_name].into:
                if target.param == HEAD and HEAD not in params:
                    continue  # tied, and the embedding itself is the head
                _copy(params[target.param], part_of_it, target)
                filled.add(target.param)
    _refuse(table.problems(seen))
    if table.tied_head and head in heads and not torch.equal(heads[head], heads[embedding]):
        _refuse([f"{head} differs from {embedding}, but the config says tie_word_embeddings"])
    _refuse(kv_scale_problems(model, table, scales))
    for (layer, part), values in scales.items():
        set_kv_scale(model.get_submodule(layer), part, next(iter(values.values())))
    for what, count in left_out.items():
        logger.info("%d tensors of the checkpoint are not loaded: the model has no part for %s", count, what)
    unfilled = sorted(params.keys() - filled - table.made_by_sglang)
    _refuse(
        [f"{len(unfilled)} parameters that no row of the weight table fills: {some_of(unfilled)}"] if unfilled else []
    )


def _entries_of(
    table: CheckpointTable, name: str, tensor: torch.Tensor, halves: dict[str, dict[str, torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the entries that ``tensor`` completes: itself, those stacked in it, or the product of weight and scales.

    ``halves`` keeps a weight or its scales until the other one is met.
    """
    if name in table.stacked:
        return table.stacked[name].split(tensor)
    weight = name.removesuffix("_scale_inv")
    block = table.entries[weight].block
    if block is None:
        return [(name, tensor)]
    pair = halves.setdefault(weight, {})
    pair[name] = tensor
    return [(weight, dequantise(pair[weight], pair[f"{weight}_scale_inv"], block))] if len(pair) == 2 else []


def dequantise(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return ``weight`` [rows, columns] times ``scales``, one for each block of so many rows and columns, in fp32."""
    rows, columns = weight.shape
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]


def kv_scale_problems(
    model: nn.Module, table: CheckpointTable, scales: dict[tuple[str, str], dict[str, float]]
) -> list[str]:
    """Return what is wrong with the KV scales of a checkpoint: (layer, "k" or "v") -> values by tensor name.

    They come for every layer and both parts or not at all, two spellings agree, and a later load of a model that serves
    keeps them: what lies in its cache was written with the first ones.
    """
    if not scales:
        return []
    wanted = set(table.kv_scales.values())
    missing = sorted(f"{part}_scale of {layer}" for layer, part in wanted - scales.keys())
    problems = [f"KV scales for some layers only; missing: {some_of(missing)}"] if missing else []
    for (layer, part), values in scales.items():
        if len(set(values.values())) > 1:
            problems.append(f"{part}_scale of {layer} is given as {values}")
        factor = 2.0 if device.fp8_is_fnuz() else 1.0
        first = vars(model.get_submodule(layer)).get(f"{part}_scale_float")
        if first is not None and first != factor * next(iter(values.values())):
            problems.append(f"{part}_scale of {layer} was {first} when the cache was written; restart to change it")
    return problems


def set_kv_scale(layer: nn.Module, part: str, scale: float) -> None:
    """Give a RadixAttention the scale of its K (``part`` "k") or V ("v") cache: stored = value / scale, per tensor.

    SGLang's backends read a tensor and its float twin; on e4m3fnuz hardware, whose largest value is 240 and not 448, a
    scale calibrated for e4m3fn is doubled (as SGLang's Fp8KVCacheMethod does).
    """
    if not 0 < scale < float("inf"):
        _refuse([f"{part}_scale of layer {layer.layer_id} is {scale}: it must be a positive number"])
    scale *= 2.0 if device.fp8_is_fnuz() else 1.0
    setattr(layer, f"{part}_scale", torch.tensor(scale, dtype=torch.float32, device=device.torch_device()))
    setattr(layer, f"{part}_scale_float", scale)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise WeightError(f"checkpoint: {'; '.join(problems)}")


def _problems_of_one(table: CheckpointTable, name: str, tensor: torch.Tensor, seen: dict[str, Shape]) -> list[str]:
    if name in seen:
        return [f"{name} is given twice"]
    shapes, dtypes, shape = table.shapes(name), table.dtypes(name), tuple(tensor.shape)
    if shapes is None or dtypes is None:
        return [f"1 tensor that the model has no place for: {name}"]
    if shape not in shapes:
        return [f"{name} is {list(shape)}, the config says {list(shapes[0])}"]
    return [] if tensor.dtype in dtypes else [f"{name} is {tensor.dtype}; accepted: {', '.join(map(str, dtypes))}"]


def _copy(param: nn.Parameter, tensor: torch.Tensor, target: Destination) -> None:
    loader = getattr(param, "weight_loader", default_weight_loader)
    if target.first_row is not None:
        default_weight_loader(param.data.narrow(0, target.first_row, len(tensor)), tensor)
    elif target.expert is not None:
        loader(param, tensor, target.param, shard_id=target.shard, expert_id=target.expert)
    elif target.shard is not None:
        loader(param, tensor, target.shard)
    else:
        loader(param, tensor)
