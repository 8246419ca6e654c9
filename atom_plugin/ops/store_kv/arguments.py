"""What every caller of store_kv has to hand over, checked without reading a tensor's values."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import TokenSlots

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
INDEX_DTYPES = (torch.int64, torch.int32)
_MAX_ROWS = 2**31  # kernels number (token, head) rows in 32 bits, and addresses in 64


def check(
    k_THD: torch.Tensor, v_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: TokenSlots
) -> None:
    """Raise ValueError, with what was given and what is taken, where the arguments of ``store_kv`` do not fit."""
    for name, rows, pages in (("k", k_THD, k_pages), ("v", v_THD, v_pages)):
        check_rows(f"{name}_THD", rows)
        if pages.dim() != 4 or pages.shape[2:] != rows.shape[1:]:
            raise ValueError(
                f"{name}_pages of shape {tuple(pages.shape)}: takes [pages, page size, KV heads, head dim] with the "
                f"heads and the dim of {name}_THD, which is {tuple(rows.shape)}"
            )
        if pages.stride(3) != 1 or (min(pages.shape[:2]) > 1 and pages.stride(0) != pages.shape[1] * pages.stride(1)):
            raise ValueError(
                f"{name}_pages of shape {tuple(pages.shape)} has strides {pages.stride()}: takes a pool whose slots "
                f"lie at one distance from each other, and each head in one piece"
            )
    if k_THD.shape[:2] != v_THD.shape[:2] or k_THD.dtype != v_THD.dtype:
        raise ValueError(
            f"v_THD is {tuple(v_THD.shape)} of {v_THD.dtype}: takes the tokens, KV heads and dtype of k_THD, which is "
            f"{tuple(k_THD.shape)} of {k_THD.dtype}"
        )
    if k_pages.shape[:2] != v_pages.shape[:2] or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"v_pages is {tuple(v_pages.shape)} of {v_pages.dtype}: takes the pages, page size and dtype of k_pages, "
            f"which is {tuple(k_pages.shape)} of {k_pages.dtype}"
        )
    check_index("slots_T", slots.slots_T, (k_THD.shape[0],))


def check_rows(name: str, rows_THD: torch.Tensor) -> None:
    """Raise ValueError where ``rows_THD`` is not [tokens, heads, head dim] of a float dtype, each head in one piece."""
    if rows_THD.dim() != 3:
        raise ValueError(f"{name} of shape {tuple(rows_THD.shape)}: takes [tokens, heads, head dim]")
    if rows_THD.dtype not in KV_DTYPES:
        raise ValueError(f"{name} of {rows_THD.dtype}: takes float32, bfloat16, float16")
    if rows_THD.stride(2) != 1:
        raise ValueError(f"{name} has strides {rows_THD.stride()}: the last one has to be 1")
    if rows_THD.shape[0] * rows_THD.shape[1] >= _MAX_ROWS:
        raise ValueError(f"{name} of shape {tuple(rows_THD.shape)}: takes fewer than 2**31 (token, head) rows")


def check_index(name: str, index: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError where ``index`` is not an integer tensor of ``shape``, in one piece along its last axis."""
    if index.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} of {index.dtype}: takes int64, int32")
    if index.shape != shape:
        raise ValueError(f"{name} of shape {tuple(index.shape)}: takes {shape}")
    if index.shape[-1] > 1 and index.stride(-1) != 1:
        raise ValueError(f"{name} has strides {index.stride()}: the last one has to be 1")
