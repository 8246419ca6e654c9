"""Inside SGLang's HybridLinearAttnBackend, with a dummy linear backend, all contracts hold (as in Qwen3.5)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from atom_plugin.attention.active import takes_qk_norm_rope
from tests.attention.test_fused_route import FusedWorld
from tests.attention.world import Shape

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
HEAD_DIM, ROTARY_DIM = 256, 64
SHAPE = Shape(head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, max_context=256, page_size=16)
# Qwen3.5's interleaved sections 11, 11, 10: axis i % 3 while that axis has frequencies left, then time
AXES = torch.tensor([i % 3 if i < 3 * (11, 11, 10)[i % 3] else 0 for i in range(ROTARY_DIM // 2)])


class DummyLinear(AttentionBackend):
    """A linear backend without layers; it only counts its metadata calls."""

    needs_cpu_seq_lens = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.linear_attn_backend_calls = 0

    def supports_prefill_graph_extend(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append("eager")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "replay")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append("state")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FusedWorld:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module

    if "check_cuda_graph_backend" in vars(module):  # asks the launch's flags, of which there are none here
        monkeypatch.setattr(module, "check_cuda_graph_backend", lambda phase, backend: False)
    return FusedWorld(SHAPE, rotary_dim=ROTARY_DIM)


def wrapped(world: FusedWorld) -> HybridLinearAttnBackend:
    return HybridLinearAttnBackend(world.backend(), DummyLinear(), [0])


def test_it_is_looked_through(world: FusedWorld) -> None:
    assert takes_qk_norm_rope(wrapped(world), EXTEND)


def test_plain_calls(world: FusedWorld) -> None:
    backend, request = wrapped(world), world.add(20)
    for mode, num in ((EXTEND, 33), (DECODE, 1)):
        step = world.step(mode, [(request, num)])
        torch.testing.assert_close(world.run(backend, step), step.expected, rtol=1e-5, atol=1e-5)
    assert backend.linear_attn_backend.calls == ["eager", "eager"]


def test_kwargs_pass_through_with_partial_rope(world: FusedWorld) -> None:
    backend, request = wrapped(world), world.add(20)
    for mode, num in ((EXTEND, 33), (DECODE, 1)):
        step = world.fused_step(mode, [(request, num)])
        out = world.run(backend, step, **world.kwargs())
        torch.testing.assert_close(out, step.expected, rtol=1e-5, atol=1e-5)


def test_mrope_positions_of_three_axes(world: FusedWorld) -> None:
    """Text has three equal rows; an image gives each axis its own, and each frequency follows its axis."""
    world.layer.qk_norm_rope = dataclasses.replace(
        world.layer.qk_norm_rope, position_source="mrope_positions", axis_of_frequency=AXES
    )
    backend, request = wrapped(world), world.add(20)
    step = world.fused_step(EXTEND, [(request, 33)])
    step.batch.mrope_positions = step.batch.positions.expand(3, -1).contiguous()
    step.batch.positions = None
    out = world.run(backend, step, **world.kwargs())
    torch.testing.assert_close(out, step.expected, rtol=1e-5, atol=1e-5)
    stored = world.pool.get_key_buffer(0)[step.batch.out_cache_loc].clone()
    step.batch.mrope_positions[1] += 5
    world.run(backend, step, **world.kwargs())
    moved = (world.pool.get_key_buffer(0)[step.batch.out_cache_loc] - stored).abs().amax((0, 1)) > 1e-6
    turned = torch.cat([AXES == 1, AXES == 1])
    assert torch.equal(moved[:ROTARY_DIM], turned) and not moved[ROTARY_DIM:].any()


def test_capture_and_replay(world: FusedWorld) -> None:
    """Metadata of both children comes through the wrapper's own methods."""
    backend, request = wrapped(world), world.add(20)
    backend.init_cuda_graph_state(1, 1)
    step = world.step(DECODE, [(request, 1)])
    backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
    backend.init_forward_metadata_out_graph(step.batch)
    torch.testing.assert_close(world.attend(backend, step), step.expected, rtol=1e-5, atol=1e-5)
    assert backend.linear_attn_backend.calls == ["state", "capture", "replay"]


def test_an_unknown_kwarg_is_not_swallowed_on_the_way(world: FusedWorld) -> None:
    step = world.step(EXTEND, [(world.add(20), 3)])
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk_indices'"):
        world.run(wrapped(world), step, topk_indices=torch.zeros(1))
