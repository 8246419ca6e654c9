"""What the programs here share: one implementation's steps, timed in a process of its own, tables, results."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
RESULTS = REPO / "benchmarks" / "results"
FIXTURES = REPO / "tests" / "fixtures" / "hf_configs"
#: Measured on an H200 by copies; the datasheet says 4.8e12.
READ_BYTES_PER_S = 4.4e12
VARIANTS: dict[str, dict[str, Any]] = {"atom": {"model_impl": "atom"}, "sglang": {"model_impl": "sglang"}}
#: The last: DeepGEMM compiles the shapes that come, not every one that could.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
#: Words of a log line that says what serves.
_TELLING = ("attention backend", "attention_backend=", "--model-impl atom:")


def measure(variant: str, engine: dict[str, Any], **job: Any) -> dict[str, Any]:
    """Run ``step_runner.py`` on dummy weights with the flags of ``variant`` and of ``engine``; return its figures.

    Raises RuntimeError with what it printed last.
    """
    flags = {"load_format": "dummy", "skip_tokenizer_init": True, "log_level": "info", **engine, **VARIANTS[variant]}
    whole = {"engine": flags, "cells": [], "prefill": [], "profile": [], **job}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("step_runner.py"))], input=json.dumps(whole), text=True,
        capture_output=True, env={**os.environ, **ENVIRONMENT}, timeout=500,
    )  # fmt: skip
    if "RESULT" not in ran.stdout:
        raise RuntimeError(f"{variant} gave no figures:\n{(ran.stdout + ran.stderr)[-4000:]}")
    for line in (ran.stdout + ran.stderr).splitlines():
        if any(word in line for word in _TELLING):
            print(f"  {variant}: {line[:300]}", flush=True)
    figures: dict[str, Any] = json.loads(ran.stdout.rsplit("RESULT", 1)[1])
    return figures


def gpu_gib() -> float | None:
    """Return the GiB that are in use on the first GPU, by whomever; None where nvidia-smi is not there."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1024


def print_row(row: dict[str, Any]) -> None:
    """Print a row of results as one of a table."""
    print("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) + " |", flush=True)


def print_kernels(rows: list[dict[str, Any]], what: str) -> None:
    """Print the kernels of the profiled cells."""
    for row in rows:
        if row["kernels"]:
            print(f"\n{what}, batch {row['batch']}, context {row['context']}: us a step, calls, kernel")
        for name, us, calls in row["kernels"][:40]:
            print(f"{us:9.1f} {calls:6.1f}  {name[:130]}")


def write_results(program: str, rows: list[dict[str, Any]], *, out: Path | None = None, **more: Any) -> None:
    """Write ``out`` or benchmarks/results/PROGRAM.json: device, date, versions, command, ``rows`` and ``more``."""
    import sglang
    import torch

    whole = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__},
        "command": " ".join([f"python benchmarks/gpu/{program}.py", *sys.argv[1:]]), "rows": rows, **more,
    }  # fmt: skip
    (out or RESULTS / f"{program}.json").write_text(json.dumps(whole, indent=1))
