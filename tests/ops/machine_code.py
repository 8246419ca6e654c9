"""Compiles our Triton kernels for AMD chips without one, exactly as their launchers launch them.

    python -m tests.ops.machine_code > benchmarks/amd_machine_code.md

A launcher is called on tensors without memory, with its kernels replaced by recorders; what they record (types, sizes,
constants, warps, stages) is compiled for the chip and its registers, LDS, spills and matrix instructions are read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from atom_plugin import device

LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class MachineCode:
    """What a chip would run. ``vgprs`` and ``spills`` a thread, ``lds`` bytes a block."""

    kernel: str
    vgprs: int
    spills: int
    lds: int
    matrix_instructions: int
    has_dot: bool


class _Recorder:
    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, num_stages: int = 2, **kwargs: Any) -> None:
            names = self.kernel.arg_names
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            self.launches.append(Launch(self.kernel, arguments, {"num_warps": num_warps, "num_stages": num_stages}))

        return launch


@contextmanager
def recorded(module: ModuleType, arch: str) -> Iterator[list[Launch]]:
    """Let the launchers of ``module`` believe that they run on ``arch``, and yield the launches that they make."""
    launches: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    own = device.arch, device.num_multiprocessors
    device.arch, device.num_multiprocessors = (lambda: arch), (lambda: 304 if arch == "gfx942" else 256)
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, launches))
        yield launches
    finally:
        device.arch, device.num_multiprocessors = own
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def source_of(launch: Launch) -> ASTSource:
    """Return a recorded launch as Triton's launcher would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if special and isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_for(launch: Launch, arch: str) -> MachineCode:
    """Compile a recorded launch for an AMD chip."""
    compiled = triton.compile(source_of(launch), target=GPUTarget("hip", arch, 64), options=launch.options)
    assembly = compiled.asm["amdgcn"]

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", assembly)
        assert found is not None, f"no {field} in the assembly of {launch.kernel.__name__}"
        return int(found.group(1))

    return MachineCode(
        kernel=launch.kernel.__name__,
        vgprs=number("vgpr_count"),
        spills=number("vgpr_spill_count"),
        lds=compiled.metadata.shared,
        matrix_instructions=len(re.findall("v_mfma", assembly)),
        has_dot="tt.dot" in compiled.asm["ttir"],
    )


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def paged_attention_calls(arch: str) -> dict[str, Callable[[], object]]:
    """Return name -> a call of the launcher."""
    from atom_plugin.ops.indices import PageTable
    from atom_plugin.ops.paged_attention import NO_WINDOW, PagedBatch, kernel

    def call(
        *, q_len: int, heads: tuple[int, int] = (32, 4), dim: int = 128, page_size: int = 64,
        q_dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype = torch.bfloat16, window: int = NO_WINDOW,
        logit_cap: float = 0.0, batch: int = 64, max_seq_len: int = 32768, v_dim: int | None = None,
        causal: bool = True, consecutive: bool = False,
    ) -> Callable[[], object]:  # fmt: skip
        k_pool, v_pool = (empty(4096, page_size, heads[1], size, dtype=kv_dtype) for size in (dim, v_dim or dim))
        paged = PagedBatch(
            qo_indptr_B1=empty(batch + 1, dtype=torch.int32),
            seq_lens_B=empty(batch, dtype=torch.int32),
            page_table=PageTable(
                pages_BP=empty(batch, max_seq_len // page_size, dtype=torch.int32), page_size=page_size
            ),
            max_q_len=q_len,
            max_seq_len=max_seq_len,
            captured=True,
            one_query_each=q_len == 1,
            causal=causal,
            consecutive=consecutive,
        )
        q, sinks = empty(batch * q_len, heads[0], dim, dtype=q_dtype), empty(heads[0], dtype=torch.float32)
        return lambda: kernel.paged_attention(
            q, k_pool, v_pool, paged, scale=0.1, k_scale=1.0, v_scale=1.0, window=window, logit_cap=logit_cap,
            return_lse=True, sinks_H=sinks,
        )  # fmt: skip

    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    unabsorbed: dict[str, Any] = {"heads": (8, 8), "dim": 192, "v_dim": 128, "page_size": 1, "consecutive": True}
    return {
        "decode, pages of 64": call(q_len=1),
        "decode, pages of 1": call(q_len=1, page_size=1),
        "decode, one request, ranges": call(q_len=1, batch=1),
        "decode, FP8": call(q_len=1, kv_dtype=fp8),
        "decode, fp16": call(q_len=1, q_dtype=torch.float16, kv_dtype=torch.float16),
        "decode, head dim 80": call(q_len=1, dim=80),
        "decode, head dim 256": call(q_len=1, heads=(16, 2), dim=256),
        "decode, window and cap": call(q_len=1, window=1024, logit_cap=30.0),
        "verify 8": call(q_len=8),
        "verify 8, FP8": call(q_len=8, kv_dtype=fp8),
        "extend": call(q_len=4096, batch=1),
        "extend, FP8": call(q_len=4096, batch=1, kv_dtype=fp8),
        "extend, head dim 256": call(q_len=4096, batch=1, heads=(16, 2), dim=256),
        "extend, window and cap": call(q_len=4096, batch=1, window=1024, logit_cap=30.0),
        "extend, MLA un-absorbed": call(q_len=4096, batch=1, **unabsorbed),
        "chunk of prefixes, MLA un-absorbed": call(q_len=4096, batch=1, causal=False, **unabsorbed),
    }


def store_kv_calls(arch: str) -> dict[str, Callable[[], object]]:
    """Return name -> a call of the launcher."""
    from atom_plugin.ops.indices import TokenSlots
    from atom_plugin.ops.store_kv import kernel

    def call(*, tokens: int, dim: int = 128, pool_dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
        k, pool = empty(tokens, 4, dim, dtype=torch.bfloat16), empty(4096, 64, 4, dim, dtype=pool_dtype)
        slots = TokenSlots(slots_T=empty(tokens, dtype=torch.int64))
        return lambda: kernel.store_kv(k, k, pool, pool, slots, k_scale=0.5, v_scale=1.0)

    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    return {
        "64 tokens": call(tokens=64),
        "8,192 tokens": call(tokens=8192),
        "8,192 tokens, FP8": call(tokens=8192, pool_dtype=fp8),
        "64 tokens, FP8, head dim 80": call(tokens=64, dim=80, pool_dtype=fp8),
        "64 tokens, latent rows": call(tokens=64, dim=576),
        "8,192 tokens, latent rows, FP8": call(tokens=8192, dim=576, pool_dtype=fp8),
    }


def qk_norm_rope_store_kv_calls(arch: str) -> dict[str, Callable[[], object]]:
    """Return name -> a call of the launcher."""
    from atom_plugin.ops.indices import TokenSlots
    from atom_plugin.ops.qk_norm_rope_store_kv import kernel

    def call(
        *, tokens: int, heads: tuple[int, int] = (32, 4), dims: tuple[int, int] = (128, 128), is_neox: bool = True,
        dtype: torch.dtype = torch.bfloat16, pool_dtype: torch.dtype = torch.bfloat16, axes: int = 1,
    ) -> Callable[[], object]:  # fmt: skip
        dim, rotary_dim = dims
        q, k = (empty(tokens, number, dim, dtype=dtype) for number in heads)
        pool, weight = empty(4096, 64, heads[1], dim, dtype=pool_dtype), empty(dim, dtype=dtype)
        positions = empty(tokens, dtype=torch.int64) if axes == 1 else empty(axes, tokens, dtype=torch.int64)
        slots = TokenSlots(slots_T=empty(tokens, dtype=torch.int64))
        return lambda: kernel.qk_norm_rope_store_kv(
            q, k, k, pool, pool, slots, positions=positions,
            axis_of_frequency=empty(rotary_dim // 2, dtype=torch.int64) if axes == 3 else None,
            cos_sin_cache=empty(4096, rotary_dim, dtype=torch.float32), is_neox=is_neox, q_weight=weight,
            k_weight=weight, eps=1e-6, k_scale=0.5, v_scale=1.0,
        )  # fmt: skip

    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    return {
        "64 tokens": call(tokens=64),
        "8,192 tokens": call(tokens=8192),
        "64 tokens, FP8": call(tokens=64, pool_dtype=fp8),
        "8,192 tokens, FP8": call(tokens=8192, pool_dtype=fp8),
        "8,192 tokens, fp32": call(tokens=8192, dtype=torch.float32, pool_dtype=torch.float32),
        "64 tokens, pairs side by side": call(tokens=64, is_neox=False),
        "8,192 tokens, pairs side by side": call(tokens=8192, is_neox=False),
        "64 tokens, head dim 80": call(tokens=64, dims=(80, 80)),
        "8,192 tokens, head dim 96": call(tokens=8192, dims=(96, 96)),
        "8,192 tokens, head dim 256": call(tokens=8192, heads=(16, 2), dims=(256, 256)),
        "8,192 tokens, head dim 256, 64 rotated by 3 axes": call(tokens=8192, heads=(16, 2), dims=(256, 64), axes=3),
        "8,192 tokens, 12 heads": call(tokens=8192, heads=(12, 3)),
    }


def mla_attention_calls(arch: str) -> dict[str, Callable[[], object]]:
    """Return name -> a call of the launcher: latent rows of 512 + 64."""
    from atom_plugin.ops.indices import PageTable
    from atom_plugin.ops.mla_attention import kernel
    from atom_plugin.ops.paged_attention import PagedBatch

    def call(
        *, heads: int, q_len: int = 1, page_size: int = 1, kv_dtype: torch.dtype = torch.bfloat16, rank: int = 512
    ) -> Callable[[], object]:
        paged = PagedBatch(
            qo_indptr_B1=empty(17, dtype=torch.int32),
            seq_lens_B=empty(16, dtype=torch.int32),
            page_table=PageTable(pages_BP=empty(16, 8192 // page_size, dtype=torch.int32), page_size=page_size),
            max_q_len=q_len,
            max_seq_len=8192,
            captured=True,
            one_query_each=q_len == 1,
        )
        q = empty(16 * q_len, heads, rank + 64, dtype=torch.bfloat16)
        pool = empty(4096, page_size, 1, rank + 64, dtype=kv_dtype)
        how = {"kv_lora_rank": rank, "scale": 0.1, "kv_scale": 1.0, "return_lse": False}
        return lambda: kernel.mla_attention(q, pool, paged, **how)

    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    return {
        "12 heads": call(heads=12),
        "12 heads, pages of 64": call(heads=12, page_size=64),
        "12 heads, FP8": call(heads=12, kv_dtype=fp8),
        "12 heads, verify 8": call(heads=12, q_len=8),
        "12 heads, verify 8, FP8": call(heads=12, q_len=8, kv_dtype=fp8),
        "128 heads": call(heads=128),
        "12 heads, rank 32": call(heads=12, rank=32),
    }


def latent_norm_rope_calls() -> dict[str, Callable[[], object]]:
    """Return name -> a call of the launcher: latent rows of 512 + 64."""
    from atom_plugin.ops.latent_norm_rope import kernel

    def call(*, tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
        q, kv = empty(tokens, heads, 64, dtype=dtype), empty(tokens, 576, dtype=dtype)
        return lambda: kernel.latent_norm_rope(
            q, kv, q, positions_T=empty(tokens, dtype=torch.int64), eps=1e-6,
            cos_sin_cache=empty(4096, 64, dtype=torch.float32), kv_weight_C=empty(512, dtype=dtype),
        )  # fmt: skip

    return {
        "8 heads": call(tokens=64, heads=8),
        "12 heads": call(tokens=64, heads=12),
        "128 heads, fp32": call(tokens=64, heads=128, dtype=torch.float32),
    }


def few_token_experts_calls() -> dict[str, Callable[[], object]]:
    """Return name -> a call of the launcher: Qwen3-30B-A3B's experts, and Kimi-K2's as one rank of eight has them."""
    from atom_plugin.ops.few_token_experts import kernel

    def call(*, tokens: int, hidden: int, width: int, top_k: int = 8) -> Callable[[], object]:
        x, w13, w2 = (
            empty(*shape, dtype=torch.bfloat16)
            for shape in ((tokens, hidden), (4, 2 * width, hidden), (4, hidden, width))
        )
        weights, ids = empty(tokens, top_k, dtype=torch.float32), empty(tokens, top_k, dtype=torch.int32)
        return lambda: kernel.few_token_experts(x, weights, ids, w13, w2)

    return {
        "4 tokens, 2,048 x 768": call(tokens=4, hidden=2048, width=768),
        "1 token, 7,168 x 256": call(tokens=1, hidden=7168, width=256),
    }


def ragged_calls() -> dict[str, Callable[[], object]]:
    """Return name -> a call of a launcher."""
    from atom_plugin.ops.indices import PageTable
    from atom_plugin.ops.ragged import kernel

    lens = empty(64, dtype=torch.int32)
    table = PageTable(pages_BP=empty(64, 2048, dtype=torch.int32), page_size=16)
    out, bounds = empty(64, 32, 128, dtype=torch.bfloat16), empty(65, dtype=torch.int32)
    return {
        "64 requests": lambda: (kernel.pack(lens, table), kernel.zero_blind(out, bounds, lens)),
        "64 requests, slots": lambda: kernel.pack_slots(lens, table, 4096),
    }


def all_calls(arch: str) -> dict[tuple[ModuleType, str], Callable[[], object]]:
    """Return (kernel module, name) -> a call of one of its launchers, for every kernel of ours."""
    from atom_plugin.ops.few_token_experts import kernel as few_token_experts
    from atom_plugin.ops.latent_norm_rope import kernel as latent_norm_rope
    from atom_plugin.ops.mla_attention import kernel as mla_attention
    from atom_plugin.ops.paged_attention import kernel as paged_attention
    from atom_plugin.ops.qk_norm_rope_store_kv import kernel as qk_norm_rope_store_kv
    from atom_plugin.ops.ragged import kernel as ragged
    from atom_plugin.ops.store_kv import kernel as store_kv

    calls = {
        paged_attention: paged_attention_calls(arch),
        mla_attention: mla_attention_calls(arch),
        store_kv: store_kv_calls(arch),
        qk_norm_rope_store_kv: qk_norm_rope_store_kv_calls(arch),
        latent_norm_rope: latent_norm_rope_calls(),
        few_token_experts: few_token_experts_calls(),
        ragged: ragged_calls(),
    }
    return {(module, name): call for module, named in calls.items() for name, call in named.items()}


def machine_code(arch: str) -> Iterator[tuple[str, str, MachineCode]]:
    """Yield (op, name of the call, machine code) of every kernel that the calls launch."""
    for (module, name), call in all_calls(arch).items():
        with recorded(module, arch) as launches:
            call()
        for launch in launches:
            yield module.__name__.split(".")[-2], name, compile_for(launch, arch)


def row(arch: str, op: str, name: str, code: MachineCode) -> str:
    """Return one line of the table."""
    return (
        f"| {arch} | {op} | {name} | {code.kernel} | {code.vgprs} | {code.spills} | {code.lds:,} "
        f"| {code.matrix_instructions} | {'yes' if code.has_dot else 'no'} |"
    )


def main() -> None:
    """Print the table."""
    print("# Machine code of the Triton kernels for AMD\n")
    print(f"Compiled by Triton {triton.__version__} (`python -m tests.ops.machine_code`), nothing run. VGPRs include")
    print("accumulation registers, a thread has 512; spills are VGPRs; LDS in bytes a block, of 65,536 on gfx942 and")
    print("163,840 on gfx950.\n")
    print("| chip | op | call | kernel | VGPRs | spills | LDS | matrix instructions | has a dot |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arch in LDS_BYTES:
        for op, name, code in machine_code(arch):
            print(row(arch, op, name, code), flush=True)


if __name__ == "__main__":
    sys.exit(main())
