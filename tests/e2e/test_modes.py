"""Our model on our backend in every way that a server runs it: the same fp32 logprobs as transformers'."""

from __future__ import annotations

from pathlib import Path

import checks
import oracle
import pytest
from server import serve

CHECKPOINT = "moe"
ATOM = ("--model-impl", "atom", "--dtype", "float32")
PAGES = {
    "page 64, mixed chunks of 64": ("--page-size", "64", "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
    "page 1024": ("--page-size", "1024"),
    "no radix cache": ("--disable-radix-cache",),
}
RANKS = {
    "TP 2": ("--tp-size", "2"),
    "EP 2": ("--tp-size", "2", "--ep-size", "2"),
    "attention DP 2, EP 2": ("--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention"),
}
MORE = {
    "page 16, chunked prefill 64": ("--page-size", "16", "--chunked-prefill-size", "64"),
    "page 128": ("--page-size", "128"),
    "no overlap": ("--disable-overlap-schedule",),
    "attention DP 2": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
}
DENSE_RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
FOUR_RANKS = {
    "TP 4": ("--tp-size", "4"),
    "attention DP 2 of TP 2, EP 2": (
        "--tp-size", "4", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention"
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", PAGES.values(), ids=PAGES.keys())
def test_pages_and_chunks(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Every page size, chunked and mixed prefill, no radix cache."""
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *ATOM, *flags, folder=tmp_path) as server:
        if "--disable-radix-cache" in flags:
            for sequences in (checks.solved(CHECKPOINT, 24), checks.joined(CHECKPOINT, (3, 7, 5))):
                checks.assert_fp32(checks.prefill_differences(server, CHECKPOINT, sequences), "prefill")
        else:
            checks.assert_serves_as_transformers(server, CHECKPOINT)
        checks.assert_serves_many_at_once(server, CHECKPOINT)


@pytest.mark.parametrize("flags", RANKS.values(), ids=RANKS.keys())
def test_several_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Tensor, expert and attention-data parallel over gloo; each rank holds what `explain` says."""
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *ATOM, *flags, folder=tmp_path) as server:
        assert [rank["model"] for rank in server.ranks()] == ["atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM"] * 2
        checks.assert_holds_what_explain_says(server, CHECKPOINT, flags)
        checks.assert_fp32(checks.prefill_differences(server, CHECKPOINT, checks.solved(CHECKPOINT, 24)), "prefill")
        checks.assert_fp32(
            checks.decode_differences(server, CHECKPOINT, checks.fragments(CHECKPOINT, 12), 16), "decode"
        )
        one = checks.fragments(CHECKPOINT, 1)
        checks.assert_fp32(checks.decode_differences(server, CHECKPOINT, one, 8), "decode with an idle rank")
        checks.assert_serves_many_at_once(server, CHECKPOINT)


@pytest.mark.slow
@pytest.mark.parametrize("flags", MORE.values(), ids=MORE.keys())
def test_more(flags: tuple[str, ...], tmp_path: Path) -> None:
    """What differs little from the modes above."""
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *ATOM, *flags, folder=tmp_path) as server:
        checks.assert_fp32(checks.prefill_differences(server, CHECKPOINT, checks.solved(CHECKPOINT, 24)), "prefill")
        checks.assert_serves_many_at_once(server, CHECKPOINT)


@pytest.mark.slow
@pytest.mark.parametrize("flags", FOUR_RANKS.values(), ids=FOUR_RANKS.keys())
def test_four_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    """More ranks than KV heads, and attention TP inside attention DP with experts split both ways."""
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *ATOM, *flags, folder=tmp_path) as server:
        assert len(server.ranks()) == 4
        checks.assert_holds_what_explain_says(server, CHECKPOINT, flags)
        checks.assert_fp32(checks.prefill_differences(server, CHECKPOINT, checks.solved(CHECKPOINT, 12)), "prefill")
        checks.assert_fp32(checks.decode_differences(server, CHECKPOINT, checks.fragments(CHECKPOINT, 7), 8), "decode")


@pytest.mark.parametrize(("prefill", "decode"), [("atom", "torch_native"), ("torch_native", "atom")])
def test_backend_for_one_phase_only(prefill: str, decode: str, tmp_path: Path) -> None:
    """Our backend for prefill or for decode only: the fused route is taken in that phase and not in the other."""
    flags = ("--prefill-attention-backend", prefill, "--decode-attention-backend", decode)
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *ATOM, *flags, folder=tmp_path) as server:
        assert len(server.ranks()[0]["backends"]) == 2
        checks.assert_serves_as_transformers(server, CHECKPOINT)


@pytest.mark.slow
def test_dense_tp(tmp_path: Path) -> None:
    """The dense twin, whose head is its embedding, over attention DP 2: the two are split in different ways."""
    with serve(oracle.CHECKPOINTS["dense"], *ATOM, *DENSE_RANKS, folder=tmp_path) as server:
        checks.assert_holds_what_explain_says(server, "dense", DENSE_RANKS)
        checks.assert_fp32(checks.prefill_differences(server, "dense", checks.solved("dense", 12)), "prefill")
        checks.assert_fp32(checks.decode_differences(server, "dense", checks.fragments("dense", 6), 16), "decode")
