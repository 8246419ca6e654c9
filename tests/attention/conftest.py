"""The backend is tested on SGLang's real classes, without gradients and with poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()  # SGLang's kits, and the pools of 0.5.17, import it where there is no GPU

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend  # noqa: E402

from atom_plugin.attention.backend import AtomAttentionBackend  # noqa: E402
from tests.ops.poison import poison_empty  # noqa: E402

if "atom" not in ATTENTION_BACKENDS:
    register_attention_backend("atom")(AtomAttentionBackend)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    poison_empty(monkeypatch)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
