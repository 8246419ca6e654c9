"""Nothing under ops/ imports SGLang, and AITER only where it is installed and one of its rows is loaded."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import importlib.util, sys
from atom_plugin.attention.tables import TABLES
for op in TABLES.values():
    for kernel in op.kernels:
        if not kernel.name.startswith("aiter_"):
            kernel.load()
        elif importlib.util.find_spec("aiter") is None:
            try:
                kernel.load()
            except ImportError as error:
                assert "AITER is not installed" in str(error), error
            else:
                raise AssertionError(f"{kernel.name} was loaded without AITER")
print(sorted({name.partition(".")[0] for name in sys.modules} & {"sglang", "aiter"}))
"""


def test_loading_every_row_imports_neither() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
