"""An installed AITER that this Python cannot read is a reason against its rows, and no harm to the others."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from atom_plugin import aiter_lib


@pytest.mark.parametrize("content", [b"def f(:\n", b"# caf\xe9\n"], ids=["syntax", "encoding"])
def test_a_source_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    ops = tmp_path / "aiter" / "ops"
    ops.mkdir(parents=True)
    for file in (tmp_path / "aiter" / "__init__.py", ops / "__init__.py", ops / "attention.py"):
        file.write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    (reason,) = aiter_lib.why_not("paged_attention_ragged", ())
    assert reason == "the installed AITER has no aiter.ops.attention.paged_attention_ragged that this Python can read"


def test_a_module_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    assert aiter_lib.why_not("paged_attention_ragged", ()) == ["AITER is not installed"]
