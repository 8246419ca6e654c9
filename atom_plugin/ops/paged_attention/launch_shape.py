"""How a launch of the Triton row is cut, and what its products are computed in."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from atom_plugin import device


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a launch is cut. ``block_m``: query rows (tokens x heads of a group) a program; ``block_n``: keys a step.

    ``beside``: programs that one multiprocessor runs beside each other with profit.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    beside: int


def shape_for(arch: str, *, rows: int, all_rows: int, head_dim: int, itemsize: int, float8: bool) -> Shape:
    """Return the launch shape for at most ``rows`` query rows a request; swept on an H200, chosen by LDS on AMD.

    ``all_rows``: of all requests and KV heads. ``itemsize``: bytes of a number in the products. ``float8``: the keys
    are, and their conversion needs more programs.
    """
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128)
    if arch == "sm90" and 128 < head_dim <= 192 and itemsize == 2 and block_m >= 64:  # MLA, un-absorbed
        if block_m == 128 and all_rows >= 128 * device.num_multiprocessors():
            return Shape(block_m=128, block_n=64, warps=8, stages=3, beside=1)
        return Shape(block_m=64, block_n=64, warps=4, stages=3, beside=1)
    wide = head_dim > 128 or itemsize > 2
    if wide:
        block_n = 16 if head_dim > 128 and itemsize > 2 else 32
        return Shape(block_m=min(block_m, 64), block_n=block_n, warps=4, stages=2, beside=1)
    if not arch.startswith("sm"):  # 64 KB of LDS on gfx942
        return Shape(block_m=block_m, block_n=64, warps=4, stages=2, beside=2 if block_m < 64 else 1)
    if block_m >= 64:
        return Shape(block_m=block_m, block_n=64, warps=4, stages=5 if block_m == 64 else 3, beside=1)
    return Shape(block_m=block_m, block_n=64, warps=4, stages=5, beside=4 if float8 else 2)


def column_blocks(head_dim: int, *, in_one: bool) -> tuple[int, int]:
    """Return the powers of two that the columns of a key are read in, the second 0 where one is enough.

    192 columns are 128 and 64: a block of 256 would multiply by a quarter of padding.

    ``in_one``: one block all the same.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    more = max(16, 1 << (head_dim - whole // 2 - 1).bit_length())
    return (whole, 0) if in_one or whole == head_dim or whole // 2 + more >= whole else (whole // 2, more)


def splits_for(*, programs: int, beside: int, max_seq_len: int) -> int:
    """Return into how many ranges the keys are cut.

    As many as fill the multiprocessors, ``beside`` programs each where a range keeps 1,024 keys, else one each.
    """
    filled = beside * device.num_multiprocessors() // programs
    if max_seq_len < 1024 * filled:
        filled = min(device.num_multiprocessors() // programs, max_seq_len // 128)
    return max(1, min(filled, 64))


@functools.cache
def dot_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """Return what the products are computed in: every stored value is exact in it, and so is q, up to a factor a row.

    float8 becomes fp16, which holds all its values and takes one instruction; q in bf16 then follows, scaled. fp16
    queries on bf16 keys have no common 16-bit type.
    """
    if kv_dtype.itemsize == 1:
        return torch.float16 if q_dtype != torch.float32 else torch.float32
    if kv_dtype == q_dtype:
        return q_dtype
    return torch.float16 if (q_dtype, kv_dtype) == (torch.bfloat16, torch.float16) else torch.float32
