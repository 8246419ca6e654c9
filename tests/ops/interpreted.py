"""Triton kernels of ours on a CPU: their modules, imported anew while Triton's interpreter is on."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def _kernel_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("atom_plugin.ops.") and name.endswith(".kernel")]


@pytest.fixture
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let rows loaded in this test, and Triton's library that they call, be interpreted; and forget them afterwards.

    Triton decides at decoration: a kernel module that was imported without the interpreter stays compiled, and so does
    the library (``tl.sum``, ``tl.cdiv``), which an interpreted kernel cannot call then.
    """
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = triton.jit(function.fn)
            monkeypatch.setattr(tl.standard, name, interpreted)
            if name in vars(tl):
                monkeypatch.setattr(tl, name, interpreted)
    held = {name: sys.modules.pop(name) for name in _kernel_modules()}
    yield
    for name in _kernel_modules():
        del sys.modules[name]
    sys.modules.update(held)
