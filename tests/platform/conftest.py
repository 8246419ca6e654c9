"""Plugins that exist for one test, and Python processes that see them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.plugin_folder import make_plugin

REPO = Path(__file__).parents[2]
OUR_VARIABLES = ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test from a user who set nothing."""
    for name in OUR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def second_platform(tmp_path: Path) -> Callable[[str, str], Path]:
    """Return a function that makes a folder with the platform plugin ``other``, whose activate() gives ``answer``."""

    def make(folder: str, answer: str) -> Path:
        make_plugin(tmp_path / folder, "other", "other_platform:activate", group="sglang.srt.platforms")
        (tmp_path / folder / "other_platform.py").write_text(
            "from sglang.srt.platforms.interface import SRTPlatform\n"
            "from sglang.srt.platforms.device_mixin import PlatformEnum\n"
            "class Other(SRTPlatform):\n    _enum = PlatformEnum.OOT\n"
            f"def activate():\n    return {answer}\n"
        )
        return tmp_path / folder

    return make


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python with our package on its path."""

    def run(*arguments: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(REPO)]
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **env},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
