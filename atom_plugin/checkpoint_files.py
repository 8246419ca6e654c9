"""The headers of a checkpoint's safetensors files, compared with the weight table before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from atom_plugin.weights import CheckpointTable, Shape

INDEX = "model.safetensors.index.json"


def folder_of(model_path: str, revision: str | None) -> Path | None:
    """Return the local folder of a checkpoint, None when a repo's files are not (all) on this machine yet."""
    if Path(model_path).is_dir():
        return Path(model_path)
    try:
        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError):
        return None


def checkpoint_problems(folder: Path, table: CheckpointTable) -> list[str]:
    """Return what is wrong with the safetensors files of ``folder``, [] for nothing or for a folder without any.

    Reads headers only. A truncated file, a file that the index names and that is missing, and every tensor that is
    missing, unknown or misshapen is a line.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    problems: list[str] = []
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            return [f"{index} is not a safetensors index: {error!r}"]
        problems += [
            f"{folder / name} is missing; {INDEX} names it" for name in sorted(named - {f.name for f in files})
        ]
        files = [file for file in files if file.name in named]
    present: dict[str, Shape] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                present |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            problems.append(f"{file} cannot be read ({error}): truncated or damaged; fetch it again")
    if problems or not files:
        return problems
    return [f"{folder}: {problem}" for problem in table.problems(present)]
