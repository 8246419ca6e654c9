"""Un-absorbed MLA over cached prefixes, a chunk at a time: SGLang's protocol of ForwardBatch, which bounds the memory.

Each part is attended to by itself and returns, beside its output, the log of the sum of its exponentials (lse), by
which SGLang's merge_state weights the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.runtime_context import get_schedule

from atom_plugin import host


def merge_state(*parts: torch.Tensor) -> None:
    """Call SGLang's merge_state; imported where a prefix needs it, as up to 0.5.21 the import loads GPU libraries."""
    from sglang.srt.layers.attention.merge_state import merge_state as merge

    merge(*parts)


def may_expand_prefixes() -> bool:
    """Return whether prefixes are expanded: the prefill backend told SGLang that it can, and no flag forbids it."""
    return not get_schedule().disable_chunked_prefix_cache


def attend_with_prefix(
    attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    forward_batch: ForwardBatch,
    *,
    expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return [T, H, V]: ``query`` over the new ``key`` and ``value``, causally, and over all of its cached prefix.

    ``attention``: SGLang's RadixAttention; query, key: [T, H, N + R]; value: [T, H, V]; ``expand`` computes keys and
    values of rows of the cache.
    """
    has_prefix = any(forward_batch.extend_prefix_lens_cpu)
    if has_prefix and forward_batch.num_prefix_chunks is None:  # the first layer of the batch
        forward_batch.prepare_chunked_prefix_cache_info(query.device)
        host.plan_prefix_chunks(get_attn_backend(), forward_batch)
    forward_batch.mha_return_lse = has_prefix
    forward_batch.set_attn_attend_prefix_cache(False)
    result = attention(query, key, value, forward_batch, save_kv_cache=False)
    if not has_prefix:
        attended: torch.Tensor = result.view(len(query), attention.tp_q_head_num, attention.v_head_dim)
        return attended
    attended, lse = result
    cache = get_token_to_kv_pool().get_key_buffer(attention.layer_id)
    forward_batch.set_attn_attend_prefix_cache(True)
    for chunk, slots in enumerate(forward_batch.prefix_chunk_kv_indices):
        forward_batch.set_prefix_chunk_idx(chunk)
        key, value = expand(cache[slots].to(query.dtype))
        of_chunk, lse_of_chunk = attention(
            query, key, value, forward_batch, save_kv_cache=False, key_value_num_tokens=len(key)
        )
        merged, merged_lse = torch.empty_like(attended), torch.empty_like(lse)
        merge_state(of_chunk, lse_of_chunk, attended, lse, merged, merged_lse)
        attended, lse = merged, merged_lse
    return attended
