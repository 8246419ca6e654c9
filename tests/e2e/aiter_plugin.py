"""An SGLang plugin for tests: AITER's Triton kernels, interpreted, in every process of a server on a CPU.

AITER_FOLDER names the unpacked wheel.
"""

from __future__ import annotations

import os
from pathlib import Path


def register() -> None:
    """Put AITER in place before our own plugin looks for it."""
    from tests.aiter.interpreted import install

    install(Path(os.environ["AITER_FOLDER"]) / "aiter")
