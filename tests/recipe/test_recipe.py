"""A recipe holds what its file says, and a file with anything else in it is refused by key and by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom_plugin.recipe import Accuracy, Recipe, RecipeError, Speed, Variant, load_recipe

WHOLE = """
title = "The tiny MoE"
model = "../tiny"
dataset = "problems.jsonl"
shared = ["--device", "cpu"]

[environment]
OMP_NUM_THREADS = "2"

[variants.eager]
flags = ["--disable-cuda-graph"]

[variants.graphs]
flags = []
environment = { X = "1" }

[accuracy]
harness = ["lm-eval", "sglang"]
limit = 200
margin = 1

[speed]
lengths = [[64, 16], [256, 16]]
concurrency = [1, 8]

[explain]
arch = "gfx950"
tp = 8
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipes" / "tiny.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_every_value_arrives_and_paths_are_those_beside_the_file(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, WHOLE))
    assert recipe.model == str(tmp_path / "tiny")
    assert recipe.dataset == str(tmp_path / "recipes" / "problems.jsonl")
    assert recipe.variants == {
        "eager": Variant(flags=("--disable-cuda-graph",)),
        "graphs": Variant(flags=(), environment={"X": "1"}),
    }
    assert recipe.accuracy == Accuracy(harness=("lm-eval", "sglang"), limit=200, margin=1.0)
    assert recipe.speed == Speed(lengths=((64, 16), (256, 16)), concurrency=(1, 8))
    assert recipe.explain is not None and (recipe.explain.arch, recipe.explain.tp) == ("gfx950", 8)
    assert recipe.agreement is None and recipe.environment == {"OMP_NUM_THREADS": "2"}


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, 'title = "x"\nmodel = "Qwen/Qwen3-30B-A3B"\n'))
    assert recipe == Recipe(title="x", model="Qwen/Qwen3-30B-A3B")
    assert {name: one.flags for name, one in recipe.variants.items()} == {
        "sglang": ("--model-impl", "sglang"),
        "atom": ("--model-impl", "atom"),
    }


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("title", "titel", "titel: unknown key; accepted are title, model"),
        ('title = "The tiny MoE"', "", "title is missing"),
        ("limit = 200", "limits = 200", "accuracy.limits: unknown key; accepted are harness"),
        ("limit = 200", 'limit = "200"', "accuracy.limit = '200': an integer is accepted"),
        ("limit = 200", "limit = true", "accuracy.limit = True: an integer is accepted"),
        ("limit = 200", "limit = 0", "accuracy.limit = 0: 1 or more is accepted"),
        ("margin = 1", "margin = nan", "accuracy.margin = nan: a finite number is accepted"),
        ("margin = 1", "margin = inf", "accuracy.margin = inf: a finite number is accepted"),
        ("margin = 1", "margin = -1", "accuracy.margin = -1: 0 or more is accepted"),
        ("[64, 16], ", "[64, 16], [64, 16], ", "speed.lengths = [[64, 16], [64, 16], "),
        ("concurrency = [1, 8]", "concurrency = [8, 1, 8]", "concurrency = [8, 1, 8]: one of them is there twice"),
        ('"sglang"]', '"openai"]', "accuracy.harness[1] = 'openai': one of lm-eval, sglang is accepted"),
        ('["lm-eval", "sglang"]', "[]", "accuracy.harness is empty"),
        ("[64, 16], ", "[64], ", "speed.lengths[0] = [64]: a list of 2 is accepted"),
        ("[64, 16], ", "[64, 0], ", "speed.lengths[0][1] = 0: 1 or more is accepted"),
        ("concurrency = [1, 8]", "concurrency = 8", "speed.concurrency = 8: a list is accepted"),
        ('OMP_NUM_THREADS = "2"', "OMP_NUM_THREADS = 2", "environment.OMP_NUM_THREADS = 2: a string is accepted"),
        ('["--device", "cpu"]', '"--device cpu"', "shared = '--device cpu': a list is accepted"),
        ("flags = []", "flag = []", "variants.graphs.flag: unknown key; accepted are flags, environment"),
        ('arch = "gfx950"', 'arch = "mi355"', "explain.arch = 'mi355': one of gfx942, gfx950, sm90, cpu is accepted"),
        ("[variants.eager]\nflags", "[explain.more]\nflags", "explain.more: unknown key"),
        ('[variants.eager]\nflags = ["--disable-cuda-graph"]', "", "[variants] has 1; two or more are accepted"),
        ("[speed]", "speed = 3\n[other]", "other: unknown key"),
        ("[speed]", "[speed", "cannot be read as a TOML file"),
    ],
)
def test_anything_else_is_refused_by_file_and_key(tmp_path: Path, before: str, after: str, says: str) -> None:
    assert before in WHOLE
    path = written(tmp_path, WHOLE.replace(before, after))
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert str(path) in str(raised.value) and says in str(raised.value)


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read as a TOML file"):
        load_recipe(tmp_path / "absent.toml")


def test_a_home_of_nobody_is_a_path_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('title = "t"\nmodel = "~no-such-user/model"\n')
    assert load_recipe(path).model == str(tmp_path / "~no-such-user" / "model")
