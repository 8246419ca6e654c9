"""Which kernels a model's layers would get, and why not the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from atom_plugin import aiter_lib
from atom_plugin.attention.tables import AttendKey, LayerProblems, forced_rows, modes_of
from atom_plugin.dispatch import Table
from atom_plugin.explain.plan import ExplainedSpec, Plan, experts_of, layers_of
from atom_plugin.ops import few_token_experts


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one op gets in one mode: ``row``, None where no row runs it, and the reasons against each other row."""

    mode: str
    row: str | None
    refused: dict[str, list[str]]


def explain(spec: ExplainedSpec, plan: Plan) -> list[Choice]:
    """Return the choice of every op and mode of the layers of ``spec``, which are alike in these models.

    The modes, problems, tables and forced rows are those of a launch; nothing is loaded. Raises ValueError for a plan
    that no launch could have.
    """
    with assumed(plan.aiter):
        return [choice_of(mode, table, problem) for _, mode, table, problem in layer_modes(spec, plan)]


def layer_modes(spec: ExplainedSpec, plan: Plan) -> Iterator[tuple[LayerProblems, str, Table[Any], Any]]:
    """Yield (layer, mode, table, problem with the row that is forced) of every call that a launch leads to, once."""
    verify_len = None if plan.query_len == 1 else plan.query_len
    forced, seen, layers = forced_rows(), set(), layers_of(spec, plan)
    for layer in layers:
        for captured in (False, True) if plan.graphs else (False,):
            modes = modes_of(layer, captured=captured, has_sinks=False, verify_len=verify_len)
            for mode, table, problem, key in modes:
                if mode not in seen and not _is_left_out(key, plan.query_len):
                    seen.add(mode)
                    yield layer, mode, table, replace(problem, forced=forced.get(table.op))
    experts, table = experts_of(spec, plan), few_token_experts.TABLE
    if experts is not None:
        yield layers[0], table.op, table, replace(experts, forced=forced.get(table.op))


def choice_of(mode: str, table: Table[Any], problem: Any) -> Choice:
    """Return which row of ``table`` runs ``problem``, of the forced one alone where it names one."""
    verdicts = table.verdicts(problem, problem.forced)
    row = next((name for name, reasons in verdicts if not reasons), None)
    return Choice(mode=mode, row=row, refused={name: reasons for name, reasons in verdicts if reasons})


def assumed(version: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which AITER is ``version``, or what is installed for "here"."""
    for known in aiter_lib.VERSIONS:
        if version == known:
            return aiter_lib.assume(known)
    return contextlib.nullcontext()


def _is_left_out(key: AttendKey | None, query_len: int | None) -> bool:
    """Return whether an attention mode is not that of ``query_len`` new tokens a request."""
    return key is not None and query_len is not None and (query_len == 1) != (key.phase == "decode")
