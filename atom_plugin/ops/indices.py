"""Indices into a paged KV pool. Pages and tokens are different types, so that one is never taken for the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """The pages of each request, in order of position.

    ``pages_BP``: int32 [requests, most pages of a request], page numbers. Entries past a request's last page are
    arbitrary and must not be used as an address. ``page_size``: tokens a page.
    """

    pages_BP: torch.Tensor
    page_size: int


@dataclass(frozen=True, kw_only=True)
class TokenSlots:
    """The pool slot of each token of a batch: int64 [tokens], in tokens (page * page_size + place in the page)."""

    slots_T: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """The pool slot of each key of each request: int64 [requests, most keys], in tokens.

    Places past a request's last key repeat the slot of that key, so that every entry may be read.
    """

    slots_BL: torch.Tensor


def slot_stride(pages: torch.Tensor) -> int:
    """Return the elements from one slot of ``pages`` to the next; the stride of an axis of one entry says nothing."""
    return pages.stride(0) if pages.shape[1] == 1 else pages.stride(1)
