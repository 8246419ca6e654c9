"""Collectives and copies between ranks without NCCL, Triton and pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def build_group_without_gpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a process group on gloo alone, without PyNccl and the custom all-reduce."""
    return original(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})


def all_gather_into_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """Gather ``input`` of all ranks into ``output`` without the custom op, which is registered for GPUs only."""
    group._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """Sum ``input`` over all ranks and keep this rank's rows in ``output``; see ``all_gather_into_tensor``."""
    group._reduce_scatter_tensor(output, input)


def copy_rows(dst: torch.Tensor, src: torch.Tensor, dim: int, offset: Any, size: Any, offset_is_in_src: bool) -> None:
    """Copy ``size`` rows from the start of one tensor to row ``offset`` of the other, in place.

    ``offset`` and ``size`` are ints or tensors of one element. ``offset_is_in_src`` says which of the two is read or
    written from ``offset`` on. Rows past the end of either tensor are left out.
    """
    if dim != 0 or dst.shape[1:] != src.shape[1:]:
        raise ValueError(f"rows of {tuple(src.shape)} cannot be copied to {tuple(dst.shape)} along dimension {dim}")
    first = int(offset)
    shifted, whole = (src, dst) if offset_is_in_src else (dst, src)
    count = max(0, min(int(size), whole.shape[0], shifted.shape[0] - first))
    if offset_is_in_src:
        dst[:count].copy_(src[first : first + count])
    else:
        dst[first : first + count].copy_(src[:count])


class _PageableMemory(TorchFunctionMode):
    """Drop ``pin_memory=True``, which PyTorch refuses on a machine without an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def prepare_in_pageable_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's DP padding with ordinary host memory in place of pinned memory."""
    with _PageableMemory():
        return original(*args, **kwargs)


def padded_sequence_length(backend: Any) -> int:
    """Return the length that padded requests get: one token, in the reserved slot 0."""
    return 1
