"""Folders that SGLang finds plugins in, for tests that need one more plugin than is installed."""

from __future__ import annotations

from pathlib import Path


def make_plugin(folder: Path, name: str, entry: str, *, group: str = "sglang.srt.plugins") -> Path:
    """Make ``folder``, put on PYTHONPATH, announce plugin ``name`` = ``entry`` (module:function), and return it."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {entry}\n")
    return folder
