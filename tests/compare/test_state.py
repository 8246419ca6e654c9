"""A folder goes on with the comparison that it was begun with, and with no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom_plugin.compare import state
from atom_plugin.compare.command import settings_of
from atom_plugin.compare.failure import MeasureError
from atom_plugin.compare.software import exported
from atom_plugin.recipe import Recipe, Variant

SETTINGS = {"launch": {"model": "m", "variants": [["a", {"flags": ("--x",)}]]}, "speed": {"repeats": 3}}


def test_finished_parts_are_there_in_the_next_run(tmp_path: Path) -> None:
    with state.opened(tmp_path / "out", SETTINGS) as store:
        assert not store.has("a", "speed")
        store.save("a", "speed", {"x": 1})
    with state.opened(tmp_path / "out", SETTINGS) as store:
        assert store.has("a", "speed") and store.load("a", "speed") == {"x": 1}


def test_another_part_may_be_added(tmp_path: Path) -> None:
    with state.opened(tmp_path, SETTINGS):
        pass
    with state.opened(tmp_path, {"launch": SETTINGS["launch"], "agreement": {"prompts": 4}}):
        pass
    assert set(json.loads((tmp_path / state.SETTINGS).read_text())) == {"launch", "speed", "agreement"}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with state.opened(tmp_path, SETTINGS):
        pass
    other = {**SETTINGS, "speed": {"repeats": 4}, "launch": {"model": "n", "variants": [["a", {"flags": ["--x"]}]]}}
    with pytest.raises(MeasureError) as raised, state.opened(tmp_path, other):
        pass
    assert "other settings" in str(raised.value)
    assert 'model: it has "m", asked is "n"' in str(raised.value)
    assert "repeats: it has 3, asked is 4" in str(raised.value)
    assert "variants" not in str(raised.value)


def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(MeasureError, match="holds other files"), state.opened(tmp_path, SETTINGS):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_that_ended_before_its_settings_leaves_the_folder_usable(tmp_path: Path) -> None:
    (tmp_path / state.LOCK).touch()
    with state.opened(tmp_path, SETTINGS) as store:
        assert store.folder == tmp_path


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        state.opened(tmp_path, SETTINGS),
        pytest.raises(MeasureError, match="another comparison is writing"),
        state.opened(tmp_path, SETTINGS),
    ):
        pass


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part.json"
    state.write_whole(path, "old")

    def crash(descriptor: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(state.os, "fsync", crash)
    with pytest.raises(OSError, match="no space"):
        state.write_whole(path, "new, which is longer")
    assert path.read_text() == "old"


def test_a_reader_keeps_the_file_that_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    state.write_whole(path, "old")
    with path.open() as reader:
        state.write_whole(path, "new")
        assert reader.read() == "old" and path.read_text() == "new"


def test_what_a_server_inherits_is_part_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume under another switch would mix two runs."""
    monkeypatch.setenv("ATOM_PLUGIN_FUSE_QK_NORM_ROPE", "0")
    recipe = Recipe(title="", model="m", variants={name: Variant(flags=()) for name in "ab"})
    assert settings_of(recipe, {"a": "http://x", "b": "http://y"})["launch"]["exported"] is None
    assert exported()["ATOM_PLUGIN_FUSE_QK_NORM_ROPE"] == "0" and "PATH" not in exported()
