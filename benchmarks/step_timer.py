"""An SGLang plugin for benchmarks: writes the attention time of every decode step of a scheduler to $STEP_TIMER_FILE.

Attention is all that happens in ``self_attn`` but its two projections: q/k norm, rope, cache write and attention, for
SGLang's models and ours alike. One line a step: batch size, seconds of attention over all layers, seconds of the step.
"""

from __future__ import annotations

import os
import time
from typing import Any


def register() -> None:
    """Wrap the modules once the backends exist."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
    HookRegistry.register(target, wrap, HookType.AROUND)


def wrap(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Time ``self_attn`` and its projections in every layer, and write a line when the model is left."""
    result = original(runner, *args, **kwargs)
    spent = {"attention": 0.0}
    out = open(os.environ["STEP_TIMER_FILE"], "a", buffering=1)  # noqa: SIM115 - it lives as long as the process

    def timed(module: Any, sign: float) -> None:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = forward(*args, **kwargs)
            spent["attention"] += sign * (time.perf_counter() - start)
            return answer

        module.forward = run

    for layer in runner.model.model.layers:
        timed(layer.self_attn, 1.0)
        timed(layer.self_attn.qkv_proj, -1.0)
        timed(layer.self_attn.o_proj, -1.0)
    model = runner.model
    forward = model.forward

    def step(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        spent["attention"] = 0.0
        start = time.perf_counter()
        answer = forward(input_ids, positions, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_decode():
            out.write(f"{forward_batch.batch_size} {spent['attention']:.9f} {time.perf_counter() - start:.9f}\n")
        return answer

    model.forward = step
    return result
