"""The comparison of a row with its reference: right rows pass, and each kind of mistake is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from atom_plugin.attention.limits import LayerOutline
from atom_plugin.attention.tables import TABLES, LayerProblems, modes_of
from atom_plugin.dispatch import Kernel, Tolerance
from atom_plugin.ops.few_token_experts import FewTokenExpertsProblem
from atom_plugin.ops.mla_attention.eager import mla_attention
from atom_plugin.ops.paged_attention.eager import paged_attention
from atom_plugin.ops.qk_norm_rope_store_kv.eager import qk_norm_rope_store_kv
from atom_plugin.ops.store_kv.eager import store_kv
from atom_plugin.selftest.cells import Cell, Pool, standard_cells
from atom_plugin.selftest.compare import compare, compare_bytes
from atom_plugin.selftest.runs import differences
from tests.ops.interpreted import triton_interpreter

__all__ = ["triton_interpreter"]

CELLS = standard_cells("cpu")
EXACT = Tolerance(rtol=0.0, atol=0.0)


def cell_of(op: str, mode: str, *, fp8: bool = False) -> Cell:
    """Return the cell of an op and mode on the CPU with a 16-bit or FP8 pool, the largest pages first."""
    found = [one for one in CELLS if one.op == op and one.mode == mode and ("e4m3" in one.title()) == fp8]
    return max(found, key=lambda one: one.pool.page_size)


@pytest.fixture
def planted() -> Iterator[Callable[[Cell, Any], Cell]]:
    """Return a function that puts a row in front of a cell's table, and the cell that runs it."""
    before = {op: table.kernels for op, table in TABLES.items()}

    def plant(cell: Cell, row: Any) -> Cell:
        eager = next(kernel for kernel in TABLES[cell.op].kernels if kernel.name == "eager")
        kernel: Kernel[Any] = Kernel("planted", lambda problem: [], lambda: row, eager.tolerance)
        TABLES[cell.op].kernels = (kernel, *TABLES[cell.op].kernels)
        return replace(cell, row="planted")

    yield plant
    for op, kernels in before.items():
        TABLES[op].kernels = kernels


def worst(cell: Cell) -> float:
    return max(difference.share for difference in differences(cell))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.mode} {cell.title()}")
def test_rows_of_a_cpu_are_right(cell: Cell) -> None:
    assert cell.row == "eager" and worst(cell) < 0.9


def scaled(**factors: float) -> Any:
    def row(*args: Any, **kwargs: Any) -> Any:
        return paged_attention(*args, **{**kwargs, **{name: kwargs[name] * by for name, by in factors.items()}})

    return row


def shifted(q: Any, k: Any, v: Any, batch: Any, **how: Any) -> Any:
    """Each query sees one key less."""
    fewer = replace(batch, seq_lens_B=(batch.seq_lens_B - 1).clamp(min=1), derived={})
    return paged_attention(q, k, v, fewer, **how)


def unwritten(q: Any, k: Any, v: Any, batch: Any, **how: Any) -> Any:
    """The last request's output is left as it was allocated."""
    out, lse = paged_attention(q, k, v, batch, **how)
    mine = allocated(out)
    last = int(batch.qo_indptr_B1[-2])
    mine[:last] = out[:last]
    return mine, lse


def allocated(like: torch.Tensor) -> torch.Tensor:
    """Return what a row of atom_plugin gets for torch.empty_like."""
    space = {"__name__": "atom_plugin.planted", "torch": torch}
    exec("def allocate(like):\n    return torch.empty_like(like)", space)
    return space["allocate"](like)


def from_the_dump(q: Any, k: Any, v: Any, batch: Any, **how: Any) -> Any:
    """The first page of a request is read from page 0, SGLang's dump, which holds NaN."""
    pages = batch.page_table.pages_BP.clone()
    pages[:, 0] = 0
    return paged_attention(
        q, k, v, replace(batch, page_table=replace(batch.page_table, pages_BP=pages), derived={}), **how
    )


def frozen() -> Any:
    """What is derived from lengths at the capture is kept for the replays."""
    kept: list[torch.Tensor] = []

    def row(q: Any, k: Any, v: Any, batch: Any, **how: Any) -> Any:
        kept.append(batch.seq_lens_B.clone())
        return paged_attention(q, k, v, replace(batch, seq_lens_B=kept[0], derived={}), **how)

    return row


DECODE, EXTEND = "paged_attention decode", "paged_attention extend"


@pytest.mark.parametrize(
    ("mode", "fp8", "row"),
    [
        (DECODE, True, scaled(k_scale=2.0)),
        (DECODE, True, scaled(v_scale=0.5)),
        (EXTEND, False, scaled(scale=1.1)),
        (DECODE, False, shifted),
        (EXTEND, False, shifted),
        (DECODE, False, unwritten),
        (EXTEND, False, from_the_dump),
        (f"{DECODE} in a graph", False, frozen()),
        (f"{EXTEND} in a graph", True, frozen()),
    ],
    ids=["k scale", "v scale", "scale", "one key less", "one key less of an extend", "unwritten", "dump page", "frozen",
         "frozen extend"],
)  # fmt: skip
def test_mistakes_of_paged_attention(mode: str, fp8: bool, row: Any, planted: Callable[[Cell, Any], Cell]) -> None:
    assert worst(planted(cell_of("paged_attention", mode, fp8=fp8), row)) > 1


def test_keys_in_a_row_are_tried_too(planted: Callable[[Cell, Any], Cell]) -> None:
    """As an un-absorbed MLA layer hands them over: a mistake there alone is seen, and mistakes elsewhere still are."""

    def wrong_in_a_row(q: Any, k: Any, v: Any, batch: Any, **how: Any) -> Any:
        return (scaled(scale=1.3) if batch.consecutive else paged_attention)(q, k, v, batch, **how)

    cell = cell_of("paged_attention", "paged_attention chunk of prefixes lse")
    assert worst(cell) < 0.9 and worst(planted(cell, wrong_in_a_row)) > 1


def test_mistakes_of_mla(planted: Callable[[Cell, Any], Cell]) -> None:
    def without_scale(*args: Any, **how: Any) -> Any:
        return mla_attention(*args, **{**how, "kv_scale": 1.0})

    assert worst(planted(cell_of("mla_attention", "mla_attention decode", fp8=True), without_scale)) > 1
    assert worst(planted(cell_of("mla_attention", "mla_attention extend"), without_scale)) < 1  # it is 1 there


def wrong_lse(*args: Any, **how: Any) -> Any:
    out, lse = paged_attention(*args, **how)
    return out, lse * 1.4427  # of base 2


def test_mistakes_of_the_lse(planted: Callable[[Cell, Any], Cell]) -> None:
    found = differences(planted(cell_of("paged_attention", "paged_attention chunk of prefixes lse"), wrong_lse))
    assert {one.what for one in found if one.share > 1} == {"lse of run 1", "lse of run 2"}


@pytest.mark.parametrize("fp8", [False, True])
def test_mistakes_of_a_store(fp8: bool, planted: Callable[[Cell, Any], Cell]) -> None:
    cell = cell_of("store_kv", "store_kv", fp8=fp8)

    def neighbour(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, **scales: Any) -> None:
        store_kv(k, v, k_pages, v_pages, replace(slots, slots_T=slots.slots_T.clone().sub_(1).clamp_(min=0)), **scales)

    def in_place(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, **scales: Any) -> None:
        store_kv(k, v, k_pages, v_pages, slots, **scales)
        k.div_(3)

    def reciprocal(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, *, k_scale: float, v_scale: float) -> None:
        store_kv(k.float() * (1 / k_scale), v, k_pages, v_pages, slots, k_scale=1.0, v_scale=v_scale)

    for row in (neighbour, in_place, *([reciprocal] if fp8 else [])):
        assert worst(planted(cell, row)) > 1, row


def test_mistakes_of_norm_and_rope(planted: Callable[[Cell, Any], Cell]) -> None:
    cell = cell_of("qk_norm_rope_store_kv", "qk_norm_rope_store_kv")
    for change in ({"is_neox": True}, {"eps": 0.1}, {"q_weight": None, "k_weight": None}):

        def row(*args: Any, change: dict[str, Any] = change, **how: Any) -> Any:
            return qk_norm_rope_store_kv(*args, **{**how, **change})

        assert worst(planted(cell, row)) > 1, change


def test_a_row_without_a_tolerance_is_an_error(planted: Callable[[Cell, Any], Cell]) -> None:
    cell = planted(cell_of("paged_attention", DECODE), paged_attention)
    first = TABLES[cell.op].kernels[0]
    TABLES[cell.op].kernels = (replace(first, tolerance={}), *TABLES[cell.op].kernels[1:])
    with pytest.raises(ValueError, match=r"planted states no tolerance for torch\.bfloat16"):
        differences(cell)


@pytest.mark.usefixtures("triton_interpreter")
def test_triton_rows_interpreted() -> None:
    """A GPU's rows through the same comparison: forced by name, in fp32."""
    outline = LayerOutline(tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=32, v_head_dim=32, fused=True)
    layer = LayerProblems(layer=outline, arch="cpu", q_dtype=torch.float32, pool_dtype=torch.float32, page_size=16)
    for captured in (False, True):
        for mode, table, problem, _ in modes_of(layer, captured=captured, has_sinks=True):
            forced = replace(problem, forced="triton")
            cell = Cell(op=table.op, mode=mode, row="triton", problem=forced, pool=Pool.of(layer))
            assert worst(cell) < 0.9, mode


def test_numbers_of_a_comparison() -> None:
    nan, inf = float("nan"), float("inf")
    ours, theirs = torch.tensor([1.0, 2.0, -inf]), torch.tensor([1.0, 2.5, -inf])
    found = compare("x", ours, theirs, Tolerance(rtol=0.1, atol=0.0))
    assert found.error == 0.5 and found.share == pytest.approx(2.0)
    assert compare("x", torch.tensor([1.0, nan]), torch.tensor([1.0, 1.0]), Tolerance(rtol=1, atol=1)).share == inf
    assert compare("x", torch.tensor([-inf]), torch.tensor([inf]), Tolerance(rtol=1, atol=1)).share == inf
    assert compare("x", torch.zeros(2), torch.zeros(3), EXACT).share == inf
    assert compare("x", torch.zeros(0), torch.zeros(0), EXACT).share == 0
    assert compare("x", torch.ones(2), torch.ones(2), EXACT).share == 0
    assert compare_bytes("x", torch.tensor([nan]), torch.tensor([nan])).share == 0
    different = compare_bytes("x", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert different.share == inf and "1 of 4 bytes differ" in different.what


@pytest.mark.usefixtures("triton_interpreter")
def test_experts_of_few_tokens() -> None:
    """Interpreted, as no other row of ours runs them; and a sum without its weights is seen."""
    problem = FewTokenExpertsProblem(
        arch="cpu", dtype=torch.float32, hidden_size=96, intermediate_size=40, num_experts=8, top_k=3, forced="triton"
    )
    cell = replace(CELLS[0], op="few_token_experts", row="triton", problem=problem)
    assert worst(cell) < 0.9
    kernel = TABLES[cell.op].kernels[0]
    row = kernel.load()

    def unweighted(experts: Any, hidden: torch.Tensor, routing: Any) -> torch.Tensor:
        routing.topk_weights = torch.ones_like(routing.topk_weights)
        return row(experts, hidden, routing)

    TABLES[cell.op].kernels = (replace(kernel, load=lambda: unweighted), *TABLES[cell.op].kernels[1:])
    try:
        assert worst(cell) > 1
    finally:
        TABLES[cell.op].kernels = (kernel, *TABLES[cell.op].kernels[1:])
