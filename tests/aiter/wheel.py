"""The PyPI wheel of AITER, unpacked into a folder of its own: an oracle, never installed beside SGLang.

Installed, its import raises RuntimeError on a machine without ROCm, and takes SGLang's imports down with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import wheels

REQUIREMENT = "amd-aiter==0.1.7.post2.dev18"


def unpacked() -> Path:
    """Return the folder that holds the package folder ``aiter``; downloads and unpacks once, skips where it cannot."""
    try:
        return wheels.unpacked(REQUIREMENT, "--pre")
    except wheels.DownloadError as error:
        pytest.skip(f"AITER's own kernels were NOT run: {error}")
