"""SGLang's own MLA kits, run for ``atom`` on the CPU in fp32 with their tolerance of 3e-2 set to 1e-5.

A floor, not the proof, as test_kits.py says: the kits store latent rows themselves and attend absorbed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla
from sglang.test.kits.attention_unittest.runner_modes import (
    cuda_graph_decode_runner,
    speculative_draft_extend_runner,
    speculative_target_verify_runner,
    split_op_runner,
)
from torch import nn

from atom_plugin import host
from tests.attention.test_kits import LAYOUTS, TOLERANCE, run

CASES = {case.name: case for case in mla.make_mla_cases("atom")}
DECODES = [name for name, case in CASES.items() if case.forward_mode.is_decode()]
EXTENDS = [name for name in CASES if name not in DECODES]


def speculative(mode: ForwardMode) -> dict[str, Any]:
    """Return cases with equal numbers of queries; the kits' own are EAGLE chains of three."""
    how: dict[str, Any] = {"backend": "atom", "forward_mode": mode, "num_heads": 4}
    shapes = {
        "page_1": (1, (2, 7), 3),
        "page_edges": (16, (13, 15, 16), 3),
        "one_token": (16, (15, 16), 1),
        "eight": (16, (9, 30), 8),
    }
    return {
        name: mla.MLAAttentionCase(
            name=f"mla_{name}", page_size=page, prefix_lens=prefixes, extend_lens=(tokens,) * len(prefixes), **how
        )
        for name, (page, prefixes, tokens) in shapes.items()
    }


VERIFY_CASES, DRAFT_CASES = speculative(ForwardMode.TARGET_VERIFY), speculative(ForwardMode.DRAFT_EXTEND_V2)


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the kits' tolerance in every module that holds a copy; give their runner a model, if without layers."""
    monkeypatch.setattr(mla.MockMLAModelRunner, "model", nn.Module(), raising=False)
    modules = (
        mla,
        cuda_graph_decode_runner,
        speculative_target_verify_runner,
        speculative_draft_extend_runner,
        split_op_runner,
    )
    for module in modules:
        monkeypatch.setattr(module, "MLA_ATOL", TOLERANCE)
        monkeypatch.setattr(module, "MLA_RTOL", TOLERANCE)


@pytest.fixture(params=[0, 16], ids=["no rope", "rope"])
def rope(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the kits' number of rotated columns; their writer of two parts is a Triton kernel, the other is not."""

    def of_two_parts(pool: Any, layer: Any, slots: Any, latent: torch.Tensor, rotated: torch.Tensor) -> None:
        pool.set_kv_buffer(layer, slots, torch.cat([latent, rotated], dim=-1), latent)

    monkeypatch.setattr(MLATokenToKVPool, "set_mla_kv_buffer", of_two_parts)
    columns: int = request.param
    return columns


def test_the_kits_hold_what_we_think_they_hold() -> None:
    assert len(CASES) == 10 and len(DECODES) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(CASES))
def test_mla(name: str, layout: str, rope: int) -> None:
    case = CASES[name]
    if layout == "non_monotonic_extend" and case.page_size > 1:
        return  # a layout that SGLang does not have: see test_kits.py
    how = {"atol": TOLERANCE, "rtol": TOLERANCE, "loc_layout": layout, "qk_rope_head_dim": rope}
    run(mla.run_mla_attention_case, case, **how)


def test_a_wrong_backend_fails_the_kits_at_this_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_plugin.attention.backend import AtomAttentionBackend

    attend = AtomAttentionBackend._attend_latent

    def nearly_right(self: Any, q: torch.Tensor, *args: Any) -> Any:
        return attend(self, q * 1.01, *args)

    monkeypatch.setattr(AtomAttentionBackend, "_attend_latent", nearly_right)
    with pytest.raises(AssertionError, match="not close"):
        run(mla.run_mla_attention_case, CASES["mla_decode_page_boundary"], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", DECODES)
def test_decode_graph(name: str, rope: int) -> None:
    how = {"cuda_graph_capture_batch_size": 4, "qk_rope_head_dim": rope}
    run(cuda_graph_decode_runner.run_mla_cuda_graph_decode_case, CASES[name], **how)


@pytest.mark.parametrize("name", list(VERIFY_CASES))
def test_target_verify(name: str, rope: int) -> None:
    kit = speculative_target_verify_runner.run_mla_eagle_verify_case
    run(kit, VERIFY_CASES[name], topk=1, qk_rope_head_dim=rope)


@pytest.mark.parametrize("name", list(VERIFY_CASES))
def test_target_verify_graph(name: str, rope: int) -> None:
    kit = speculative_target_verify_runner.run_mla_eagle_verify_cuda_graph_case
    run(kit, VERIFY_CASES[name], topk=1, qk_rope_head_dim=rope)


def test_a_tree_is_refused_where_the_kit_brings_one() -> None:
    with pytest.raises(ValueError, match="verifies EAGLE chains only"):
        run(speculative_target_verify_runner.run_mla_eagle_verify_case, VERIFY_CASES["page_1"], topk=2)


@pytest.mark.parametrize("name", list(DRAFT_CASES))
def test_draft_extend_graph(name: str, rope: int) -> None:
    kit = speculative_draft_extend_runner.run_mla_draft_extend_v2_cuda_graph_case
    run(kit, DRAFT_CASES[name], qk_rope_head_dim=rope)


@pytest.mark.parametrize("name", EXTENDS)
def test_split_op(name: str) -> None:
    """A padded prefill graph, whose attention breaks out of it."""
    how = {"breakable": True, "static_num_tokens": 64}
    if not host.since("0.5.23"):
        # Up to 0.5.21 the break is a custom op that has a CUDA kernel only.
        with pytest.raises((NotImplementedError, AssertionError, RuntimeError)):
            run(split_op_runner.run_mla_split_op_extend_case, CASES[name], **how)
        return
    run(split_op_runner.run_mla_split_op_extend_case, CASES[name], **how)
