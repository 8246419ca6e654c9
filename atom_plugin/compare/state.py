"""The folder of a comparison: what was asked, and every finished part, so that a second run goes on from there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atom_plugin.compare.failure import MeasureError

SETTINGS, LOCK = "settings.json", ".lock"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a run after a crash, sees all of it or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class Store:
    """The finished parts below ``folder``; made by ``opened``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def folder_of(self, variant: str) -> Path:
        """Return the folder of a variant, made where it is not there."""
        folder = self.folder / variant
        folder.mkdir(exist_ok=True)
        return folder

    def path(self, variant: str, part: str) -> Path:
        """Return where the result of a part is, or will be."""
        return self.folder_of(variant) / f"{part}.json"

    def has(self, variant: str, part: str) -> bool:
        """Return whether a part is finished."""
        return self.path(variant, part).is_file()

    def save(self, variant: str, part: str, result: Any) -> None:
        """Keep the result of a finished part."""
        write_whole(self.path(variant, part), json.dumps(result))

    def load(self, variant: str, part: str) -> Any:
        """Return the result of a finished part."""
        return json.loads(self.path(variant, part).read_text())


@contextlib.contextmanager
def opened(folder: Path, settings: Mapping[str, Any]) -> Iterator[Store]:
    """Yield the store of ``folder``, which is made where it is not there; one run at a time.

    ``settings``: all that the results depend on, in sections. Raises MeasureError where a section of the folder's own
    differs, since its finished parts would then be another comparison's, or where another run has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.exists() and any(one.name != LOCK for one in folder.iterdir()):  # a run may have ended in between
        raise MeasureError(f"{folder} holds other files than a comparison's; give an --out that is empty or not there")
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MeasureError(
                f"another comparison is writing to {folder}; wait for it, or give another --out"
            ) from error
        before = json.loads(path.read_text()) if path.exists() else {}
        wanted = json.loads(json.dumps(settings))
        changed = [
            line for section in wanted if section in before for line in differing(before[section], wanted[section])
        ]
        if changed:
            raise MeasureError(
                f"{folder} holds a comparison with other settings; give another --out, or the settings of its own:"
                + "".join(f"\n  {line}" for line in changed)
            )
        write_whole(path, json.dumps({**before, **wanted}, indent=1))
        yield Store(folder)


def differing(before: Any, now: Any, name: str = "") -> list[str]:
    """Return a line for each value that differs between two JSON trees."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*before, *now]))
        return [
            line for one in names for line in differing(before.get(one), now.get(one), f"{name}.{one}" if name else one)
        ]
    return [] if before == now else [f"{name}: it has {json.dumps(before)}, asked is {json.dumps(now)}"]
