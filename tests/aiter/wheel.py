"""The PyPI wheel of AITER, unpacked into a folder of its own: an oracle, never installed beside SGLang.

Installed, its import raises RuntimeError on a machine without ROCm, and takes SGLang's imports down with it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REQUIREMENT = "amd-aiter==0.1.7.post2.dev18"
CACHE = Path(__file__).parents[2] / ".cache" / "aiter"


def unpacked() -> Path:
    """Return the folder that holds the package folder ``aiter``; downloads and unpacks once, skips where it cannot."""
    folder = CACHE / REQUIREMENT.replace("==", "-")
    if not folder.is_dir():
        wheels = CACHE / "wheels"
        command = [sys.executable, "-m", "pip", "download", "-q", "--pre", "--no-deps", "-d", str(wheels), REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(
                f"{REQUIREMENT} cannot be downloaded, so AITER's own kernels were NOT run: {done.stderr[-500:]}"
            )
        (wheel,) = wheels.glob("*.whl")
        partial = folder.with_suffix(".partial")
        zipfile.ZipFile(wheel).extractall(partial)
        partial.rename(folder)
    return folder
