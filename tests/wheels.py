"""Wheels that tests look into or put on the path, and never install: each is downloaded and unpacked once."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

CACHE = Path(__file__).parents[1] / ".cache" / "wheels"


class DownloadError(RuntimeError):
    """A wheel that pip could not download; the text is pip's."""


def unpacked(requirement: str, *options: str) -> Path:
    """Return the folder that the wheel of ``requirement`` (name==version) is unpacked in; raise DownloadError.

    ``options`` are pip's. Safe to call from several processes at once.
    """
    folder = CACHE / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            files = CACHE / "files" / folder.name
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", *options]
            done = subprocess.run([*command, "-d", str(files), requirement], capture_output=True, text=True)
            if done.returncode != 0:
                raise DownloadError(f"{requirement} cannot be downloaded: {done.stderr[-500:]}")
            (wheel,) = files.glob("*.whl")
            partial = Path(f"{folder}.partial")
            zipfile.ZipFile(wheel).extractall(partial)
            partial.rename(folder)
    return folder
