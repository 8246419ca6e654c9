"""A captured batch keeps its addresses, is refilled before each replay, and reads nothing of SGLang's in the graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from atom_plugin.attention.backend import AtomAttentionBackend
from tests.attention.graph_contract import StaticBatch, check_graph_contract
from tests.attention.world import Shape, World


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("mode", "tokens_per_request"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 4)], ids=["decode", "verify"]
)
def test_the_backend_keeps_the_contract(mode: ForwardMode, tokens_per_request: int, page_size: int) -> None:
    check_graph_contract(
        lambda world: world.backend(), mode=mode, tokens_per_request=tokens_per_request, page_size=page_size
    )


class ReadsLiveTensors(AtomAttentionBackend):
    """Planted: its replay hands the graph SGLang's own lengths instead of a copy."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self.live_lens = forward_batch.seq_lens

    def _attend(self, q_THD: Any, pages: Any, layer: Any, metadata: Any, *, return_lse: bool, sinks: Any) -> Any:
        live = dataclasses.replace(metadata.batch, seq_lens_B=self.live_lens)
        return super()._attend(
            q_THD, pages, layer, dataclasses.replace(metadata, batch=live), return_lse=return_lse, sinks=sinks
        )


class ReadsTheLiveTable(AtomAttentionBackend):
    """Planted: copies the lengths, and looks the slots up inside the graph."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self.rows = forward_batch.req_pool_indices.clone()

    def _attend(self, q_THD: Any, pages: Any, layer: Any, metadata: Any, *, return_lse: bool, sinks: Any) -> Any:
        live_BP = self.req_to_token_pool.req_to_token[self.rows]
        table = dataclasses.replace(metadata.batch.page_table, pages_BP=live_BP)
        live = dataclasses.replace(metadata.batch, page_table=table)
        return super()._attend(
            q_THD, pages, layer, dataclasses.replace(metadata, batch=live), return_lse=return_lse, sinks=sinks
        )


class FreezesLengths(AtomAttentionBackend):
    """Planted: what its capture saw is what every replay sees."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        buffers = self._builder._buffers
        assert buffers is not None
        before = buffers.seq_lens_B.clone()
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if not in_capture:
            buffers.seq_lens_B.copy_(before)


class PlansOncePerCapture(AtomAttentionBackend):
    """Planted: refills its buffers, but keeps what it derived from them at capture."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture:
            metadata: Any = self.forward_metadata
            object.__setattr__(metadata.batch, "captured", False)


class AllocatesAtReplay(AtomAttentionBackend):
    """Planted (fault 10): its replay builds new tensors, where the graph keeps the old addresses."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
        else:
            self.init_forward_metadata(forward_batch)


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        (ReadsLiveTensors, "the replay read live tensors|the replay is wrong"),
        (ReadsTheLiveTable, "the replay read live tensors|the replay is wrong"),
        (FreezesLengths, "the replay is wrong"),
        (PlansOncePerCapture, "the replay is wrong"),
        (AllocatesAtReplay, "the replay's metadata moved: .*seq_lens_B"),
    ],
)
def test_a_planted_fault_fails_the_check(planted: type[AtomAttentionBackend], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_graph_contract(lambda world: planted(world.runner))


def test_a_tail_of_huge_indices_in_our_own_buffers_is_never_read() -> None:
    world = World(Shape(page_size=16))
    backend = world.backend()
    backend.init_cuda_graph_state(2, 2)
    static = StaticBatch(ForwardMode.DECODE, 2, 1)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    backend.forward_metadata.batch.page_table.pages_BP.fill_(2**30)
    requests = [world.add(length) for length in (17, 40)]
    step = world.step(ForwardMode.DECODE, [(request, 1) for request in requests])
    backend.init_forward_metadata_out_graph(static.fill(step))
    out = backend.forward(static.q, static.k, static.v, world.layer, static.batch)
    torch.testing.assert_close(out, step.expected, rtol=1e-5, atol=1e-5)


def test_replay_gives_what_eager_gives_bit_by_bit() -> None:
    world = World(Shape(page_size=16))
    backend = world.backend()
    backend.init_cuda_graph_state(4, 4)
    static = StaticBatch(ForwardMode.DECODE, 4, 1)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    requests = [world.add(length) for length in (17, 40, 41, 3)]
    step = world.step(ForwardMode.DECODE, [(request, 1) for request in requests])
    backend.init_forward_metadata_out_graph(static.fill(step))
    replayed = backend.forward(static.q, static.k, static.v, world.layer, static.batch)
    assert torch.equal(replayed, world.run(backend, step))


def test_eager_metadata_between_two_replays_leaves_the_graph_alone() -> None:
    world = World()
    backend = world.backend()
    backend.init_cuda_graph_state(1, 1)
    static = StaticBatch(ForwardMode.DECODE, 1, 1)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    captured = backend.forward_metadata
    request = world.add(17)
    world.run(backend, world.step(ForwardMode.EXTEND, [(request, 30)]))
    step = world.step(ForwardMode.DECODE, [(request, 1)])
    backend.init_forward_metadata_out_graph(static.fill(step))
    assert backend.forward_metadata is captured
    out = backend.forward(static.q, static.k, static.v, world.layer, static.batch)
    torch.testing.assert_close(out, step.expected, rtol=1e-5, atol=1e-5)


def test_a_graph_larger_than_what_was_allocated_is_refused() -> None:
    world = World()
    backend = world.backend()
    static = StaticBatch(ForwardMode.DECODE, 4, 1)
    with pytest.raises(ValueError, match="a graph of 4 requests is captured, init_cuda_graph_state allocated for 0"):
        backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    backend.init_cuda_graph_state(2, 2)
    with pytest.raises(ValueError, match="a graph of 4 requests is captured, init_cuda_graph_state allocated for 2"):
        backend.init_forward_metadata_out_graph(static.batch, in_capture=True)


def test_a_replay_of_what_was_never_captured_is_refused() -> None:
    world = World()
    backend = world.backend()
    backend.init_cuda_graph_state(4, 4)
    static = StaticBatch(ForwardMode.DECODE, 4, 1)
    with pytest.raises(ValueError, match="a graph of 4 requests with 4 tokens is replayed that was never captured"):
        backend.init_forward_metadata_out_graph(static.batch)


def test_padded_requests_have_length_one() -> None:
    assert World().backend().get_cuda_graph_seq_len_fill_value() == 1


def test_a_ragged_batch_of_as_many_tokens_leaves_the_bounds_of_equal_ones_alone() -> None:
    world = World()
    backend = world.backend()
    backend.init_cuda_graph_state(2, 8)
    verify = StaticBatch(ForwardMode.TARGET_VERIFY, 2, 4)
    backend.init_forward_metadata_out_graph(verify.batch, in_capture=True)
    of_verify: Any = backend.forward_metadata
    ragged = world.step(ForwardMode.EXTEND, [(world.add(9), 3), (world.add(2), 5)])
    backend.init_forward_metadata_out_graph(ragged.batch, in_capture=True)
    of_ragged: Any = backend.forward_metadata
    backend.init_forward_metadata_out_graph(verify.batch)
    assert backend.forward_metadata is of_verify and of_verify.batch.qo_indptr_B1.tolist() == [0, 4, 8]
    assert of_ragged.q_len is None and of_ragged.batch.qo_indptr_B1.tolist() == [0, 3, 8]
