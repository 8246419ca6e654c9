"""q/k norm, rope and KV store on a GPU: our one Triton launch beside what SGLang runs for the same work, in one run.

    python benchmarks/qk_norm_rope_store_kv.py [--tokens 64 8192] [--sweep]

SGLang's default is its in-place q/k norm and then rope with the KV store in it; with --enable-fused-qk-norm-rope it is
positions to int32, norm and rope in one kernel that computes its own angles, and the KV store. Into a float8 pool rope
and store are apart, with two casts between them. "cold": inputs that no cache holds; "warm": qkv in the L2 cache, as
the projection leaves it. The limit is the bytes that have to move once, at the speed of a copy measured in this run,
and no less than a launch. --sweep: launch shapes of our row, best first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.qk_norm_rope_store_kv import kernel
from benchmarks.gpu_timing import COLD_BYTES, graph_us

DIM, EPS, THETA, NUM_POSITIONS = 128, 1e-6, 1e6, 40960
MODELS = {"Qwen3-30B-A3B": (32, 4), "Qwen3-235B-A22B": (64, 4)}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WARM_BYTES = 8 << 20
Call = Callable[[int], object]


@dataclass(kw_only=True)
class Work:
    """One cell: ``tokens`` of a decode batch (random positions) or of a prefill, in several copies of qkv."""

    heads: int
    kv_heads: int
    tokens: int
    pool_dtype: torch.dtype = BF16
    cold: bool = True

    def __post_init__(self) -> None:
        width = (self.heads + 2 * self.kv_heads) * DIM
        self.copies = max(2, (COLD_BYTES if self.cold else WARM_BYTES) // (2 * self.tokens * width))
        self.qkv = torch.randn(self.copies, self.tokens, width, device="cuda", dtype=BF16)
        slots = max(self.copies, 2) * self.tokens + 64
        self.k_pages, self.v_pages = (
            torch.zeros(slots // 64, 64, self.kv_heads, DIM, device="cuda", dtype=self.pool_dtype) for _ in "kv"
        )
        order = torch.randperm(slots // 64 * 64 - 1, device="cuda") + 1  # SGLang's writer skips slot 0
        self.slots = order[: self.copies * self.tokens].view(self.copies, self.tokens)
        self.positions = (
            torch.arange(self.tokens, device="cuda").repeat(self.copies, 1)
            if self.tokens > 1024
            else torch.randint(NUM_POSITIONS, (self.copies, self.tokens), device="cuda")
        )
        angles = torch.arange(NUM_POSITIONS)[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        self.cache = torch.cat([angles.cos(), angles.sin()], dim=-1).cuda()
        self.q_weight, self.k_weight = (torch.rand(DIM, device="cuda", dtype=BF16) + 0.5 for _ in "qk")
        self.out: list[object] = [None] * self.copies

    @property
    def bytes_moved(self) -> int:
        """Return what one call reads and writes once: qkv, q, k and v, cosines and sines, positions and slots."""
        row = DIM * (2 * (2 * self.heads + 2 * self.kv_heads) + 2 * self.kv_heads * self.pool_dtype.itemsize)
        return self.tokens * (row + 4 * DIM + 16)

    def split(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of copy ``i``, [tokens, heads * DIM] each, slices of one projection."""
        q, k, v = self.qkv[i].split([self.heads * DIM, self.kv_heads * DIM, self.kv_heads * DIM], dim=1)
        return q, k, v

    def ours(self) -> Call:
        """Return a call of our row; what it returns lives on, or its memory would be the same and in the cache."""
        inputs = [tuple(x.view(self.tokens, -1, DIM) for x in self.split(i)) for i in range(self.copies)]
        slots = [TokenSlots(slots_T=slots) for slots in self.slots]

        def call(i: int) -> object:
            self.out[i] = kernel.qk_norm_rope_store_kv(
                *inputs[i],
                self.k_pages,
                self.v_pages,
                slots[i],
                positions=self.positions[i],
                axis_of_frequency=None,
                cos_sin_cache=self.cache,
                is_neox=True,
                q_weight=self.q_weight,
                k_weight=self.k_weight,
                eps=EPS,
                k_scale=1.0,
                v_scale=1.0,
            )
            return self.out[i]

        return call

    def sglang(self) -> Call:
        """Return a call of what SGLang runs by default; it norms and rotates in place."""
        from sglang.kernels.ops.attention.rope import FusedSetKVBufferArg, apply_rope_with_cos_sin_cache_inplace
        from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

        k_pool, v_pool = self.pools()
        row_bytes = self.kv_heads * DIM * self.pool_dtype.itemsize
        store = store_cache() if self.pool_dtype != BF16 else None

        def call(i: int) -> object:
            q, k, v = self.split(i)
            q3, k3 = q.view(self.tokens, -1, DIM), k.view(self.tokens, -1, DIM)
            fused_inplace_qknorm(q3, k3, self.q_weight, self.k_weight, EPS, head_dim=DIM)
            fused = None if store else FusedSetKVBufferArg(v, k_pool, v_pool, self.slots[i])
            apply_rope_with_cos_sin_cache_inplace(q3, k3, self.cache, self.positions[i], is_neox=True, fused_args=fused)
            if store is not None:
                k_bytes, v_bytes = (x.to(self.pool_dtype).view(torch.uint8) for x in (k, v))
                store(k_bytes, v_bytes, k_pool, v_pool, self.slots[i], row_bytes=row_bytes, v_row_bytes=row_bytes)
            return q3

        return call

    def sglang_fused(self) -> Call:
        """Return a call of what SGLang runs with --enable-fused-qk-norm-rope; in place as well."""
        from sglang.kernels.ops.attention.fused_qknorm_rope import fused_qk_norm_rope

        k_pool, v_pool = self.pools()
        row_bytes = self.kv_heads * DIM * self.pool_dtype.itemsize
        store = store_cache()

        def call(i: int) -> object:
            positions = self.positions[i].to(torch.int32)
            fused_qk_norm_rope(
                self.qkv[i], self.heads, self.kv_heads, self.kv_heads, DIM, EPS, self.q_weight, self.k_weight,
                THETA, True, positions, 1.0, 0.0, 0.0, 1.0,
            )  # fmt: skip
            q, k, v = self.split(i)
            if self.pool_dtype != BF16:
                k, v = (x.to(self.pool_dtype).view(torch.uint8) for x in (k, v))
            store(k, v, k_pool, v_pool, self.slots[i], row_bytes=row_bytes, v_row_bytes=row_bytes)
            return q.view(self.tokens, -1, DIM)

        return call

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pools as SGLang's writers take them, [slots, KV heads * DIM], float8 as bytes."""
        k, v = (x.view(-1, self.kv_heads * DIM) for x in (self.k_pages, self.v_pages))
        return (k, v) if self.pool_dtype == BF16 else (k.view(torch.uint8), v.view(torch.uint8))

    def us(self, call: Call) -> float:
        """Return microseconds of ``call``, over all copies."""
        return graph_us([lambda i=i: call(i) for i in range(self.copies)])

    def difference(self, theirs: Call) -> float:
        """Return the largest difference of q and of the stored k between ``theirs`` and ours; v has to be the same.

        SGLang rounds between norm and rope, and its fused kernel computes angles in fast arithmetic: not an error here.
        """
        before = self.qkv[0].clone()
        done = []
        for call in (self.ours(), theirs):
            self.qkv[0].copy_(before)
            q = call(0)
            pools = (x.flatten(0, 1)[self.slots[0]].float() for x in (self.k_pages, self.v_pages))
            done.append([torch.as_tensor(q).float(), *pools])
        self.qkv[0].copy_(before)
        if not torch.equal(done[0][2], done[1][2]):
            raise ValueError("SGLang and we stored different values of v: not the same work")
        return max(float((ours - other).abs().max()) for ours, other in zip(done[0][:2], done[1][:2], strict=True))


def store_cache() -> Callable[..., object]:
    """Return SGLang's writer of k and v."""
    from sglang.kernels.ops.kvcache.kvcache import store_cache as store

    return store


def why_no_sglang() -> str | None:
    """Return why SGLang's kernels cannot be timed here; None where they can."""
    try:
        import sglang.kernels.ops.attention.rope  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def copy_bandwidth() -> float:
    """Return bytes a second of a copy, read and written, measured here."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (1e-6 * graph_us([lambda: target.copy_(source)] * 3))


def launch_us() -> float:
    """Return microseconds of a kernel with nothing to do, one of many in a graph."""
    one = torch.zeros(1, device="cuda")
    return graph_us([lambda: one.add_(1)] * 200)


def host_us(call: Call) -> float:
    """Return microseconds that Python takes to launch ``call``, without a graph."""
    for i in (0, 1):
        call(i)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        call(0)
    span = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e4 * span


def table(token_counts: list[int]) -> None:
    """Print us of ours and of SGLang's sequences."""
    missing = why_no_sglang()
    bandwidth, launch = copy_bandwidth(), launch_us()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:,.0f} GB/s, an empty launch {launch:.2f} us")
    print(f"SGLang: {missing or 'importable'}\n")
    print(
        "| model | tokens | pool | inputs | limit us | ours us | GB/s | SGLang us | x | fused flag us | x | differ by |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for model, tokens, pool_dtype, cold in cells(token_counts):
        heads, kv_heads = MODELS[model]
        work = Work(heads=heads, kv_heads=kv_heads, tokens=tokens, pool_dtype=pool_dtype, cold=cold)
        limit = max(launch, 1e6 * work.bytes_moved / bandwidth)
        ours = work.us(work.ours())
        line = [model, tokens, "bf16" if pool_dtype == BF16 else "fp8", "cold" if cold else "warm"]
        line += [f"{limit:.2f}", f"{ours:.2f}", f"{1e-3 * work.bytes_moved / ours:,.0f}"]
        if missing is None:
            differences = []
            for call in (work.sglang(), work.sglang_fused()):
                differences.append(f"{work.difference(call):.3f}")
                theirs = work.us(call)
                line += [f"{theirs:.2f}", f"{theirs / ours:.2f}"]
            line.append(", ".join(differences))
        print("|", " | ".join(map(str, line)), "|", flush=True)
    work = Work(heads=32, kv_heads=4, tokens=64, cold=False)
    names = {"ours": work.ours()} | ({} if missing else {"SGLang": work.sglang(), "fused flag": work.sglang_fused()})
    print("\nlaunch from Python, 64 tokens: " + ", ".join(f"{name} {host_us(c):.0f} us" for name, c in names.items()))


def cells(token_counts: list[int]) -> list[tuple[str, int, torch.dtype, bool]]:
    """Return (model, tokens, pool dtype, cold) of every row; a long prefill does not fit the cache."""
    every = itertools.product(MODELS, token_counts, (BF16, FP8), (True, False))
    return [cell for cell in every if cell[3] or cell[1] <= 1024]


def sweep(token_counts: list[int]) -> None:
    """Print us of each launch shape of our row, best first."""
    chosen = kernel.launch_shape
    for model, tokens in itertools.product(MODELS, token_counts):
        heads, kv_heads = MODELS[model]
        work = Work(heads=heads, kv_heads=kv_heads, tokens=tokens)
        num_rows = tokens * (heads + 2 * kv_heads)
        found = []
        for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)):
            if not 8 <= rows * DIM // (32 * warps) <= 64:
                continue
            kernel.launch_shape = lambda num_rows, dim, shape=(rows, warps): shape
            found.append((work.us(work.ours()), rows, warps))
        kernel.launch_shape = chosen
        print(f"{model}, {tokens} tokens, cold (chosen: rows, warps = {chosen(num_rows, DIM)})")
        for us, rows, warps in sorted(found):
            print(f"    {us:8.2f} us   {rows} rows, {warps} warps")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 8192])
    parser.add_argument("--sweep", action="store_true", help="time launch shapes of our row instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    (sweep if arguments.sweep else table)(arguments.tokens)


if __name__ == "__main__":
    main()
