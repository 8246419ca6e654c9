"""Which kernels a model's attention layers would get on a machine that need not be this one, and why not the others."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from atom_plugin import aiter_lib
from atom_plugin.attention.kv_layout import pool_dtype_of
from atom_plugin.attention.limits import LayerOutline, latent_outlines, why_not_backend
from atom_plugin.attention.tables import AttendKey, LayerProblems, forced_rows, modes_of
from atom_plugin.configs import (
    ConfigError,
    KimiLinearSpec,
    Qwen3MoeSpec,
    Qwen3Spec,
    ServedSpec,
    load_served_spec,
    load_spec,
)
from atom_plugin.configs.latent_moe import LatentMoeSpec
from atom_plugin.dispatch import Table
from atom_plugin.layers.rope import why_not_rope

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where and how a model is to be served; names and units as SGLang's flags.

    ``tp``: ranks that share the attention heads. ``query_len``: new tokens a request, None for every mode. ``aiter``:
    the version there, "here" for what is installed on this machine.
    """

    arch: str
    tp: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    page_size: int = 1
    query_len: int | None = None
    aiter: str = "main"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one op gets in one mode: ``row``, None where no row runs it, and the reasons against each other row."""

    mode: str
    row: str | None
    refused: dict[str, list[str]]


#: MLA has two attention layers a layer, on a pool of latent rows; the others have one, on keys and values.
ExplainedSpec = Qwen3Spec | Qwen3MoeSpec | LatentMoeSpec


def explain(spec: ExplainedSpec, plan: Plan) -> list[Choice]:
    """Return the choice of every op and mode of the attention layers of ``spec``, which are alike in these models.

    The modes, problems, tables and forced rows are those of a launch; nothing is loaded. Raises ValueError for a plan
    that no launch could have.
    """
    problems = why_not_backend(kv_cache_dtype=plan.kv_cache_dtype, page_size=plan.page_size)
    if plan.query_len is not None and plan.query_len < 1:
        problems.append(f"--query-len {plan.query_len}: takes 1 for decode, or more")
    if problems:
        raise ValueError("; ".join(problems))
    q_dtype = DTYPES[plan.dtype]
    verify_len = None if plan.query_len == 1 else plan.query_len
    forced = forced_rows()
    choices: dict[str, Choice] = {}
    with _assumed(plan.aiter):
        for outline in outlines_of(spec, plan.tp):
            layer = LayerProblems(
                layer=outline,
                arch=plan.arch,
                q_dtype=q_dtype,
                pool_dtype=pool_dtype_of(plan.kv_cache_dtype, q_dtype, fnuz=plan.arch == "gfx942"),
                page_size=plan.page_size,
                kv_lora_rank=spec.kv_lora_rank if isinstance(spec, LatentMoeSpec) else None,
            )
            for captured in (False, True):
                modes = modes_of(layer, captured=captured, has_sinks=False, verify_len=verify_len)
                for mode, table, problem, key in modes:
                    if not _is_left_out(key, plan.query_len):
                        choices[mode] = _choice(mode, table, problem, forced.get(table.op))
    return list(choices.values())


def _is_left_out(key: AttendKey | None, query_len: int | None) -> bool:
    """Return whether an attention mode is not that of ``query_len`` new tokens a request."""
    return key is not None and query_len is not None and (query_len == 1) != (key.phase == "decode")


def outlines_of(spec: ExplainedSpec, tp: int) -> list[LayerOutline]:
    """Return the attention layers of one layer of ``spec`` on one of ``tp`` ranks.

    Raises ValueError where the ranks cannot share its heads.
    """
    heads = spec.num_attention_heads
    if isinstance(spec, LatentMoeSpec):
        if tp < 1 or heads % tp:
            raise ValueError(f"--tp {tp} does not divide {heads} query heads")
        return latent_outlines(
            heads=heads // tp,
            kv_lora_rank=spec.kv_lora_rank,
            rope_dim=spec.qk_rope_head_dim,
            unabsorbed=(spec.qk_head_dim, spec.v_head_dim),
        )
    kv_heads = spec.num_key_value_heads
    if tp < 1 or heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ValueError(f"--tp {tp} does not divide {heads} query heads and {kv_heads} KV heads")
    outline = LayerOutline(
        tp_q_head_num=heads // tp,
        tp_k_head_num=max(1, kv_heads // tp),
        qk_head_dim=spec.head_dim,
        v_head_dim=spec.head_dim,
        fused=True,
    )
    return [outline]


def _assumed(version: str) -> contextlib.AbstractContextManager[None]:
    for known in aiter_lib.VERSIONS:
        if version == known:
            return aiter_lib.assume(known)
    return contextlib.nullcontext()


def _choice(mode: str, table: Table[Any], problem: Any, forced: str | None) -> Choice:
    verdicts = table.verdicts(replace(problem, forced=forced), forced)
    row = next((name for name, reasons in verdicts if not reasons), None)
    return Choice(mode=mode, row=row, refused={name: reasons for name, reasons in verdicts if reasons})


def report(model: str, plan: Plan, *, why: bool, as_json: bool) -> tuple[str, bool]:
    """Return (the choices as text or JSON, whether every op and mode has a row) for ``model``, a folder or a config."""
    spec = load_spec(model)
    if not isinstance(spec, ExplainedSpec):
        spec = load_served_spec(model)  # which says that there is no model for it yet
    problems = why_not_rope(spec.rope) if spec.rope is not None else []
    if problems:
        raise ConfigError(f"{model}: {'; '.join(problems)}")
    choices = explain(spec, plan)
    served = all(choice.row for choice in choices)
    if as_json:
        return json.dumps({"plan": asdict(plan), "choices": [asdict(choice) for choice in choices]}, indent=1), served
    whose = "" if isinstance(spec, ServedSpec) else " (SGLang's own model, with --attention-backend atom)"
    lines = [
        f"{model}{whose} on {plan.arch}, AITER {plan.aiter}, attention TP {plan.tp}: {_in_words(spec, plan.tp)}, "
        f"{plan.dtype}, KV cache {plan.kv_cache_dtype}, pages of {plan.page_size}"
    ]
    for choice in choices:
        lines.append(f"  {choice.mode:<38}{choice.row or 'NO ROW RUNS THIS'}")
        if why or choice.row is None:
            lines += [f"      not {name}: {reason}" for name, reasons in choice.refused.items() for reason in reasons]
    return "\n".join(lines), served


def _in_words(spec: ExplainedSpec, tp: int) -> str:
    """Return which layers attend, and with which heads on one of ``tp`` ranks."""
    layer = outlines_of(spec, tp)[0]
    of_kda = spec.kda_layers if isinstance(spec, KimiLinearSpec) else frozenset()
    if not isinstance(spec, LatentMoeSpec):
        heads = f"{layer.tp_q_head_num} query and {layer.tp_k_head_num} KV heads of {layer.qk_head_dim}"
        return f"layers 0 to {spec.num_hidden_layers - 1} have {heads} a rank"
    heads = (
        f"{layer.tp_q_head_num} query heads a rank over latent rows of {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
    )
    if not of_kda:
        return f"layers 0 to {spec.num_hidden_layers - 1} have {heads}"
    attending = [str(index) for index in range(spec.num_hidden_layers) if index not in of_kda]
    return f"layers {', '.join(attending)} have {heads} (the others are KDA, which SGLang runs)"
