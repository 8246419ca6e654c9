"""An SGLang plugin for tests: AITER's Triton kernels, interpreted, in every process of a server on a CPU.

AITER_FOLDER names the unpacked wheel. Of the modes that a layer can be called in, those with lse and sinks are left
out: the row that the test forces returns no lse, so that a launch that has to resolve them is refused, as it should be.
"""

from __future__ import annotations

import os
from pathlib import Path


def register() -> None:
    """Put AITER in place before our own plugin looks for it."""
    from atom_plugin.attention import tables
    from tests.aiter.interpreted import install

    install(Path(os.environ["AITER_FOLDER"]) / "aiter")
    keys_of = tables.keys_of
    tables.keys_of = lambda *, captured: [  # type: ignore[assignment]
        key for key in keys_of(captured=captured) if not key.return_lse and not key.has_sinks
    ]
