"""``atom-plugin doctor --selftest``: which cells to run, and the table of what came of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from atom_plugin import device
from atom_plugin.configs import ConfigError, load_spec
from atom_plugin.dispatch import NoKernelError, Table
from atom_plugin.explain import ExplainedSpec, layer_modes
from atom_plugin.explain.check import plan_of
from atom_plugin.explain.report import read_config
from atom_plugin.ops import few_token_experts
from atom_plugin.recipe import RecipeError, load_recipe
from atom_plugin.selftest.cells import Cell, Pool, Problem, standard_cells
from atom_plugin.selftest.parent import HEADER, as_line, as_values, ended_in_order, run_all


class SelfTestError(ValueError):
    """A self-test that cannot begin; the text says why."""


def run(
    recipe: str | None, config: str | None, time_limit: float, *, quiet: bool
) -> tuple[list[dict[str, object]], bool]:
    """Run the rows that a launch of ``recipe`` gets on this machine, or every row that can run here, and print a table.

    ``config``: a config.json to read in place of that of the recipe's model. ``time_limit``: seconds a row. ``quiet``:
    print nothing. Returns (the outcomes as plain values, whether all are ok); raises SelfTestError.
    """
    arch = device.arch()
    if not time_limit > 0:
        raise SelfTestError(f"--time-limit {time_limit:g}: takes seconds, more than 0")
    cells = standard_cells(arch) if recipe is None else recipe_cells(recipe, config, arch)
    if not cells:
        raise SelfTestError(f"no row of any op runs on {arch}: `atom-plugin doctor` says why")

    def show(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    show(f"\nself-test of {len(cells)} calls on {arch}, each against its op's reference:\n{HEADER}")
    outcomes = []
    with ended_in_order():
        for outcome in run_all(cells, time_limit):
            outcomes.append(outcome)
            show(as_line(outcome))
    counts = Counter(outcome.verdict for outcome in outcomes)
    show(f"self-test: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    return [as_values(outcome) for outcome in outcomes], set(counts) == {"ok"}


def recipe_cells(recipe: str, config: str | None, arch: str) -> list[Cell]:
    """Return the row that each mode of a recipe's launch gets on this machine, whose AITER is the one installed here.

    Raises SelfTestError for a recipe, a config or a plan that cannot be read.
    """
    try:
        loaded = load_recipe(recipe)
        if loaded.explain is None:
            raise SelfTestError(f"{recipe}: [explain] is missing, and says how the model is to be served")
        source, raw = read_config(config or loaded.model)
        spec = load_spec(raw, source=source)
        if not isinstance(spec, ExplainedSpec):
            raise SelfTestError(f"{source}: nothing of atom-plugin runs this architecture")
        plan = plan_of(loaded).on(arch)
        cells = [
            _cell_of(mode, table, problem, Pool.of(layer)) for layer, mode, table, problem in layer_modes(spec, plan)
        ]
        return [cell for cell in cells if cell.row != few_token_experts.SGLANG]  # which is not ours to test
    except (RecipeError, ConfigError) as error:
        raise SelfTestError(str(error)) from error
    except ValueError as error:
        if isinstance(error, SelfTestError):
            raise
        raise SelfTestError(f"{recipe}: {error}") from error


def _cell_of(mode: str, table: Table[Any], problem: Problem, pool: Pool) -> Cell:
    try:
        row = table.choose(problem, problem.forced).name
    except NoKernelError as error:
        reasons = tuple(line.strip() for line in str(error).splitlines())
        return Cell(op=table.op, mode=mode, row=None, problem=problem, pool=pool, refused=reasons)
    return Cell(op=table.op, mode=mode, row=row, problem=problem, pool=pool)
