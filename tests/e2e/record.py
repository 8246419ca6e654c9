"""Records, inside a scheduler, what our models hand to our backend and what is in the pool afterwards.

One torch file a forward step: for every layer the mode, the kwargs, raw k, the pool's K rows of the new tokens, and how
often norm, rope and store happened between two calls.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def start(runner: Any, folder: Path) -> None:
    """Wrap the backend and count norms, rotations and stores of this process from now on; files go to ``folder``."""
    from sglang.srt.runtime_context import get_parallel

    from atom_plugin.attention.backend import AtomAttentionBackend
    from atom_plugin.attention.tables import LayerKernels
    from atom_plugin.layers.attention import QKNormAttention

    counts: Counter[str] = Counter()
    numbers = itertools.count()
    last_layer = runner.model_config.num_hidden_layers - 1
    step: list[dict[str, Any]] = []
    pool = runner.token_to_kv_pool
    prefix = f"rank{get_parallel().tp_rank}"

    def count(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    count(QKNormAttention, "norm_heads", "model_norm")
    count(type(pool), "set_kv_buffer", "pool_store")
    for kernels in runner.attn_backend._kernels.values():
        count(kernels, "store", "pool_store")
    rotary = runner.model.model.layers[0].self_attn.rotary_emb
    count(rotary, "forward", "model_rope")
    choose = LayerKernels.norm_rope_store

    def counted_choose(*args: Any, **kwargs: Any) -> Any:
        run = choose(*args, **kwargs)

        def counted_run(*run_args: Any, **run_kwargs: Any) -> Any:
            counts["fused"] += 1
            return run(*run_args, **run_kwargs)

        return counted_run

    LayerKernels.norm_rope_store = counted_choose

    for name in ("forward_decode", "forward_extend"):
        original = getattr(AtomAttentionBackend, name)

        def wrapped(
            self: Any,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            batch: Any,
            *args: Any,
            _original: Any = original,
            **kwargs: Any,
        ) -> Any:
            raw_k = k.detach().clone()
            result = _original(self, q, k, v, layer, batch, *args, **kwargs)
            slots = batch.out_cache_loc[: k.shape[0]]
            step.append(
                {
                    "mode": batch.forward_mode.name,
                    "layer": layer.layer_id,
                    "kwargs": sorted(kwargs),
                    "raw_k": raw_k,
                    "pool_k": pool.get_key_buffer(layer.layer_id)[slots].clone(),
                    "slots": slots.clone(),
                    "positions": batch.positions[: k.shape[0]].clone(),
                    "input_ids": batch.input_ids[: k.shape[0]].clone(),
                    "counts": dict(counts),
                }
            )
            counts.clear()
            if layer.layer_id == last_layer:
                torch.save(list(step), folder / f"{prefix}-step{next(numbers):05d}.pt")
                step.clear()
            return result

        setattr(AtomAttentionBackend, name, wrapped)
