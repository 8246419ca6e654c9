"""The definition of a KV store: one token at a time."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import TokenSlots


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: TokenSlots,
    *,
    k_scale: float,
    v_scale: float,
) -> None:
    """See ``atom_plugin.ops.store_kv.store_kv``."""
    num_pages, page_size = k_pages.shape[:2]
    for token, slot in enumerate(slots.slots_T.tolist()):
        if not 0 <= slot < num_pages * page_size:
            continue
        k_pages[slot // page_size, slot % page_size] = (k_THD[token] / k_scale).to(k_pages.dtype)
        v_pages[slot // page_size, slot % page_size] = (v_THD[token] / v_scale).to(v_pages.dtype)
