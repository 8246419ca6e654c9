"""What every AITER row asks first, and the small tensors that AITER's functions take in place of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom_plugin import aiter_lib, device

ARCHS = ("gfx942", "gfx950")
#: The only float8 that AITER's kernels decode on an architecture: the other's bytes would be read as other numbers.
#: Interpreted on a CPU its kernels are those of gfx942.
FLOAT8_OF_ARCH = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn, "cpu": torch.float8_e4m3fnuz}


def why_not_aiter(
    arch: str, row: str, forced: str | None, function: str, passed: Sequence[str], *, in_triton: bool = False
) -> list[str]:
    """Return what keeps the row called ``row`` from calling AITER's ``function`` with the keywords ``passed``.

    ``in_triton``: the function is Triton, which runs interpreted on a CPU.
    """
    reasons = []
    if arch == "cpu" and in_triton:
        if not device.triton_interprets():
            reasons.append(f"runs on {' and '.join(ARCHS)}; on cpu only with TRITON_INTERPRET=1, and forced by name")
        elif forced != row:
            reasons.append("interpreted on cpu only when forced by name: it is slow")
    elif arch not in ARCHS:
        reasons.append(f"runs on {' and '.join(ARCHS)}, this is {arch}")
    return reasons + aiter_lib.why_not(function, passed)


def _is_capturing(where: torch.device) -> bool:
    return where.type == "cuda" and torch.cuda.is_current_stream_capturing()


_numbers: dict[tuple[float, torch.device], torch.Tensor] = {}


def number_on(where: torch.device, value: float) -> torch.Tensor:
    """Return a float32 tensor [1] on ``where`` that holds ``value``; shared, nobody writes it.

    What is not there yet while a graph is captured is made inside of the graph: its memory belongs to the graph, and
    holds the value only once that was replayed.
    """
    key = (value, where)
    if key not in _numbers:
        with torch.inference_mode(False):
            made = torch.full((1,), value, dtype=torch.float32, device=where)
        if _is_capturing(where):
            return made
        _numbers[key] = made
    return _numbers[key]


_converted: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}


def converted(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a constant 2-D ``table`` in ``dtype``, dense and with one readable row after its end; shared by layers.

    The copy and the table live as long as the process: one cosine table a model. As with ``number_on``, a copy made
    during a capture belongs to the graph.
    """
    # by memory and not by object: a table that came through a custom op is a new object at each call
    key = (table.data_ptr(), table.shape, table.stride(), table.dtype, table.device, dtype)
    if key not in _converted:
        with torch.inference_mode(False):
            made = torch.zeros(table.shape[0] + 1, table.shape[1], dtype=dtype, device=table.device)
        made[:-1] = table
        if _is_capturing(table.device):
            return made[:-1]
        _converted[key] = (table, made[:-1])  # holds the table, so that nothing else comes to lie at its address
    return _converted[key][1]
