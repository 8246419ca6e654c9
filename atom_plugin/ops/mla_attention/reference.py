"""The definition of absorbed MLA: fp32, one query at a time."""

from __future__ import annotations

import torch

from atom_plugin.ops.paged_attention import PagedBatch


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
    """See ``atom_plugin.ops.mla_attention.mla_attention``."""
    num_tokens, num_heads, _ = q_THD.shape
    out_THC = q_THD.new_zeros(num_tokens, num_heads, kv_lora_rank)
    lse_TH = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q_THD.device)
    bounds, seq_lens = batch.qo_indptr_B1.tolist(), batch.seq_lens_B.tolist()
    for request, seq_len in enumerate(seq_lens):
        latent_LD = kv_scale * _latent_rows(kv_pages, batch, request, seq_len)
        first_token, end_token = bounds[request], bounds[request + 1]
        for token in range(first_token, end_token):
            position = seq_len - (end_token - token)
            if position < 0:
                continue
            seen_LD = latent_LD[: position + 1]
            scores_HL = scale * (q_THD[token].float() @ seen_LD.T)
            lse_TH[token] = torch.logsumexp(scores_HL, dim=1)
            out_THC[token] = (torch.softmax(scores_HL, dim=1) @ seen_LD[:, :kv_lora_rank]).to(q_THD.dtype)
    return out_THC, lse_TH if return_lse else None


def _latent_rows(kv_pages: torch.Tensor, batch: PagedBatch, request: int, seq_len: int) -> torch.Tensor:
    """Return the latent rows of one request as float32 [keys, kv_lora_rank + rope dim]."""
    page_size = batch.page_table.page_size
    num_pages = -(-seq_len // page_size)
    pages = batch.page_table.pages_BP[request, :num_pages].long()
    return kv_pages[pages].float().flatten(0, 2)[:seq_len]
