"""MLA decode on a GPU: our Triton row beside SGLang's FA3 and FlashMLA, in one run, against the physical limit.

    python benchmarks/mla_decode.py [--quick] [--sweep] [--no-table]

heads x query length x context x batch, bf16, page 64 (FlashMLA's). The limit is the larger of the latent bytes over
4,400 GB/s and the operations over 800 TFLOP/s. --quick: the cells that goals are stated for. --sweep: launch
configurations of our row, best first: what it prints decides config.choose_tiles. SGLang's columns
are empty where SGLang is not installed or its kernel does not take the shape; the reason is printed below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from atom_plugin import device
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.mla_attention import kernel
from atom_plugin.ops.mla_attention.config import Config, choose_tiles, split
from atom_plugin.ops.paged_attention import PagedBatch
from benchmarks.gpu_timing import COLD_BYTES, graph_us

RANK, ROPE, PAGE = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
READ_BYTES_PER_S, OPERATIONS_PER_S = 4.4e12, 8e14
Call = Callable[[int], torch.Tensor]
#: What another kernel said when it did not take a shape.
REFUSALS: dict[str, str] = {}


@dataclass(kw_only=True)
class Work:
    """One cell: equal requests of ``context`` keys, the last ``q_len`` of them new, in shuffled pages of one pool."""

    heads: int
    q_len: int
    context: int
    batch: int
    page_size: int = PAGE
    kv_dtype: torch.dtype = torch.bfloat16

    def allocate(self) -> Work:
        """Make the tensors, and return the cell."""
        pages = -(-self.context // self.page_size)
        self.copies = max(2, min(16, COLD_BYTES // self.kv_bytes + 1))
        total = self.copies * self.batch * pages
        shape = (total, self.page_size, 1, RANK + ROPE)
        self.kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.kv_dtype)
        self.tables = torch.randperm(total, device="cuda").to(torch.int32).view(self.copies, self.batch, pages)
        self.q = torch.randn(self.batch * self.q_len, self.heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        self.seq_lens = torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")
        self.qo_indptr = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.q_len
        return self

    @property
    def kv_bytes(self) -> int:
        """Return the latent bytes that one call has to read."""
        return self.batch * self.context * (RANK + ROPE) * self.kv_dtype.itemsize

    @property
    def limit_us(self) -> float:
        """Return the microseconds that memory or the matrix units need, whichever is more."""
        keys = self.context - (self.q_len - 1) / 2
        operations = 2.0 * self.batch * self.q_len * self.heads * keys * (2 * RANK + ROPE)
        return 1e6 * max(self.kv_bytes / READ_BYTES_PER_S, operations / OPERATIONS_PER_S)

    def tiles(self) -> Config:
        """Return the tiles that our row chooses here."""
        return choose_tiles(device.arch(), self.q_len * self.heads, 2, self.kv_dtype.itemsize)

    def config(self) -> Config:
        """Return the launch that our row chooses here."""
        return split(
            self.tiles(),
            num_requests=self.batch,
            num_rows=self.q_len * self.heads,
            max_seq_len=self.context,
            num_multiprocessors=device.num_multiprocessors(),
        )

    def ours(self, config: Config) -> Call:
        """Return a call of our row on copy ``i``, cut as ``config`` says."""
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
        how = {"kv_lora_rank": RANK, "scale": SCALE, "kv_scale": 1.0, "return_lse": False}
        return lambda i: kernel.launch(self.q, self.kv, batches[i], config, **how)[0]

    def fa3(self) -> Call:
        """Return a call of SGLang's FA3 as its backend makes it for absorbed MLA."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        indptr_k = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.context
        return lambda i: flash_attn_with_kvcache(
            q=self.q[..., RANK:],
            qv=self.q[..., :RANK],
            k_cache=self.kv[..., RANK:],
            v_cache=self.kv[..., :RANK],
            page_table=self.tables[i],
            cache_seqlens=self.seq_lens,
            cu_seqlens_q=self.qo_indptr,
            cu_seqlens_k_new=indptr_k,
            max_seqlen_q=self.q_len,
            softmax_scale=SCALE,
            causal=True,
        )

    def flash_mla(self) -> Call:
        """Return a call of FlashMLA as SGLang's backend makes it; its metadata, made once a step, are not timed.

        Heads are padded to a multiple of 16, before the time is taken: with 12 heads it crashes.
        """
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        padded = -(-self.heads // 16) * 16
        metadata, num_splits = get_mla_metadata(self.seq_lens, self.q_len * padded, 1, is_fp8_kvcache=False)
        q = torch.nn.functional.pad(self.q, (0, 0, 0, padded - self.heads))
        q = q.view(self.batch, self.q_len, padded, RANK + ROPE)
        return lambda i: flash_mla_with_kvcache(
            q=q,
            k_cache=self.kv,
            block_table=self.tables[i],
            cache_seqlens=self.seq_lens,
            head_dim_v=RANK,
            tile_scheduler_metadata=metadata,
            num_splits=num_splits,
            softmax_scale=SCALE,
            causal=True,
        )[0]

    def us(self, call: Call) -> float:
        """Return microseconds of ``call``, over all copies."""
        return graph_us([lambda i=i: call(i) for i in range(self.copies)])

    def us_of_theirs(self, name: str, make: Callable[[], Call]) -> float:
        """Return microseconds of another kernel and whether it agrees with ours; NaN where it cannot run."""
        try:
            call = make()
            theirs = call(0).reshape(self.batch * self.q_len, -1, RANK)[:, : self.heads]
        except (ImportError, ValueError, RuntimeError) as error:
            REFUSALS[f"{name}, {self.heads} heads"] = (str(error).strip() or repr(error)).splitlines()[0][:150]
            return float("nan")
        worst = (self.ours(self.config())(0).float() - theirs.float()).abs().max().item()
        if not worst < 0.05:
            REFUSALS[f"{name}, {self}"] = f"DISAGREES with ours by {worst:.3f}"
            return float("nan")
        return self.us(call)


def compiled(job: tuple[Work, Config]) -> None:
    """Fill Triton's cache on disk with one launch; what fails here fails again later."""
    work, config = job
    try:
        work.allocate().ours(config)(0)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the cell itself reports it
        print(f"not compiled: {config}: {type(error).__name__}", file=sys.stderr)


def compile_all(jobs: list[tuple[Work, Config]]) -> None:
    """Compile on many cores what would take minutes on one."""
    kinds = {
        (
            work.heads,
            work.q_len,
            work.page_size,
            work.kv_dtype,
            dataclasses.replace(config, splits=min(2, config.splits), min_tiles=1),
        )
        for work, config in jobs
    }
    jobs = [
        (Work(heads=heads, q_len=q_len, context=256, batch=1, page_size=page_size, kv_dtype=kv_dtype), config)
        for heads, q_len, page_size, kv_dtype, config in kinds
    ]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, jobs))


def table(quick: bool) -> None:
    """Print one line a cell."""
    print(
        "| heads | q | context | batch | limit us | ours us | of limit | FA3 us | FlashMLA us | ours against the best |"
    )
    print("|---" * 10 + "|")
    if quick:
        cells = [(h, q, 8192, 16) for h, q in itertools.product((12, 16, 64, 128), (1, 4, 8))]
        cells += [(12, 1, 1024, 64), (12, 1, 8192, 64), (12, 1, 8192, 1), (8, 1, 8192, 16), (16, 8, 1024, 64)]
    else:
        cells = list(itertools.product((8, 12, 16, 64, 128), (1, 4, 8), (1024, 8192), (1, 16, 64)))
    works = [Work(heads=h, q_len=q, context=context, batch=batch) for h, q, context, batch in cells]
    compile_all([(work, work.config()) for work in works])
    for cell in works:
        work = dataclasses.replace(cell).allocate()  # a copy: the tensors go with it
        ours = work.us(work.ours(work.config()))
        fa3 = work.us_of_theirs("FA3", work.fa3)
        flash_mla = work.us_of_theirs("FlashMLA", work.flash_mla)
        best = min((us for us in (fa3, flash_mla) if us == us), default=float("nan"))
        print(
            f"| {work.heads} | {work.q_len} | {work.context:,} | {work.batch} | {work.limit_us:.1f} | {ours:.1f} "
            f"| {work.limit_us / ours:.2f} | {fa3:.1f} | {flash_mla:.1f} | {best / ours:.2f} |",
            flush=True,
        )
    others: tuple[dict[str, Any], ...] = ({"page_size": 1}, {"kv_dtype": torch.float8_e4m3fn})
    for other in others:
        work = Work(heads=12, q_len=1, context=8192, batch=64, **other).allocate()
        us = work.us(work.ours(work.config()))
        print(f"\n12 heads, q 1, context 8,192, batch 64, {other}: {us:.1f} us, limit {work.limit_us:.1f}", flush=True)
    for name, reason in REFUSALS.items():
        print(f"\n{name}: {reason}")


def configurations(rows: int) -> list[Config]:
    """Return what the sweep tries for so many rows of a program: (keys, warps, stages, at a time)."""
    shapes = {
        16: [
            (32, 4, 3, 2),
            (32, 4, 4, 2),
            (32, 4, 4, 1),
            (32, 4, 5, 1),
            (16, 4, 4, 2),
            (64, 4, 2, 2),
            (64, 4, 3, 1),
            (64, 8, 3, 1),
        ],
        32: [
            (32, 4, 3, 1),
            (32, 8, 3, 1),
            (32, 8, 4, 1),
            (64, 8, 2, 1),
            (64, 8, 3, 1),
        ],
        64: [
            (32, 8, 3, 1),
            (32, 8, 4, 1),
            (64, 8, 2, 1),
        ],
    }
    names = ("keys", "warps", "stages", "per_multiprocessor")
    return [Config(rows=rows, **dict(zip(names, shape, strict=True))) for shape in shapes[rows]]


def launches_of(work: Work, rows: tuple[int, ...]) -> Iterator[Config]:
    """Return each configuration with half, all and twice the splits that we would choose for it."""
    for tiles in itertools.chain.from_iterable(map(configurations, rows)):
        chosen = split(
            tiles,
            num_requests=work.batch,
            num_rows=work.q_len * work.heads,
            max_seq_len=work.context,
            num_multiprocessors=device.num_multiprocessors(),
        )
        for splits in sorted({max(1, chosen.splits // 2), chosen.splits, min(128, 2 * chosen.splits)}):
            yield dataclasses.replace(chosen, splits=splits, min_tiles=max(1, 64 // chosen.keys))


def sweep() -> None:
    """Print the best launches of a few cells, and one that was middling."""
    cells = [
        (Work(heads=12, q_len=1, context=8192, batch=16), (16, 32)),
        (Work(heads=12, q_len=1, context=1024, batch=64), (16,)),
        (Work(heads=12, q_len=1, context=8192, batch=1), (16,)),
        (Work(heads=12, q_len=1, context=8192, batch=16, page_size=1), (16,)),
        (Work(heads=12, q_len=1, context=8192, batch=16, kv_dtype=torch.float8_e4m3fn), (16,)),
        (Work(heads=12, q_len=4, context=8192, batch=16, kv_dtype=torch.float8_e4m3fn), (16, 32, 64)),
        (Work(heads=8, q_len=4, context=8192, batch=16), (16, 32, 64)),
        (Work(heads=12, q_len=4, context=8192, batch=16), (16, 32, 64)),
        (Work(heads=12, q_len=8, context=8192, batch=16), (32, 64)),
        (Work(heads=128, q_len=1, context=8192, batch=16), (32, 64)),
    ]
    launches = [(work, list(launches_of(work, rows))) for work, rows in cells]
    compile_all([(work, config) for work, configs in launches for config in configs])
    for cell, configs in launches:
        work = dataclasses.replace(cell).allocate()
        found: list[tuple[float, Config, str]] = []
        for config in configs:
            try:
                found.append((work.us(work.ours(config)), config, ""))
            except Exception as error:  # noqa: BLE001 - what does not fit the chip is one result of the sweep
                found.append((float("inf"), config, f" {type(error).__name__}: {str(error)[:90]}"))
        found.sort(key=lambda one: one[0])
        print(
            f"\n{work.heads} heads, q {work.q_len}, context {work.context}, batch {work.batch}, page {work.page_size}, "
            f"{work.kv_dtype}: limit {work.limit_us:.1f} us, chosen {work.us(work.ours(work.config())):.1f}"
        )
        for us, config, note in [*found[:8], found[len(found) // 2]]:
            print(
                f"  {us:8.1f} us  rows {config.rows} keys {config.keys} warps {config.warps} stages {config.stages} "
                f"splits {config.splits} min_tiles {config.min_tiles}{note}",
                flush=True,
            )
        for _us, config, note in found:
            if note:
                print(f"  failed: keys {config.keys} warps {config.warps} stages {config.stages}{note}", flush=True)


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.no_table:
        table(arguments.quick)
    if arguments.sweep:
        sweep()


if __name__ == "__main__":
    main()
