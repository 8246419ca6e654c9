"""An SGLang plugin for tests: counts, inside a scheduler, its steps and what our backend did in them.

Written as JSON to $ATOM_TEST_STEPS after every step: ``steps`` (mode and "graph" or "eager" -> how many), ``largest``
(the same -> requests of the largest batch), ``prefill_replays`` of a breakable graph, and how often a layer's fused
norm, rope and store ran in such a replay (``fused_in_replay``) and elsewhere (``fused``), a store by itself
(``stores``), and a norm of our model's own (``norms``).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

_steps: Counter[str] = Counter()
_largest: Counter[str] = Counter()
_counts: Counter[str] = Counter({"prefill_replays": 0, "fused_in_replay": 0, "fused": 0, "stores": 0, "norms": 0})
_in_replay = False


def register() -> None:
    """Hook the steps of a model runner, and the end of its backend's construction."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.forward", step, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}.init_attention_backends", watch, HookType.AROUND)


def step(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one step and count it."""
    mode, requests = forward_batch.forward_mode.name, forward_batch.batch_size
    output = original(runner, forward_batch, *args, **kwargs)
    key = f"{mode} {'graph' if output.can_run_graph else 'eager'}"
    _steps[key] += 1
    _largest[key] = max(_largest[key], requests)
    if torch.distributed.get_rank():  # one process of several speaks, in a file that all know of
        return output
    report = Path(os.environ["ATOM_TEST_STEPS"])
    partial = report.with_suffix(".partial")
    partial.write_text(json.dumps({"steps": _steps, "largest": _largest, **_counts}))
    partial.replace(report)
    return output


def watch(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the original, then count what our backend does, where it is ours."""
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    from atom_plugin.attention.backend import AtomAttentionBackend
    from atom_plugin.attention.tables import LayerKernels
    from atom_plugin.layers.attention import QKNormAttention

    result = original(runner, *args, **kwargs)
    _count(QKNormAttention, "norm_heads", "norms")
    if isinstance(runner.attn_backend, AtomAttentionBackend):
        for kernels in runner.attn_backend._kernels.values():
            _count(kernels, "store", "stores")
    choose, replay = LayerKernels.norm_rope_store, BreakableCudaGraphBackend.replay

    def counted_choice(*choice: Any, **named: Any) -> Any:
        run = choose(*choice, **named)

        def counted_run(*given: Any, **given_named: Any) -> Any:
            _counts["fused_in_replay" if _in_replay else "fused"] += 1
            return run(*given, **given_named)

        return counted_run

    def counted_replay(*given: Any, **named: Any) -> Any:
        global _in_replay
        _counts["prefill_replays"] += 1
        _in_replay = True
        try:
            return replay(*given, **named)
        finally:
            _in_replay = False

    LayerKernels.norm_rope_store = counted_choice
    BreakableCudaGraphBackend.replay = counted_replay
    return result


def _count(owner: Any, name: str, what: str) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _counts[what] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)
