"""``atom-plugin explain --check``: the recipes that we ship are right, and each fault of a recipe is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom_plugin import cli
from atom_plugin.explain import check as checking
from atom_plugin.recipe import load_recipe

REPO = Path(__file__).parents[2]
RECIPES = sorted((REPO / "examples" / "recipes").glob("*.toml"))
CONFIGS = REPO / "tests" / "fixtures" / "hf_configs"
BIG = REPO / "examples" / "recipes" / "qwen3-235b-fp8-8x-mi355x.toml"
BIG_CONFIG = CONFIGS / "Qwen--Qwen3-235B-A22B-Instruct-2507-FP8.json"


def config_of(recipe: Path) -> Path:
    """Return the config that its model was published with."""
    return CONFIGS / f"{load_recipe(recipe).model.replace('/', '--')}.json"


OURS = [path for path in RECIPES if path.stem.startswith(("qwen3-", "kimi-"))]


@pytest.mark.parametrize("recipe", OURS, ids=lambda path: path.stem)
def test_our_recipes_are_right(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also that they are launches of SGLang's model and of ours, and compare accuracy, agreement and speed."""
    assert cli.main(["explain", str(recipe), "--check", "--config", str(config_of(recipe))]) == 0
    captured = capsys.readouterr()
    assert f"{recipe}: nothing is wrong with it" in captured.out and "explain --check:" not in captured.err
    assert ("in a graph" in captured.out) == ("no-graphs" not in recipe.stem)
    loaded = load_recipe(recipe)
    assert list(loaded.variants) == ["sglang", "atom"]
    assert loaded.accuracy and loaded.agreement and loaded.speed


def test_the_recipes_of_the_issue_are_there() -> None:
    models = {(load_recipe(path).model, load_recipe(path).explain) for path in OURS}
    ranks = {(model, explain.tp, explain.ep, explain.page_size) for model, explain in models if explain}
    assert ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", 8, 8, 1024) in ranks
    assert {model for model, *_ in ranks} == {
        "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B", "moonshotai/Kimi-K2-Instruct"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            '"--tp-size", "8"',
            '"--tp-sizes", "8"',
            "sglang: SGLang takes no such launch: unrecognized arguments: --tp-si",
        ),
        ('"fp8_e4m3",', '"fp7",', "argument --kv-cache-dtype: invalid choice: 'fp7'"),
        ('"--tp-size", "8"', '"--tp-size", "4"', "atom: the flags say tp_size 4, and [explain] tp = 8"),
        ('"--ep-size", "8", ', "", "atom: the flags say ep_size 1, and [explain] ep = 8"),
        ("page_size = 1024", "page_size = 512", "the flags say page_size 1024, and [explain] page_size = 512"),
        ('"fp8_e4m3", ', '"auto", ', "the flags say kv_cache_dtype auto, and [explain] kv_cache_dtype = fp8_e4m3"),
        ('"0.85"', '"0.9"', "the flags say mem_fraction_static 0.9, and [explain] 0.85"),
        ('"--model-impl", "atom"', '"--model-impl", "atom", "--pp-size", "2"', "--pp-size 2: the atom model serves"),
        ('"--model-impl", "atom"', '"--model-impl", "atom", "--enable-lora"', "--enable-lora True: the atom model"),
        (
            '"--model-impl", "atom"',
            '"--model-impl", "atom", "--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4"',
            "--speculative-eagle-topk 4: the atom model and backend serves only 1",
        ),
        ('SGLANG_USE_AITER = "1"', 'ATOM_PLUGIN_KERNEL = "x"', "ATOM_PLUGIN_KERNEL is no variable of ours"),
        ('SGLANG_USE_AITER = "1"', 'ATOM_PLUGIN_KERNELS = "x"', "ATOM_PLUGIN_KERNELS='x' is not valid"),
        ("memory = 288", "memory = 32", "the weights do not fit in 0.85 of 32 GiB"),
        ('arch = "gfx950"', 'arch = "cpu"', "the checkpoint is block FP8"),
        ("ep = 8", "ep = 3", "--ep 3 does not divide --tp 8"),
        ("[explain]", "[explained]", "explained: unknown key"),
    ],
)
def test_each_fault_is_named(
    before: str, after: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = BIG.read_text()
    assert before in text
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace(before, after))
    assert cli.main(["explain", str(recipe), "--check", "--config", str(BIG_CONFIG)]) == 1
    assert says in capsys.readouterr().err


def test_a_recipe_without_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('title = "x"\nmodel = "Qwen/Qwen3-30B-A3B"\n')
    assert cli.main(["explain", str(recipe), "--check"]) == 1
    assert "[explain] is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--check", "--arch", "gfx950", "--tp", "8"], "the recipe says how it is served: drop --arch, --tp"),
        (["--check", "--json"], "the recipe says how it is served: drop --json"),
        (["--arch", "gfx950", "--config", "x"], "--config goes with --check"),
    ],
)
def test_flags_that_would_do_nothing(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(BIG), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert cli.main(["doctor", "--config", "x"]) == 2
    assert "--config goes with --selftest RECIPE" in capsys.readouterr().err


def test_without_sglang_its_flags_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking.importlib.util, "find_spec", lambda name: None)
    assert checking.check(BIG, config=str(BIG_CONFIG), why=False)[1] == [
        "SGLang is not installed here, and its flags cannot be checked: pip install 'atom-plugin[sglang]'"
    ]


def test_experts_that_tp_alone_would_cut_inside_of_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Why the recipe has EP 8."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BIG.read_text().replace('"--ep-size", "8", ', "").replace("ep = 8\n", ""))
    assert cli.main(["explain", str(recipe), "--check", "--config", str(BIG_CONFIG)]) == 1
    assert "moe_intermediate_size 1536 is not divisible by 8 ranks into whole FP8 blocks" in capsys.readouterr().err


def test_variables_of_a_recipe_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "store_kv=eager")
    with checking._environment({"ATOM_PLUGIN_KERNELS": "x", "ATOM_PLUGIN_FUSE_QK_NORM_ROPE": "0"}):
        assert checking.os.environ["ATOM_PLUGIN_KERNELS"] == "x"
    assert checking.os.environ["ATOM_PLUGIN_KERNELS"] == "store_kv=eager"
    assert "ATOM_PLUGIN_FUSE_QK_NORM_ROPE" not in checking.os.environ
