"""Which kernel runs an op, and why the others do not: ordered rows, each of which can say what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

P = TypeVar("P")


class Tolerance(NamedTuple):
    """What a row promises against the fp32 reference, as ``torch.testing.assert_close`` takes it."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Kernel(Generic[P]):
    """One row of a table.

    ``why_not(problem)`` returns every reason against running ``problem``; an empty list means that it can run, and
    what it raises is a bug that propagates. ``load()`` imports the kernel and returns it. ``tolerance`` holds one
    entry per dtype of the queries; tests read it from here.
    """

    name: str
    why_not: Callable[[P], list[str]]
    load: Callable[[], Callable[..., Any]]
    tolerance: Mapping[torch.dtype, Tolerance]


class NoKernelError(ValueError):
    """No row of a table can run a problem; the message holds the problem and every row's reasons."""


class Table(Generic[P]):
    """The rows of one op, best first."""

    def __init__(self, op: str, kernels: Sequence[Kernel[P]]) -> None:
        names = [kernel.name for kernel in kernels]
        if len(set(names)) != len(names):
            raise ValueError(f"two rows of {op} have the same name: {', '.join(names)}")
        self.op = op
        self.kernels = tuple(kernels)

    def names(self) -> list[str]:
        """Return the names of the rows, best first."""
        return [kernel.name for kernel in self.kernels]

    def choose(self, problem: P, forced: str | None = None) -> Kernel[P]:
        """Return the first row that can run ``problem``, or the row called ``forced`` if that one can.

        Raises ValueError for an unknown ``forced`` and NoKernelError when nothing is left.
        """
        rows = self.kernels if forced is None else (self._named(forced),)
        refusals: list[str] = []
        for kernel in rows:
            reasons = kernel.why_not(problem)
            if not reasons:
                return kernel
            refusals.append(f"  {kernel.name}:" + "".join(f"\n    - {reason}" for reason in reasons))
        asked = "" if forced is None else f" (forced: {forced})"
        raise NoKernelError(f"no kernel of {self.op}{asked} can run {problem}\n" + "\n".join(refusals))

    def verdicts(self, problem: P, forced: str | None = None) -> list[tuple[str, list[str]]]:
        """Return (name, reasons against it) of each row that ``choose`` asks, best first, past the chosen one too."""
        rows = self.kernels if forced is None else (self._named(forced),)
        return [(kernel.name, kernel.why_not(problem)) for kernel in rows]

    def _named(self, name: str) -> Kernel[P]:
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise ValueError(f"{self.op} has no row {name!r}; its rows are: {', '.join(self.names())}")
