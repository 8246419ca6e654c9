"""Runs one cell: inputs of its shapes, the row on this machine's device, the reference in fp32 on the CPU.

Every run starts from outputs that are NaN: a row that leaves something unwritten shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from atom_plugin import device
from atom_plugin.dispatch import Tolerance
from atom_plugin.ops.few_token_experts import MOST_TOKENS, FewTokenExpertsProblem
from atom_plugin.ops.few_token_experts.reference import few_token_experts as few_token_experts_reference
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.latent_norm_rope import LatentNormRopeProblem
from atom_plugin.ops.latent_norm_rope.reference import latent_norm_rope as latent_norm_rope_reference
from atom_plugin.ops.mla_attention import MlaAttentionProblem
from atom_plugin.ops.mla_attention.reference import mla_attention as mla_reference
from atom_plugin.ops.paged_attention import PagedAttentionProblem, PagedBatch
from atom_plugin.ops.paged_attention.reference import paged_attention as paged_reference
from atom_plugin.ops.qk_norm_rope_store_kv import QKNormRopeStoreKVProblem
from atom_plugin.ops.qk_norm_rope_store_kv.reference import qk_norm_rope_store_kv as norm_rope_reference
from atom_plugin.ops.store_kv import StoreKVProblem
from atom_plugin.ops.store_kv.reference import store_kv as store_reference
from atom_plugin.selftest.batches import (
    VERIFY_LEN,
    as_captured,
    equal_lengths,
    fill_pool,
    make_batch,
    mixed_lengths,
    moved,
    refill,
)
from atom_plugin.selftest.cells import Cell, Pool
from atom_plugin.selftest.compare import Difference, compare, compare_bytes
from atom_plugin.selftest.poison import poison_free_memory, poisoned

#: Scales of FP8 pools, and the spread of keys as they count: large enough that a scale left out is seen.
K_SCALE, V_SCALE, KEY_STD = 0.5, 2.0, 2.0
NUM_POSITIONS, PADDED_TOKENS = 4096, 3
#: Tokens of one call besides padded ones; fewer where the reference loops over frequencies as well.
STORED_TOKENS, ROTATED_TOKENS = 147, 37
#: In an FP8 pool the neighbouring value is close as well: what is rounded differs in its last bits.
FP8_NEIGHBOUR = Tolerance(rtol=0.126, atol=2**-9)

Attended = tuple[torch.Tensor, torch.Tensor | None]


def differences(cell: Cell) -> list[Difference]:
    """Run ``cell`` and return the difference of every output; raises what the row raises."""
    kernel, problem = cell.kernel(), cell.problem
    torch.manual_seed(0)
    with torch.no_grad(), poisoned():
        row = kernel.load()
        poison_free_memory(device.torch_device())
        if isinstance(problem, StoreKVProblem):
            return _store(row, problem, cell.pool)
        dtype = _dtype_of(problem)
        if dtype not in kernel.tolerance:
            raise ValueError(f"the row {kernel.name} states no tolerance for {dtype}, which it says that it takes")
        tolerance = kernel.tolerance[dtype]
        if isinstance(problem, QKNormRopeStoreKVProblem):
            return [difference for is_neox in (True, False) for difference in _norm_rope(row, cell, tolerance, is_neox)]
        if isinstance(problem, LatentNormRopeProblem):
            return _latent_norm_rope(row, problem, tolerance)
        if isinstance(problem, FewTokenExpertsProblem):
            return _few_token_experts(row, problem, tolerance)
        if isinstance(problem, MlaAttentionProblem):
            return _latent(row, problem, tolerance)
        # keys that a model hands over lie in a row: extends over pages of one token are run both ways
        both = problem.page_size == 1 and problem.phase == "extend" and not problem.captured
        orders = (False, True) if both else (False,)
        return [found for order in orders for found in _paged(row, problem, tolerance, consecutive=order)]


def _dtype_of(
    problem: PagedAttentionProblem
    | MlaAttentionProblem
    | QKNormRopeStoreKVProblem
    | LatentNormRopeProblem
    | FewTokenExpertsProblem,
) -> torch.dtype:
    """Return the dtype that a row states its tolerance for."""
    if isinstance(problem, QKNormRopeStoreKVProblem):
        return problem.qkv_dtype
    return problem.dtype if isinstance(problem, LatentNormRopeProblem | FewTokenExpertsProblem) else problem.q_dtype


def _paged(row: Any, problem: PagedAttentionProblem, tolerance: Tolerance, *, consecutive: bool) -> list[Difference]:
    page_size, is_decode = problem.page_size, problem.phase == "decode"
    if is_decode or problem.captured:
        lengths = equal_lengths(1 if is_decode else VERIFY_LEN, page_size)
    else:
        lengths = mixed_lengths(page_size, causal=problem.causal)
    batch, num_pages = make_batch(
        lengths, page_size, causal=problem.causal, one_query_each=is_decode, consecutive=consecutive
    )
    k_scale, v_scale = (K_SCALE, V_SCALE) if problem.kv_dtype.itemsize == 1 else (1.0, 1.0)
    heads, kv_dtype = problem.num_kv_heads, problem.kv_dtype
    k = fill_pool(batch, num_pages, heads, problem.qk_head_dim, kv_dtype, KEY_STD / k_scale)
    v = fill_pool(batch, num_pages, heads, problem.v_head_dim, kv_dtype, 1 / v_scale)
    how = {
        "scale": problem.qk_head_dim**-0.5,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "window": problem.window,
        "logit_cap": problem.logit_cap,
        "return_lse": problem.return_lse,
    }
    where = device.torch_device()
    k_here, v_here = k.to(where), v.to(where)
    sinks = torch.randn(problem.num_q_heads) if problem.has_sinks else None
    sinks_here = None if sinks is None else sinks.to(where)

    def ours(q: torch.Tensor, here: PagedBatch) -> Attended:
        return row(q, k_here, v_here, here, **how, sinks_H=sinks_here)

    def theirs(q: torch.Tensor) -> Attended:
        return paged_reference(q.float(), k, v, batch, **how, sinks_H=sinks)

    width = (problem.num_q_heads, problem.qk_head_dim)
    return _attend(ours, theirs, batch, lengths.num_tokens, width, problem, tolerance)


def _latent(row: Any, problem: MlaAttentionProblem, tolerance: Tolerance) -> list[Difference]:
    page_size, is_decode = problem.page_size, problem.phase == "decode"
    if problem.equal_q_lens or problem.captured:
        lengths = equal_lengths(problem.max_q_len if problem.equal_q_lens else VERIFY_LEN, page_size)
    else:
        lengths = mixed_lengths(page_size, causal=True)
    batch, num_pages = make_batch(lengths, page_size, causal=True, one_query_each=is_decode)
    dim = problem.kv_lora_rank + problem.rope_dim
    kv_pages = fill_pool(batch, num_pages, 1, dim, problem.kv_dtype, 1.0)
    how = {
        "kv_lora_rank": problem.kv_lora_rank,
        "scale": (128 + problem.rope_dim) ** -0.5 / 4,  # of an un-absorbed head, for scores of about 1
        "kv_scale": K_SCALE if problem.kv_dtype.itemsize == 1 else 1.0,
        "return_lse": problem.return_lse,
    }
    kv_here = kv_pages.to(device.torch_device())

    def ours(q: torch.Tensor, here: PagedBatch) -> Attended:
        return row(q, kv_here, here, **how)

    def theirs(q: torch.Tensor) -> Attended:
        return mla_reference(q.float(), kv_pages, batch, **how)

    return _attend(ours, theirs, batch, lengths.num_tokens, (problem.num_heads, dim), problem, tolerance)


def _attend(
    ours: Callable[[torch.Tensor, PagedBatch], Attended],
    theirs: Callable[[torch.Tensor], Attended],
    batch: PagedBatch,
    num_tokens: int,
    width: tuple[int, int],
    problem: PagedAttentionProblem | MlaAttentionProblem,
    tolerance: Tolerance,
) -> list[Difference]:
    """Run a batch twice as it is, or captured and replayed with two sets of queries; ``width``: heads and dim of q."""
    where, found = device.torch_device(), []
    queries = [torch.randn(num_tokens, *width).to(problem.q_dtype) for _ in range(2)]
    replay = _captured(ours, batch, queries[0], where) if problem.captured else None
    here = moved(batch, where)
    for run, q in enumerate(queries):
        out, lse = replay(q.to(where)) if replay is not None else ours(q.to(where), here)
        expected, expected_lse = theirs(q)
        if out.dtype != q.dtype:
            raise ValueError(f"the output is {out.dtype}: {q.dtype} is expected, that of the queries")
        name = f"run {run + 1}"
        found.append(compare(f"out of {name}", out[:num_tokens].cpu(), expected, tolerance))
        if expected_lse is not None:
            if lse is None:
                raise ValueError("the row returns no lse, which the problem asks for")
            found.append(compare(f"lse of {name}", lse[:num_tokens].cpu(), expected_lse, tolerance))
    return found


def _captured(
    ours: Callable[[torch.Tensor, PagedBatch], Attended], batch: PagedBatch, like: torch.Tensor, where: torch.device
) -> Callable[[torch.Tensor], Attended]:
    """Return a function that replays what was captured on dump pages with ``batch`` in its place.

    On a GPU this is a graph; on a CPU, which has none, the row runs again on the same memory.
    """
    captured = as_captured(batch, where)
    rows = captured.seq_lens_B.shape[0] * captured.max_q_len
    static_q = torch.randn(rows, *like.shape[1:]).to(like.dtype).to(where)
    results = [ours(static_q, captured)]
    graph = torch.cuda.CUDAGraph() if where.type == "cuda" else None
    if graph is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results.append(ours(static_q, captured))
    refill(captured, moved(batch, where))

    def replay(q: torch.Tensor) -> Attended:
        static_q[: q.shape[0]].copy_(q)
        if graph is None:
            return ours(static_q, captured)
        out, lse = results[-1]
        for tensor in (out, lse):
            if tensor is not None:
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return out, lse

    return replay


def _pools(pool: Pool, dtype: torch.dtype, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (k pages, v pages, slots of the tokens): all NaN, on the CPU; the last tokens are padding, on page 0."""
    num_pages = 2 + -(-num_tokens // pool.page_size)
    shape = (num_pages, pool.page_size, pool.heads)
    k = torch.full((*shape, pool.k_dim), float("nan")).to(dtype)
    v = k if pool.is_latent else torch.full((*shape, pool.v_dim), float("nan")).to(dtype)
    slots_T = pool.page_size + torch.randperm((num_pages - 1) * pool.page_size)[:num_tokens]
    slots_T[num_tokens - PADDED_TOKENS :] = 0
    return k, v, slots_T


def _store(row: Any, problem: StoreKVProblem, pool: Pool) -> list[Difference]:
    num_tokens, where = STORED_TOKENS + PADDED_TOKENS, device.torch_device()
    k_pages, v_pages, slots_T = _pools(pool, problem.pool_dtype, num_tokens)
    width = pool.heads * (pool.k_dim + (0 if pool.is_latent else pool.v_dim))
    both = (4 * torch.randn(num_tokens, width)).to(problem.kv_dtype)  # k and v are parts of wider rows, as in a model
    k = both[:, : pool.heads * pool.k_dim].view(num_tokens, pool.heads, pool.k_dim)
    v = k if pool.is_latent else both[:, pool.heads * pool.k_dim :].view(num_tokens, pool.heads, pool.v_dim)
    scales = _store_scales(problem.pool_dtype, pool)
    k_here = k_pages.to(where, copy=True)
    v_here = k_here if pool.is_latent else v_pages.to(where, copy=True)
    given = both.to(where)
    k_in = given[:, : pool.heads * pool.k_dim].view(k.shape)
    v_in = k_in if pool.is_latent else given[:, pool.heads * pool.k_dim :].view(v.shape)
    row(k_in, v_in, k_here, v_here, TokenSlots(slots_T=slots_T.to(where)), **scales)
    store_reference(k, v, k_pages, v_pages, TokenSlots(slots_T=slots_T), **scales)
    found = [
        compare_bytes(f"pool of {name}", _past_dump(actual.cpu()), _past_dump(expected))
        for name, actual, expected in (("k", k_here, k_pages), ("v", v_here, v_pages))
    ]
    return [*found, compare_bytes("k and v that were handed over", given.cpu(), both)]


def _store_scales(pool_dtype: torch.dtype, pool: Pool) -> dict[str, float]:
    if pool_dtype.itemsize > 1:
        return {"k_scale": 1.0, "v_scale": 1.0}
    return {"k_scale": 0.3, "v_scale": 0.3 if pool.is_latent else 1.7}


def _past_dump(pages: torch.Tensor) -> torch.Tensor:
    """Return what is not SGLang's dump page, where either of two padded tokens may stay."""
    return pages[1:]


def _norm_rope(row: Any, cell: Cell, tolerance: Tolerance, is_neox: bool) -> list[Difference]:
    problem, pool, where = cell.problem, cell.pool, device.torch_device()
    assert isinstance(problem, QKNormRopeStoreKVProblem)
    num_tokens, dim = ROTATED_TOKENS + PADDED_TOKENS, problem.head_dim
    k_pages, v_pages, slots_T = _pools(replace(pool, is_latent=False), problem.pool_dtype, num_tokens)
    heads = (problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads)
    widths = [heads[0] * dim, heads[1] * dim, heads[2] * pool.v_dim]
    qkv = (2 * torch.randn(num_tokens, sum(widths))).to(problem.qkv_dtype)
    half = problem.rotary_dim // 2
    angles = torch.arange(NUM_POSITIONS)[:, None] * 1e4 ** (-torch.arange(half) / half)
    axes = (num_tokens,) if problem.num_position_axes == 1 else (3, num_tokens)
    weights = [(torch.rand(dim) + 0.5).to(problem.qkv_dtype) if problem.normed else None for _ in range(2)]
    tensors: dict[str, torch.Tensor | None] = {
        "positions": torch.randint(NUM_POSITIONS, axes),
        "axis_of_frequency": None if len(axes) == 1 else torch.arange(half) % 3,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "q_weight": weights[0],
        "k_weight": weights[1],
    }
    constants = {"is_neox": is_neox, "eps": 1e-6, **_store_scales(problem.pool_dtype, pool)}

    def call(function: Any, at: torch.device, pages: list[torch.Tensor]) -> torch.Tensor:
        parts = qkv.to(at).split(widths, dim=1)
        q, k, v = (part.view(num_tokens, count, -1) for part, count in zip(parts, heads, strict=True))
        moved_tensors = {name: None if x is None else x.to(at) for name, x in tensors.items()}
        return function(q, k, v, *pages, TokenSlots(slots_T=slots_T.to(at)), **moved_tensors, **constants)

    here = [pages.to(where, copy=True) for pages in (k_pages, v_pages)]
    done_q = call(row, where, here)
    expected_q = call(norm_rope_reference, torch.device("cpu"), [k_pages, v_pages])
    of_keys = FP8_NEIGHBOUR if problem.pool_dtype.itemsize == 1 else tolerance
    order = "halves" if is_neox else "pairs"
    return [
        compare(f"q rotated by {order}", done_q.cpu(), expected_q, tolerance),
        compare(f"pool of k rotated by {order}", _floats(here[0]), _floats(k_pages), of_keys),
        compare_bytes("pool of v", _past_dump(here[1].cpu()), _past_dump(v_pages)),
    ]


def _latent_norm_rope(row: Any, problem: LatentNormRopeProblem, tolerance: Tolerance) -> list[Difference]:
    num_tokens, rank, rope_dim, where = ROTATED_TOKENS, problem.kv_lora_rank, problem.rope_dim, device.torch_device()
    nope, heads = 128, problem.num_heads
    query = torch.randn(num_tokens, heads, nope + rope_dim).to(problem.dtype)
    kv = (2 * torch.randn(num_tokens, 64 + rank + rope_dim)).to(problem.dtype)  # a part of a wider row, as in a model
    angles = torch.arange(NUM_POSITIONS)[:, None] * 1e4 ** (-torch.arange(0, rope_dim, 2) / rope_dim)
    tensors = {
        "positions_T": torch.randint(NUM_POSITIONS, (num_tokens,)),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "kv_weight_C": (torch.rand(rank) + 0.5).to(problem.dtype),
    }

    def call(function: Any, at: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        absorbed = torch.full((num_tokens, heads, rank + rope_dim), float("nan"), device=at).to(problem.dtype)
        moved_tensors = {name: tensor.to(at) for name, tensor in tensors.items()}
        rotated = absorbed[..., rank:]
        rows = function(query.to(at)[..., nope:], kv.to(at)[:, 64:], rotated, **moved_tensors, eps=1e-6)
        return rows.cpu(), rotated.cpu()

    rows, rotated = call(row, where)
    expected_rows, expected_rotated = call(latent_norm_rope_reference, torch.device("cpu"))
    return [
        compare("rows of the cache", rows, expected_rows, tolerance),
        compare("rotated queries", rotated, expected_rotated, tolerance),
    ]


def _few_token_experts(row: Any, problem: FewTokenExpertsProblem, tolerance: Tolerance) -> list[Difference]:
    hidden, width, experts = problem.hidden_size, problem.intermediate_size, problem.num_experts
    ids = torch.stack([torch.randperm(experts)[: problem.top_k] for _ in range(MOST_TOKENS)]).int()
    ids[-1] = -1  # a padded token of a graph
    wide = (2 * torch.randn(MOST_TOKENS, 64 + hidden)).to(problem.dtype)
    weights = torch.rand(MOST_TOKENS, problem.top_k)
    w13 = (torch.randn(experts, 2 * width, hidden) / hidden**0.5).to(problem.dtype)
    w2 = (torch.randn(experts, hidden, width) / width**0.5).to(problem.dtype)
    at = device.torch_device()
    layer = SimpleNamespace(w13_weight=w13.to(at), w2_weight=w2.to(at))
    # a part of a wider row, there as well
    done = row(layer, wide.to(at)[:, 64:], SimpleNamespace(topk_weights=weights.to(at), topk_ids=ids.to(at)))
    return [
        compare(
            "sums of experts", done.cpu(), few_token_experts_reference(wide[:, 64:], weights, ids, w13, w2), tolerance
        )
    ]


def _floats(pages: torch.Tensor) -> torch.Tensor:
    return _past_dump(pages.cpu()).float()
