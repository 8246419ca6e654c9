"""The check that a backend's captured decode reads only what it filled before the replay.

A real graph keeps the addresses, and the Python values, of its capture. This check plays one on a CPU: the captured
attention call is run again on the metadata object of the capture. Before that, all that SGLang may reuse once the
metadata is built (index table, lengths, request rows) is overwritten.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from tests.attention.world import HUGE_SLOT, Shape, World, verify_input


def tensors_in(metadata: Any, name: str = "metadata") -> dict[str, torch.Tensor]:
    """Return every tensor field of a dataclass, nested ones included, by its path."""
    found = {}
    for field in dataclasses.fields(metadata):
        value, path = getattr(metadata, field.name), f"{name}.{field.name}"
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif dataclasses.is_dataclass(value):
            found |= tensors_in(value, path)
    return found


class StaticBatch:
    """SGLang's static buffers for one captured size, as its graph runner holds them."""

    def __init__(self, mode: ForwardMode, requests: int, tokens_per_request: int, shape: Shape | None = None) -> None:
        shape = shape or Shape()
        tokens = requests * tokens_per_request
        self.mode, self.tokens_per_request = mode, tokens_per_request
        self.q = torch.zeros(tokens, shape.num_q_heads * shape.head_dim)
        self.k = torch.zeros(tokens, shape.num_kv_heads, shape.head_dim)
        self.v = torch.zeros(tokens, shape.num_kv_heads, shape.v_head_dim)
        self.batch = ForwardBatch(
            forward_mode=mode,
            batch_size=requests,
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            req_pool_indices=torch.zeros(requests, dtype=torch.int64),
            seq_lens=torch.ones(requests, dtype=torch.int64),
            seq_lens_cpu=torch.ones(requests, dtype=torch.int64),
            out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
            seq_lens_sum=requests,
            positions=torch.zeros(tokens, dtype=torch.int64),
            spec_info=verify_input(tokens_per_request, topk=1) if mode.is_target_verify() else None,
        )

    def fill(self, step: Any) -> SimpleNamespace:
        """Copy a live step in, pad the rest as SGLang does, and return the view that a replay is given."""
        batch, live = self.batch, step.batch
        for name, padding in (("req_pool_indices", 0), ("seq_lens", 1), ("seq_lens_cpu", 1)):
            getattr(batch, name).fill_(padding)
            getattr(batch, name)[: live.batch_size].copy_(getattr(live, name))
        for name in ("out_cache_loc", "positions"):
            getattr(batch, name).zero_()
            getattr(batch, name)[: step.num_real].copy_(getattr(live, name))
        for ours, theirs in ((self.q, step.q), (self.k, step.k), (self.v, step.v)):
            ours.zero_()
            ours[: step.num_real].copy_(theirs.view(-1, *ours.shape[1:]))
        return SimpleNamespace(
            batch_size=batch.batch_size,
            forward_mode=self.mode,
            actual_forward_mode=live.forward_mode,
            input_ids=batch.input_ids,
            positions=batch.positions,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_sum=int(batch.seq_lens.sum()),
            seq_lens_cpu=batch.seq_lens_cpu,
            num_padding=batch.batch_size - live.batch_size,
            encoder_lens=None,
            out_cache_loc=live.out_cache_loc,
            spec_info=batch.spec_info,
        )


def check_graph_contract(
    make_backend: Any,
    *,
    mode: ForwardMode = ForwardMode.DECODE,
    tokens_per_request: int = 1,
    page_size: int = 1,
    world: World | None = None,
) -> None:
    """Capture sizes 4, 2 and 1, replay them with other lengths and with padding, and compare each with the oracle.

    Raises AssertionError that says what moved, or which replay was wrong.
    """
    world = world or World(Shape(page_size=page_size, max_context=256))
    for buffer in world.pool.get_kv_buffer(world.layer.layer_id):
        buffer[0] = 0.0  # SGLang's dump slot: zeros at first, padding afterwards
    backend = make_backend(world)
    backend.init_cuda_graph_state(4, 4 * tokens_per_request)
    graphs = {}
    for requests in (4, 2, 1):
        static = StaticBatch(mode, requests, tokens_per_request, world.shape)
        backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
        backend.init_forward_metadata_in_graph(static.batch)
        metadata = backend.forward_metadata
        addresses = {path: tensor.data_ptr() for path, tensor in tensors_in(metadata).items()}
        assert addresses, "a captured batch has no tensors"
        _run(world, backend, static, metadata)
        graphs[requests] = static, metadata, addresses
    requests = [world.add(length) for length in (1, 40, 17, 90)]
    for size, live in ((4, 4), (4, 3), (2, 1), (1, 1), (4, 4), (2, 2)):
        static, metadata, addresses = graphs[size]
        step = world.step(mode, [(request, tokens_per_request) for request in requests[:live]])
        backend.init_forward_metadata_out_graph(static.fill(step))
        moved = [p for p, tensor in tensors_in(backend.forward_metadata).items() if tensor.data_ptr() != addresses[p]]
        assert not moved, f"the replay's metadata moved: {', '.join(moved)}"
        table = world.req_to_token_pool.req_to_token.clone()
        static.batch.seq_lens.fill_(HUGE_SLOT)
        static.batch.req_pool_indices.fill_(HUGE_SLOT)
        world.req_to_token_pool.req_to_token.fill_(HUGE_SLOT)
        try:
            out = _run(world, backend, static, metadata)
        except IndexError as error:
            raise AssertionError(f"the replay read live tensors of SGLang's: {error}") from error
        finally:
            world.req_to_token_pool.req_to_token.copy_(table)
        torch.testing.assert_close(
            out[: step.num_real], step.expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"the replay is wrong: {text}"
        )


def _run(world: World, backend: Any, static: StaticBatch, metadata: Any) -> torch.Tensor:
    """Run the captured call: on the buffers and the metadata object of the capture."""
    backend.forward_metadata = metadata
    return backend.forward(static.q, static.k, static.v, world.layer, static.batch)
