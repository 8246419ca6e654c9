"""Causal attention of new tokens over a paged KV pool, for decode and extend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from atom_plugin import device
from atom_plugin.dispatch import Kernel, Table, Tolerance
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention.aiter import ROWS as AITER_ROWS
from atom_plugin.ops.triton_rows import why_not_triton

NO_WINDOW = -1
MOST_GROUPED = 16  # query heads a KV head that the Triton row takes: they are rows of one block


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """Which keys each query token may see; built once a step, read by every layer.

    ``qo_indptr_B1``: int32 [requests + 1], cumulated query tokens. ``seq_lens_B``: int32 [requests], keys of each
    request **including** this step's new tokens, which are its last ones. ``max_q_len`` and ``max_seq_len``: bounds
    in tokens; for a captured batch they bound every later replay. ``captured``: the tensors are refilled in place
    between runs, so nothing derived from their values may outlive one call. ``one_query_each``: query b is the one of
    request b, for every request, as in decode. ``causal``: False where the new tokens are not among the keys, each of
    which every query of the request sees. ``consecutive``: the keys of each request lie in one run of slots, as the
    page table says too; a row may read its first slot alone.
    """

    qo_indptr_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    page_table: PageTable
    max_q_len: int
    max_seq_len: int
    captured: bool
    one_query_each: bool
    causal: bool = True
    consecutive: bool = False
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: object, derive: Callable[[], Any]) -> Any:
        """Return ``derive()``, worked out once for this batch; each time when the batch is captured."""
        if self.captured:
            return derive()
        if key not in self.derived:
            self.derived[key] = derive()
        return self.derived[key]


@dataclass(frozen=True, kw_only=True)
class PagedAttentionProblem:
    """What a row has to know to say whether it can run; one per layer kind and mode.

    ``window``: a query at position p sees keys p - window ... p, NO_WINDOW for all of them. ``causal``: as in
    PagedBatch. ``forced``: the row that a person asked for by name.
    """

    arch: str
    phase: Literal["decode", "extend"]
    captured: bool
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    page_size: int
    window: int
    logit_cap: float
    return_lse: bool
    has_sinks: bool
    causal: bool = True
    forced: str | None = None


class PagedAttention(Protocol):
    """What every row is called with; see ``paged_attention``."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        k_scale: float,
        v_scale: float,
        window: int,
        logit_cap: float,
        return_lse: bool,
        sinks_H: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*_FLOATS, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def why_not_on_host(problem: PagedAttentionProblem, row: str) -> list[str]:
    """Return what keeps the PyTorch row called ``row`` from running ``problem``."""
    reasons = []
    if device.is_accelerator(problem.arch) and problem.forced != row:
        reasons.append(f"runs on {problem.arch} only when forced by name: it is PyTorch for CPUs")
    if device.is_accelerator(problem.arch) and problem.captured:
        reasons.append(f"reads lengths on the host, which a graph captured on {problem.arch} cannot repeat")
    if problem.q_dtype not in _FLOATS:
        reasons.append(f"queries of {problem.q_dtype}: takes float32, bfloat16, float16")
    if problem.kv_dtype not in KV_DTYPES:
        reasons.append(f"KV cache of {problem.kv_dtype}: takes float32, bfloat16, float16, float8_e4m3")
    if problem.num_q_heads % problem.num_kv_heads:
        reasons.append(f"{problem.num_q_heads} query heads do not divide over {problem.num_kv_heads} KV heads")
    return reasons


def _why_not_triton(problem: PagedAttentionProblem) -> list[str]:
    reasons = why_not_triton(problem.arch, "triton", problem.forced, (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _FLOATS:
        reasons.append(f"queries of {problem.q_dtype}: takes float32, bfloat16, float16")
    if problem.kv_dtype not in KV_DTYPES:
        reasons.append(f"KV cache of {problem.kv_dtype}: takes float32, bfloat16, float16, float8_e4m3")
    if problem.num_q_heads % problem.num_kv_heads:
        reasons.append(f"{problem.num_q_heads} query heads do not divide over {problem.num_kv_heads} KV heads")
    elif problem.num_q_heads // problem.num_kv_heads > MOST_GROUPED:
        reasons.append(
            f"{problem.num_q_heads // problem.num_kv_heads} query heads a KV head: takes up to {MOST_GROUPED}"
        )
    if problem.kv_dtype.itemsize == 1 and (problem.qk_head_dim | problem.v_head_dim) % 2:
        reasons.append(f"odd head dims {problem.qk_head_dim} and {problem.v_head_dim} of float8: takes even ones")
    if max(problem.qk_head_dim, problem.v_head_dim) > 256:
        reasons.append(f"head dims {problem.qk_head_dim} and {problem.v_head_dim}: takes up to 256")
    if problem.page_size & (problem.page_size - 1):
        reasons.append(f"pages of {problem.page_size} tokens: takes powers of two")
    return reasons


def _load_triton() -> PagedAttention:
    from atom_plugin.ops.paged_attention.kernel import paged_attention as row

    return row


def _why_not_eager(problem: PagedAttentionProblem) -> list[str]:
    return why_not_on_host(problem, "eager")


def _load_eager() -> PagedAttention:
    from atom_plugin.ops.paged_attention.eager import paged_attention as row

    return row


def _why_not_reference(problem: PagedAttentionProblem) -> list[str]:
    reasons = why_not_on_host(problem, "reference")
    if problem.forced != "reference":
        reasons.append("runs only when forced by name: it is the slow definition")
    return reasons


def _load_reference() -> PagedAttention:
    from atom_plugin.ops.paged_attention.reference import paged_attention as row

    return row


_TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
}

TABLE: Table[PagedAttentionProblem] = Table(
    "paged_attention",
    [
        *AITER_ROWS,
        Kernel("triton", _why_not_triton, _load_triton, _TOLERANCE),
        Kernel("eager", _why_not_eager, _load_eager, _TOLERANCE),
        Kernel("reference", _why_not_reference, _load_reference, _TOLERANCE),
    ],
)


def paged_attention(
    q_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = NO_WINDOW,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    sinks_H: torch.Tensor | None = None,
    forced: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend each query to the keys of its own request up to its own position, and return ``(out, lse)``.

    In a batch that is not causal each query sees all keys of its request. ``q_THD``: [tokens, query heads, qk head
    dim]. ``k_pages``: [pages, page size, KV heads, qk head dim]; ``v_pages``: same with the v head dim; both are the
    pool's own memory, or keys and values handed over as pages of one token, only read. Scores are
    ``scale * k_scale * q.k``, then ``logit_cap * tanh(scores / logit_cap)`` if ``logit_cap > 0``, then softmax; values
    count ``v_scale`` times. ``sinks_H``: [query heads], a score a head that takes its share of the softmax and has no
    value (https://arxiv.org/abs/2309.17453, as in gpt-oss). ``out``: [tokens, query heads, v head dim] in the dtype of
    q; a query that sees no key gets zeros. ``lse``: float32 [tokens, query heads], natural log of the sum of
    exponentials of the scores, the sink's included, -inf where no key is seen; None unless ``return_lse``. Raises
    ValueError for tensors that do not fit together, NoKernelError when no row can run this.
    """
    from atom_plugin.ops.paged_attention.checks import problems_of  # which imports this module

    found = problems_of(q_THD, k_pages, v_pages, batch, sinks_H)
    if not isinstance(window, int) or window < NO_WINDOW:
        found.append(f"window {window!r}: takes a number of keys, or NO_WINDOW ({NO_WINDOW})")
    elif window != NO_WINDOW and not batch.causal:
        found.append(f"window {window} of a batch that is not causal: takes NO_WINDOW ({NO_WINDOW})")
    if found:
        raise ValueError("paged_attention: " + "; ".join(found))
    problem = PagedAttentionProblem(
        arch=device.arch(),
        phase="decode" if batch.one_query_each else "extend",
        captured=batch.captured,
        q_dtype=q_THD.dtype,
        kv_dtype=k_pages.dtype,
        num_q_heads=q_THD.shape[1],
        num_kv_heads=k_pages.shape[2],
        qk_head_dim=q_THD.shape[2],
        v_head_dim=v_pages.shape[3],
        page_size=batch.page_table.page_size,
        window=window,
        logit_cap=logit_cap,
        return_lse=return_lse,
        has_sinks=sinks_H is not None,
        causal=batch.causal,
        forced=forced,
    )
    row: PagedAttention = TABLE.choose(problem, forced).load()
    return row(
        q_THD, k_pages, v_pages, batch, scale=scale, k_scale=k_scale, v_scale=v_scale, window=window,
        logit_cap=logit_cap, return_lse=return_lse, sinks_H=sinks_H,
    )  # fmt: skip
