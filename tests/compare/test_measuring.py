"""Parts of one variant are all of one server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atom_plugin.compare import measuring, state
from atom_plugin.compare.failure import MeasureError
from atom_plugin.compare.measuring import Part
from atom_plugin.compare.progress import Progress
from atom_plugin.compare.servers import Server
from atom_plugin.recipe import Recipe, Speed, Variant

INFO = dict.fromkeys(("model_path", *measuring.SHOWN_OF_SERVER), "x")


def test_a_url_with_another_server_behind_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {**INFO, "random_seed": 1}
    wanted: list[str] = []
    monkeypatch.setattr(measuring.servers, "running", Server)
    monkeypatch.setattr(Server, "ask", lambda self, path: dict(told))
    recipe = Recipe(title="", model="", variants={"a": Variant(flags=()), "b": Variant(flags=())}, speed=Speed())
    with state.opened(tmp_path, {}) as store:
        run = measuring.Run(recipe, {"a": "http://h:1", "b": "http://h:2"}, None, 1.0, store, Progress(Console()))

        def part(name: str) -> Part:
            return Part(name, name, lambda server, show: store.save("a", name, 1))

        monkeypatch.setattr(measuring, "parts", lambda run, name: [part(one) for one in wanted])
        wanted.append("first")
        measuring.measure(run, "a")
        wanted.append("second")
        told["random_seed"] = 2
        measuring.measure(run, "a")
        wanted.append("third")
        told["kv_cache_dtype"] = "fp8_e4m3"
        with pytest.raises(MeasureError, match="kv_cache_dtype was x, and is fp8_e4m3"):
            measuring.measure(run, "a")
        assert store.has("a", "second") and not store.has("a", "third")
