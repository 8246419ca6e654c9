"""Multi-head latent attention (MLA): the forms of a call, and what queries see that do not read the pool.

A model of this kind has two attention layers of one ``layer_id``. The absorbed one has one KV head whose keys are the
pool's latent rows (kv_lora_rank columns of latent, then the rotated ones) and whose values are their first
kv_lora_rank columns. The un-absorbed one has keys and values of every head, which the model makes of latent rows and
hands over: of the new tokens, or of one chunk of the requests' prefixes. They are pages of one token here.

Shape suffixes: T tokens, N keys handed over, H query heads, C kv_lora_rank, R rotated columns, D = C + R, B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from atom_plugin.attention.call import Call, first
from atom_plugin.attention.kv_layout import KVScales, is_fp8_kv
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import PagedBatch


def queries(q: torch.Tensor, call: Call) -> torch.Tensor:
    """Return absorbed queries as [T, H, D] from [T, H * D] or [T, H, D], or from the latent part and ``q_rope``.

    Raises ValueError where the rotated part is handed over apart for q or k alone.
    """
    layer = call.layer
    if call.k is not None and (call.q_rope is None) != (call.k_rope is None):
        alone = "q_rope" if call.k_rope is None else "k_rope"
        raise ValueError(f"attention layer {layer.layer_id} got {alone} alone: q_rope and k_rope belong together")
    if call.q_rope is None:
        return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    rotated_THR = call.q_rope.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim - layer.v_head_dim)
    return torch.cat([q.reshape(-1, layer.tp_q_head_num, layer.v_head_dim), rotated_THR], dim=-1)


def latent_rows(call: Call, num_tokens: int) -> torch.Tensor | None:
    """Return the first ``num_tokens`` latent rows that the call stores, [T, 1, D]; None where it stores none."""
    layer, k = call.layer, call.k
    if k is None or not call.stores:
        return None
    if call.k_rope is None:
        return first(num_tokens, k).view(-1, 1, layer.qk_head_dim)
    latent_T1C = first(num_tokens, k).view(-1, 1, layer.v_head_dim)
    rotated_T1R = first(num_tokens, call.k_rope).view(-1, 1, layer.qk_head_dim - layer.v_head_dim)
    return torch.cat([latent_T1C, rotated_T1R], dim=-1)


def handed_over(
    call: Call, batch: PagedBatch, num_tokens: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Return the keys and values of an un-absorbed call as [N, 1, H, dim], and which of them each query sees.

    ``batch``: the step's own, over the pool, of ``num_tokens`` queries; the call brings ``num_rows``, with padding
    after them. Raises ValueError for a call that is not un-absorbed attention of an
    extend, and for keys that are not those of the batch.
    """
    layer, k, v = call.layer, call.k, call.v
    call.refuse(save_kv_cache=call.stores)
    if k is None or v is None or batch.captured or batch.one_query_each:
        raise ValueError(
            f"attention layer {layer.layer_id} has keys of {layer.tp_k_head_num} heads, and the pool holds latent "
            f"rows: it attends in extends that no graph captures, to the k and v that it is handed"
        )
    if call.forward_batch.attn_attend_prefix_cache:
        seen, chunk = prefix_chunk(batch, call.forward_batch)
        expected = {chunk}
    else:
        seen, expected = new_tokens(batch), {num_tokens, num_rows}
    k_NHD = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
    v_NHD = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    if k_NHD.shape[0] not in expected or v_NHD.shape[0] != k_NHD.shape[0]:
        raise ValueError(
            f"attention layer {layer.layer_id} got {k_NHD.shape[0]} keys and {v_NHD.shape[0]} values: takes "
            f"{' or '.join(map(str, sorted(expected)))} of both, "
            + ("those of the new tokens" if seen.causal else "those of one chunk of the prefixes")
        )
    return k_NHD.unsqueeze(1), v_NHD.unsqueeze(1), seen


def new_tokens(batch: PagedBatch) -> PagedBatch:
    """Return what queries see of the keys of the new tokens alone, which are numbered as the queries are."""

    def derive() -> PagedBatch:
        bounds_B1 = batch.qo_indptr_B1
        return _over_rows(batch, starts_B=bounds_B1[:-1], lens_B=bounds_B1.diff(), longest=batch.max_q_len, causal=True)

    seen: PagedBatch = batch.once("new tokens", derive)
    return seen


def prefix_chunk(batch: PagedBatch, forward_batch: Any) -> tuple[PagedBatch, int]:
    """Return what queries see of the current chunk of prefixes, all of it, and how many keys the chunk has.

    The chunk is that of SGLang's ``prefix_chunk_*`` fields, which lie on the device and on the host.
    """
    chunk = forward_batch.prefix_chunk_idx
    bounds_B1 = forward_batch.prefix_chunk_cu_seq_lens[chunk]
    if bounds_B1.shape != batch.qo_indptr_B1.shape:
        raise ValueError(
            f"a chunk of the prefixes of {bounds_B1.shape[0] - 1} requests for {batch.seq_lens_B.shape[0]} requests"
        )

    def derive() -> PagedBatch:
        longest = int(forward_batch.prefix_chunk_max_seq_lens[chunk])
        return _over_rows(batch, starts_B=bounds_B1[:-1], lens_B=bounds_B1.diff(), longest=longest, causal=False)

    seen: PagedBatch = batch.once(("prefix chunk", chunk), derive)
    return seen, int(forward_batch.prefix_chunk_num_tokens[chunk])


def _over_rows(
    batch: PagedBatch, *, starts_B: torch.Tensor, lens_B: torch.Tensor, longest: int, causal: bool
) -> PagedBatch:
    """Return ``batch``'s queries over keys that lie one after the other, request after request."""
    places_L = torch.arange(longest, dtype=torch.int32, device=starts_B.device)
    return PagedBatch(
        qo_indptr_B1=batch.qo_indptr_B1,
        seq_lens_B=lens_B,
        page_table=PageTable(pages_BP=starts_B[:, None] + places_L, page_size=1),
        max_q_len=batch.max_q_len,
        max_seq_len=longest,
        captured=False,
        one_query_each=False,
        causal=causal,
        consecutive=True,
    )


def why_not_pairs(layers: Sequence[Any], kinds: Sequence[str], pool_dtype: torch.dtype) -> list[str]:
    """Return why the attention layers of a model on a latent pool do not belong together; empty if they do.

    ``kinds``: of each layer, as LayerProblems says it.
    """
    absorbed = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == "absorbed"]
    reasons = []
    if len({layer.layer_id for layer in absorbed}) < len(absorbed):
        reasons.append("two attention layers of one layer_id have one KV head with values as wide as latent rows")
    scale_of = {layer.layer_id: KVScales.of(layer, pool_dtype).k for layer in absorbed}
    for layer, kind in zip(layers, kinds, strict=True):
        if kind != "unabsorbed" or not is_fp8_kv(pool_dtype) or layer.layer_id not in scale_of:
            continue
        own, absorbed_scale = KVScales.of(layer, pool_dtype).k, scale_of[layer.layer_id]
        if own != absorbed_scale:
            # SGLang's writer of latent rows takes no scale: what the model itself stores is divided only by a model
            # that knows of it, and that sets both
            reasons.append(
                f"attention layer {layer.layer_id} has a k_scale of {absorbed_scale} where it is absorbed, and {own} "
                f"where the model stores latent rows itself: takes equal ones"
            )
    return reasons
