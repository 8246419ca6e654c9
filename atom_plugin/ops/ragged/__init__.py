"""A page table as kernels of other libraries take it: the pages of all requests one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class RaggedPages:
    """The pages of the requests of a batch, without gaps.

    ``indptr_B1``: int32 [requests + 1], cumulated pages. ``pages_N``: int32, the pages of request b are
    ``pages_N[indptr_B1[b] : indptr_B1[b + 1]]``; TAIL entries after the last one name page 0, so that a kernel that
    reads ahead reads a page number; what follows is arbitrary. ``last_lens_B``: int32 [requests], keys in each
    request's last page, 1 ... page size.
    """

    indptr_B1: torch.Tensor
    pages_N: torch.Tensor
    last_lens_B: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RaggedSlots:
    """The pool slots of the keys of a batch, in tokens and without gaps: RaggedPages for pages of one token.

    ``indptr_B1``: int32 [requests + 1], cumulated keys. ``slots_N``: int32, the keys of request b are at
    ``slots_N[indptr_B1[b] : indptr_B1[b + 1]]``; TAIL entries after the last one name slot 0; what follows is
    arbitrary. ``ones_B``: int32 [requests], 1 each: keys in a last page of one token.
    """

    indptr_B1: torch.Tensor
    slots_N: torch.Tensor
    ones_B: torch.Tensor
