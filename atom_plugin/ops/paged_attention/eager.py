"""Paged attention in PyTorch for CPUs: gather the keys of many requests at once, then one fused attention call.

A batch is cut into tiles (see tiles.py). Decode and short equal queries are batched over requests, so the number of
PyTorch calls does not grow with the batch; long queries run a request at a time, in blocks of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atom_plugin.ops.paged_attention import PagedBatch
from atom_plugin.ops.paged_attention.scratch import Scratch
from atom_plugin.ops.paged_attention.tiles import Tile, cut_into_tiles

MAX_SCRATCH_BYTES = 256 << 20
_SCRATCH = Scratch()
_QUERY_BLOCK = 256
# measured with torch 2.14 on AVX-512 and AMX: in 16 bits, a block of 2 or 3 queries takes longer than one by one
_SMALLEST_FOLDED_GROUP = 4


@dataclass(frozen=True, kw_only=True)
class _Softmax:
    """How scores become weights; names as in ``paged_attention``."""

    scale: float
    window: int
    logit_cap: float
    return_lse: bool
    sinks_H: torch.Tensor | None


def paged_attention(
    q_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    k_scale: float,
    v_scale: float,
    window: int,
    logit_cap: float,
    return_lse: bool,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``atom_plugin.ops.paged_attention.paged_attention``; scratch stays under MAX_SCRATCH_BYTES."""
    num_tokens, num_q_heads, _ = q_THD.shape
    v_dim = v_pages.shape[3]
    softmax = _Softmax(
        scale=scale * k_scale, window=window, logit_cap=logit_cap, return_lse=return_lse, sinks_H=sinks_H
    )
    max_keys = _max_keys(k_pages, v_pages, q_THD.dtype)
    tiles = batch.once(("tiles", window, max_keys), lambda: cut_into_tiles(batch, window=window, max_keys=max_keys))
    if len(tiles) == 1 and tiles[0].num_queries == num_tokens:
        out_THD, lse_TH = _attend(q_THD, k_pages, v_pages, tiles[0], softmax, max_keys)
    else:  # zeros stay where a request has no key, or a row no request
        out_THD = q_THD.new_zeros(num_tokens, num_q_heads, v_dim)
        lse_TH = torch.full((num_tokens, num_q_heads), -torch.inf, device=q_THD.device) if return_lse else None
        for tile in tiles:
            out_THD[tile.rows], tile_lse_TH = _attend(q_THD[tile.rows], k_pages, v_pages, tile, softmax, max_keys)
            if lse_TH is not None and tile_lse_TH is not None:
                lse_TH[tile.rows] = tile_lse_TH
    return (out_THD if v_scale == 1.0 else out_THD.mul_(v_scale)), lse_TH


def _max_keys(k_pages: torch.Tensor, v_pages: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how many keys, over all requests, may be gathered at once: half of MAX_SCRATCH_BYTES is for them."""
    copies = dtype.itemsize if k_pages.dtype == dtype else dtype.itemsize + k_pages.dtype.itemsize
    bytes_per_key = k_pages.shape[2] * (k_pages.shape[3] + v_pages.shape[3]) * copies
    return max(1, MAX_SCRATCH_BYTES // (2 * bytes_per_key))


def _attend(
    q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tile: Tile, softmax: _Softmax, max_keys: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend one tile: ([its queries, heads, v head dim], lse [its queries, heads] if asked for)."""
    fits = tile.num_keys * tile.num_requests <= max_keys
    fused = fits and softmax.logit_cap <= 0 and not softmax.return_lse and softmax.sinks_H is None
    if fused and tile.q_len == 1:
        return _fused_decode(q_THD, k_pages, v_pages, tile, softmax), None
    q_BnHD = q_THD.view(tile.num_requests, tile.q_len, *q_THD.shape[1:])
    if fused:
        return _fused_extend(q_BnHD, k_pages, v_pages, tile, softmax).flatten(0, 1), None
    out_BnHD, lse_BnH = _blocked(q_BnHD, k_pages, v_pages, tile, softmax)
    return out_BnHD.flatten(0, 1), lse_BnH.flatten(0, 1) if softmax.return_lse else None


def _gather(pages: torch.Tensor, slots_N: torch.Tensor, tile: Tile, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return the pool's rows at ``slots_N`` (int64 [requests * keys]) in ``dtype``: [requests, KV heads, keys, dim].

    They are in scratch memory, theirs until the next gather of the same ``name``; a captured batch gets memory of its
    own, as scratch that grows after the capture would move under the graph.
    """
    take = _allocate if tile.captured else _SCRATCH.take
    _, _, heads, dim = pages.shape
    # keys and values that a model hands over may be parts of wider rows; the pool's own are not, and not copied here
    rows, shape = pages.reshape(-1, heads * dim), (slots_N.shape[0], heads * dim)
    if pages.dtype.itemsize == 1:  # index_select has no float8
        rows = rows.view(torch.uint8)
    gathered = take(name if pages.dtype == dtype else "stored", shape, rows.dtype, pages.device)
    torch.index_select(rows, 0, slots_N, out=gathered)
    if pages.dtype != dtype:
        gathered = take(name, shape, dtype, pages.device).copy_(gathered.view(pages.dtype))
    return gathered.view(tile.num_requests, -1, heads, dim).transpose(1, 2)


def _allocate(name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _gather_both(
    k_pages: torch.Tensor, v_pages: torch.Tensor, tile: Tile, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all keys and values of a tile, [requests, KV heads, keys, dim] each."""
    k_BHLD = _gather(k_pages, tile.slots_N, tile, dtype, "k")
    return k_BHLD, _gather(v_pages, tile.slots_N, tile, dtype, "v")


def _fused_extend(
    q_BnHD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tile: Tile, softmax: _Softmax
) -> torch.Tensor:
    """Attend one tile through PyTorch's fused attention: [requests, queries, heads, v head dim]."""
    q_len, heads, kv_heads = q_BnHD.shape[1], q_BnHD.shape[2], k_pages.shape[2]
    k_BHLD, v_BHLD = _gather_both(k_pages, v_pages, tile, q_BnHD.dtype)
    q_BHnD, grouped = q_BnHD.transpose(1, 2), heads != kv_heads
    if tile.is_causal_square:
        out = F.scaled_dot_product_attention(
            q_BHnD, k_BHLD, v_BHLD, is_causal=True, scale=softmax.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    blocks = []
    for first in range(0, q_len, _QUERY_BLOCK):
        queries = slice(first, min(first + _QUERY_BLOCK, q_len))
        keys = tile.keys_seen_by(queries, softmax.window)
        seen_B1nL = tile.visible(queries, keys, softmax.window).unsqueeze(1)
        out = F.scaled_dot_product_attention(
            q_BHnD[:, :, queries],
            k_BHLD[:, :, keys],
            v_BHLD[:, :, keys],
            attn_mask=seen_B1nL,
            scale=softmax.scale,
            enable_gqa=grouped,
        )
        if tile.has_blind_queries:
            out = out.masked_fill(~seen_B1nL.any(-1, keepdim=True), 0)
        blocks.append(out)
    return torch.cat(blocks, dim=2).transpose(1, 2)


def _fused_decode(
    q_BHD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tile: Tile, softmax: _Softmax
) -> torch.Tensor:
    """Attend one query a request through PyTorch's fused attention: [requests, heads, v head dim]."""
    requests, heads, dim = q_BHD.shape
    k_BHLD, v_BHLD = _gather_both(k_pages, v_pages, tile, q_BHD.dtype)
    group = heads // k_BHLD.shape[1]
    bias = tile.bias(q_BHD.dtype)
    if q_BHD.dtype == torch.float32 or group >= _SMALLEST_FOLDED_GROUP:
        # the heads of a group as a block of queries: K and V are read once for all of them
        q_BHGD = q_BHD.reshape(requests, heads // group, group, dim)
        out = F.scaled_dot_product_attention(q_BHGD, k_BHLD, v_BHLD, attn_mask=bias, scale=softmax.scale)
        return out.reshape(requests, heads, out.shape[3])
    q_BH1D = q_BHD.unsqueeze(2)
    out = F.scaled_dot_product_attention(
        q_BH1D, k_BHLD, v_BHLD, attn_mask=bias, scale=softmax.scale, enable_gqa=group > 1
    )
    return out.squeeze(2)


def _blocked(
    q_BnHD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tile: Tile, softmax: _Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one tile in fp32, a block of keys at a time: (out [B, n, H, Dv], natural-log lse [B, n, H])."""
    outs, lses = [], []
    for first in range(0, tile.q_len, _QUERY_BLOCK):
        queries = slice(first, min(first + _QUERY_BLOCK, tile.q_len))
        out, lse = _blocked_queries(q_BnHD[:, queries], k_pages, v_pages, tile, queries, softmax)
        if softmax.sinks_H is not None:
            sinks_H = softmax.sinks_H.float()
            blind = lse == -torch.inf
            share = torch.sigmoid(lse - sinks_H).masked_fill(blind, 0)  # of the keys in a softmax with the sink
            out, lse = out * share.unsqueeze(-1), torch.logaddexp(lse, sinks_H).masked_fill(blind, -torch.inf)
        outs.append(out.to(q_BnHD.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _blocked_queries(
    q_BnHD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tile: Tile,
    queries: slice,
    softmax: _Softmax,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running softmax over blocks of keys; returns float32 (out [B, n, H, Dv], lse [B, n, H])."""
    requests, q_len, heads, dim = q_BnHD.shape
    kv_heads = k_pages.shape[2]
    q_BKGnD = q_BnHD.float().view(requests, q_len, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    top_BKGn1 = q_BKGnD.new_full((*q_BKGnD.shape[:4], 1), -torch.inf)
    total_BKGn1 = torch.zeros_like(top_BKGn1)
    out_BKGnD = q_BKGnD.new_zeros(*q_BKGnD.shape[:4], v_pages.shape[3])
    seen_keys = tile.keys_seen_by(queries, softmax.window)
    scores_per_key = requests * heads * q_len
    max_keys = _max_keys(k_pages, v_pages, torch.float32)
    step = max(1, min(max_keys // requests, MAX_SCRATCH_BYTES // (16 * scores_per_key)))
    for first in range(seen_keys.start, seen_keys.stop, step):
        keys = slice(first, min(first + step, seen_keys.stop))
        slots_N = tile.slots_BL[:, keys].reshape(-1)
        k_BK1LD = _gather(k_pages, slots_N, tile, torch.float32, "k").unsqueeze(2)
        v_BK1LD = _gather(v_pages, slots_N, tile, torch.float32, "v").unsqueeze(2)
        scores = torch.matmul(q_BKGnD, k_BK1LD.transpose(-1, -2)).mul_(softmax.scale)
        if softmax.logit_cap > 0:
            scores = scores.div_(softmax.logit_cap).tanh_().mul_(softmax.logit_cap)
        seen_B11nL = tile.visible(queries, keys, softmax.window)[:, None, None]
        scores.masked_fill_(~seen_B11nL, -torch.inf)
        new_top = torch.maximum(top_BKGn1, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == -torch.inf, 0)  # nothing seen so far: exp(-inf - 0) is 0, not NaN
        weights, fade = scores.sub_(base).exp_(), (top_BKGn1 - base).exp_()
        total_BKGn1 = total_BKGn1 * fade + weights.sum(-1, keepdim=True)
        out_BKGnD = out_BKGnD * fade + torch.matmul(weights, v_BK1LD)
        top_BKGn1 = new_top
    lse = (top_BKGn1 + total_BKGn1.log()).squeeze(-1).permute(0, 3, 1, 2).reshape(requests, q_len, heads)
    out = out_BKGnD / total_BKGn1.masked_fill(total_BKGn1 == 0, 1)
    return out.permute(0, 3, 1, 2, 4).reshape(requests, q_len, heads, out.shape[4]), lse
