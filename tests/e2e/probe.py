"""A general SGLang plugin for tests: reports, from inside each scheduler, which model class and which backend serve.

Installed by ``plugin_path`` (a folder with a dist-info, for PYTHONPATH). Writes one JSON a rank into $ATOM_TEST_PROBE.
With $ATOM_TEST_RECORD it also records what reaches our backend, layer by layer (``record.py``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Hook the end of ModelRunner.init_attention_backends."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends", report, HookType.AROUND
    )


def report(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the original, then write what this rank serves with."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    from atom_plugin import host

    result = original(runner, *args, **kwargs)
    tp_rank = get_parallel().tp_rank
    backend = runner.attn_backend
    parts = [vars(backend)[name] for name in ("prefill_backend", "decode_backend") if name in vars(backend)] or [
        backend
    ]
    facts = {
        "tp_rank": tp_rank,
        "model": f"{type(runner.model).__module__}.{type(runner.model).__qualname__}",
        "backends": [f"{type(part).__module__}.{type(part).__qualname__}" for part in parts],
        "page_size": runner.page_size,
        "kv_cache_dtype": str(runner.token_to_kv_pool.dtype),
        "platform": type(current_platform).__name__,
        "parameters": sum(one.numel() for one in runner.model.parameters()),
        "parameter_bytes": sum(one.numel() * one.element_size() for one in runner.model.parameters()),
        "kv_bytes_a_slot": kv_bytes_a_slot(runner.token_to_kv_pool),
        "kv_scales": [(layer.k_scale_float, layer.v_scale_float) for layer in host.attention_layers(runner.model)],
    }
    Path(os.environ["ATOM_TEST_PROBE"], f"rank{tp_rank}-{os.getpid()}.json").write_text(json.dumps(facts))
    if "ATOM_TEST_RECORD" in os.environ:
        import record

        record.start(runner, Path(os.environ["ATOM_TEST_RECORD"]))
    return result


def kv_bytes_a_slot(pool: Any) -> float:
    """Return the bytes of one token slot, all layers together, as SGLang's pool counts its own bytes."""
    sizes = pool.get_kv_size_bytes()
    return (sum(sizes) if isinstance(sizes, tuple) else sizes) / (pool.size + pool.page_size)
