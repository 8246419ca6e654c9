"""Absorbed multi-head latent attention (MLA) of new tokens over a paged cache of latent rows, for decode and extend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from atom_plugin import device
from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops.mla_attention.aiter import ROWS as AITER_ROWS
from atom_plugin.ops.paged_attention import KV_DTYPES, PagedBatch
from atom_plugin.ops.paged_attention.checks import index_problems
from atom_plugin.ops.triton_rows import why_not_triton

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class MlaAttentionProblem:
    """What a row has to know to say whether it can run; one per layer kind and mode.

    ``num_heads``: query heads of this rank. ``max_q_len``: most query tokens of one request, in a captured batch of
    any replay. ``equal_q_lens``: each request has that many, and no token is without a request. ``pool_bytes``: of one
    layer's pool, 0 where it is not known yet. ``forced``: the row that a person asked for by name.
    """

    arch: str
    phase: Literal["decode", "extend"]
    captured: bool
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    page_size: int
    max_q_len: int
    equal_q_lens: bool
    pool_bytes: int
    return_lse: bool
    forced: str | None = None


class MlaAttention(Protocol):
    """What every row is called with; see ``mla_attention``."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv_pages: torch.Tensor,
        batch: PagedBatch,
        *,
        kv_lora_rank: int,
        scale: float,
        kv_scale: float,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def _why_not_triton(problem: MlaAttentionProblem) -> list[str]:
    reasons = why_not_triton(problem.arch, "triton", problem.forced, (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _FLOATS:
        reasons.append(f"queries of {problem.q_dtype}: takes float32, bfloat16, float16")
    if problem.kv_dtype != problem.q_dtype and problem.kv_dtype not in KV_DTYPES[len(_FLOATS) :]:
        reasons.append(
            f"KV cache of {problem.kv_dtype} with queries of {problem.q_dtype}: takes the dtype of the queries, "
            "float8_e4m3fn or float8_e4m3fnuz"
        )
    rank, rope = problem.kv_lora_rank, problem.rope_dim
    if rank < 32 or rank & (rank - 1) or rank > 512:
        reasons.append(f"kv_lora_rank {rank}: takes powers of two from 32 to 512")
    if rope and (rope < 16 or rope & (rope - 1) or rope > 128):
        reasons.append(f"rope_dim {rope}: takes 0 and powers of two from 16 to 128")
    return reasons


def _load_triton() -> MlaAttention:
    from atom_plugin.ops.mla_attention.kernel import mla_attention as row

    return row


def _why_not_on_host(problem: MlaAttentionProblem, row: str) -> list[str]:
    reasons = []
    if device.is_accelerator(problem.arch) and problem.forced != row:
        reasons.append(f"runs on {problem.arch} only when forced by name: it is PyTorch for CPUs")
    if device.is_accelerator(problem.arch) and problem.captured:
        reasons.append(f"reads lengths on the host, which a graph captured on {problem.arch} cannot repeat")
    if problem.q_dtype not in _FLOATS:
        reasons.append(f"queries of {problem.q_dtype}: takes float32, bfloat16, float16")
    if problem.kv_dtype not in KV_DTYPES:
        reasons.append(f"KV cache of {problem.kv_dtype}: takes float32, bfloat16, float16, float8_e4m3")
    return reasons


def _why_not_eager(problem: MlaAttentionProblem) -> list[str]:
    return _why_not_on_host(problem, "eager")


def _load_eager() -> MlaAttention:
    from atom_plugin.ops.mla_attention.eager import mla_attention as row

    return row


def _why_not_reference(problem: MlaAttentionProblem) -> list[str]:
    reasons = _why_not_on_host(problem, "reference")
    if problem.forced != "reference":
        reasons.append("runs only when forced by name: it is the slow definition")
    return reasons


def _load_reference() -> MlaAttention:
    from atom_plugin.ops.mla_attention.reference import mla_attention as row

    return row


_TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
}

TABLE: Table[MlaAttentionProblem] = Table(
    "mla_attention",
    [
        *AITER_ROWS,
        Kernel("triton", _why_not_triton, _load_triton, _TOLERANCE),
        Kernel("eager", _why_not_eager, _load_eager, _TOLERANCE),
        Kernel("reference", _why_not_reference, _load_reference, _TOLERANCE),
    ],
)


def mla_attention(
    q_THD: torch.Tensor,
    kv_pages: torch.Tensor,
    batch: PagedBatch,
    *,
    kv_lora_rank: int,
    scale: float,
    kv_scale: float = 1.0,
    return_lse: bool = False,
    forced: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend each query to the latent rows of its own request up to its own position, and return ``(out, lse)``.

    ``q_THD``: [tokens, query heads, kv_lora_rank + rope dim], the part that met W_UK, then the rotated part.
    ``kv_pages``: [pages, page size, 1, kv_lora_rank + rope dim], the pool's own memory, only read, but that AITER's
    rows put 0 for what is no finite number in slot 0, SGLang's dump; a row is a key as it is, and its first
    ``kv_lora_rank`` columns are the value. Scores are ``scale * kv_scale * q.k``, then softmax;
    values count ``kv_scale`` times. ``out``: [tokens, query heads, kv_lora_rank] in the dtype of q; a query that sees
    no key gets zeros. ``lse``: float32 [tokens, query heads], natural log of the sum of exponentials of the scores,
    -inf where no key is seen; None unless ``return_lse``. Raises ValueError for tensors that do not fit together and
    NoKernelError when no row can run this.
    """
    check(q_THD, kv_pages, batch, kv_lora_rank)
    found = [] if batch.captured else index_problems(q_THD.shape[0], kv_pages.shape[0], batch)
    if found:
        raise ValueError("mla_attention: " + "; ".join(found))
    problem = MlaAttentionProblem(
        arch=device.arch(),
        phase="decode" if batch.one_query_each else "extend",
        captured=batch.captured,
        q_dtype=q_THD.dtype,
        kv_dtype=kv_pages.dtype,
        num_heads=q_THD.shape[1],
        kv_lora_rank=kv_lora_rank,
        rope_dim=q_THD.shape[2] - kv_lora_rank,
        page_size=batch.page_table.page_size,
        max_q_len=batch.max_q_len,
        equal_q_lens=q_THD.shape[0] == batch.seq_lens_B.shape[0] * batch.max_q_len,
        pool_bytes=kv_pages.numel() * kv_pages.element_size(),
        return_lse=return_lse,
        forced=forced,
    )
    kernel = TABLE.choose(problem, forced)
    if q_THD.shape[0] == 0:
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if return_lse else None
        return q_THD.new_empty(*q_THD.shape[:2], kv_lora_rank), lse_TH
    row: MlaAttention = kernel.load()
    return row(q_THD, kv_pages, batch, kv_lora_rank=kv_lora_rank, scale=scale, kv_scale=kv_scale, return_lse=return_lse)


def check(q_THD: torch.Tensor, kv_pages: torch.Tensor, batch: PagedBatch, kv_lora_rank: int) -> None:
    """Raise ValueError unless the tensors' shapes and dtypes fit together."""
    pages_BP, page_size = batch.page_table.pages_BP, batch.page_table.page_size
    q_shape, kv_shape = tuple(q_THD.shape), tuple(kv_pages.shape)
    if len(q_shape) != 3 or q_shape[1] == 0 or q_THD.stride(2) != 1:
        raise ValueError(
            f"q_THD {q_shape} with strides {q_THD.stride()}: takes [tokens, heads, kv_lora_rank + rope dim], at least "
            "one head, last stride 1"
        )
    if len(kv_shape) != 4 or kv_shape[1:3] != (page_size, 1) or not kv_pages.is_contiguous():
        raise ValueError(
            f"kv_pages {kv_shape} with strides {kv_pages.stride()}: takes contiguous [pages, {page_size} (the page "
            "table's page size), 1, kv_lora_rank + rope dim]"
        )
    if q_shape[2] != kv_shape[3] or not 0 < kv_lora_rank <= q_shape[2]:
        raise ValueError(
            f"queries of {q_shape[2]} columns, latent rows of {kv_shape[3]}, kv_lora_rank {kv_lora_rank}: takes equal "
            "numbers of columns, kv_lora_rank at most as many"
        )
    if not batch.causal:
        raise ValueError("a batch that is not causal: takes causal ones")
    num_requests = batch.seq_lens_B.shape[0]
    indices = {"qo_indptr_B1": batch.qo_indptr_B1, "seq_lens_B": batch.seq_lens_B, "pages_BP": pages_BP}
    shapes = {name: tuple(tensor.shape) for name, tensor in indices.items()}
    if shapes["qo_indptr_B1"] != (num_requests + 1,) or pages_BP.dim() != 2 or pages_BP.shape[0] != num_requests:
        raise ValueError(f"index tensors of {shapes}: takes [requests + 1], [requests] and [requests, pages]")
    for name, tensor in indices.items():
        if tensor.dtype != torch.int32 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            raise ValueError(f"{name} of {tensor.dtype} with strides {tensor.stride()}: takes int32, last stride 1")
    devices = {tensor.device for tensor in (q_THD, kv_pages, *indices.values())}
    if len(devices) != 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: takes one device")
    if batch.max_seq_len > pages_BP.shape[1] * page_size:
        raise ValueError(
            f"max_seq_len {batch.max_seq_len} with a page table of {pages_BP.shape[1]} pages of {page_size}: takes at "
            "most as many tokens as the table has places"
        )
