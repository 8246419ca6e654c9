"""Server flags of which we serve only some values, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atom_plugin import host

MODEL: tuple[str, ...] = ("model",)
BACKEND: tuple[str, ...] = ("backend",)
EITHER = (*MODEL, *BACKEND)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A server flag of which we serve only some values. ``parts``: which of ours cannot serve the others."""

    field: str
    served: tuple[Any, ...]
    parts: tuple[str, ...]
    why: str


def flag_problems(flags: Iterable[Flag], cfg: Any, parts: Sequence[str]) -> list[str]:
    """Return a reason for each of ``flags`` whose value one of ``parts`` ("model", "backend") does not serve."""
    problems = []
    for flag in flags:
        concerned = [part for part in flag.parts if part in parts]
        absent = flag.field in host.FLAGS_SINCE and not host.since(host.FLAGS_SINCE[flag.field])
        value = getattr(cfg, flag.field) if concerned and not absent else flag.served[0]
        if value not in flag.served:
            served = " or ".join(map(str, flag.served))
            who = " and ".join(concerned)
            problems.append(f"{host.as_option(flag.field, value)}: the atom {who} serves only {served} ({flag.why})")
    return problems
