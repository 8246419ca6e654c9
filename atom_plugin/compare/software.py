"""What runs: versions, our own sources, the device and the model's files, which results are only valid for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import logging as hub_logging

import atom_plugin
from atom_plugin.compare.failure import MeasureError
from atom_plugin.recipe import Recipe

PACKAGES = ("sglang", "atom-plugin", "torch", "transformers", "triton", "amd-aiter", "lm-eval")
#: What compare imports, by the name that pip installs; lm-eval only where its harness is asked.
NEEDED = {
    "numpy": "numpy",
    "scipy": "scipy",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "requests": "requests",
    "psutil": "psutil",
    "sglang": "sglang",
}
NEEDED_BY_LM_EVAL = {"lm_eval": "lm-eval", "tenacity": "lm-eval[api]", "aiohttp": "lm-eval[api]"}
NEEDED_BY_HUB = {"datasets": "datasets"}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DEVICE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print("DEVICE" + json.dumps(gpus))
"""


#: Of variables that servers read, and inherit.
PREFIXES = ("ATOM_PLUGIN_", "SGLANG_", "AITER_")


def missing(recipe: Recipe) -> list[str]:
    """Return what has to be installed for this comparison, by the names that pip takes."""
    needed = dict(NEEDED)
    if recipe.accuracy is not None and "lm-eval" in recipe.accuracy.harness:
        needed |= NEEDED_BY_LM_EVAL
    if recipe.dataset is None and (recipe.accuracy or recipe.agreement):
        needed |= NEEDED_BY_HUB
    return sorted({name for module, name in needed.items() if util.find_spec(module) is None})


def versions() -> dict[str, str]:
    """Return the version of each package that is installed, and a hash of our sources as they are."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "atom-plugin sources": _hash_of_sources()}


def _hash_of_sources() -> str:
    """Return a hash over our modules, which may change under one version while a person works on them."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(atom_plugin.__file__).parent, followlinks=True)):
        for name in sorted(names):
            # compare itself only measures
            if name.endswith(".py") and Path(folder).name != "compare":
                digest.update(f"{name}\0".encode() + (Path(folder) / name).read_bytes())
    return digest.hexdigest()[:12]


def device() -> str:
    """Return the accelerators of this machine, or its CPU, in words; asked in another process, which frees them."""
    asked = subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, text=True)
    if asked.returncode != 0:
        raise MeasureError(f"torch cannot say what device this is: {asked.stderr.strip()[-500:]}")
    gpus: list[str] = json.loads(asked.stdout.rsplit("DEVICE", 1)[1])
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return f"CPU, {os.cpu_count()} cores"


def check_model(model: str) -> None:
    """Raise MeasureError where a model is neither a folder with a config.json nor to be had from the hub."""
    if Path(model).exists():
        if not (Path(model) / "config.json").is_file():
            raise MeasureError(f"{model} is there, but has no config.json: give the folder of a checkpoint")
        return
    if "://" in model:
        return  # object stores: the server's own matter
    if not _HUB_ID.fullmatch(model):
        raise MeasureError(f"there is no folder {model}")
    hub_logging.set_verbosity_error()  # one message, ours, and not one for each retry
    try:
        hf_hub_download(model, "config.json")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MeasureError(f"{model} is no folder here, and the hub does not give it ({reason})") from error


def model_files(model: Path) -> list[list[Any]] | None:
    """Return what tells one state of a model's folder from another, None for what is no folder here."""
    if not model.is_dir():
        return None
    paths = sorted(path for path in model.iterdir() if path.suffix in (".json", ".safetensors"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def exported() -> dict[str, str]:
    """Return the variables of this process that change what a server runs: ours, SGLang's and AITER's."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
