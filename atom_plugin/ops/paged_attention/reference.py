"""The definition of paged attention: fp32, one query and one head at a time."""

from __future__ import annotations

import torch

from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch


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
    """See ``atom_plugin.ops.paged_attention.paged_attention``."""
    num_tokens, num_q_heads, _ = q_THD.shape
    num_kv_heads = k_pages.shape[2]
    out_THD = q_THD.new_zeros(num_tokens, num_q_heads, v_pages.shape[3])
    lse_TH = torch.full((num_tokens, num_q_heads), -torch.inf, dtype=torch.float32, device=q_THD.device)
    bounds, seq_lens = batch.qo_indptr_B1.tolist(), batch.seq_lens_B.tolist()
    for request, seq_len in enumerate(seq_lens):
        k_LHD, v_LHD = (_keys_of(pages, batch, request, seq_len) for pages in (k_pages, v_pages))
        first_token, end_token = bounds[request], bounds[request + 1]
        for token in range(first_token, end_token):
            position = seq_len - (end_token - token if batch.causal else 1)
            seen = slice(0 if window == NO_WINDOW else max(0, position - window), position + 1)
            if position < 0:
                continue
            for head in range(num_q_heads):
                kv_head = head * num_kv_heads // num_q_heads
                scores_L = scale * k_scale * (k_LHD[seen, kv_head] @ q_THD[token, head].float())
                if logit_cap > 0:
                    scores_L = logit_cap * torch.tanh(scores_L / logit_cap)
                if sinks_H is not None:
                    scores_L = torch.cat([scores_L, sinks_H[head].float().view(1)])
                weights_L = torch.softmax(scores_L, dim=0)[: position + 1 - seen.start]
                lse_TH[token, head] = torch.logsumexp(scores_L, dim=0)
                out_THD[token, head] = v_scale * (weights_L @ v_LHD[seen, kv_head])
    return out_THD, lse_TH if return_lse else None


def _keys_of(pages: torch.Tensor, batch: PagedBatch, request: int, seq_len: int) -> torch.Tensor:
    """Return the keys (or values) of one request as float32 [keys, KV heads, head dim]."""
    rows = []
    for position in range(seq_len):
        page = int(batch.page_table.pages_BP[request, position // batch.page_table.page_size])
        rows.append(pages[page, position % batch.page_table.page_size].float())
    return torch.stack(rows) if rows else pages.new_zeros(0, *pages.shape[2:], dtype=torch.float32)
