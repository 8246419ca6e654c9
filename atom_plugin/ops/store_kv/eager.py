"""KV store in PyTorch for CPUs: one scatter for all tokens."""

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
    _scatter(k_THD, k_pages, slots, k_scale)
    _scatter(v_THD, v_pages, slots, v_scale)


def _scatter(x_THD: torch.Tensor, pages: torch.Tensor, slots: TokenSlots, scale: float) -> None:
    scaled = x_THD if scale == 1.0 else x_THD / scale
    stored_THD, pool_SHD = scaled.to(pages.dtype), pages.flatten(0, 1)
    if pages.dtype.itemsize == 1:  # index_copy has no float8
        stored_THD, pool_SHD = stored_THD.view(torch.uint8), pool_SHD.view(torch.uint8)
    pool_SHD.index_copy_(0, slots.slots_T.to(torch.int64), stored_THD)
