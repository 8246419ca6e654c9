"""Prefill of MLA on a GPU: un-absorbed beside FA3, absorbed beside un-absorbed, and where the two cross.

    python benchmarks/gpu/mla_prefill.py [--sweep]

Per-rank heads of Kimi, bf16. "New": requests of new tokens alone, causal, keys of 128 + 64 columns and values of 128 of
every head, as the model hands them over. "Prefix": new tokens over cached latents; un-absorbed that is kv_b_proj of the
chunk, attention of it, attention of the new tokens and merging, as the layer calls them; absorbed, two products by head
and attention over the pool. --sweep: launch shapes of the un-absorbed call, best first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from atom_plugin.attention.mla import _over_rows
from atom_plugin.layers.mla import crossover
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.mla_attention import kernel as absorbed
from atom_plugin.ops.paged_attention import PagedBatch, kernel
from atom_plugin.ops.paged_attention.launch_shape import Shape
from benchmarks.gpu_timing import graph_us

RANK, ROPE, NOPE, V = 512, 64, 128, 128
OPERATIONS_PER_S = 8e14
SCALE = (NOPE + ROPE) ** -0.5
HOW = {"scale": SCALE, "k_scale": 1.0, "v_scale": 1.0, "window": -1, "logit_cap": 0.0, "sinks_H": None}


def batch_of(requests: int, new: int, cached: int) -> PagedBatch:
    """Return the step's own batch: ``new`` tokens a request after ``cached`` ones, in pages of one token."""
    length = new + cached
    return PagedBatch(
        qo_indptr_B1=torch.arange(requests + 1, dtype=torch.int32, device="cuda") * new,
        seq_lens_B=torch.full((requests,), length, dtype=torch.int32, device="cuda"),
        page_table=PageTable(
            pages_BP=torch.randperm(requests * length, device="cuda").to(torch.int32).view(requests, length),
            page_size=1,
        ),
        max_q_len=new, max_seq_len=length, captured=False, one_query_each=False,
    )  # fmt: skip


def rows_of(batch: PagedBatch, each: int, *, causal: bool) -> PagedBatch:
    """Return ``batch``'s queries over ``each`` keys a request that lie one after the other."""
    lens = torch.full_like(batch.seq_lens_B, each)
    starts = torch.arange(len(lens), dtype=torch.int32, device="cuda") * each
    return _over_rows(batch, starts_B=starts, lens_B=lens, longest=each, causal=causal)


class Unabsorbed:
    """Queries of ``requests`` x ``new`` over ``keys`` handed-over keys a request."""

    def __init__(self, heads: int, requests: int, new: int, keys: int, *, causal: bool) -> None:
        tokens, total = requests * new, requests * keys
        self.q = torch.randn(tokens, heads, NOPE + ROPE, device="cuda", dtype=torch.bfloat16)
        self.k = torch.randn(total, heads, NOPE + ROPE, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn(total, heads, V, device="cuda", dtype=torch.bfloat16)
        self.requests, self.new, self.keys, self.causal = requests, new, keys, causal
        self.seen = rows_of(batch_of(requests, new, keys - new if causal else 0), keys, causal=causal)
        pairs = requests * new * ((keys - (new - 1) / 2) if causal else keys)
        self.limit_us = 1e6 * 2 * pairs * heads * (NOPE + ROPE + V) / OPERATIONS_PER_S

    def ours(self) -> torch.Tensor:
        """Return our row's output."""
        pages = self.k.unsqueeze(1), self.v.unsqueeze(1)
        return kernel.paged_attention(self.q, *pages, self.seen, **HOW, return_lse=True)[0]

    def fa3(self) -> torch.Tensor:
        """Return FA3's, called as SGLang's backend calls it."""
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        indptr = torch.arange(self.requests + 1, dtype=torch.int32, device="cuda")
        answer = flash_attn_varlen_func(
            q=self.q, k=self.k, v=self.v, cu_seqlens_q=indptr * self.new, cu_seqlens_k=indptr * self.keys,
            max_seqlen_q=self.new, max_seqlen_k=self.keys, softmax_scale=SCALE, causal=self.causal,
            return_softmax_lse=True,
        )  # fmt: skip
        return answer[0]

    def row(self, name: str) -> None:
        """Print one line of the table."""
        ours = graph_us([self.ours] * 3)
        try:
            worst = (self.ours().float() - self.fa3().float()).abs().max().item()
            fa3 = graph_us([self.fa3] * 3)
            assert worst < 0.05, f"differs from FA3 by {worst}"
        except (ImportError, RuntimeError) as error:
            fa3, worst = float("nan"), float("nan")
            print(str(error).splitlines()[0][:150])
        print(f"| {name} | {self.limit_us:.0f} | {ours:.0f} | {fa3:.0f} | {fa3 / ours:.2f} | {worst:.4f} |", flush=True)


def crossing(heads: int, cached: int, new: int) -> None:
    """Print the time of both forms of ``new`` tokens over ``cached`` latents, one request."""
    up = torch.randn(heads * (NOPE + V), RANK, device="cuda", dtype=torch.bfloat16) / RANK**0.5
    own = Unabsorbed(heads, 1, new, new, causal=True)
    chunk = Unabsorbed(heads, 1, new, cached, causal=False)
    latents = torch.randn(cached + new, 1, 1, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(cached, device="cuda")
    pool = batch_of(1, new, cached)
    absorbed_q = torch.randn(new, heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    by_head = up.view(heads, NOPE + V, RANK)

    def expand(rows: torch.Tensor) -> None:
        both = (rows[:, 0, 0, :RANK].contiguous() @ up.t()).view(len(rows), heads, NOPE + V)
        chunk.k[: len(rows), :, :NOPE] = both[..., :NOPE]
        chunk.k[: len(rows), :, NOPE:] = rows[:, 0, :, RANK:]
        both[..., NOPE:].contiguous()

    def in_unabsorbed() -> torch.Tensor:
        expand(latents[cached:])
        out = own.ours()
        expand(latents[slots])
        return out + chunk.ours()  # merging by lse costs about as much

    def in_absorbed() -> torch.Tensor:
        torch.bmm(own.q[..., :NOPE].transpose(0, 1), by_head[:, :NOPE], out=absorbed_q[..., :RANK].transpose(0, 1))
        absorbed_q[..., RANK:] = own.q[..., NOPE:]
        mixed, _ = absorbed.mla_attention(
            absorbed_q, latents, pool, kv_lora_rank=RANK, scale=SCALE, kv_scale=1.0, return_lse=False
        )
        return torch.bmm(mixed.transpose(0, 1), by_head[:, NOPE:].transpose(1, 2))

    one, other = graph_us([in_unabsorbed] * 2), graph_us([in_absorbed] * 2)
    print(f"| {heads} | {cached:,} | {new} | {one:.0f} | {other:.0f} | {other / one:.2f} |", flush=True)


SHAPES = [
    (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 32, 8, 3), (128, 64, 4, 2),
    (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 4, 2),
]  # fmt: skip


def sweep() -> None:
    """Print how each launch shape does for new tokens alone and for a chunk of a prefix."""
    for name, work in (
        ("8 heads, 1 x 4,096 new", Unabsorbed(8, 1, 4096, 4096, causal=True)),
        ("8 heads, 16 x 512 new", Unabsorbed(8, 16, 512, 512, causal=True)),
        ("8 heads, 1,024 over a chunk of 8,192", Unabsorbed(8, 1, 1024, 8192, causal=False)),
    ):
        found = []
        for block_m, block_n, warps, stages in SHAPES:
            shape = Shape(block_m=block_m, block_n=block_n, warps=warps, stages=stages, beside=1)
            choose: Callable[..., Shape] = lambda *_a, _shape=shape, **_k: _shape  # noqa: E731
            with mock.patch.object(kernel, "shape_for", choose):
                try:
                    found.append((graph_us([work.ours] * 3), shape))
                except Exception as error:  # noqa: BLE001 - what does not fit the chip is one result of the sweep
                    print(f"{shape}: {type(error).__name__} {str(error)[:80]}")
        print(f"\n{name}: limit {work.limit_us:.0f} us")
        for us, shape in sorted(found, key=lambda one: one[0]):
            print(f"  {us:8.1f} us {shape}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    if parser.parse_args().sweep:
        sweep()
    print(
        "\n| un-absorbed | limit us | ours us | FA3 us | ours against FA3 | largest difference |\n" + "|---" * 6 + "|"
    )
    for heads in (8, 12):
        for requests, new in ((1, 1024), (1, 4096), (1, 16384), (16, 512)):
            Unabsorbed(heads, requests, new, new, causal=True).row(f"{heads} heads, {requests} x {new:,} new")
        Unabsorbed(heads, 1, 1024, 8192, causal=False).row(f"{heads} heads, 1,024 over a chunk of 8,192")
    spec = SimpleNamespace(kv_lora_rank=RANK, qk_nope_head_dim=NOPE, v_head_dim=V)
    print(f"\nby multiplications, un-absorbed from {crossover(spec):.0f} new tokens on\n")
    print("| heads | cached | new | un-absorbed us | absorbed us | un-absorbed is faster by |\n" + "|---" * 6 + "|")
    for heads in (8, 12):
        for cached in (1024, 8192, 32768):
            for new in (16, 64, 128, 256, 512):
                crossing(heads, cached, new)


if __name__ == "__main__":
    main()
