"""The command line of ``atom-plugin compare``, and the recipe that it and a recipe's file make together."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atom_plugin.compare.failure import MeasureError
from atom_plugin.recipe import (
    Accuracy,
    Agreement,
    Recipe,
    RecipeError,
    Speed,
    Variant,
    build,
    default_variants,
    load_recipe,
)

PARTS: dict[str, type[Any]] = {"accuracy": Accuracy, "agreement": Agreement, "speed": Speed}


def lengths(text: str) -> list[int]:
    """Return [input, output] of ``1024/128``."""
    first, _, second = text.partition("/")
    return [int(first), int(second)]


@dataclass(frozen=True)
class Option:
    """A flag that sets one field of a part's settings."""

    name: str
    part: str
    field: str
    kind: Callable[[str], Any]
    help: str
    many: bool = False


OPTIONS = (
    Option(
        "--harness", "accuracy", "harness", str, "lm-eval, sglang (its developers' few-shot benchmark) or both", True
    ),
    Option("--num-fewshot", "accuracy", "num_fewshot", int, "examples in each prompt"),
    Option("--limit", "accuracy", "limit", int, "problems to ask, the first ones; all of them without it"),
    Option("--concurrency", "accuracy", "concurrency", int, "requests at a time"),
    Option("--retries", "accuracy", "retries", int, "attempts at each request"),
    Option("--max-tokens", "accuracy", "max_tokens", int, "of an answer; the share that is cut off is reported"),
    Option("--margin", "accuracy", "margin", float, "points of accuracy that count as the same"),
    Option("--prompts", "agreement", "prompts", int, "problems, the first ones, whatever --limit says"),
    Option("--new-tokens", "agreement", "new_tokens", int, "greedy tokens after each prompt"),
    Option("--top-k", "agreement", "top_k", int, "likeliest tokens that the KL divergence sees"),
    Option("--bound", "agreement", "bound", float, "nats of mean logprob difference above which the variants disagree"),
    Option("--lengths", "speed", "lengths", lengths, "tokens in and out, as 1024/128", True),
    Option("--concurrencies", "speed", "concurrency", int, "requests at a time", True),
    Option("--prompts-per-slot", "speed", "prompts_per_slot", int, "requests for each of the concurrent ones"),
    Option("--repeats", "speed", "repeats", int, "runs of every cell"),
    Option("--speed-margin", "speed", "margin", float, "per cent of output throughput that counts as the same"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what ``compare`` takes."""
    command.add_argument("recipe", nargs="?", help="TOML file; flags of this command line replace what it says")
    command.add_argument("--out", required=True, type=Path, help="folder of the results; a second run goes on in it")
    command.add_argument("--model", help="hub id, or folder")
    command.add_argument("--dataset", help="problems as JSON lines of question and answer; default: GSM8K from the hub")
    command.add_argument("--fewshot-dataset", help="problems that prompts show; default: the first of --dataset")
    command.add_argument(
        "--variant", action="append", default=[], metavar="NAME=OPTIONS",
        help="a server's launch flags, in one word; twice, the baseline first (default: --model-impl sglang, atom)",
    )  # fmt: skip
    command.add_argument("--variants", nargs=2, metavar="NAME", help="two variants of the recipe, the baseline first")
    command.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL",
        help="a server that already runs, instead of launching; twice, the baseline first",
    )  # fmt: skip
    command.add_argument("--parts", nargs="+", choices=list(PARTS), help="default: the recipe's tables, or all")
    command.add_argument("--port", type=int, help="of the launched servers; default: one that is free")
    command.add_argument("--start-timeout", type=float, default=3600, help="seconds that a server may take to answer")
    for part, kind in PARTS.items():
        group, defaults = command.add_argument_group(part), asdict(kind())
        for flag in OPTIONS:
            if flag.part == part:
                default = defaults[flag.field]
                group.add_argument(
                    flag.name,
                    type=flag.kind,
                    nargs="+" if flag.many else None,
                    help=flag.help + ("" if default is None else f" (default: {_as_typed(default)})"),
                )
    command.epilog = "What follows -- are launch flags of every variant: atom-plugin compare ... -- --tp-size 8"


def _as_typed(default: Any) -> str:
    """Return a default as it is written on the command line."""
    if not isinstance(default, tuple):
        return str(default)
    return " ".join("/".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in default)


def split_flags(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return (what argparse is to see, the launch flags after ``--``), which argparse would take for a recipe."""
    if argv[:1] != ["compare"] or "--" not in argv:
        return argv, ()
    at = argv.index("--")
    return argv[:at], tuple(argv[at + 1 :])


def run(arguments: argparse.Namespace, flags: tuple[str, ...]) -> int:
    """Compare as the command line says, with launch ``flags`` for every variant, and return the exit status.

    Raises RecipeError for arguments that cannot be used, MeasureError for what could not be measured.
    """
    from atom_plugin.compare import software

    recipe, urls = recipe_of(arguments, flags)
    missing = software.missing(recipe)
    if missing:
        raise MeasureError(f"{', '.join(missing)} cannot be imported here: pip install 'atom-plugin[compare]'")
    from atom_plugin.compare import command  # imports what may have been missing

    return command.compare(arguments, recipe, urls)


def recipe_of(arguments: argparse.Namespace, flags: tuple[str, ...]) -> tuple[Recipe, dict[str, str]]:
    """Return (what is to be compared, with two variants; the URLs of servers that already run, by name).

    Raises RecipeError for arguments that do not go together.
    """
    urls = _by_name("--url", arguments.url)
    if arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe)
    elif arguments.model or urls:
        recipe = Recipe(title="", model="", accuracy=Accuracy(), agreement=Agreement(), speed=Speed())
    else:
        raise RecipeError("a recipe, --model or two --url are needed")
    recipe = replace(
        recipe,
        model=_absolute(arguments.model) or recipe.model,
        dataset=_absolute(arguments.dataset) or recipe.dataset,
        fewshot_dataset=_absolute(arguments.fewshot_dataset) or recipe.fewshot_dataset,
        shared=(*recipe.shared, *flags),
        variants=_variants(arguments, recipe, urls, flags),
        **_settings(arguments, recipe),
    )
    if recipe.fewshot_dataset and not recipe.dataset:
        raise RecipeError("--fewshot-dataset goes with --dataset: the hub's GSM8K brings its own examples")
    return recipe, urls


def _settings(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return the settings of every part, None for a part that is not run."""
    parts = arguments.parts or [part for part in PARTS if getattr(recipe, part) is not None]
    if not parts:
        raise RecipeError(f"{arguments.recipe} has no table of {', '.join(PARTS)}: add one, or give --parts")
    settings: dict[str, Any] = {}
    for part, kind in PARTS.items():
        given = {flag.field: getattr(arguments, _attribute(flag.name)) for flag in OPTIONS if flag.part == part}
        given = {name: value for name, value in given.items() if value is not None}
        if part not in parts and given:
            names = ", ".join(flag.name for flag in OPTIONS if flag.part == part and flag.field in given)
            raise RecipeError(f"{names}: for {part}, which is not run; add it to --parts")
        current = getattr(recipe, part) or kind()
        build(kind, given, key=part)  # refuses what a recipe would
        settings[part] = replace(current, **_frozen(given)) if part in parts else None
    return settings


def _frozen(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else value
        for name, value in given.items()
    }


def _variants(
    arguments: argparse.Namespace, recipe: Recipe, urls: dict[str, str], flags: tuple[str, ...]
) -> dict[str, Variant]:
    """Return the two variants, the baseline first."""
    if sum(map(bool, (arguments.variant, arguments.variants, urls))) > 1:
        raise RecipeError("--variant, --variants and --url exclude each other")
    if urls:
        if flags or arguments.port:
            raise RecipeError("launch flags and --port are for servers that compare launches, not for those of --url")
        variants = {name: Variant(flags=()) for name in urls}
    elif arguments.variant:
        named = _by_name("--variant", arguments.variant)
        variants = {name: Variant(flags=_words(name, flags)) for name, flags in named.items()}
    elif arguments.variants:
        unknown = [name for name in arguments.variants if name not in recipe.variants]
        if unknown:
            raise RecipeError(f"--variants {' '.join(unknown)}: the recipe has {', '.join(recipe.variants)}")
        variants = {name: recipe.variants[name] for name in arguments.variants}
    else:
        variants = dict(list(recipe.variants.items())[:2]) if arguments.recipe else default_variants()
    if len(variants) != 2:
        raise RecipeError(f"two variants of different names are compared, here are {len(variants)}")
    for name in variants:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise RecipeError(f"variant {name!r}: letters, digits, - and _ make a name")
    return variants


def _by_name(flag: str, texts: list[str]) -> dict[str, str]:
    """Return the values of a flag that takes NAME=VALUE, and no name twice."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"{flag} {text}: NAME=... is accepted")
        if name in values:
            raise RecipeError(f"{flag} {text}: {name} is there already; two different names are accepted")
        values[name] = value.rstrip("/") if flag == "--url" else value
    return values


def _words(name: str, flags: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise RecipeError(f"--variant {name}={flags}: not the words of a shell: {error}") from error


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _absolute(path: str | None) -> str | None:
    """Return a path that names the same from any folder; what is not there is left as it was given."""
    if not path:
        return path
    there = Path(os.path.expanduser(path))  # Path's own raises where there is no such user
    return str(there.resolve()) if there.exists() else path
