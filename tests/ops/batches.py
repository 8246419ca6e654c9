"""Random paged batches whose memory shows every stray read."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import PagedBatch

HUGE_PAGE = 2**30


def make_batch(
    q_lens: list[int],
    seq_lens: list[int],
    *,
    page_size: int = 1,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    captured: bool = False,
    orphans: int = 0,
    causal: bool = True,
    consecutive: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Return (k_pages, v_pages, batch) with shuffled pages; what holds no key is NaN, unused table entries are huge.

    ``orphans``: rows of q past the last request's. ``consecutive``: pages are not shuffled.
    """
    num_pages = [-(-seq_len // page_size) for seq_len in seq_lens]
    pages = torch.full((len(seq_lens), max(num_pages) + 1), HUGE_PAGE, dtype=torch.int32)
    order = (torch.randperm(sum(num_pages)) + 1).tolist()
    if consecutive:
        order.sort(reverse=True)
    k = torch.full((sum(num_pages) + 1, page_size, kv_heads, dim), float("nan"))
    v = torch.full((sum(num_pages) + 1, page_size, kv_heads, v_dim), float("nan"))
    for request, seq_len in enumerate(seq_lens):
        for place in range(num_pages[request]):
            page = order.pop()
            pages[request, place] = page
            filled = min(page_size, seq_len - place * page_size)
            k[page, :filled], v[page, :filled] = (
                3 * torch.randn(filled, kv_heads, dim),
                torch.randn(filled, kv_heads, v_dim),
            )
    batch = PagedBatch(
        qo_indptr_B1=torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
        page_table=PageTable(pages_BP=pages, page_size=page_size),
        max_q_len=max(q_lens),
        max_seq_len=max(seq_lens),
        captured=captured,
        one_query_each=orphans == 0 and all(q_len == 1 for q_len in q_lens),
        causal=causal,
        consecutive=consecutive,
    )
    return k.to(dtype), v.to(dtype), batch
