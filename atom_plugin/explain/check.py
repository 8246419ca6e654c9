"""Whether a recipe can be launched, found without a GPU: its flags, its variables, its plan, and what we refuse."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from atom_plugin import settings
from atom_plugin.configs import ConfigError
from atom_plugin.explain.plan import Plan
from atom_plugin.explain.report import as_text, explanation_of
from atom_plugin.recipe import Recipe, RecipeError, Variant, load_recipe

NAME = "atom"
#: What the plan and the flags of a launch both say: field of the plan -> SGLang's field and its default.
SAID_TWICE: dict[str, tuple[str, Any]] = {
    "tp": ("tp_size", 1),
    "ep": ("ep_size", 1),
    "page_size": ("page_size", 1),
    "kv_cache_dtype": ("kv_cache_dtype", "auto"),
    "dtype": ("dtype", "bfloat16"),
}


def check(path: Path | str, *, config: str | None, why: bool) -> tuple[str, list[str]]:
    """Return (the explanation of the recipe's plan as text, everything that is wrong with the recipe).

    ``config``: a config.json to read in place of the model's, for a machine without the model and without a hub.
    """
    try:
        recipe = load_recipe(path)
    except RecipeError as error:
        return "", [str(error)]
    if recipe.explain is None:
        return "", [f"{path}: [explain] is missing, and says on which machine the recipe is to run"]
    if importlib.util.find_spec("sglang") is None:
        return "", ["SGLang is not installed here, and its flags cannot be checked: pip install 'atom-plugin[sglang]'"]
    problems, plan = _launches(recipe, plan_of(recipe))
    try:
        found = explanation_of(config or recipe.model, plan)
    except (ConfigError, ValueError) as error:
        return "", [*problems, str(error)]
    problems += found.refused
    problems += [f"no row runs {choice.mode}: see above" for choice in found.choices if choice.row is None]
    if found.tokens == 0:
        problems.append(f"the weights do not fit in {plan.mem_fraction:g} of {plan.memory_gib:g} GiB")
    return as_text(found, why=why), problems


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan of a recipe that has one."""
    stated = recipe.explain
    assert stated is not None
    return Plan(
        arch=stated.arch,
        tp=stated.tp,
        ep=stated.ep,
        dp=stated.dp,
        dtype=stated.dtype,
        kv_cache_dtype=stated.kv_cache_dtype,
        page_size=stated.page_size,
        aiter=stated.aiter,
        memory_gib=stated.memory,
        mem_fraction=stated.mem_fraction_static,
    )


def _launches(recipe: Recipe, plan: Plan) -> tuple[list[str], Plan]:
    """Return what is wrong with the launches of the variants, and the plan, with graphs where one captures them."""
    problems, captures = [], []
    parser = _sglang_parser()
    for name, variant in recipe.variants.items():
        problems += [f"{name}: {problem}" for problem in _variable_problems(recipe, variant)]
        try:
            parsed = parser.parse_args(["--model-path", recipe.model, *recipe.shared, *variant.flags])
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        given = {field: value for field, value in vars(parsed).items() if value != parser.get_default(field)}
        parts = _parts_of(given)
        if parts:
            captures.append("disable_cuda_graph" not in given and "cuda_graph_config" not in given)
            problems += [f"{name}: {problem}" for problem in _atom_problems(given, parts, plan)]
    return problems, Plan(**{**vars(plan), "graphs": any(captures)})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"SGLang takes no such launch: {message}")


def _sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    from atom_plugin import host

    host.add_attention_backend_choice(NAME)
    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _parts_of(given: Mapping[str, Any]) -> list[str]:
    """Return which of ours a launch asks for: "model", "backend"; our models take our backend unless told else."""
    named = [given.get(f"{phase}attention_backend") for phase in ("", "prefill_", "decode_")]
    uses_model = given.get("model_impl") == NAME
    uses_backend = NAME in named or (uses_model and not any(named))
    return [part for part, used in (("model", uses_model), ("backend", uses_backend)) if used]


def _atom_problems(given: Mapping[str, Any], parts: list[str], plan: Plan) -> list[str]:
    """Return why we would not serve a launch with the flags ``given``, and where the plan says something else."""
    from atom_plugin import speculation  # these need SGLang
    from atom_plugin.flags import flag_problems
    from atom_plugin.refusals import FLAGS

    flags = (*FLAGS, *speculation.FLAGS) if given.get("speculative_algorithm") else FLAGS
    cfg = SimpleNamespace(**{flag.field: given.get(flag.field, flag.served[0]) for flag in flags})
    problems = flag_problems(flags, cfg, parts)
    if given.get("speculative_algorithm"):
        problems += speculation.machine_problems(plan.arch)
    for field, (flag, default) in SAID_TWICE.items():
        launched, planned = given.get(flag, default), vars(plan)[field]
        if launched != planned:
            problems.append(f"the flags say {flag} {launched}, and [explain] {field} = {planned}")
    replicas = given.get("attn_dp_size") or (given.get("dp_size", 1) if given.get("enable_dp_attention") else 1)
    if replicas != plan.dp:
        problems.append(
            f"the flags split attention over {replicas} data-parallel replicas, and [explain] dp = {plan.dp}"
        )
    share = given.get("mem_fraction_static", plan.mem_fraction)
    if share != plan.mem_fraction:
        problems.append(f"the flags say mem_fraction_static {share}, and [explain] {plan.mem_fraction}")
    return problems


def _variable_problems(recipe: Recipe, variant: Variant) -> list[str]:
    """Return what is wrong with the variables of ours that a launch is given."""
    variables = {**recipe.environment, **variant.environment}
    known = {setting.name: setting for setting in settings.ALL}
    problems = [
        f"{name} is no variable of ours: {', '.join(known)} are"
        for name in variables
        if name.startswith("ATOM_PLUGIN_") and name not in known
    ]
    with _environment({name: value for name, value in variables.items() if name in known}):
        for name in variables.keys() & known.keys():
            try:
                known[name].get()
            except ValueError as error:
                problems.append(str(error))
    return problems


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
