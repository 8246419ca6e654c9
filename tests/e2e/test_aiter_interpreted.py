"""A server on a CPU whose attention is AITER's own Triton kernel, interpreted: the tokens of the reference row."""

from __future__ import annotations

import os
from pathlib import Path

import checks
import oracle
import pytest
from server import serve

from tests.aiter.wheel import unpacked
from tests.plugin_folder import make_plugin

REPO = Path(__file__).parents[2]
NEW_TOKENS = 8


def _serve_two_requests(row: str, folder: Path, **env: str) -> tuple[list[list[int]], str]:
    """Return the new tokens of two short greedy requests, sent at once, and the log of a server with ``row`` forced."""
    flags = ("--dtype", "float32", "--model-impl", "atom", "--page-size", "16")
    variables = {"ATOM_PLUGIN_KERNELS": f"paged_attention={row}", **env}
    with serve(oracle.CHECKPOINTS["dense"], *flags, folder=folder, env=variables, max_total_tokens=1024) as server:
        answers = checks.decode(server, checks.fragments("dense", 2), NEW_TOKENS, ignore_eos=True)
        log = server.log.read_text(errors="replace")
    tokens = [[entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    return tokens, log


@pytest.mark.slow
def test_the_tokens_are_those_of_the_reference_row(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, so no server ran on AITER's kernel")
    plugin = make_plugin(tmp_path / "plugin", "atom_test_aiter", "aiter_plugin:register")
    got, log = _serve_two_requests(
        "aiter_unified_attention",
        tmp_path / "aiter",
        AITER_FOLDER=str(unpacked()),
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join([str(plugin), str(REPO)]),
    )
    want, _ = _serve_two_requests("reference", tmp_path / "reference")
    assert got == want and all(len(tokens) == NEW_TOKENS for tokens in got)
    assert "The attention backend atom on cpu: paged_attention=aiter_unified_attention" in log
