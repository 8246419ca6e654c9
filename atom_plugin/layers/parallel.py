"""Who holds what, and the two collectives of a block: tensor parallel, expert parallel and attention data parallel.

Attention is split over the attention-TP group of one DP rank. Feed-forward parts are split over the whole TP group,
so under attention DP every rank's tokens are gathered before them and handed back after.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.dp_attention import (
    dp_gather_replicate,
    dp_scatter,
    get_global_dp_buffer,
    get_local_dp_buffer,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel


def heads_per_rank(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return (query heads, KV heads) of one attention-TP rank; fewer KV heads than ranks are replicated."""
    size = get_parallel().attn_tp_size
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(f"attention TP {size} does not divide {num_heads} query and {num_kv_heads} KV heads")
    return num_heads // size, max(1, num_kv_heads // size)


def reduce_attention(partial_TD: torch.Tensor) -> torch.Tensor:
    """Sum the output projections of the attention-TP ranks, [tokens, hidden_size]."""
    group = get_parallel().attn_tp_group
    return group.all_reduce(partial_TD) if group.world_size > 1 else partial_TD


def reduce_feed_forward(partial_TD: torch.Tensor) -> torch.Tensor:
    """Sum the feed-forward parts of all TP ranks (shards of a width, shards of the experts), [tokens, hidden_size]."""
    return tensor_model_parallel_all_reduce(partial_TD) if get_parallel().tp_size > 1 else partial_TD


def over_all_tokens(
    feed_forward: Callable[[torch.Tensor], torch.Tensor], hidden_TD: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """Return ``feed_forward`` of this rank's rows, computed together with the rows of every attention-DP rank."""
    if get_parallel().attn_dp_size == 1:
        return feed_forward(hidden_TD)
    group = get_parallel().tp_group
    everyone_TD = get_global_dp_buffer(group)
    # the gather overwrites its input on ranks other than the first of an attention-TP group
    dp_gather_replicate(everyone_TD, hidden_TD.clone(), forward_batch)
    everyone_TD = feed_forward(everyone_TD)
    own_TD = get_local_dp_buffer(group)
    dp_scatter(own_TD, everyone_TD, forward_batch)
    return own_TD
