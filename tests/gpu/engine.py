"""One sglang.Engine in a process of its own, and what it did step by step; without a GPU a dry run on the CPU.

The dry run shows that a test runs: graphs and the kernels of a GPU are left out, the rest is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from tests.e2e.server import LOCK
from tests.plugin_folder import make_plugin

ON_GPU = torch.cuda.is_available()
HERE = Path(__file__).parent
#: Where the probe of ``step_probe.py`` writes.
STEPS = "ATOM_TEST_STEPS"
_NEW_TOKENS = 24


def run_engine(
    folder: Path,
    ids: list[list[int]],
    flags: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    *,
    tails: Sequence[dict[str, Any]] = (),
    more: Mapping[str, Any] | None = None,
) -> Any:
    """Run one engine in a process of its own and return (its result or None, what it printed).

    ``tails``: {"cached": length of a prefix that is sent alone first, "ids": the prefix and what follows}. ``more``:
    other parts of the job of ``engine_logprobs.py``.
    """
    engine = {
        "mem_fraction_static": 0.5, "max_total_tokens": 65536, "log_level": "info",
        "cuda_graph_backend_prefill": "disabled", **flags,
    }  # fmt: skip
    engine = engine if ON_GPU else _on_a_cpu(engine)
    job = {"engine": {"model_path": str(folder), **engine}, "ids": ids, "new_tokens": _NEW_TOKENS}
    with contextlib.nullcontext() if ON_GPU else FileLock(str(LOCK)):
        ran = subprocess.run(
            [sys.executable, str(HERE / "engine_logprobs.py")],
            input=json.dumps({**job, "tails": list(tails), **(more or {})}),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", **(env or {})},
            capture_output=True,
            text=True,
            timeout=500,
        )
    log = ran.stdout + ran.stderr
    return (json.loads(ran.stdout.rsplit("RESULT", 1)[1]) if "RESULT" in ran.stdout else None), log


def _on_a_cpu(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a dry run: what only a GPU has is left out."""
    kept = {name: value for name, value in engine.items() if "cuda_graph" not in name}
    if kept.get("attention_backend") == "fa3":
        kept["attention_backend"] = "torch_native"
    return {**kept, "device": "cpu", "mem_fraction_static": 0.2, "max_total_tokens": 16384}


def probe_environment(folder: Path) -> dict[str, str]:
    """Return the environment of an engine whose steps are counted into ``folder``; ``steps_of`` reads them."""
    site = make_plugin(folder / "site", "atom_step_probe", "step_probe:register")
    path = [str(site), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), STEPS: str(folder / "steps.json")}


def steps_of(folder: Path) -> dict[str, Any]:
    """Return what ``step_probe.py`` counted."""
    found: dict[str, Any] = json.loads((folder / "steps.json").read_text())
    return found
