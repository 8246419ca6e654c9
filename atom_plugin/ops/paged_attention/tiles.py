"""Cuts a batch into tiles: requests with equally many queries and similar lengths, which run as one attention call."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from atom_plugin.ops.indices import TokenTable
from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch

_MOST_BATCHED_QUERIES = 16


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Requests that run together.

    ``rows``: their query tokens in the batch, request-major. ``slots_BL``: int64 slots of the keys that any of their
    queries sees. ``first_keys``, ``first_queries``: positions of each request's first key and first query; not
    ``causal``, all queries of a request are at its last key.
    """

    rows: slice | torch.Tensor
    num_requests: int
    q_len: int
    slots_BL: torch.Tensor
    first_keys: tuple[int, ...]
    first_queries: tuple[int, ...]
    is_padded: bool
    is_causal_square: bool
    has_blind_queries: bool
    causal: bool
    captured: bool
    _bias: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def slots_N(self) -> torch.Tensor:  # noqa: N802 - a shape suffix
        """Return ``slots_BL`` as one row."""
        return self.slots_BL.reshape(-1)

    @property
    def num_queries(self) -> int:
        """Return how many query tokens the tile holds."""
        return self.num_requests * self.q_len

    @property
    def num_keys(self) -> int:
        """Return how many keys each request is given, padding included."""
        return self.slots_BL.shape[1]

    def keys_seen_by(self, queries: slice, window: int) -> slice:
        """Return the range of key places that hold all keys seen by the queries in ``queries``."""
        if self.num_requests > 1:
            return slice(0, self.num_keys)
        offset = self.first_queries[0] - self.first_keys[0]
        end = max(1, min(self.num_keys, offset + queries.stop))
        start = 0 if window == NO_WINDOW else max(0, min(end - 1, offset + queries.start - window))
        return slice(start, end)

    def visible(self, queries: slice, keys: slice, window: int) -> torch.Tensor:
        """Return bool [requests, queries, keys]: whether a query may see a key."""
        device = self.slots_BL.device
        first_B2 = torch.tensor([self.first_queries, self.first_keys], device=device).T
        places = torch.arange(queries.start, queries.stop, device=device)
        q_pos = first_B2[:, :1] + (places if self.causal else torch.zeros_like(places))
        k_pos = first_B2[:, 1:] + torch.arange(keys.start, keys.stop, device=device)
        seen = k_pos[:, None, :] <= q_pos[:, :, None]
        if window != NO_WINDOW:
            seen &= k_pos[:, None, :] >= q_pos[:, :, None] - window
        return seen

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what decode adds to its scores, [requests, 1, 1, keys] of 0 and -inf; None where no key is padding."""
        if not self.is_padded:
            return None
        if dtype not in self._bias:
            device = self.slots_BL.device
            lengths = [query - key + 1 for query, key in zip(self.first_queries, self.first_keys, strict=True)]
            length_B1 = torch.tensor(lengths, device=device)[:, None]
            hidden_BL = torch.arange(self.num_keys, device=device) >= length_B1
            bias_BL = torch.zeros(hidden_BL.shape, dtype=dtype, device=hidden_BL.device).masked_fill_(
                hidden_BL, -torch.inf
            )
            self._bias[dtype] = bias_BL[:, None, None, :]
        return self._bias[dtype]


def cut_into_tiles(batch: PagedBatch, *, window: int, max_keys: int) -> list[Tile]:
    """Cut ``batch`` so that no batched tile gathers more than ``max_keys`` keys and padding stays below a third.

    Requests without a key or a query are in no tile. Short queries are batched, longer ones get a tile a request.
    """
    bounds, seq_lens = batch.qo_indptr_B1.tolist(), batch.seq_lens_B.tolist()
    by_q_len: dict[int, list[int]] = {}
    tiles = []
    for request, seq_len in enumerate(seq_lens):
        q_len = bounds[request + 1] - bounds[request]
        if q_len == 0 or seq_len <= 0:
            continue
        if q_len > _MOST_BATCHED_QUERIES:
            tiles.append(_tile(batch, bounds, seq_lens, [request], window))
        else:
            by_q_len.setdefault(q_len, []).append(request)
    for q_len, requests in by_q_len.items():
        spans = {request: _num_keys(seq_lens[request], q_len, window) for request in requests}
        tiles += [_tile(batch, bounds, seq_lens, group, window) for group in _similar(spans, max_keys)]
    return tiles


def _num_keys(seq_len: int, q_len: int, window: int) -> int:
    return seq_len if window == NO_WINDOW else min(seq_len, q_len + window)


def _similar(spans: dict[int, int], max_keys: int) -> list[list[int]]:
    """Group requests by number of keys; one group where that wastes little, as it keeps the batch's order."""
    longest = max(spans.values())
    total = longest * len(spans)
    if total <= max_keys and 2 * total <= 3 * sum(spans.values()) + 256:
        return [list(spans)]
    groups: list[list[int]] = []
    longest = 0
    for request in sorted(spans, key=lambda request: -spans[request]):
        if not groups or 3 * spans[request] < 2 * longest or longest * (len(groups[-1]) + 1) > max_keys:
            groups.append([])
            longest = spans[request]
        groups[-1].append(request)
    return [sorted(group) for group in groups]


def _tile(batch: PagedBatch, bounds: list[int], seq_lens: list[int], requests: list[int], window: int) -> Tile:
    q_len = bounds[requests[0] + 1] - bounds[requests[0]]
    lens = [seq_lens[request] for request in requests]
    spans = [_num_keys(seq_len, q_len, window) for seq_len in lens]
    return Tile(
        rows=_rows(bounds, requests, q_len, batch.seq_lens_B.device),
        num_requests=len(requests),
        q_len=q_len,
        slots_BL=_token_table(batch, requests, spans, lens).slots_BL,
        first_keys=tuple(seq_len - span for seq_len, span in zip(lens, spans, strict=True)),
        first_queries=tuple(seq_len - (q_len if batch.causal else 1) for seq_len in lens),
        is_padded=min(spans) != max(spans),
        is_causal_square=batch.causal and len(requests) == 1 and window == NO_WINDOW and lens[0] == q_len,
        has_blind_queries=batch.causal and min(lens) < q_len,
        causal=batch.causal,
        captured=batch.captured,
    )


def _rows(bounds: list[int], requests: list[int], q_len: int, device: torch.device) -> slice | torch.Tensor:
    if requests[-1] - requests[0] + 1 == len(requests) == (bounds[requests[-1] + 1] - bounds[requests[0]]) / q_len:
        return slice(bounds[requests[0]], bounds[requests[-1] + 1])
    starts_B1 = torch.tensor([bounds[request] for request in requests], device=device)[:, None]
    return (starts_B1 + torch.arange(q_len, device=device)).flatten()


def _token_table(batch: PagedBatch, requests: list[int], spans: list[int], lens: list[int]) -> TokenTable:
    """Return the slots of the last ``spans`` of the ``lens`` keys of each request, padded with its last key's slot."""
    page_size, num_keys = batch.page_table.page_size, max(spans)
    pages_BP = batch.page_table.pages_BP
    if len(requests) < pages_BP.shape[0]:
        pages_BP = pages_BP[requests]
    if page_size == 1 and min(spans) == max(lens):  # the table is the answer: all keys, and no padding
        return TokenTable(slots_BL=pages_BP[:, :num_keys].to(torch.int64))
    last_B2 = torch.tensor([lens, spans], device=pages_BP.device).T
    position_BL = last_B2[:, :1] - last_B2[:, 1:] + torch.arange(num_keys, device=pages_BP.device)
    position_BL = torch.minimum(position_BL, last_B2[:, :1] - 1)
    if page_size == 1:
        return TokenTable(slots_BL=pages_BP.gather(1, position_BL).to(torch.int64))
    slots_BL = pages_BP.gather(1, position_BL // page_size).to(torch.int64) * page_size
    return TokenTable(slots_BL=slots_BL.add_(position_BL % page_size))
