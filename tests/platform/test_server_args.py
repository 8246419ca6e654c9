"""What the platform defaults in a launch, loudly, and what it refuses to load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom_plugin import host
from atom_plugin.cpu import srt_platform, threads
from tests.platform.test_processes import TINY

ATTENTION_DP = {"attn_dp_size": 2} if host.since("0.5.22") else {"dp_size": 2, "enable_dp_attention": True}
CORES = sorted(os.sched_getaffinity(0))


def split(num_ranks: int) -> str:
    return "|".join(",".join(map(str, group)) for group in threads.split_cores(CORES, num_ranks))


LAUNCHES: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "plain": ({}, srt_platform.DEFAULT_MAX_TOTAL_TOKENS, None),
    "bounded by the user": ({"max_total_tokens": 99}, 99, None),
    "many TP ranks": ({"tp_size": 32}, srt_platform.DEFAULT_MAX_TOTAL_TOKENS, 32),
    "attention DP": ({"tp_size": 32, **ATTENTION_DP}, srt_platform.DEFAULT_MAX_TOTAL_TOKENS, 32),
    # up to 0.5.18 the ranks of one replica count
    "replicas": (
        {"tp_size": 16, "dp_size": 2},
        srt_platform.DEFAULT_MAX_TOTAL_TOKENS,
        32 if host.since("0.5.19") else 16,
    ),
}


def test_defaults(run_python: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_attention_heads": 32, "num_key_value_heads": 32}))
    script = Path(__file__).with_name("resolve_flags.py")
    done = run_python(str(script), str(tmp_path), json.dumps([flags for flags, _, _ in LAUNCHES.values()]))
    assert done.returncode == 0, done.stderr
    found = dict(zip(LAUNCHES, json.loads(done.stdout.splitlines()[-1]), strict=True))
    expected = {
        name: [bound, split(num_ranks) if num_ranks else None, "cpu"]
        for name, (_, bound, num_ranks) in LAUNCHES.items()
    }
    assert found == expected
    assert "SGLang runs on the CPU platform of atom-plugin" in done.stderr
    assert "KV pool bounded to 65536 tokens; --max-total-tokens sets another bound." in done.stderr
    assert "32 ranks share " in done.stderr
    assert f"{threads.BIND} is not set: set to {split(32)}." in done.stderr


@pytest.mark.parametrize("quantization", ["fp8", "awq", "compressed-tensors"])
def test_quantised_checkpoints_are_refused(quantization: str) -> None:
    with pytest.raises(ValueError, match=f"quantization '{quantization}' cannot be served on a CPU"):
        srt_platform.AtomCpuPlatform().get_quantization_config(quantization)
