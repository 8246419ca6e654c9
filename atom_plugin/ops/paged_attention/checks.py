"""What the public function asks of its tensors before any row sees them."""

from __future__ import annotations

import torch

from atom_plugin.ops.paged_attention import PagedBatch


def problems_of(
    q_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    sinks_H: torch.Tensor | None,
) -> list[str]:
    """Return what is wrong with a call, in words; indices are read, which waits for a GPU, unless it is captured."""
    found = _shapes(q_THD, k_pages, v_pages, batch, sinks_H)
    if found or batch.captured:
        return found
    return index_problems(q_THD.shape[0], k_pages.shape[0], batch)


def _shapes(
    q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, sinks_H: torch.Tensor | None
) -> list[str]:
    ranks = [("q_THD", q_THD, 3), ("k_pages", k_pages, 4), ("v_pages", v_pages, 4)]
    found = [f"{name} has shape {tuple(x.shape)}: takes {rank} dims" for name, x, rank in ranks if x.dim() != rank]
    found += [f"{name} has stride {x.stride(-1)} in its last dim: takes 1" for name, x, _ in ranks if x.stride(-1) != 1]
    tables = [
        ("qo_indptr_B1", batch.qo_indptr_B1, 1),
        ("seq_lens_B", batch.seq_lens_B, 1),
        ("pages_BP", batch.page_table.pages_BP, 2),
    ]
    for name, x, rank in tables:
        if x.dtype != torch.int32 or x.dim() != rank or (x.numel() > 1 and x.stride(-1) != 1):
            found.append(f"{name} is {x.dtype} of shape {tuple(x.shape)}: takes int32 of {rank} dims, packed rows")
    if found:
        return found
    (_, num_heads, head_dim), (pages, page_size, _, k_dim) = q_THD.shape, k_pages.shape
    if k_dim != head_dim:
        found.append(f"queries of head dim {head_dim} on keys of head dim {k_dim}")
    if v_pages.shape[:3] != k_pages.shape[:3] or v_pages.dtype != k_pages.dtype:
        found.append(
            f"v_pages is {v_pages.dtype} {tuple(v_pages.shape)}, k_pages {k_pages.dtype} {tuple(k_pages.shape)}"
        )
    if page_size != batch.page_table.page_size:
        found.append(f"pages of {page_size} tokens, the page table says {batch.page_table.page_size}")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if page_size > 1 and pages > 1 and x.stride(0) != page_size * x.stride(1):
            found.append(f"{name} has strides {x.stride()}: slots have to follow each other over pages")
    requests = batch.seq_lens_B.shape[0]
    if batch.qo_indptr_B1.shape[0] != requests + 1 or batch.page_table.pages_BP.shape[0] != requests:
        found.append(
            f"{requests} lengths, {batch.qo_indptr_B1.shape[0]} bounds of queries and "
            f"{batch.page_table.pages_BP.shape[0]} rows of pages: takes n, n + 1, n"
        )
    sinks = torch.zeros(num_heads) if sinks_H is None else sinks_H
    if sinks.shape != (num_heads,) or not sinks.is_floating_point() or sinks.stride(0) != 1:
        found.append(f"sinks of {sinks.dtype} {tuple(sinks.shape)}: takes one packed float a query head")
    places = {
        x.device for x in (q_THD, k_pages, v_pages, *(x for _, x, _ in tables), *([] if sinks_H is None else [sinks_H]))
    }
    if len(places) > 1:
        found.append(f"tensors on {', '.join(sorted(map(str, places)))}: takes one device")
    return found


def index_problems(num_tokens: int, num_pages: int, batch: PagedBatch) -> list[str]:
    """Return what is wrong with the bounds, lengths and pages of a batch of ``num_tokens`` queries; reads them."""
    found: list[str] = []
    bounds, lengths = batch.qo_indptr_B1, batch.seq_lens_B
    pages_BP, page_size = batch.page_table.pages_BP, batch.page_table.page_size
    if lengths.numel() == 0:
        return found
    q_lens = bounds.diff()
    if int(bounds[0]) != 0 or int(q_lens.min()) < 0 or int(bounds[-1]) > num_tokens:
        found.append(
            f"qo_indptr_B1 runs {bounds[:4].tolist()} ... {int(bounds[-1])}: has to rise from 0 to {num_tokens}"
        )
    if batch.one_query_each and not (int(q_lens.min()) == int(q_lens.max()) == 1 and num_tokens == lengths.numel()):
        found.append(f"one_query_each, and {num_tokens} queries of {lengths.numel()} requests are not one each")
    if int(q_lens.max()) > batch.max_q_len:
        found.append(f"a request of {int(q_lens.max())} queries, max_q_len is {batch.max_q_len}")
    longest = int(lengths.max())
    if longest > batch.max_seq_len or longest > pages_BP.shape[1] * page_size:
        found.append(
            f"a request of {longest} keys: max_seq_len is {batch.max_seq_len}, "
            f"the page table holds {pages_BP.shape[1] * page_size}"
        )
    first_keys = page_size * torch.arange(pages_BP.shape[1], device=pages_BP.device)
    used = pages_BP[first_keys < lengths[:, None]]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_pages:
        found.append(f"pages {int(used.min())} to {int(used.max())} are used, the pool has 0 to {num_pages - 1}")
    return found
