"""Ops are tested without gradients and with poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.interpreted import triton_interpreter
from tests.ops.poison import poison_empty

__all__ = ["triton_interpreter"]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    poison_empty(monkeypatch)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
