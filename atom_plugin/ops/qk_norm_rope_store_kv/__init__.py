"""The work between the qkv projection and attention: RMS norm of q and k, rotary embedding, KV store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_plugin import device
from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.qk_norm_rope_store_kv import arguments
from atom_plugin.ops.qk_norm_rope_store_kv.aiter import ROWS as AITER_ROWS
from atom_plugin.ops.store_kv import why_not_on_host as why_not_store_on_host
from atom_plugin.ops.store_kv import why_not_triton as why_not_store_in_triton

_MAX_HEAD_DIM = 512


@dataclass(frozen=True, kw_only=True)
class QKNormRopeStoreKVProblem:
    """What a row has to know to say whether it can run; one per layer kind. Every row takes both rotation orders.

    ``normed``: q and k have norm weights. ``forced``: the row that a person asked for by name.
    """

    arch: str
    qkv_dtype: torch.dtype
    pool_dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    num_position_axes: int
    normed: bool
    forced: str | None = None


class QKNormRopeStoreKV(Protocol):
    """What every row is called with; see ``qk_norm_rope_store_kv``."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: TokenSlots,
        *,
        positions: torch.Tensor,
        axis_of_frequency: torch.Tensor | None,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        k_scale: float,
        v_scale: float,
    ) -> torch.Tensor: ...


def _why_not_on_host(problem: QKNormRopeStoreKVProblem, row: str) -> list[str]:
    reasons = why_not_store_on_host(problem.arch, problem.qkv_dtype, problem.pool_dtype, row, problem.forced)
    return reasons + _why_not_rope(problem)


def _why_not_rope(problem: QKNormRopeStoreKVProblem) -> list[str]:
    reasons = []
    if problem.rotary_dim % 2 or problem.rotary_dim > problem.head_dim:
        reasons.append(f"rotary dim {problem.rotary_dim} of head dim {problem.head_dim}: has to be even and no larger")
    if problem.num_position_axes not in (1, 3):
        reasons.append(f"{problem.num_position_axes} position axes: takes 1, or 3 (time, height, width)")
    return reasons


def _why_not_triton(problem: QKNormRopeStoreKVProblem) -> list[str]:
    reasons = why_not_store_in_triton(
        problem.arch, problem.qkv_dtype, problem.pool_dtype, "triton", problem.forced
    ) + _why_not_rope(problem)
    if problem.head_dim > _MAX_HEAD_DIM:
        reasons.append(f"head dim {problem.head_dim}: takes up to {_MAX_HEAD_DIM}, a head has to fit a few registers")
    return reasons


def _load_triton() -> QKNormRopeStoreKV:
    from atom_plugin.ops.qk_norm_rope_store_kv.kernel import qk_norm_rope_store_kv as row

    return row


def _why_not_eager(problem: QKNormRopeStoreKVProblem) -> list[str]:
    return _why_not_on_host(problem, "eager")


def _load_eager() -> QKNormRopeStoreKV:
    from atom_plugin.ops.qk_norm_rope_store_kv.eager import qk_norm_rope_store_kv as row

    return row


def _why_not_reference(problem: QKNormRopeStoreKVProblem) -> list[str]:
    reasons = _why_not_on_host(problem, "reference")
    if problem.forced != "reference":
        reasons.append("runs only when forced by name: it is the slow definition")
    return reasons


def _load_reference() -> QKNormRopeStoreKV:
    from atom_plugin.ops.qk_norm_rope_store_kv.reference import qk_norm_rope_store_kv as row

    return row


_TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
}

TABLE: Table[QKNormRopeStoreKVProblem] = Table(
    "qk_norm_rope_store_kv",
    [
        *AITER_ROWS,
        Kernel("triton", _why_not_triton, _load_triton, _TOLERANCE),
        Kernel("eager", _why_not_eager, _load_eager, _TOLERANCE),
        Kernel("reference", _why_not_reference, _load_reference, _TOLERANCE),
    ],
)


def qk_norm_rope_store_kv(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: TokenSlots,
    *,
    positions: torch.Tensor,
    axis_of_frequency: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    forced: str | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, store k and v, and return the normed, rotated q; the arguments keep their values.

    ``q_THD``: [tokens, query heads, head dim]; ``k_THD``, ``v_THD``: [tokens, KV heads, head dim (of v)].
    ``q_weight``, ``k_weight``: [head dim] of the RMS norm over each head, None for no norm; ``eps`` inside its root.
    ``positions``: int64 [tokens], or [3, tokens] with ``axis_of_frequency`` (int64 [rotary dim / 2], which of the 3
    axes drives each frequency). ``cos_sin_cache``: [positions, rotary dim], cosines then sines of the angles.
    ``is_neox``: frequency i turns the pair (i, i + rotary dim / 2), else (2i, 2i + 1); dims past the rotary dim stay.
    Norm and rope are fp32 with one rounding to the dtype of q; the store is that of ``ops.store_kv``, into pages
    [pages, page size, KV heads, head dim]. A position outside of the cache is an IndexError on a CPU and gives NaN in
    the rotated dims from Triton. Raises ValueError for arguments that do not fit together and NoKernelError when no
    row can run this.
    """
    arguments.check(
        q_THD, k_THD, v_THD, k_pages, v_pages, slots,
        positions=positions, axis_of_frequency=axis_of_frequency, cos_sin_cache=cos_sin_cache,
        q_weight=q_weight, k_weight=k_weight,
    )  # fmt: skip
    problem = QKNormRopeStoreKVProblem(
        arch=device.arch(),
        qkv_dtype=q_THD.dtype,
        pool_dtype=k_pages.dtype,
        num_q_heads=q_THD.shape[1],
        num_kv_heads=k_THD.shape[1],
        head_dim=q_THD.shape[2],
        rotary_dim=cos_sin_cache.shape[1],
        num_position_axes=1 if positions.dim() == 1 else positions.shape[0],
        normed=q_weight is not None,
        forced=forced,
    )
    row: QKNormRopeStoreKV = TABLE.choose(problem, forced).load()
    return row(
        q_THD, k_THD, v_THD, k_pages, v_pages, slots,
        positions=positions, axis_of_frequency=axis_of_frequency, cos_sin_cache=cos_sin_cache, is_neox=is_neox,
        q_weight=q_weight, k_weight=k_weight, eps=eps, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
