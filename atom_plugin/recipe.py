"""Recipes: one TOML file that says how a model is launched, what two variants are compared by, and what is planned.

Every key is checked: a recipe with an unknown key or a value of the wrong type is refused as a whole.
"""

from __future__ import annotations

import math
import os
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HARNESSES = ("lm-eval", "sglang")
ARCHS = ("gfx942", "gfx950", "sm90", "cpu")
DTYPES = ("bfloat16", "float16", "float32")
AITERS = ("wheel", "main", "here")


class RecipeError(ValueError):
    """A recipe that cannot be used; the text names the file, the key and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the servers that are compared: launch ``flags`` and ``environment`` beside the shared ones."""

    flags: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """GSM8K; ``limit`` None for all problems, ``max_tokens`` a new answer, ``margin`` in points of accuracy.

    ``harness``: lm-eval's own task, SGLang's few-shot benchmark, or both.
    """

    harness: tuple[str, ...] = field(default=("lm-eval",), metadata={"accepted": HARNESSES})
    num_fewshot: int = field(default=5, metadata={"least": 0})
    limit: int | None = field(default=None, metadata={"least": 1})
    concurrency: int = field(default=64, metadata={"least": 1})
    retries: int = field(default=3, metadata={"least": 1})
    max_tokens: int = field(default=2048, metadata={"least": 1})
    margin: float = field(default=2.0, metadata={"least": 0})


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Logprobs of the first ``prompts`` problems and the baseline's ``new_tokens`` greedy tokens after each.

    ``top_k``: tokens that the KL divergence sees. ``bound``: the mean absolute difference of logprobs, in nats, above
    which the variants disagree.
    """

    prompts: int = field(default=64, metadata={"least": 1})
    new_tokens: int = field(default=128, metadata={"least": 1})
    top_k: int = field(default=20, metadata={"least": 1})
    bound: float = field(default=0.1, metadata={"least": 0})


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Every pair of ``lengths`` (input, output tokens) at every concurrency, ``repeats`` times.

    ``prompts_per_slot``: requests for each of the concurrent ones. ``margin``: per cent of output throughput.
    """

    lengths: tuple[tuple[int, int], ...] = field(default=((1024, 1024),), metadata={"least": 1})
    concurrency: tuple[int, ...] = field(default=(1, 16, 64), metadata={"least": 1})
    prompts_per_slot: int = field(default=4, metadata={"least": 1})
    repeats: int = field(default=3, metadata={"least": 2})
    margin: float = field(default=5.0, metadata={"least": 0})


@dataclass(frozen=True, kw_only=True)
class Explain:
    """The plan that ``atom-plugin explain --check`` takes; names and units as those of its flags.

    ``memory``: GiB of one device, None where nobody asks what fits.
    """

    arch: str = field(metadata={"accepted": ARCHS})
    tp: int = field(default=1, metadata={"least": 1})
    ep: int = field(default=1, metadata={"least": 1})
    dp: int = field(default=1, metadata={"least": 1})
    dtype: str = field(default="bfloat16", metadata={"accepted": DTYPES})
    kv_cache_dtype: str = "auto"
    page_size: int = field(default=1, metadata={"least": 1})
    aiter: str = field(default="main", metadata={"accepted": AITERS})
    memory: float | None = field(default=None, metadata={"least": 1})
    mem_fraction_static: float = field(default=0.85, metadata={"least": 0})


def default_variants() -> dict[str, Variant]:
    """Return SGLang's own model, the baseline, and ours."""
    return {name: Variant(flags=("--model-impl", name)) for name in ("sglang", "atom")}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A launch and its comparison; a part of the comparison without a table is not run.

    ``model``: a hub id, or a folder where it begins with ``.``, ``~`` or ``/``. ``dataset``: GSM8K problems as JSON
    lines, and ``fewshot_dataset`` those that few-shot prompts show; None for the hub's. ``shared``: launch flags of
    every variant. ``variants``: the first is the baseline. Relative paths are those beside the recipe's file.
    """

    title: str
    model: str
    dataset: str | None = None
    fewshot_dataset: str | None = None
    shared: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    variants: dict[str, Variant] = field(default_factory=default_variants)
    accuracy: Accuracy | None = None
    agreement: Agreement | None = None
    speed: Speed | None = None
    explain: Explain | None = None


def load_recipe(path: Path | str) -> Recipe:
    """Return the recipe of a TOML file, its paths made absolute; RecipeError names what is wrong with it."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as a TOML file: {error}") from error
    for name in ("model", "dataset", "fewshot_dataset"):
        value = table.get(name)
        if isinstance(value, str) and (name != "model" or value.startswith((".", "~", "/"))):
            # Path.expanduser would raise where there is no such user
            table[name] = str((path.parent / os.path.expanduser(value)).resolve())
    try:
        recipe: Recipe = build(Recipe, table)
        if len(recipe.variants) < 2:
            raise RecipeError(f"[variants] has {len(recipe.variants)}; two or more are accepted, or no such table")
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    return recipe


def build(kind: type[Any], table: Mapping[str, Any], *, key: str = "") -> Any:
    """Return the dataclass ``kind`` made of a TOML table, which is the value of ``key``.

    Raises RecipeError for a key or a value that it does not take.
    """
    known = {one.name: one for one in fields(kind)}
    unknown = [name for name in table if name not in known]
    if unknown:
        raise RecipeError(f"{_dotted(key, unknown[0])}: unknown key; accepted are {', '.join(known)}")
    missing = [name for name, one in known.items() if name not in table and _is_required(one)]
    if missing:
        raise RecipeError(f"{_dotted(key, missing[0])} is missing")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in table.items():
        values[name] = _value(value, hints[name], known[name].metadata, key=_dotted(key, name))
    return kind(**values)


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _value(value: Any, hint: Any, limits: Mapping[str, Any], *, key: str) -> Any:
    """Return ``value`` as ``hint`` has it, or raise RecipeError."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # X | None: TOML has no null, so it is an X
        return _value(value, inner[0], limits, key=key)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise RecipeError(f"{key} = {value!r}: a table is accepted")
        return build(hint, value, key=key)
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"{key} = {value!r}: a table is accepted")
        return {name: _value(one, inner[1], limits, key=f"{key}.{name}") for name, one in value.items()}
    if origin is tuple:
        return _tuple(value, inner, limits, key=key)
    return _scalar(value, hint, limits, key=key)


def _tuple(value: Any, inner: tuple[Any, ...], limits: Mapping[str, Any], *, key: str) -> tuple[Any, ...]:
    same = inner[-1] is Ellipsis
    if not isinstance(value, list) or not (same or len(value) == len(inner)):
        raise RecipeError(f"{key} = {value!r}: a list {'' if same else f'of {len(inner)} '}is accepted")
    if limits and not value:
        raise RecipeError(f"{key} is empty: one or more are accepted")
    hints = inner[:1] * len(value) if same else inner
    made = tuple(
        _value(one, hint, limits, key=f"{key}[{i}]") for i, (one, hint) in enumerate(zip(value, hints, strict=True))
    )
    if same and limits and len(set(made)) < len(made):
        raise RecipeError(f"{key} = {value!r}: one of them is there twice")
    return made


def _scalar(value: Any, hint: type[Any], limits: Mapping[str, Any], *, key: str) -> Any:
    words = {str: "a string", int: "an integer", float: "a number"}
    takes = (int, float) if hint is float else hint
    if isinstance(value, bool) or not isinstance(value, takes):
        raise RecipeError(f"{key} = {value!r}: {words[hint]} is accepted")
    if hint is float and not math.isfinite(value):
        raise RecipeError(f"{key} = {value!r}: a finite number is accepted")
    if "accepted" in limits and value not in limits["accepted"]:
        raise RecipeError(f"{key} = {value!r}: one of {', '.join(limits['accepted'])} is accepted")
    if "least" in limits and not value >= limits["least"]:
        raise RecipeError(f"{key} = {value!r}: {limits['least']} or more is accepted")
    return hint(value)
