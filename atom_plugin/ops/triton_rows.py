"""What every Triton row asks before anything of its own: is there a GPU, or an interpreter asked for by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from atom_plugin import device

_SINCE = {torch.bfloat16: 80, torch.float8_e4m3fn: 89}  # NVIDIA's compute capability, in tens and units


def why_not_triton(arch: str, row: str, forced: str | None, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Return what keeps any Triton kernel of ours, as the row called ``row``, from computing ``dtypes`` on ``arch``.

    Whether Triton is installed is asked where ``arch`` is this machine's: a plan for another says nothing about it.
    """
    if arch == device.arch() and importlib.util.find_spec("triton") is None:
        return ["the triton package is not installed"]
    if not device.is_accelerator(arch):
        return _why_not_interpreted(arch, row, forced, dtypes)
    reasons = []
    if arch.startswith("sm"):
        reasons += [
            f"{dtype} on {arch}: NVIDIA computes it from sm{first} on"
            for dtype, first in _SINCE.items()
            if dtype in dtypes and int(arch[2:]) < first
        ]
    if torch.float8_e4m3fnuz in dtypes and arch != "gfx942":
        reasons.append(f"torch.float8_e4m3fnuz on {arch}: it is the FP8 of gfx942 alone")
    return reasons


def _why_not_interpreted(arch: str, row: str, forced: str | None, dtypes: Sequence[torch.dtype]) -> list[str]:
    reasons = []
    if not device.triton_interprets():
        reasons.append(f"runs on GPUs; on {arch} only interpreted: TRITON_INTERPRET=1, and forced by name")
    elif forced != row:
        reasons.append(f"interpreted on {arch} only when forced by name: it is slow")
    if torch.bfloat16 in dtypes:
        reasons.append("bfloat16 interpreted: Triton's interpreter rounds it towards zero; takes float32, float16")
    return reasons
