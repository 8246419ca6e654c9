"""Paged attention on a GPU: our Triton row beside SGLang's FA3 and Triton decode kernels, in one run.

    python benchmarks/paged_attention.py [decode] [queries] [extend] [--quick] [--sweep]

decode: batch x context x page size, bf16 and fp8 KV, as GB/s of K and V and as a ratio to FA3. queries: 8 query tokens
a request against 1. extend: 4,096 new tokens after 0 and 8,192 cached ones. --sweep: launch shapes of our row, best
first. SGLang's columns are empty where SGLang is not installed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch, kernel
from atom_plugin.ops.paged_attention.launch_shape import Shape
from benchmarks.gpu_timing import COLD_BYTES, graph_us, read_bandwidth

HEADS, KV_HEADS, DIM = 32, 4, 128
FP8 = torch.float8_e4m3fn


@dataclass(kw_only=True)
class Work:
    """One cell: equal requests of ``context`` keys, the last ``q_len`` of them new, in shuffled pages of one pool."""

    batch: int
    context: int
    page_size: int
    q_len: int = 1
    kv_dtype: torch.dtype = torch.bfloat16
    max_copies: int = 16

    def __post_init__(self) -> None:
        pages = -(-self.context // self.page_size)
        self.copies = min(self.max_copies, COLD_BYTES // self.kv_bytes + 2)
        total = self.copies * self.batch * pages
        shape = (total, self.page_size, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.kv_dtype) for _ in range(2))
        self.tables = torch.randperm(total, device="cuda").to(torch.int32).view(self.copies, self.batch, pages)
        self.q = torch.randn(self.batch * self.q_len, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.seq_lens = torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")
        self.qo_indptr = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.q_len

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V that one call has to read."""
        return self.batch * self.context * KV_HEADS * 2 * DIM * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        """Return the operations of one call: two products over the keys that each query sees."""
        return 4.0 * self.batch * HEADS * DIM * self.q_len * (self.context - (self.q_len - 1) / 2)

    def ours(self) -> Callable[[int], torch.Tensor]:
        """Return a call of our row on copy ``i``."""
        batches = [
            PagedBatch(
                qo_indptr_B1=self.qo_indptr,
                seq_lens_B=self.seq_lens,
                page_table=PageTable(pages_BP=table, page_size=self.page_size),
                max_q_len=self.q_len,
                max_seq_len=self.context,
                captured=True,
                one_query_each=self.q_len == 1,
            )
            for table in self.tables
        ]
        how = {"scale": DIM**-0.5, "k_scale": 1.0, "v_scale": 1.0, "window": NO_WINDOW, "logit_cap": 0.0}
        return lambda i: kernel.paged_attention(
            self.q, self.k, self.v, batches[i], **how, return_lse=False, sinks_H=None
        )[0]

    def fa3(self) -> Callable[[int], torch.Tensor] | None:
        """Return a call of SGLang's FA3 as its backend makes it."""
        try:
            from sgl_kernel.flash_attn import flash_attn_with_kvcache
        except ImportError:
            return None
        q = self.q if self.kv_dtype == torch.bfloat16 else self.q.to(FP8)
        one = torch.ones(self.batch, KV_HEADS, device="cuda") if self.kv_dtype == FP8 else None
        return lambda i: flash_attn_with_kvcache(
            q=q,
            k_cache=self.k,
            v_cache=self.v,
            page_table=self.tables[i],
            cache_seqlens=self.seq_lens,
            cu_seqlens_q=self.qo_indptr,
            max_seqlen_q=self.q_len,
            softmax_scale=DIM**-0.5,
            causal=True,
            k_descale=one,
            v_descale=one,
        )

    def sglang_triton(self) -> Callable[[int], torch.Tensor] | None:
        """Return a call of SGLang's Triton decode kernel with its default of 8 splits."""
        try:
            from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        except ImportError:
            return None
        if self.q_len > 1 or self.kv_dtype != torch.bfloat16:
            return None
        out = torch.empty_like(self.q)
        logits = torch.empty(self.batch, HEADS, 8, DIM, device="cuda")
        lse = torch.empty(self.batch, HEADS, 8, device="cuda")
        splits = torch.full((self.batch,), 8, dtype=torch.int32, device="cuda")
        indptr = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.context
        offsets = torch.arange(self.page_size, device="cuda")
        indices = [
            (table.long()[:, :, None] * self.page_size + offsets).view(self.batch, -1)[:, : self.context].flatten()
            for table in self.tables
        ]
        k, v = self.k.view(-1, KV_HEADS, DIM), self.v.view(-1, KV_HEADS, DIM)

        def call(i: int) -> torch.Tensor:
            decode_attention_fwd(self.q, k, v, out, indptr, indices[i], logits, lse, splits, 8, DIM**-0.5, 1.0, 1.0)
            return out

        return call

    def us(self, call: Callable[[int], torch.Tensor]) -> float:
        """Return microseconds of ``call``, over all copies."""
        return graph_us([lambda i=i: call(i) for i in range(self.copies)])

    def check(self) -> None:
        """Compare our row with FA3 on this cell."""
        theirs = self.fa3()
        if theirs is not None and self.kv_dtype == torch.bfloat16:
            torch.testing.assert_close(self.ours()(0), theirs(0).view_as(self.q), rtol=2e-2, atol=1e-2)


def decode(quick: bool) -> None:
    """Print the decode table."""
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e9:,.0f} GB/s; a cell: us (GB/s of K and V)\n")
    print("| KV | page | batch | context | limit us | ours | of bandwidth | FA3 | ours against FA3 | SGLang Triton |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    cells: Iterator[tuple[torch.dtype, int, int, int]] = itertools.product(
        (torch.bfloat16, FP8), (64,) if quick else (1, 16, 64), (1, 16, 64, 256), (1024, 8192, 32768)
    )
    for kv_dtype, page_size, batch, context in cells:
        if batch * context * KV_HEADS * DIM * 4 > 20 << 30 or (quick and (batch, context) == (256, 32768)):
            continue
        work = Work(batch=batch, context=context, page_size=page_size, kv_dtype=kv_dtype)
        work.check()

        def told(call: Callable[[int], torch.Tensor] | None, work: Work = work) -> tuple[float, str]:
            if call is None:
                return float("nan"), ""
            us = work.us(call)
            return us, f"{us:.1f} ({work.kv_bytes / us / 1e3:,.0f})"

        (ours, ours_text), (fa3, fa3_text), (_, triton_text) = map(
            told, (work.ours(), work.fa3(), work.sglang_triton())
        )
        limit = work.kv_bytes / bandwidth * 1e6
        print(
            f"| {str(kv_dtype).split('.')[1]} | {page_size} | {batch} | {context:,} | {limit:.1f} | {ours_text} "
            f"| {limit / ours:.2f} | {fa3_text} | {fa3 / ours:.2f} | {triton_text} |",
            flush=True,
        )


def queries() -> None:
    """Print the time of 8 query tokens a request over that of 1."""
    print("\n| batch | context | 1 query us | 8 queries us | ratio | FA3 1 | FA3 8 | ratio |\n" + "|---" * 8 + "|")
    for batch, context in ((1, 8192), (16, 8192), (64, 8192), (64, 1024)):
        one, eight = (Work(batch=batch, context=context, page_size=64, q_len=q_len) for q_len in (1, 8))
        eight.check()
        ours = [work.us(work.ours()) for work in (one, eight)]
        calls = [work.fa3() for work in (one, eight)]
        fa3 = [float("nan") if call is None else work.us(call) for work, call in zip((one, eight), calls, strict=True)]
        print(
            f"| {batch} | {context:,} | {ours[0]:.1f} | {ours[1]:.1f} | {ours[1] / ours[0]:.2f} "
            f"| {fa3[0]:.1f} | {fa3[1]:.1f} | {fa3[1] / fa3[0]:.2f} |",
            flush=True,
        )


def extend() -> None:
    """Print 4,096 new tokens after a prefix, in TFLOP/s."""
    print(
        "\n| requests | new | prefix | page | ours us (TFLOP/s) | FA3 us (TFLOP/s) | ours against FA3 |\n"
        + "|---" * 7
        + "|"
    )
    for batch, prefix, page_size in ((1, 0, 64), (1, 8192, 64), (1, 8192, 1), (4, 0, 64)):
        q_len = 4096 // batch
        work = Work(batch=batch, context=prefix + q_len, page_size=page_size, q_len=q_len)
        work.check()
        ours = work.us(work.ours())
        call = work.fa3()
        fa3 = float("nan") if call is None else work.us(call)
        print(
            f"| {batch} | {q_len:,} | {prefix:,} | {page_size} | {ours:.0f} ({work.flops / ours / 1e6:.0f}) "
            f"| {fa3:.0f} ({work.flops / fa3 / 1e6:.0f}) | {fa3 / ours:.2f} |",
            flush=True,
        )


Candidate = tuple[dict[str, Any], tuple[int, int, int, int], int]  # cell, (block_m, block_n, warps, stages), splits


def candidates() -> list[Candidate]:
    """Return what the sweep tries."""
    few, eight = ([(m, n, 4, s) for n in (64, 128) for s in (3, 5)] for m in (16, 64))
    long = [(m, n, w, s) for m, w in ((64, 4), (128, 4), (128, 8), (256, 8)) for n in (64, 128) for s in (2, 3)]
    paged, new = {"context": 8192, "page_size": 64}, {"batch": 1, "context": 12288, "q_len": 4096}
    groups: list[tuple[dict[str, Any], list[tuple[int, int, int, int]], tuple[int, ...]]] = [
        ({**paged, "batch": 1}, few, (16, 32, 64)),
        ({**paged, "batch": 16}, few, (2, 4, 8)),
        ({**paged, "batch": 64}, few, (1, 2, 4)),
        ({**paged, "batch": 64, "page_size": 1}, few, (1, 2)),
        ({**paged, "batch": 16, "kv_dtype": FP8}, few, (2, 4, 8)),
        ({**paged, "batch": 64, "kv_dtype": FP8}, few, (1, 2, 4)),
        ({**paged, "batch": 16, "q_len": 8}, eight, (1, 2, 4)),
        ({**paged, "batch": 64, "q_len": 8}, eight, (1, 2)),
        ({**new, "page_size": 64}, long, (1,)),
        ({**new, "page_size": 1}, [(128, 64, 4, s) for s in (2, 3)], (1,)),
    ]
    return [(cell, shape, split) for cell, shapes, splits in groups for shape in shapes for split in splits]


def with_shape(candidate: Candidate, run: Callable[[Work], float], **work: Any) -> float:
    """Return ``run`` of the candidate's cell with its launch shape; infinity where that does not fit the chip."""
    cell, (block_m, block_n, warps, stages), splits = candidate
    own = kernel.shape_for, kernel.splits_for
    shape = Shape(block_m=block_m, block_n=block_n, warps=warps, stages=stages, beside=1)
    kernel.shape_for, kernel.splits_for = (lambda *_args, **_kw: shape), (lambda **_kw: splits)
    try:
        return run(Work(**{**cell, **work}))
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    finally:
        kernel.shape_for, kernel.splits_for = own


def compile_only(candidate: Candidate) -> float:
    """Compile a candidate into Triton's cache on disk."""
    return with_shape(candidate, lambda work: float(work.ours()(0).numel()), max_copies=1)


def sweep() -> None:
    """Print the best launch shapes of a few cells."""
    tried = candidates()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compile_only, tried, chunksize=4)
    found: dict[str, list[tuple[float, Candidate]]] = {}
    for candidate in tried:
        found.setdefault(str(candidate[0]), []).append(
            (with_shape(candidate, lambda work: work.us(work.ours())), candidate)
        )
    for cell, times in found.items():
        times.sort(key=lambda one: one[0])
        print(f"\n{cell}")
        for us, (_, shape, splits) in [*times[:6], times[len(times) // 2]]:
            print(f"  {us:9.1f} us  m n warps stages {shape} splits {splits}", flush=True)


def main() -> None:
    """Run the parts asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["decode", "queries", "extend"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    parts = arguments.parts or ([] if arguments.sweep else ["decode", "queries", "extend"])
    if arguments.sweep:
        sweep()
    if "decode" in parts:
        decode(arguments.quick)
    if "queries" in parts:
        queries()
    if "extend" in parts:
        extend()


if __name__ == "__main__":
    main()
