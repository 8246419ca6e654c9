"""SGLang's own MLA models take on ``atom`` the form of attention that the backend serves best, in every version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import server_args
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.runtime_context import get_context

from atom_plugin import host, platform, register
from tests.attention.mla_world import MlaWorld

THRESHOLD = 8192


def method(mode: ForwardMode, prefixes: list[int] | None, **attention: Any) -> str:
    """Return the name of the form that a layer of SGLang's takes for a batch."""
    fields = {"chunked_prefix_cache_threshold": THRESHOLD, "disable_chunked_prefix_cache": False, **attention}
    batch = SimpleNamespace(
        forward_mode=mode,
        extend_prefix_lens_cpu=prefixes,
        seq_lens_cpu=[length + 5 for length in prefixes or [1]],
        get_max_chunk_capacity=lambda: 1 << 17,
        attn_cp_metadata=None,
    )
    with get_context().override_server_args(attention_backend="atom"):
        chosen = AttentionBackendRegistry.get_handler("atom")(SimpleNamespace(**fields), batch)
    return str(chosen.name)


@pytest.fixture(autouse=True)
def _registered() -> None:
    MlaWorld().backend()


@pytest.mark.parametrize(
    ("mode", "prefixes", "attention", "expected"),
    [
        (ForwardMode.EXTEND, [0, 0], {}, "MHA_CHUNKED_KV"),
        (ForwardMode.EXTEND, [0, 0], {"disable_chunked_prefix_cache": True}, "MHA_CHUNKED_KV"),
        (ForwardMode.EXTEND, [0, THRESHOLD - 1], {}, "MLA"),
        (ForwardMode.EXTEND, [1, THRESHOLD - 1], {}, "MHA_CHUNKED_KV"),
        (ForwardMode.EXTEND, [1, THRESHOLD - 1], {"disable_chunked_prefix_cache": True}, "MLA"),
        (ForwardMode.DECODE, None, {}, "MLA"),
        (ForwardMode.TARGET_VERIFY, None, {}, "MLA"),
    ],
)
def test_form(mode: ForwardMode, prefixes: list[int] | None, attention: dict[str, Any], expected: str) -> None:
    """Never one-shot, whose keys are those of whole sequences: no backend of ours takes them."""
    assert method(mode, prefixes, **attention) == expected


@pytest.mark.parametrize("on_cpu", [True, False])
def test_chunks_of_prefixes_are_on_where_sglangs_kernels_for_them_run(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    supported: list[str] = ["fa3"]
    monkeypatch.setattr(server_args, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", supported)
    monkeypatch.setattr(host, "register_attention_backend", lambda *_: None)
    monkeypatch.setattr(register, "install", lambda hooks: None)
    monkeypatch.setattr("atom_plugin.cpu.install.install_cpu_hooks", lambda: None)
    monkeypatch.setattr(platform, "is_active", lambda: on_cpu)
    added: list[str] = []
    monkeypatch.setattr(server_args, "add_chunked_prefix_cache_attention_backend", added.append)
    register.prepare_serving()
    assert added == ([] if on_cpu else ["atom"])
    supported.append("atom")
    register.prepare_serving()
    assert len(added) == int(not on_cpu), "once"
