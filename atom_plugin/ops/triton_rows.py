"""What every Triton row asks before anything of its own: is there a GPU, or an interpreter asked for by name."""

from __future__ import annotations

import importlib.util

from atom_plugin import device


def why_not_triton(arch: str, row: str, forced: str | None) -> list[str]:
    """Return what keeps any Triton kernel of ours, as the row called ``row``, from running on ``arch``."""
    if importlib.util.find_spec("triton") is None:
        return ["the triton package is not installed"]
    if device.is_accelerator(arch):
        return []
    if not device.triton_interprets():
        return [f"runs on GPUs; on {arch} only interpreted: TRITON_INTERPRET=1, and forced by name"]
    return [] if forced == row else [f"interpreted on {arch} only when forced by name: it is slow"]
