"""Triton's own library (``tl.sum``, ``tl.cdiv``, ...) for interpreted kernels, where Triton was imported before."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import triton_interpreter

__all__ = ["interpreter", "triton_interpreter"]


@pytest.fixture
def interpreter(triton_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret our kernels and the library functions that they call until the test ends.

    The library is decorated when Triton is first imported, in most runs without the interpreter, and an interpreted
    kernel that calls a compiled function raises.
    """
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = triton.jit(function.fn)
            monkeypatch.setattr(tl.standard, name, interpreted)
            if name in vars(tl):
                monkeypatch.setattr(tl, name, interpreted)
