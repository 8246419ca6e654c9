"""The package as a user installs it: contents of the wheel, entry points, dependencies, links, house rules."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PRODUCT = [path for folder in ("atom_plugin", "models", "configs") for path in sorted((REPO / folder).rglob("*.py"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build a wheel from a copy of the tree."""
    out = tmp_path_factory.mktemp("wheel")
    tree = out / "tree"
    names = ("atom_plugin", "models", "configs", "pyproject.toml", "README.md", "LICENSE")
    tree.mkdir()
    for name in names:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, tree], check=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_wheel_holds_models_and_configs_and_no_tests(wheel: zipfile.ZipFile) -> None:
    """The linked folders arrive as packages, once, and nothing else of the checkout does."""
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    assert "atom_plugin/models/qwen3_moe.py" in names and "atom_plugin/configs/qwen3.py" in names
    assert {name.split("/")[0] for name in names} == {"atom_plugin"}


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    """The names that SGLang and the shell look for."""
    (info,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(info).decode()
    assert "[sglang.srt.plugins]\natom = atom_plugin.register:register" in text
    assert "[sglang.srt.platforms]\natom_cpu = atom_plugin.platform:activate" in text
    assert "[console_scripts]\natom-plugin = atom_plugin.cli:main" in text


def test_nothing_of_the_host_is_required() -> None:
    """Installing must not pull or pin torch, SGLang, transformers or AITER."""
    required = [line for line in metadata.requires("atom-plugin") or [] if "extra ==" not in line]
    assert not [line for line in required if re.match(r"(torch|sglang|transformers|triton|amd-aiter|aiter)\b", line)]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(REPO)))
def test_airlocks_and_house_rules(path: Path) -> None:
    """AITER and transformers behind their airlocks, no ``import models``, no catch-all, no getattr on a config."""
    relative = path.relative_to(REPO)
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            root = name.split(".")[0]
            assert root not in ("models", "configs"), f"{relative}:{node.lineno}: import atom_plugin.{root}"
            assert root != "aiter" or relative.name == "aiter_lib.py", f"{relative}:{node.lineno} imports aiter"
            assert root != "transformers" or str(relative) == "configs/airlock.py", f"{relative}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("everything", "Exception", "BaseException"), f"{relative}:{node.lineno}: {caught}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            first = ast.unparse(node.args[0])
            assert "config" not in first or len(node.args) < 3, f"{relative}:{node.lineno}: a hidden default"


@pytest.mark.parametrize("link", ["models", "configs"])
def test_a_lost_link_says_what_to_do(link: str, tmp_path: Path) -> None:
    """A zip download turns the links into text files; the import then names the remedy."""
    shutil.copytree(REPO / "atom_plugin", tmp_path / "atom_plugin", symlinks=True)
    (tmp_path / "atom_plugin" / link).unlink()
    (tmp_path / "atom_plugin" / link).write_text(f"../{link}")
    for other in {"models", "configs"} - {link}:
        shutil.copytree(REPO / other, tmp_path / other)
    ran = subprocess.run([sys.executable, "-c", "import atom_plugin"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode != 0 and f"ln -sfn ../{link} atom_plugin/{link}" in ran.stderr


def test_settings_are_all_listed_in_the_readme() -> None:
    """Every environment variable is documented where a user looks."""
    from atom_plugin import settings

    readme = (REPO / "README.md").read_text()
    assert not [setting.name for setting in settings.ALL if setting.name not in readme]
