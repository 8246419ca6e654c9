"""Norm of MLA's new latents and rope of the columns beside them, of keys and of queries, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_plugin import device
from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops.triton_rows import why_not_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class LatentNormRopeProblem:
    """What a row has to know to say whether it can run. ``forced``: the row that a person asked for by name."""

    arch: str
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    forced: str | None = None


class LatentNormRope(Protocol):
    """What every row is called with; see ``latent_norm_rope``."""

    def __call__(
        self,
        q_rope_THR: torch.Tensor,
        kv_TD: torch.Tensor,
        out_THR: torch.Tensor,
        *,
        positions_T: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_weight_C: torch.Tensor,
        eps: float,
    ) -> torch.Tensor: ...


def _why_not_shape(problem: LatentNormRopeProblem) -> list[str]:
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(f"queries and latents of {problem.dtype}: takes float32, bfloat16, float16")
    if problem.rope_dim < 2 or problem.rope_dim % 2:
        reasons.append(f"{problem.rope_dim} columns to rotate: takes pairs, one at least")
    return reasons


def _why_not_triton(problem: LatentNormRopeProblem) -> list[str]:
    return why_not_triton(problem.arch, "triton", problem.forced, (problem.dtype,)) + _why_not_shape(problem)


def _load_triton() -> LatentNormRope:
    from atom_plugin.ops.latent_norm_rope.kernel import latent_norm_rope as row

    return row


def _why_not_eager(problem: LatentNormRopeProblem) -> list[str]:
    on_gpu = device.is_accelerator(problem.arch) and problem.forced != "eager"
    reasons = [f"runs on {problem.arch} only when forced by name: it is PyTorch for CPUs"] if on_gpu else []
    return reasons + _why_not_shape(problem)


def _load_eager() -> LatentNormRope:
    from atom_plugin.ops.latent_norm_rope.eager import latent_norm_rope as row

    return row


def _why_not_reference(problem: LatentNormRopeProblem) -> list[str]:
    reasons = [] if problem.forced == "reference" else ["runs only when forced by name: it is the slow definition"]
    return reasons + _why_not_shape(problem)


def _load_reference() -> LatentNormRope:
    from atom_plugin.ops.latent_norm_rope.reference import latent_norm_rope as row

    return row


_TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-5),
    torch.float16: Tolerance(rtol=2e-3, atol=1e-5),
}

TABLE: Table[LatentNormRopeProblem] = Table(
    "latent_norm_rope",
    [
        Kernel("triton", _why_not_triton, _load_triton, _TOLERANCE),
        Kernel("eager", _why_not_eager, _load_eager, _TOLERANCE),
        Kernel("reference", _why_not_reference, _load_reference, _TOLERANCE),
    ],
)


def latent_norm_rope(
    q_rope_THR: torch.Tensor,
    kv_TD: torch.Tensor,
    out_THR: torch.Tensor,
    *,
    positions_T: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_weight_C: torch.Tensor,
    eps: float,
    forced: str | None = None,
) -> torch.Tensor:
    """Return the rows of the cache of new tokens, and write rotated queries to ``out_THR``.

    ``q_rope_THR``: [tokens, heads, R], the columns of queries that turn, of any strides but 1 in the last dim.
    ``out_THR``: the same shape and dtype, the caller's; it may be ``q_rope_THR`` itself. ``kv_TD``: [tokens, C + R],
    the projection's latents and the columns that turn. ``positions_T``: integers, one a token. ``cos_sin_cache``:
    [positions, R], cosines of the R / 2 frequencies and then sines, as SGLang's rotary embeddings hold them.
    ``kv_weight_C``: of the RMSNorm of the latents, whose ``eps`` is added to the mean of their squares.

    Columns 2 i and 2 i + 1 turn together. The result is [tokens, 1, C + R] of the dtype of ``kv_TD``, new memory;
    all is computed in fp32 and rounded once. Raises ValueError for arguments that do not fit together, and
    NoKernelError when no row can run this.
    """
    check(q_rope_THR, kv_TD, out_THR, positions_T, cos_sin_cache, kv_weight_C)
    problem = LatentNormRopeProblem(
        arch=device.arch(),
        dtype=kv_TD.dtype,
        num_heads=q_rope_THR.shape[1],
        kv_lora_rank=kv_weight_C.shape[0],
        rope_dim=q_rope_THR.shape[2],
        forced=forced,
    )
    row: LatentNormRope = TABLE.choose(problem, forced).load()
    return row(
        q_rope_THR, kv_TD, out_THR, positions_T=positions_T, cos_sin_cache=cos_sin_cache, kv_weight_C=kv_weight_C,
        eps=eps,
    )  # fmt: skip


def check(
    q_rope_THR: torch.Tensor,
    kv_TD: torch.Tensor,
    out_THR: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_weight_C: torch.Tensor,
) -> None:
    """Raise ValueError, with what was given and what is taken, where the arguments do not fit; no value is read."""
    if q_rope_THR.dim() != 3 or out_THR.shape != q_rope_THR.shape or out_THR.dtype != q_rope_THR.dtype:
        raise ValueError(
            f"q_rope_THR is {tuple(q_rope_THR.shape)} of {q_rope_THR.dtype}, out_THR {tuple(out_THR.shape)} of "
            f"{out_THR.dtype}: takes [tokens, heads, R] and the same again"
        )
    (tokens, _, rope_dim), (rank,) = q_rope_THR.shape, kv_weight_C.shape
    if kv_TD.shape != (tokens, rank + rope_dim) or kv_TD.dtype != q_rope_THR.dtype:
        raise ValueError(
            f"kv_TD is {tuple(kv_TD.shape)} of {kv_TD.dtype}: takes {(tokens, rank + rope_dim)} of {q_rope_THR.dtype}, "
            f"a row for each token of {rank} latent and {rope_dim} rotated columns"
        )
    if rope_dim % 2 or cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rope_dim:
        raise ValueError(
            f"cos_sin_cache is {tuple(cos_sin_cache.shape)}: takes [positions, {rope_dim}], an even number"
        )
    if positions_T.shape != (tokens,) or positions_T.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"positions_T is {tuple(positions_T.shape)} of {positions_T.dtype}: takes {(tokens,)} of int64, int32"
        )
    for name, tensor in (
        ("q_rope_THR", q_rope_THR),
        ("out_THR", out_THR),
        ("kv_TD", kv_TD),
        ("cos_sin_cache", cos_sin_cache),
    ):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last one has to be 1")
