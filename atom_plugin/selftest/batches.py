"""Small batches as a server makes them: cached prefixes, odd lengths, shuffled pages, padding, NaN beside every key."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import PagedBatch

#: Entries of a page table past a request's last page; no row may use one as an address.
UNUSED_PAGE = 2**30
#: Query tokens of each request in a captured extend, where the problem does not say.
VERIFY_LEN = 4
#: Tokens of a prefix where a page would make the slow reference slower still.
LONGEST_PREFIX = 2100


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Query tokens and keys of each request; ``orphans``: padded rows of q past the last request's."""

    q_lens: list[int]
    seq_lens: list[int]
    orphans: int

    @property
    def num_tokens(self) -> int:
        """Return how many rows q has."""
        return sum(self.q_lens) + self.orphans


def prefixes(page_size: int) -> list[int]:
    """Return cached tokens of requests: none, odd, and at both sides of the borders of pages."""
    return [min(length, LONGEST_PREFIX) for length in (0, 17, page_size, 2 * page_size - 1, page_size + 1 + 128)]


def equal_lengths(q_len: int, page_size: int) -> Lengths:
    """Return requests of ``q_len`` queries each, as in decode and in verify."""
    cached = prefixes(page_size)
    return Lengths(q_lens=[q_len] * len(cached), seq_lens=[q_len + length for length in cached], orphans=0)


def mixed_lengths(page_size: int, *, causal: bool) -> Lengths:
    """Return requests of unequal numbers of queries, one of none, and padded rows; not causal: keys of a prefix alone.

    A chunk of prefixes may hold nothing of a request.
    """
    q_lens = [5, 1, 33, 0, 21]
    new = q_lens if causal else [0] * len(q_lens)
    seq_lens = [length + cached for length, cached in zip(new, prefixes(page_size), strict=True)]
    return Lengths(q_lens=q_lens, seq_lens=seq_lens, orphans=3)


def make_batch(
    lengths: Lengths, page_size: int, *, causal: bool, one_query_each: bool, consecutive: bool = False
) -> tuple[PagedBatch, int]:
    """Return (a batch on the CPU, how many pages its pool has); page 0 is SGLang's dump.

    Pages are shuffled, but with ``consecutive`` in order, as PagedBatch means it.
    """
    counts = [-(-seq_len // page_size) for seq_len in lengths.seq_lens]
    order = [page + 1 for page in (range(sum(counts)) if consecutive else torch.randperm(sum(counts)).tolist())]
    pages_BP = torch.full((len(counts), max(counts) + 1), UNUSED_PAGE, dtype=torch.int32)
    for request, count in enumerate(counts):
        pages_BP[request, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    bounds = torch.tensor([0, *torch.tensor(lengths.q_lens).cumsum(0).tolist()], dtype=torch.int32)
    batch = PagedBatch(
        qo_indptr_B1=bounds,
        seq_lens_B=torch.tensor(lengths.seq_lens, dtype=torch.int32),
        page_table=PageTable(pages_BP=pages_BP, page_size=page_size),
        max_q_len=max(lengths.q_lens),
        max_seq_len=max(lengths.seq_lens),
        captured=False,
        one_query_each=one_query_each,
        causal=causal,
        consecutive=consecutive,
    )
    return batch, sum(counts) + 1


def fill_pool(batch: PagedBatch, num_pages: int, heads: int, dim: int, dtype: torch.dtype, std: float) -> torch.Tensor:
    """Return [pages, page size, heads, dim] with numbers where ``batch`` has keys, and NaN everywhere else."""
    page_size = batch.page_table.page_size
    pool_SHD = torch.full((num_pages * page_size, heads, dim), float("nan"))
    for pages_P, seq_len in zip(batch.page_table.pages_BP, batch.seq_lens_B.tolist(), strict=True):
        slots_L = slots_of(pages_P, page_size, 0, seq_len)
        pool_SHD[slots_L] = std * torch.randn(seq_len, heads, dim)
    return pool_SHD.to(dtype).view(num_pages, page_size, heads, dim)


def slots_of(pages_P: torch.Tensor, page_size: int, start: int, end: int) -> torch.Tensor:
    """Return the pool slots, int64, of the keys ``start`` to ``end`` of a request."""
    places_L = torch.arange(start, end)
    return pages_P[places_L // page_size].long() * page_size + places_L % page_size


def moved(batch: PagedBatch, where: torch.device) -> PagedBatch:
    """Return a copy of ``batch`` on ``where``."""
    return replace(
        batch,
        qo_indptr_B1=batch.qo_indptr_B1.to(where, copy=True),
        seq_lens_B=batch.seq_lens_B.to(where, copy=True),
        page_table=replace(batch.page_table, pages_BP=batch.page_table.pages_BP.to(where, copy=True)),
        derived={},
    )


def as_captured(batch: PagedBatch, where: torch.device) -> PagedBatch:
    """Return the batch that a graph is captured with, of one padded request more than ``batch``: all on page 0.

    Its bounds hold for every later replay.
    """
    (requests, columns), page_size = batch.page_table.pages_BP.shape, batch.page_table.page_size
    q_len = batch.max_q_len
    return PagedBatch(
        qo_indptr_B1=torch.arange(0, (requests + 1) * q_len + 1, q_len, dtype=torch.int32, device=where),
        seq_lens_B=torch.full((requests + 1,), q_len, dtype=torch.int32, device=where),
        page_table=PageTable(
            pages_BP=torch.zeros(requests + 1, columns, dtype=torch.int32, device=where), page_size=page_size
        ),
        max_q_len=q_len,
        max_seq_len=columns * page_size,
        captured=True,
        one_query_each=batch.one_query_each,
        causal=batch.causal,
    )


def refill(captured: PagedBatch, batch: PagedBatch) -> None:
    """Put ``batch`` into the memory that a graph reads; the padded request stays on page 0."""
    requests = batch.seq_lens_B.shape[0]
    captured.seq_lens_B[:requests].copy_(batch.seq_lens_B)
    captured.page_table.pages_BP[:requests].copy_(batch.page_table.pages_BP)
