"""A package ``aiter`` made of signatures/VERSION.json whose functions check every argument and compute in float32.

``Refused`` is raised where AITER raises, aborts the process or fails to build, ``Silent`` where it would compute wrong
numbers or touch memory that is not its own: both from the limits in its source. Its modules are files, so that the
version and the parameters are found as those of the real one are.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atom_plugin import aiter_lib

FLOATS_16 = (torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
AHEAD = 256  # entries that batch prefill reads past the last page number
#: Function and arguments of each call, defaults included.
CALLS: list[tuple[str, dict[str, Any]]] = []
#: Function -> the keywords of its last call.
PASSED: dict[str, set[str]] = {}


class MlaVersion(enum.Enum):
    """A default of AITER's parameters names it."""

    V32 = 0


class Refused(Exception):
    """AITER would raise, or abort the process."""


class Silent(Exception):
    """AITER would go on with wrong numbers, or with memory that is not its own."""


def write_package(folder: Path, version: aiter_lib.Version, changes: dict[str, list[str] | None] | None = None) -> None:
    """Write the package ``aiter`` of ``version`` into ``folder``; ``changes``: function -> other parameters, or none.

    Without its ``__init__`` it cannot be imported by accident where it is not on the path.
    """
    for function, modules in aiter_lib.MODULES.items():
        if version not in modules:
            continue
        path = f"{modules[version]}.{function}"
        parameters = (changes or {}).get(function, aiter_lib.signatures(version)[path])
        file = folder.joinpath(*modules[version].split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        body = "from tests.aiter import stand_in\nfrom tests.aiter.stand_in import MlaVersion\n"
        if parameters is not None:
            body += f"@stand_in.by_keyword\ndef {function}({', '.join(parameters)}):\n"
            body += f"    return stand_in.call({function!r}, locals())\n"
        with file.open("a") as out:
            out.write(body)
    (folder / "aiter" / "__init__.py").touch()


def by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``function`` take keywords alone, and note which ones came: what they are called differs between versions."""

    def called(**keywords: Any) -> Any:
        PASSED[function.__name__] = set(keywords)
        return function(**keywords)

    return called


def call(function: str, arguments: dict[str, Any]) -> Any:
    """Check the arguments of ``function`` and compute what it returns."""
    CALLS.append((function, arguments))
    if "mla" in function:
        from tests.aiter import mla_stand_in  # which imports this module

        return mla_stand_in.functions()[function](**arguments)
    return {
        "paged_attention_ragged": paged_attention_ragged,
        "mha_batch_prefill_func": mha_batch_prefill_func,
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "fused_qk_norm_rope_cache_pts_quant_shuffle": fused_qk_norm_rope_cache_pts_quant_shuffle,
        "fused_qk_rope_reshape_and_cache": fused_qk_rope_reshape_and_cache,
    }[function](**arguments)


def refuse_unless(holds: bool, what: str) -> None:
    """Raise Refused unless ``holds``."""
    if not holds:
        raise Refused(what)


def silent_unless(holds: bool, what: str) -> None:
    """Raise Silent unless ``holds``."""
    if not holds:
        raise Silent(what)


def _indices(name: str, x: torch.Tensor, dtype: torch.dtype, *shape: int) -> list[int]:
    """Return the values of an index tensor that the function reads as ``dtype``, contiguous, at least ``shape``."""
    silent_unless(x.dtype == dtype, f"{name} of {x.dtype} is read as {dtype}")
    silent_unless(x.is_contiguous(), f"{name} with strides {x.stride()} is read as contiguous")
    silent_unless(list(x.shape) == list(shape) if shape else True, f"{name} has shape {tuple(x.shape)}, not {shape}")
    return x.flatten().tolist()


def _ragged_slots(
    indptr: torch.Tensor, pages: torch.Tensor, last_lens: torch.Tensor | None, num_pages: int, page_size: int
) -> list[list[int]]:
    """Return the slots of the keys of each request, after checking every index that the kernel reads."""
    bounds, numbers = _indices("kv_indptr", indptr, torch.int32), _indices("kv_page_indices", pages, torch.int32)
    silent_unless(bounds[0] == 0 and bounds == sorted(bounds), f"kv_indptr {bounds} has to rise from 0")
    silent_unless(bounds[-1] <= len(numbers), f"{len(numbers)} page indices, kv_indptr ends at {bounds[-1]}")
    lens = [1] * (len(bounds) - 1)
    if page_size > 1:
        assert last_lens is not None
        lens = _indices("kv_last_page_lens", last_lens, torch.int32, len(bounds) - 1)
        silent_unless(all(1 <= length <= page_size for length in lens), f"last page lengths {lens} of {page_size}")
    slots = []
    for begin, end, last in zip(bounds[:-1], bounds[1:], lens, strict=True):
        mine = numbers[begin:end]
        silent_unless(all(0 <= page < num_pages for page in mine), f"pages {mine} of a pool of {num_pages}")
        all_slots = [page * page_size + place for page in mine for place in range(page_size)]
        slots.append(all_slots[: len(all_slots) - page_size + last] if mine else [])
    return slots


def _softmax_rows(
    q_HD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, scale: float, logit_cap: float
) -> torch.Tensor:
    group = q_HD.shape[0] // k_LKD.shape[1]
    k_LHD, v_LHD = (x.repeat_interleave(group, dim=1) for x in (k_LKD, v_LKD))
    scores_HL = scale * torch.einsum("hd,lhd->hl", q_HD, k_LHD)
    if logit_cap > 0:
        scores_HL = logit_cap * torch.tanh(scores_HL / logit_cap)
    return torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), v_LHD)


def _scale_of(name: str, scale: torch.Tensor | None) -> float:
    silent_unless(scale is not None, f"{name} is dereferenced, and is None")
    assert scale is not None
    silent_unless(scale.dtype == torch.float32 and scale.numel() == 1, f"{name} is {scale.dtype} {tuple(scale.shape)}")
    return float(scale)


def paged_attention_ragged(
    *, out: torch.Tensor, workspace_buffer: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor,
    value_cache: torch.Tensor, scale: float, kv_indptr: torch.Tensor, kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor, block_size: int, max_num_partitions: int, alibi_slopes: None, kv_cache_dtype: str,
    kv_cache_layout: str, logits_soft_cap: float, k_scale: torch.Tensor, v_scale: torch.Tensor, fp8_out_scale: None,
    partition_size: int, mtp: int,
) -> torch.Tensor:  # fmt: skip
    """Decode over ragged pages, one query a request."""
    requests, heads, dim = query.shape
    num_pages, page_size, kv_heads, _ = key_cache.shape
    refuse_unless(query.dtype in FLOATS_16 and out.dtype == query.dtype, f"queries of {query.dtype}")
    refuse_unless(kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"), f"kv_cache_dtype {kv_cache_dtype}")
    cache_dtypes = (query.dtype,) if kv_cache_dtype == "auto" else FLOAT8
    silent_unless(key_cache.dtype in cache_dtypes, f"a cache of {key_cache.dtype} is read as {kv_cache_dtype}")
    silent_unless(kv_cache_layout == "NHD" and block_size == page_size, f"{kv_cache_layout} pages of {block_size}")
    silent_unless(key_cache.stride() == value_cache.stride(), "the strides of k are used for v")
    silent_unless(query.stride()[1:] == (dim, 1), f"queries with strides {query.stride()}")
    silent_unless(out.is_contiguous() and out.shape == query.shape, "the output is written as contiguous")
    refuse_unless(block_size <= (64 if kv_cache_dtype != "auto" else 32), f"no build for pages of {block_size}")
    refuse_unless(dim % 64 == 0, f"no build for head dim {dim}")
    refuse_unless(heads % kv_heads == 0 and heads // kv_heads <= 16, f"{heads} / {kv_heads} heads")
    refuse_unless(partition_size == 256 and mtp == 1 and alibi_slopes is None, "partitions of 256, one query")
    needed = requests * heads * max_num_partitions * (8 + dim * query.itemsize)
    given = workspace_buffer.numel() * workspace_buffer.itemsize
    silent_unless(given >= needed, f"a workspace of {given} bytes, {needed} are written")
    silent_unless(kv_indptr.shape == (requests + 1,), f"kv_indptr of {tuple(kv_indptr.shape)} for {requests} requests")
    k_factor, v_factor = _scale_of("k_scale", k_scale), _scale_of("v_scale", v_scale)
    all_slots = _ragged_slots(kv_indptr, kv_page_indices, kv_last_page_lens, num_pages, page_size)
    for request, slots in enumerate(all_slots):
        silent_unless(0 < len(slots) <= 256 * max_num_partitions, f"{len(slots)} keys, {max_num_partitions} partitions")
        k, v = (pages.flatten(0, 1)[slots].float() for pages in (key_cache, value_cache))
        out[request] = _softmax_rows(query[request].float(), k * k_factor, v * v_factor, scale, logits_soft_cap)
    return out


def mha_batch_prefill_func(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None,
    logits_soft_cap: float, causal: bool, window_size: tuple[int, int], alibi_slopes: None, deterministic: bool,
    return_lse: bool, return_attn_probs: bool, out: torch.Tensor | None, kv_last_page_lens: torch.Tensor | None = None,
    block_table: None = None, seqlen_k: None = None, q_descale: None = None, k_descale: None = None,
    v_descale: None = None, kv_block_descale: None = None, sink_ptr: None = None, sink_size: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of ragged queries over ragged pages; NaN for queries that see no key."""
    is_main = aiter_lib.version() == "main"
    tokens, heads, dim = q.shape
    refuse_unless(q.dtype in FLOATS_16 and k.dtype == v.dtype == q.dtype, f"{q.dtype} with a cache of {k.dtype}")
    refuse_unless(k.dim() == v.dim() == 3 or (is_main and k.dim() == v.dim() == 4), f"pages with {k.dim()} axes")
    page_size, kv_heads = (k.shape[1] if k.dim() == 4 else 1), k.shape[-2]
    refuse_unless(page_size in ((1, 16, 1024) if is_main else (1,)), f"no kernel found. page_size={page_size}")
    refuse_unless(dim in ((128, 256) if is_main else (128,)) and v.shape[-1] == dim, f"no kernel for head dim {dim}")
    refuse_unless(heads % kv_heads == 0 and k.shape == v.shape, f"{heads} / {kv_heads} heads")
    refuse_unless(not (return_lse or return_attn_probs or dropout_p) and causal, "causal, and nothing but the output")
    refuse_unless(sink_ptr is None and k_descale is None and alibi_slopes is None, "no sinks, descales or slopes")
    refuse_unless(all(x.stride(-1) == 1 for x in (q, k, v)), "the last axis has to be contiguous")
    refuse_unless(page_size == 1 or kv_last_page_lens is not None, "pages need kv_last_page_lens")
    assert out is not None and softmax_scale is not None
    refuse_unless(out.shape == q.shape and out.dtype == q.dtype, f"an output {tuple(out.shape)} of {out.dtype}")
    bounds = _indices("cu_seqlens_q", cu_seqlens_q, torch.int32)
    silent_unless(bounds[0] == 0 and bounds == sorted(bounds), f"cu_seqlens_q {bounds} has to rise from 0")
    silent_unless(bounds[-1] <= tokens, f"cu_seqlens_q ends at {bounds[-1]}, there are {tokens} queries")
    silent_unless(kv_indptr.shape == cu_seqlens_q.shape, "kv_indptr and cu_seqlens_q of different batches")
    all_slots = _ragged_slots(kv_indptr, kv_page_indices, kv_last_page_lens, k.shape[0], page_size)
    ahead = kv_page_indices[int(kv_indptr[-1]) :][:AHEAD].tolist()
    silent_unless(
        len(ahead) == AHEAD and all(0 <= page < k.shape[0] for page in ahead),
        f"the kernel reads {AHEAD} page indices past the last, these are {ahead[:4]}...",
    )
    k_SKD, v_SKD = (x.reshape(-1, kv_heads, dim).float() for x in (k, v))
    for begin, end, slots in zip(bounds[:-1], bounds[1:], all_slots, strict=True):
        silent_unless(end - begin <= max_seqlen_q, f"{end - begin} queries, max_seqlen_q is {max_seqlen_q}")
        silent_unless(len(slots) <= max_seqlen_k, f"{len(slots)} keys, max_seqlen_k is {max_seqlen_k}")
        for token in range(begin, end):
            position = len(slots) - (end - token)
            left = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            seen = slots[left : max(0, position + 1)]
            row = _softmax_rows(q[token].float(), k_SKD[seen], v_SKD[seen], softmax_scale, logits_soft_cap)
            out[token] = row if seen else math.nan
    return out


def _slots(slot_mapping: torch.Tensor, tokens: int, num_slots: int) -> list[int]:
    slots = _indices("slot_mapping", slot_mapping, torch.int64, tokens)
    silent_unless(all(slot < num_slots for slot in slots), f"slots {slots} of a pool of {num_slots}")
    return slots


def reshape_and_cache_flash(
    *, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Copy keys and values into NHD pages."""
    tokens, heads, dim = key.shape
    refuse_unless(tokens > 0, "an empty grid")
    refuse_unless(kv_cache_dtype == "auto" and key.dtype in (*FLOATS_16, torch.float32), f"{kv_cache_dtype}")
    silent_unless(key.shape == value.shape, f"values {tuple(value.shape)} are read as {tuple(key.shape)}")
    silent_unless(key_cache.dtype == value_cache.dtype == key.dtype == value.dtype, "one dtype is used for all")
    silent_unless(key.stride()[1:] == value.stride()[1:] == (dim, 1), "heads and dims are read as contiguous")
    refuse_unless(key_cache.stride(0) == value_cache.stride(0), "strides of the pages differ")
    silent_unless(key_cache.is_contiguous() and value_cache.is_contiguous(), "pages are written as contiguous")
    silent_unless(key_cache.shape[2:] == (heads, dim), f"pages {tuple(key_cache.shape)} for keys {tuple(key.shape)}")
    _scale_of("k_scale", k_scale), _scale_of("v_scale", v_scale)
    for token, slot in enumerate(_slots(slot_mapping, tokens, key_cache.shape[0] * key_cache.shape[1])):
        if slot >= 0:
            key_cache.flatten(0, 1)[slot], value_cache.flatten(0, 1)[slot] = key[token], value[token]


def _rotated(x_HD: torch.Tensor, cos_F: torch.Tensor, sin_F: torch.Tensor, is_neox: bool) -> torch.Tensor:
    out, half = x_HD.clone(), cos_F.shape[0]
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    out[:, first] = x_HD[:, first] * cos_F - x_HD[:, second] * sin_F
    out[:, second] = x_HD[:, second] * cos_F + x_HD[:, first] * sin_F
    return out


def fused_qk_norm_rope_cache_pts_quant_shuffle(
    *, qkv: torch.Tensor, qw: torch.Tensor, kw: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor,
    num_tokens: int, num_heads_q: int, num_heads_k: int, num_heads_v: int, head_size: int, is_neox_style: bool,
    eps: float, q_out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor,
    per_tensor_k_scale: torch.Tensor, per_tensor_v_scale: torch.Tensor, k_out: None, v_out: None, return_kv: bool,
    use_shuffle_layout: bool, block_size: int, x: int, rotary_dim: int,
) -> None:  # fmt: skip
    """Norm, rotate and store; rounds cosines and what it normed to the dtype of q, as the kernel does."""
    dtype, heads = qkv.dtype, num_heads_q + num_heads_k + num_heads_v
    refuse_unless(num_tokens > 0, "an empty grid")
    refuse_unless(all(t.is_contiguous() for t in (qkv, qw, kw, cos_sin, slot_mapping)), "contiguous inputs")
    refuse_unless(head_size in (64, 128, 256) and positions.dim() == 1, f"head size {head_size}")
    silent_unless(qkv.numel() == num_tokens * heads * head_size, f"qkv {tuple(qkv.shape)}")
    silent_unless(qw.dtype == kw.dtype == cos_sin.dtype == q_out.dtype == dtype, "one dtype is used for all")
    silent_unless(qw.numel() == kw.numel() == head_size, "a weight a dim")
    silent_unless(q_out.is_contiguous() and q_out.shape == (num_tokens, num_heads_q, head_size), "q_out")
    silent_unless(k_cache.dtype == v_cache.dtype == dtype and not use_shuffle_layout, "NHD caches of q's dtype")
    silent_unless(block_size == x == 0 and k_out is v_out is None and not return_kv, "slots are rows, nothing returned")
    silent_unless(cos_sin.shape[1] == rotary_dim and rotary_dim % (head_size // 16) == 0, f"rotary dim {rotary_dim}")
    spare = cos_sin.untyped_storage().nbytes() // dtype.itemsize - cos_sin.numel() - cos_sin.storage_offset()
    silent_unless(is_neox_style or spare >= head_size // 64, "interleaved, the last row is read past its end")
    for scale in (per_tensor_k_scale, per_tensor_v_scale):
        silent_unless(scale.device.type == "cpu" and _scale_of("the scale", scale) == 1.0, "scales on the host")
    strides = (num_heads_k * head_size, num_heads_k * head_size, head_size, 1)
    silent_unless(k_cache.stride() == v_cache.stride() == strides, f"caches with strides {k_cache.stride()}")
    at = _indices("positions", positions, torch.int64, num_tokens)
    silent_unless(all(0 <= position < cos_sin.shape[0] for position in at), f"positions {at}")
    rows = qkv.reshape(num_tokens, heads, head_size).float()
    half = rotary_dim // 2
    for token, slot in enumerate(_slots(slot_mapping, num_tokens, k_cache.shape[0])):
        parts = rows[token].split([num_heads_q, num_heads_k, num_heads_v])
        done = []
        for part, weight in zip(parts[:2], (qw, kw), strict=True):
            normed = (part * (part.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(dtype).float()
            cos, sin = cos_sin[at[token]].float().split(half)
            done.append(_rotated(normed, cos, sin, is_neox_style).to(dtype))
        q_out[token], k_cache[slot, 0], v_cache[slot, 0] = done[0], done[1], parts[2].to(dtype)


def fused_qk_rope_reshape_and_cache(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, pos: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, k_scale: None, v_scale: None,
    is_neox: bool, flash_layout: bool, apply_scale: bool, offs: None, q_out: None, k_out: None, output_zeros: bool,
    zeros_out: None, upcast_operand: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Rotate and store, on NHD pages."""
    tokens, heads, dim = q.shape
    is_main = aiter_lib.version() == "main"
    refuse_unless(not is_main or key_cache.dtype == torch.bfloat16, f"a cache of {key_cache.dtype}")
    refuse_unless(k.shape == v.shape and key_cache.shape == value_cache.shape, "k and v alike")
    refuse_unless(key_cache.shape[2:] == k.shape[1:] and k.shape[2] == dim, f"pages {tuple(key_cache.shape)}")
    refuse_unless(dim & (dim - 1) == 0 and key_cache.shape[1] & (key_cache.shape[1] - 1) == 0, "powers of two")
    refuse_unless(heads % k.shape[1] == 0 and cos.shape[1] == sin.shape[1] == dim // 2, f"{cos.shape[1]} frequencies")
    silent_unless(cos.stride() == sin.stride(), "the strides of cos are used for sin")
    silent_unless(flash_layout and not output_zeros and k_scale is v_scale is offs is None, "NHD, unscaled")
    silent_unless(cos.dtype == torch.float32 or upcast_operand, f"products of {q.dtype} and {cos.dtype} are rounded")
    at = _indices("pos", pos, torch.int64, tokens)
    silent_unless(all(0 <= position < cos.shape[0] for position in at), f"positions {at}")
    done_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    for token, slot in enumerate(_slots(slot_mapping, tokens, key_cache.shape[0] * key_cache.shape[1])):
        turn = (cos[at[token]].float(), sin[at[token]].float(), is_neox)
        done_q[token] = _rotated(q[token].float(), *turn).to(q.dtype)
        key_cache.flatten(0, 1)[slot] = _rotated(k[token].float(), *turn).to(k.dtype)
        value_cache.flatten(0, 1)[slot] = v[token]
    return done_q, k, key_cache, value_cache
