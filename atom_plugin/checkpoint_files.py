"""The headers of a checkpoint's safetensors files, compared with the weight table before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from atom_plugin.weights import CheckpointTable, Shape, some_of

INDEX = "model.safetensors.index.json"
HEADER_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}


def folder_of(model_path: str, revision: str | None) -> Path | None:
    """Return the local folder of a checkpoint, None when a repo's files are not (all) on this machine yet."""
    if Path(model_path).is_dir():
        return Path(model_path)
    try:
        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError):
        return None


def checkpoint_problems(folder: Path, table: CheckpointTable) -> list[str]:
    """Return what is wrong with the safetensors files of ``folder``; [] for nothing.

    Reads headers only. No file at all, a truncated one, one that the index names and that is not there, a tensor in two
    files, and every tensor that is missing, unknown, misshapen or of a dtype that is no weight's is a line.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    problems: list[str] = []
    if index.is_file():
        try:
            named = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            return [f"{index} is not a safetensors index: {error!r}"]
        problems += [
            f"{folder / name} is missing; {INDEX} names it" for name in sorted(named - {f.name for f in files})
        ]
        files = [file for file in files if file.name in named]
    if not files and not problems:
        return [f"{folder} holds no *.safetensors that can be loaded; others are not served"]
    present: dict[str, Shape] = {}
    for file in files:
        try:
            headers = headers_of(file)
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} cannot be read ({error}): truncated or damaged; fetch it again")
            continue
        problems += [f"{file}: {name} is in another file as well" for name in sorted(headers.keys() & present.keys())]
        odd: dict[tuple[str, tuple[torch.dtype, ...]], list[str]] = {}
        for name, (shape, dtype) in headers.items():
            present[name] = shape
            accepted = table.dtypes(name)
            if accepted is not None and HEADER_DTYPES.get(dtype) not in accepted:
                odd.setdefault((dtype, accepted), []).append(name)
        problems += [
            f"{file}: {len(names)} tensors stored as {dtype}: {some_of(names)}; "
            f"accepted: {', '.join(map(str, accepted))}"
            for (dtype, accepted), names in odd.items()
        ]
    return problems or [f"{folder}: {problem}" for problem in table.problems(present)]


def headers_of(file: Path) -> dict[str, tuple[Shape, str]]:
    """Return (shape, dtype as safetensors writes it) of each tensor of a file."""
    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
