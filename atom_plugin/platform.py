"""SGLang platform for machines without an accelerator: the entry point ``atom_cpu``, and why it keeps out of the way.

An out-of-tree platform that activates itself wins over everything that SGLang finds by itself, so ours answers only
where SGLang would find nothing at all. Two situations are decided by name:

* ``SGLANG_PLATFORM=atom_cpu``: SGLang loads no other platform plugin, so that others are installed does not matter;
  an accelerator or SGLANG_USE_CPU_ENGINE=1 still does, and is then an error that says so.
* another platform plugin is installed and SGLang may load it: whether it will activate itself is not known before
  SGLang has asked it, so the machine is left to it. Where it does not activate itself either, SGLang is left without
  a platform, and ``SGLANG_PLATFORM=atom_cpu`` is the way out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch

from atom_plugin.hooks import Hook

logger = logging.getLogger(__name__)

NAME = "atom_cpu"
GROUP = "sglang.srt.platforms"
ENTRY_POINT = "atom_plugin.platform:activate"
PLATFORM_CLASS = "atom_plugin.cpu.srt_platform.AtomCpuPlatform"


def _has_cuda() -> bool:
    return torch.version.hip is None and torch.cuda.is_available()


def _has_rocm() -> bool:
    return torch.version.hip is not None and torch.cuda.is_available()


def _has_npu() -> bool:
    return "npu" in vars(torch) and bool(vars(torch)["npu"].is_available())


def _has_musa() -> bool:
    return vars(torch.version).get("musa") is not None


ACCELERATORS: dict[str, Callable[[], bool]] = {
    "CUDA": _has_cuda,
    "ROCm": _has_rocm,
    "XPU": lambda: torch.xpu.is_available(),
    "NPU": _has_npu,
    "MUSA": _has_musa,
    "MPS": lambda: torch.mps.is_available(),
}


def activate() -> str | None:
    """Return the dotted name of our platform class, or None where SGLang serves without it.

    Raises RuntimeError when SGLANG_PLATFORM names us and this machine is not ours to serve: SGLang would otherwise
    only report that the plugin returned None.
    """
    reason = why_inactive()
    if not reason:
        return PLATFORM_CLASS
    if os.environ.get("SGLANG_PLATFORM") == NAME:
        raise RuntimeError(f"SGLANG_PLATFORM={NAME} asks for the CPU platform of atom-plugin, but {reason}")
    logger.info("The CPU platform of atom-plugin is not used: %s", reason)
    return None


def why_inactive() -> str:
    """Return in words why SGLang does not run on our CPU platform here and what to do, or "" where it does."""
    return " ".join([*_why_not_asked(), *_why_not_needed()])


def why_not_device(device: str) -> list[str]:
    """Return why a launch on ``device`` (SGLang's resolved flag) has no platform under it; empty when it has one."""
    if device != "cpu" or is_active() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return []
    reason = why_inactive() or "SGLang did not find it, or could not load it: see `atom-plugin doctor`."
    return [f"--device cpu: the CPU platform of atom-plugin ({NAME}) is not in use: {reason}"]


def is_active() -> bool:
    """Return whether this process runs on our platform, as SGLang has resolved it."""
    from sglang.srt.platforms import current_platform

    cls = type(current_platform)
    return f"{cls.__module__}.{cls.__qualname__}" == PLATFORM_CLASS


def _why_not_asked() -> list[str]:
    """Return why SGLang does not load our entry point, or why it must not get an answer from it."""
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected == NAME:
        return []
    if selected:
        return [f"SGLANG_PLATFORM={selected} selects another platform: unset it, or set SGLANG_PLATFORM={NAME}."]
    listed = os.environ.get("SGLANG_PLUGINS")
    allowed = {name.strip() for name in listed.split(",")} if listed else None
    if allowed is not None and NAME not in allowed:
        return [f"SGLANG_PLUGINS={listed} leaves {NAME} out: set SGLANG_PLUGINS={listed},{NAME}, or unset it."]
    others = sorted(
        f"{point.name} of {point.dist.name if point.dist else 'an unnamed package'}"
        for point in entry_points(group=GROUP)
        if point.value != ENTRY_POINT and (allowed is None or point.name in allowed)
    )
    if others:
        return [
            f"another SGLang platform plugin is installed ({', '.join(others)}), and this machine is left to it: "
            f"set SGLANG_PLATFORM={NAME} to serve on the CPU instead."
        ]
    return []


def _why_not_needed() -> list[str]:
    """Return the platforms that SGLang has here without us."""
    found = [name for name, is_there in ACCELERATORS.items() if is_there()]
    reasons = [f"SGLang serves {', '.join(found)} on this machine without it."] if found else []
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        reasons.append("SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine: unset it to use ours.")
    return reasons


def _get_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        reason = why_inactive()
        if not reason:
            raise
        raise RuntimeError(
            f"{error} atom-plugin has a platform for CPUs ({NAME}), which is not in use: {reason}"
        ) from error


DEVICE = Hook(
    target="sglang.srt.utils.common.get_device",
    kind="around",
    hook=_get_device,
    why="without a platform SGLang says that no accelerator was found, and not that ours was left out, nor by what",
    upstream="the message is the same from 0.5.17 to 0.5.23",
    remove_when="SGLang's message names the platform plugins that are installed and not in use",
)
