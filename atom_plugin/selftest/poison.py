"""Makes memory that a row forgets to write visible: what it allocates without a value comes as NaN."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Packages whose allocations are poisoned: rows of ours, and the Python side of AITER's functions.
ALLOCATES = ("atom_plugin", "aiter")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Let ``empty``, ``empty_like`` and ``new_empty`` give NaN, or the largest integer, to our rows and to AITER."""
    places: list[tuple[Any, str]] = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, original in originals:
        setattr(owner, name, _filling(original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def poison_free_memory(where: torch.device) -> None:
    """Leave NaN in the blocks that a GPU's allocator hands out next, for kernels that allocate by themselves."""
    if where.type == "cuda":
        for megabytes in (1, 4, 16, 64):
            torch.full((megabytes << 18,), float("nan"), device=where)


def _filling(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = allocate(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals["__name__"])
        if caller.split(".")[0] in ALLOCATES and made.dtype != torch.bool and made.device.type != "meta":
            made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max)
        return made

    return wrapper
