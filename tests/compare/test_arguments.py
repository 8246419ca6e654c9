"""What the command line and a recipe's file make together, and which arguments are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from atom_plugin.compare import arguments
from atom_plugin.recipe import Accuracy, Agreement, Recipe, RecipeError, Speed, Variant


def parsed(*words: str) -> tuple[Recipe, dict[str, str]]:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser.add_subparsers().add_parser("compare"))
    ours, flags = arguments.split_flags(["compare", "--out", "out", *words])
    return arguments.recipe_of(parser.parse_args(ours), flags)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.toml"
    path.write_text(
        'title = "t"\nmodel = "org/model"\nshared = ["--tp-size", "8"]\n'
        "[variants.one]\nflags = []\n[variants.two]\nflags = []\n[variants.three]\nflags = ['--x']\n"
        "[accuracy]\nlimit = 100\n[speed]\nconcurrency = [4]\n"
    )
    return str(path)


def test_a_model_alone_takes_every_default() -> None:
    found, urls = parsed("--model", "org/model")
    assert urls == {} and found.model == "org/model" and list(found.variants) == ["sglang", "atom"]
    assert (found.accuracy, found.agreement, found.speed) == (Accuracy(), Agreement(), Speed())


def test_launch_flags_after_the_dashes_are_shared() -> None:
    found, _ = parsed("--model", "org/model", "--", "--device", "cpu", "--port-of-mine")
    assert found.shared == ("--device", "cpu", "--port-of-mine")


def test_a_recipe_and_what_replaces_it(recipe: str) -> None:
    found, _ = parsed(recipe, "--margin", "1", "--lengths", "64/16", "256/32", "--", "--disable-cuda-graph")
    assert found.accuracy == Accuracy(limit=100, margin=1.0)
    assert found.speed == Speed(concurrency=(4,), lengths=((64, 16), (256, 32)))
    assert found.agreement is None
    assert found.shared == ("--tp-size", "8", "--disable-cuda-graph") and list(found.variants) == ["one", "two"]


def test_parts_and_variants_are_chosen(recipe: str) -> None:
    found, _ = parsed(recipe, "--parts", "agreement", "accuracy", "--variants", "three", "one")
    assert found.agreement == Agreement() and found.accuracy == Accuracy(limit=100) and found.speed is None
    assert found.variants == {"three": Variant(flags=("--x",)), "one": Variant(flags=())}


def test_variants_and_servers_of_the_command_line() -> None:
    found, _ = parsed("--model", "m/m", "--variant", "a=--x '1 2'", "--variant", "b=")
    assert found.variants == {"a": Variant(flags=("--x", "1 2")), "b": Variant(flags=())}
    found, urls = parsed("--url", "a=http://127.0.0.1:1/", "--url", "b=http://127.0.0.1:2")
    assert urls == {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"} and list(found.variants) == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "a recipe, --model or two --url are needed"),
        (("--model", "m/m", "--variant", "a=--x"), "two variants of different names are compared, here are 1"),
        (("--model", "m/m", "--variant", "x"), "--variant x: NAME=... is accepted"),
        (
            ("--model", "m/m", "--variant", "a=--x", "--variant", "a=", "--variant", "b="),
            "--variant a=: a is there alr",
        ),
        (("--url", "a=http://h:1", "--url", "a=http://h:2", "--url", "b=http://h:3"), "a is there already"),
        (("--model", "m/m", "--variant", "a=--x '1", "--variant", "b="), "not the words of a shell: No closing quot"),
        (("--model", "m/m", "--variant", "../a=", "--variant", "b="), "variant '../a': letters, digits"),
        (("--model", "m/m", "--variant", "a=", "--url", "b=http://h:1"), "exclude each other"),
        (("--url", "a=http://h:1", "--url", "b=http://h:2", "--", "--tp-size", "2"), "not for those of --url"),
        (("--model", "m/m", "--parts", "speed", "--limit", "3"), "--limit: for accuracy, which is not run"),
        (("--model", "m/m", "--limit", "0"), "accuracy.limit = 0: 1 or more is accepted"),
        (("--model", "m/m", "--repeats", "1"), "speed.repeats = 1: 2 or more is accepted"),
        (("--model", "m/m", "--harness", "openai"), "accuracy.harness[0] = 'openai'"),
        (("--model", "m/m", "--fewshot-dataset", "x.jsonl"), "--fewshot-dataset goes with --dataset"),
        (("absent.toml",), "absent.toml: cannot be read as a TOML file"),
    ],
)
def test_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parsed(*words)
    assert says in str(raised.value)


def test_an_unknown_variant_and_a_recipe_without_parts(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--variants four: the recipe has one, two, three"):
        parsed(recipe, "--variants", "one", "four")
    plan = tmp_path / "plan.toml"
    plan.write_text('title = "t"\nmodel = "m/m"\n[explain]\narch = "gfx950"\n')
    with pytest.raises(RecipeError, match="has no table of accuracy, agreement, speed"):
        parsed(str(plan))
