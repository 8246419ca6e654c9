"""MLA in PyTorch for CPUs: gather the latent rows of many requests at once, then two matrix products.

Tiles are those of paged_attention: decode and short equal queries are batched over requests, long queries run a
request at a time. A tile whose rows exceed the scratch walks its keys in blocks.
"""

from __future__ import annotations

import torch

from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch
from atom_plugin.ops.paged_attention.scratch import Scratch
from atom_plugin.ops.paged_attention.tiles import Tile, cut_into_tiles

MAX_SCRATCH_BYTES = 256 << 20
_SCRATCH = Scratch()
_QUERY_BLOCK = 256


def mla_attention(
    q_THD: torch.Tensor,
    kv_pages: torch.Tensor,
    batch: PagedBatch,
    *,
    kv_lora_rank: int,
    scale: float,
    kv_scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``atom_plugin.ops.mla_attention.mla_attention``; gathered rows stay under MAX_SCRATCH_BYTES."""
    num_tokens, num_heads, _ = q_THD.shape
    out_THC = q_THD.new_zeros(num_tokens, num_heads, kv_lora_rank)  # zeros stay where no key is seen
    lse_TH = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q_THD.device)
    max_keys = _max_keys(kv_pages)
    tiles = batch.once(("mla", max_keys), lambda: cut_into_tiles(batch, window=NO_WINDOW, max_keys=max_keys))
    for tile in tiles:
        q_BnHD = q_THD[tile.rows].view(tile.num_requests, tile.q_len, num_heads, -1)
        outs, lses = [], []
        for first in range(0, tile.q_len, _QUERY_BLOCK):
            queries = slice(first, min(first + _QUERY_BLOCK, tile.q_len))
            out, lse = _attend(q_BnHD[:, queries], kv_pages, tile, queries, kv_lora_rank, scale * kv_scale)
            outs.append(out.mul_(kv_scale).to(q_THD.dtype))
            lses.append(lse)
        out_THC[tile.rows] = torch.cat(outs, dim=1).flatten(0, 1)
        lse_TH[tile.rows] = torch.cat(lses, dim=1).flatten(0, 1)
    return out_THC, lse_TH if return_lse else None


def _max_keys(kv_pages: torch.Tensor) -> int:
    """Return how many latent rows, over all requests, may be gathered at once: half of MAX_SCRATCH_BYTES is theirs."""
    copies = 4 if kv_pages.dtype == torch.float32 else 4 + kv_pages.dtype.itemsize
    return max(1, MAX_SCRATCH_BYTES // (2 * kv_pages.shape[3] * copies))


def _gather(kv_pages: torch.Tensor, slots_N: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return the latent rows at ``slots_N`` (int64 [requests * keys]) as float32 [requests, keys, columns].

    They are in scratch memory, theirs until the next gather; a captured batch gets memory of its own, as scratch that
    grows after the capture would move under the graph.
    """
    dim = kv_pages.shape[3]
    rows, shape = kv_pages.view(-1, dim), (slots_N.shape[0], dim)
    if kv_pages.dtype.itemsize == 1:  # index_select has no float8
        rows = rows.view(torch.uint8)
    is_float = kv_pages.dtype == torch.float32
    stored = _take("latent" if is_float else "stored", shape, rows.dtype, tile, kv_pages.device)
    torch.index_select(rows, 0, slots_N, out=stored)
    if is_float:
        return stored.view(tile.num_requests, -1, dim)
    latent = _take("latent", shape, torch.float32, tile, kv_pages.device)
    return latent.copy_(stored.view(kv_pages.dtype)).view(tile.num_requests, -1, dim)


def _take(name: str, shape: tuple[int, int], dtype: torch.dtype, tile: Tile, device: torch.device) -> torch.Tensor:
    if tile.captured:
        return torch.empty(shape, dtype=dtype, device=device)
    return _SCRATCH.take(name, shape, dtype, device)


def _attend(
    q_BnHD: torch.Tensor, kv_pages: torch.Tensor, tile: Tile, queries: slice, kv_lora_rank: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running softmax over blocks of keys; returns float32 (out [B, n, H, kv_lora_rank], lse [B, n, H])."""
    requests, q_len, heads, dim = q_BnHD.shape
    q_BND = q_BnHD.float().reshape(requests, q_len * heads, dim)
    top_BN1 = q_BND.new_full((requests, q_len * heads, 1), -torch.inf)
    total_BN1 = torch.zeros_like(top_BN1)
    out_BNC = q_BND.new_zeros(requests, q_len * heads, kv_lora_rank)
    seen_keys = tile.keys_seen_by(queries, NO_WINDOW)
    step = max(1, min(_max_keys(kv_pages) // requests, MAX_SCRATCH_BYTES // (16 * requests * q_len * heads)))
    for first in range(seen_keys.start, seen_keys.stop, step):
        keys = slice(first, min(first + step, seen_keys.stop))
        latent_BLD = _gather(kv_pages, tile.slots_BL[:, keys].reshape(-1), tile)
        scores_BNL = torch.matmul(q_BND, latent_BLD.transpose(1, 2)).mul_(scale)
        hidden_Bn1L = ~tile.visible(queries, keys, NO_WINDOW).unsqueeze(2)
        scores_BNL.view(requests, q_len, heads, -1).masked_fill_(hidden_Bn1L, -torch.inf)
        new_top = torch.maximum(top_BN1, scores_BNL.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == -torch.inf, 0)  # nothing seen so far: exp(-inf - 0) is 0, not NaN
        weights, fade = scores_BNL.sub_(base).exp_(), (top_BN1 - base).exp_()
        total_BN1 = total_BN1 * fade + weights.sum(-1, keepdim=True)
        out_BNC = out_BNC * fade + torch.matmul(weights, latent_BLD[:, :, :kv_lora_rank])
        top_BN1 = new_top
    lse_BnH = (top_BN1 + total_BN1.log()).view(requests, q_len, heads)
    out_BNC = out_BNC / total_BN1.masked_fill(total_BN1 == 0, 1)
    return out_BNC.view(requests, q_len, heads, kv_lora_rank), lse_BnH
