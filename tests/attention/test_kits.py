"""SGLang's own attention kits, run for ``atom`` on the CPU in fp32 with their tolerance of 3e-2 set to 1e-5.

A floor, not the proof: they pass for far worse backends at their own tolerance. Each kit skips where it cannot build a
backend; here a skip is a failure.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
from sglang.test.kits.attention_unittest.runner_modes import (
    cuda_graph_decode_runner,
    speculative_draft_extend_runner,
    speculative_target_verify_runner,
    split_op_runner,
)

from atom_plugin import host

TOLERANCE = 1e-5
HOW: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
CASES = {case.name: case for case in dense.make_dense_cases("atom")}
SWA_CASES = {
    case.name: case
    for make in (dense.make_swa_no_prefix_input_config_cases, dense.make_swa_prefix_input_config_cases)
    for case in make("atom")
}
VERIFY_CASES = {
    case.name: case
    for case in (
        dense.DenseAttentionCase(
            name=name,
            backend="atom",
            forward_mode=ForwardMode.TARGET_VERIFY,
            num_heads=4,
            num_kv_heads=kv_heads,
            page_size=page_size,
            prefix_lens=prefixes,
            extend_lens=(tokens,) * len(prefixes),
        )
        for name, kv_heads, page_size, prefixes, tokens in (
            ("verify_page_1", 4, 1, (2, 7), 3),
            ("verify_page_edges", 2, 16, (13, 15, 16), 3),
            ("verify_one_token", 1, 16, (15, 16), 1),
        )
    )
}


class NoSkip(unittest.TestCase):
    """What the kits take as their test; they may not skip."""

    def skipTest(self, reason: str) -> None:  # noqa: N802
        raise AssertionError(f"the kit skipped: {reason}")


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the kits' tolerance in every module that holds a copy, and tell which window rule is ours."""
    modules = (
        dense,
        cuda_graph_decode_runner,
        speculative_target_verify_runner,
        speculative_draft_extend_runner,
        split_op_runner,
    )
    for module in modules:
        monkeypatch.setattr(module, "DENSE_ATOL", TOLERANCE)
        monkeypatch.setattr(module, "DENSE_RTOL", TOLERANCE)
    ours = dense._SWA_DECODE_EXTEND_WINDOW | {"atom"}
    monkeypatch.setattr(dense, "_SWA_DECODE_EXTEND_WINDOW", ours)


def run(kit: Callable[..., Any], case: Any, **how: Any) -> None:
    kit(NoSkip(), case, **HOW, **how)


def test_the_kits_hold_what_we_think_they_hold() -> None:
    assert len(CASES) == 12 and len(SWA_CASES) == 2
    assert sum(case.forward_mode.is_decode() for case in CASES.values()) == 3


LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend")
DENSE = [
    pytest.param(case, layout, id=f"{name}-{layout}")
    for name, case in (CASES | SWA_CASES).items()
    for layout in LAYOUTS
    if layout != "non_monotonic_extend" or case.page_size == 1
]


@pytest.mark.parametrize(("case", "layout"), DENSE)
def test_dense(case: Any, layout: str) -> None:
    run(dense.run_dense_attention_case, case, loc_layout=layout)


def test_the_layout_left_out_of_larger_pages_is_none_that_sglang_has() -> None:
    """SGLang keeps the tokens of a page in order (facts 4.5); non_monotonic_extend shuffles them within a page."""
    case = CASES["mha_extend_zero_prefix_exact_page"]
    how = {"batch_size": 1, "seq_lens": case.seq_lens, "prefix_lens": case.prefix_lens, "page_size": 16}
    slot_of = dense.make_loc_fn("non_monotonic_extend", **how, max_context_len=64)
    assert any(slot_of(0, position) % 16 != position % 16 for position in range(16))


def test_a_wrong_backend_fails_the_kits_at_this_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_plugin.attention.backend import AtomAttentionBackend

    attend = AtomAttentionBackend._attend

    def nearly_right(self: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(self, q * 1.01, *args, **kwargs)

    monkeypatch.setattr(AtomAttentionBackend, "_attend", nearly_right)
    with pytest.raises(AssertionError, match="not close"):
        run(dense.run_dense_attention_case, CASES["gqa_decode_page_boundary"])


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.forward_mode.is_decode()])
def test_decode_graph(case: str) -> None:
    run(cuda_graph_decode_runner.run_dense_cuda_graph_decode_case, CASES[case], cuda_graph_capture_batch_size=4)


@pytest.mark.parametrize("case", list(VERIFY_CASES))
def test_target_verify(case: str) -> None:
    run(speculative_target_verify_runner.run_dense_eagle_verify_case, VERIFY_CASES[case], topk=1)


@pytest.mark.parametrize("case", list(VERIFY_CASES))
def test_target_verify_graph(case: str) -> None:
    run(speculative_target_verify_runner.run_dense_spec_verify_cuda_graph_case, VERIFY_CASES[case], topk=1)


def test_a_tree_is_refused_where_the_kit_brings_one() -> None:
    with pytest.raises(ValueError, match="verifies EAGLE chains only"):
        run(speculative_target_verify_runner.run_dense_eagle_verify_case, VERIFY_CASES["verify_page_1"], topk=2)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.forward_mode.is_decode()])
def test_split_op(case: str) -> None:
    """A padded prefill graph, whose attention breaks out of it."""
    if not host.since("0.5.23"):
        # Up to 0.5.21 the break is a custom op that has a CUDA kernel only.
        with pytest.raises((NotImplementedError, AssertionError, RuntimeError)):
            run(split_op_runner.run_dense_split_op_extend_case, CASES[case], breakable=True, static_num_tokens=64)
        return
    run(split_op_runner.run_dense_split_op_extend_case, CASES[case], breakable=True, static_num_tokens=64)
