"""The published config.json files, in the form of their publishers and in the one that transformers 5 saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "fixtures" / "hf_configs"

#: Models that are not ours, whatever their form.
NOT_OURS = (
    "Inferact--Kimi-K3-DSpark",
    "RedHatAI--Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "deepseek-ai--DeepSeek-V3",
)
#: Ours, but transformers 5 saved them as DeepSeek-V3: read only with OVERRIDE.
NEED_OVERRIDE = ("moonshotai--Kimi-K2-Instruct.v5", "moonshotai--Kimi-K2-Thinking.v5")
OVERRIDE = {"model_type": "kimi_k2"}


def names() -> list[str]:
    """Return every file by its name without ``.json``; ``.v5`` marks the form of transformers 5."""
    return sorted(path.name.removesuffix(".json") for path in FOLDER.glob("*.json") if not path.name.startswith("_"))


def understood() -> list[str]:
    """Return those that have a spec without any override."""
    return [name for name in names() if name not in refused()]


def refused() -> list[str]:
    """Return those that are refused by name: not ours, or ours and in need of OVERRIDE."""
    return [name for name in names() if name.removesuffix(".v5") in NOT_OURS or name in NEED_OVERRIDE]


def pairs() -> list[tuple[str, str]]:
    """Return (published form, form of transformers 5) for every model of ours that is here in both."""
    return [
        (name.removesuffix(".v5"), name)
        for name in names()
        if name.endswith(".v5") and name.removesuffix(".v5") not in NOT_OURS
    ]


def path(name: str) -> Path:
    """Return the path of the file ``name``."""
    return FOLDER / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """Return a fresh copy of what the file ``name`` holds."""
    return json.loads(path(name).read_text())


def fragments() -> dict[str, Any]:
    """Return the quantization_config pieces of checkpoints whose whole config is not published, by name."""
    return json.loads((FOLDER / "_fragments.quantization_config.json").read_text())
