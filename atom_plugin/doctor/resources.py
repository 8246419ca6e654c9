"""Memory of the host, and room on the disks that a launch writes to."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from atom_plugin import aiter_lib
from atom_plugin.doctor.finding import Finding, fail, note

GIB = 1 << 30
#: GiB below which a launch cannot even write compiled kernels, and below which it is worth a word.
DISK_NEEDED, DISK_WANTED = 0.5, 10.0
SHARED_WANTED = 1.0  # ranks exchange messages and tensors through /dev/shm; docker gives 64 MiB unless told else
MEMORY_WANTED = 8.0


def check_resources() -> list[Finding]:
    """Return memory, shared memory, and the room where models, kernels and temporary files are kept."""
    return [*_memory(), *_shared_memory(), *(_disk(name, folder) for name, folder in _folders().items())]


def _folders() -> dict[str, Path]:
    """Return what a launch writes, and where."""
    home = Path.home()
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface") / "hub"
    folders = {
        "models (HF_HUB_CACHE)": Path(hub),
        "Triton's kernels (TRITON_CACHE_DIR)": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "temporary files (TMPDIR)": Path(tempfile.gettempdir()),
    }
    if aiter_lib.version() is not None:
        folders["AITER's kernels (AITER_JIT_DIR)"] = Path(os.environ.get("AITER_JIT_DIR") or home / ".aiter")
    return folders


def _disk(name: str, folder: Path) -> Finding:
    there = next(one for one in (folder, *folder.parents) if one.exists())
    title, free = f"disk of {name}", shutil.disk_usage(there).free / GIB
    text = f"{folder}, {free:.1f} GiB free"
    if not os.access(there, os.W_OK):
        return fail(title, f"{folder}: {there} cannot be written", "set the variable to a folder that can be written")
    if free < DISK_NEEDED:
        return fail(title, text, f"make {DISK_NEEDED:g} GiB free, or set the variable to another disk")
    return note(title, f"{text}: checkpoints take more") if free < DISK_WANTED else Finding(title, text)


def _memory() -> list[Finding]:
    if not sys.platform.startswith("linux"):
        return []
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(rest.split()[0]) / (1 << 20) for name, rest in lines}
    text = f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GiB available"
    if sizes["MemAvailable"] < MEMORY_WANTED:
        return [note("memory", f"{text}: each rank of a launch takes a few")]
    return [Finding("memory", text)]


def _shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    free = shutil.disk_usage(folder).free / GIB
    text = f"{free:.2f} GiB free in {folder}"
    if free < SHARED_WANTED:
        return [note("shared memory", f"{text}: several ranks need more (docker run --shm-size=16g, or --ipc=host)")]
    return [Finding("shared memory", text)]
