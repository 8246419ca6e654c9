"""What the self-test runs: a row of a table, the mode that it is for, and the problem; as JSON for its own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from atom_plugin.attention.limits import LayerOutline, latent_outlines
from atom_plugin.attention.tables import TABLES, LayerProblems, modes_of
from atom_plugin.dispatch import Kernel
from atom_plugin.ops import few_token_experts
from atom_plugin.ops.few_token_experts import FewTokenExpertsProblem
from atom_plugin.ops.latent_norm_rope import LatentNormRopeProblem
from atom_plugin.ops.mla_attention import MlaAttentionProblem
from atom_plugin.ops.paged_attention import PagedAttentionProblem
from atom_plugin.ops.qk_norm_rope_store_kv import QKNormRopeStoreKVProblem
from atom_plugin.ops.store_kv import StoreKVProblem

Problem = (
    PagedAttentionProblem
    | MlaAttentionProblem
    | QKNormRopeStoreKVProblem
    | StoreKVProblem
    | LatentNormRopeProblem
    | FewTokenExpertsProblem
)
PROBLEMS: dict[str, type[Problem]] = {
    "paged_attention": PagedAttentionProblem,
    "mla_attention": MlaAttentionProblem,
    "qk_norm_rope_store_kv": QKNormRopeStoreKVProblem,
    "store_kv": StoreKVProblem,
    "latent_norm_rope": LatentNormRopeProblem,
    "few_token_experts": FewTokenExpertsProblem,
}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What a pool looks like where its problem does not say: a store's. ``is_latent``: one tensor of latent rows."""

    heads: int
    k_dim: int
    v_dim: int
    page_size: int
    is_latent: bool

    @classmethod
    def of(cls, layer: LayerProblems) -> Pool:
        """Return the pool of an attention layer."""
        outline = layer.layer
        is_latent = layer.kind != "dense"
        v_dim = outline.qk_head_dim if is_latent else outline.v_head_dim
        return cls(
            heads=outline.tp_k_head_num,
            k_dim=outline.qk_head_dim,
            v_dim=v_dim,
            page_size=layer.page_size,
            is_latent=is_latent,
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run. ``row`` of the table ``op``, None where the table has no row for ``problem``; then ``refused`` says why.

    ``mode``: in words, for people; ``pool``: of the layer.
    """

    op: str
    mode: str
    row: str | None
    problem: Problem
    pool: Pool
    refused: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the cell as text for ``from_json``."""
        values = asdict(self)
        values["problem"] = {name: _plain(value) for name, value in values["problem"].items()}
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Cell:
        """Return the cell that ``to_json`` wrote."""
        values = json.loads(text)
        kind = PROBLEMS[values["op"]]
        typed = {field.name: _typed(field.type, values["problem"][field.name]) for field in fields(kind)}
        pool, refused = Pool(**values["pool"]), tuple(values["refused"])
        return cls(**{**values, "problem": kind(**typed), "pool": pool, "refused": refused})

    def kernel(self) -> Kernel[Any]:
        """Return the row; raises ValueError where its table does not have it."""
        table = TABLES[self.op]
        for kernel in table.kernels:
            if kernel.name == self.row:
                return kernel
        raise ValueError(f"{self.op} has no row {self.row!r}; its rows are: {', '.join(table.names())}")

    def stores(self) -> bool:
        """Return whether the row writes to the pool, whose shape its problem does not say."""
        return isinstance(self.problem, (StoreKVProblem, QKNormRopeStoreKVProblem))

    def title(self) -> str:
        """Return the problem's numbers in a few words, for the table."""
        problem = self.problem
        if isinstance(problem, PagedAttentionProblem):
            heads = f"{problem.num_q_heads}/{problem.num_kv_heads}x{problem.qk_head_dim}"
            if problem.v_head_dim != problem.qk_head_dim:
                heads += f",{problem.v_head_dim}"
            return f"{heads} {_short(problem.q_dtype)}/{_short(problem.kv_dtype)} p{problem.page_size}"
        if isinstance(problem, MlaAttentionProblem):
            dims = f"{problem.num_heads}x{problem.kv_lora_rank}+{problem.rope_dim}"
            return f"{dims} {_short(problem.q_dtype)}/{_short(problem.kv_dtype)} p{problem.page_size}"
        if isinstance(problem, LatentNormRopeProblem):
            return f"{problem.num_heads}x{problem.kv_lora_rank}+{problem.rope_dim} {_short(problem.dtype)}"
        if isinstance(problem, FewTokenExpertsProblem):
            return f"{problem.num_experts}x{problem.hidden_size}x{problem.intermediate_size} {_short(problem.dtype)}"
        dtype = problem.kv_dtype if isinstance(problem, StoreKVProblem) else problem.qkv_dtype
        pool = self.pool
        return f"{pool.heads}x{pool.k_dim} {_short(dtype)}/{_short(problem.pool_dtype)} p{pool.page_size}"


def standard_layers(arch: str) -> list[LayerProblems]:
    """Return small attention layers of both kinds, with 16-bit and FP8 pools and with several page sizes."""
    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    dense = LayerOutline(tp_q_head_num=8, tp_k_head_num=2, qk_head_dim=128, v_head_dim=128, fused=True)
    latent = latent_outlines(heads=16, kv_lora_rank=512, rope_dim=64, unabsorbed=(192, 128), ours=True)
    bf16 = torch.bfloat16
    layers = [
        LayerProblems(layer=dense, arch=arch, q_dtype=bf16, pool_dtype=pool_dtype, page_size=page_size)
        for pool_dtype, page_size in ((bf16, 1), (bf16, 16), (fp8, 64))
    ]
    layers += [
        LayerProblems(layer=outline, arch=arch, q_dtype=bf16, pool_dtype=pool_dtype, page_size=size, kv_lora_rank=512)
        for pool_dtype, size in ((bf16, 64), (fp8, 1))
        for outline in latent
    ]
    return layers


def standard_cells(arch: str) -> list[Cell]:
    """Return every row of every op that can run on this machine, for each problem of the standard layers, once."""
    cells = [
        Cell(op=table.op, mode=mode, row=kernel.name, problem=problem, pool=Pool.of(layer))
        for layer, mode, table, problem in _standard_modes(arch)
        for kernel in table.kernels
        if kernel.name != few_token_experts.SGLANG and not kernel.why_not(problem)
    ]
    return list({(cell.row, cell.problem, cell.pool if cell.stores() else None): cell for cell in cells}.values())


def standard_verdicts(arch: str) -> dict[str, dict[str, tuple[int, list[str]]]]:
    """Return op -> row -> (standard problems that it can run here, the reasons against the first that it cannot)."""
    found: dict[str, dict[str, tuple[int, list[str]]]] = {
        op: {kernel.name: (0, []) for kernel in table.kernels} for op, table in TABLES.items()
    }
    for _, _, table, problem in _standard_modes(arch):
        rows = found[table.op]
        for kernel in table.kernels:
            reasons = kernel.why_not(problem)
            count, first = rows[kernel.name]
            rows[kernel.name] = (count, first or reasons) if reasons else (count + 1, first)
    return found


def _standard_modes(arch: str) -> Iterator[tuple[LayerProblems, str, Any, Any]]:
    for layer in standard_layers(arch):
        for captured in (False, True):
            for mode, table, problem, key in modes_of(layer, captured=captured, has_sinks=False):
                if not captured or key is not None:  # a store is the same problem in a graph
                    yield layer, mode, table, problem
    experts = FewTokenExpertsProblem(
        arch=arch, dtype=torch.bfloat16, hidden_size=256, intermediate_size=96, num_experts=16, top_k=4
    )
    for forced in (None, "triton"):
        yield layer, "few_token_experts", few_token_experts.TABLE, replace(experts, forced=forced)


def _short(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names.get(dtype, str(dtype).removeprefix("torch.float8_"))


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _typed(kind: Any, value: Any) -> Any:
    if kind != "torch.dtype":  # annotations are text
        return tuple(value) if isinstance(value, list) else value
    dtype = vars(torch)[value]
    assert isinstance(dtype, torch.dtype), value
    return dtype
