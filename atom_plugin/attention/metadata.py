"""Attention metadata: one builder for eager, capture and replay, which differ only in whose memory is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom_plugin import host
from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.paged_attention import PagedBatch


@dataclass(frozen=True, kw_only=True)
class DecodeMetadata:
    """One query token a request; ``num_tokens`` of them, padded rows included."""

    num_tokens: int
    batch: PagedBatch
    q_len: int = 1


@dataclass(frozen=True, kw_only=True)
class ExtendMetadata:
    """Any number of query tokens a request: extend, mixed, target verify, draft extend. ``num_tokens`` in all.

    ``q_len``: query tokens of each request in the modes that have as many of each, else None.
    """

    num_tokens: int
    batch: PagedBatch
    q_len: int | None


@dataclass(frozen=True, kw_only=True)
class IdleMetadata:
    """A batch without work for attention."""


Metadata = DecodeMetadata | ExtendMetadata | IdleMetadata


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step, read from SGLang's batch. ``seq_lens_B``: keys of each request including this step's new tokens.

    ``q_len``: as in ExtendMetadata, and ``extend_seq_lens_B`` where there is none. All tensors may be SGLang's own.
    """

    is_decode: bool
    q_len: int | None
    seq_lens_B: torch.Tensor
    req_pool_indices_B: torch.Tensor
    extend_seq_lens_B: torch.Tensor | None
    num_tokens: int
    max_q_len: int
    max_seq_len: int

    @property
    def requests(self) -> int:
        """Return how many there are, padded ones included."""
        return self.seq_lens_B.shape[0]

    def query_bounds(self) -> torch.Tensor:
        """Return the bounds of the queries in new memory; with a ``q_len`` they are the same in every such step."""
        device = self.seq_lens_B.device
        if self.q_len is not None:
            return torch.arange(0, self.num_tokens + 1, self.q_len, dtype=torch.int32, device=device)
        assert self.extend_seq_lens_B is not None
        bounds_B1 = torch.zeros(self.requests + 1, dtype=torch.int32, device=device)
        torch.cumsum(self.extend_seq_lens_B, 0, dtype=torch.int32, out=bounds_B1[1:])
        return bounds_B1


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Memory of what changes from step to step; shapes and dtypes as in PagedBatch."""

    seq_lens_B: torch.Tensor
    pages_BP: torch.Tensor

    @classmethod
    def zeros(cls, *, max_requests: int, max_pages: int, device: torch.device) -> _Buffers:
        """Allocate for ``max_requests`` requests of ``max_pages`` pages; unused entries name page 0."""
        return cls(
            seq_lens_B=torch.zeros(max_requests, dtype=torch.int32, device=device),
            pages_BP=torch.zeros(max_requests, max_pages, dtype=torch.int32, device=device),
        )

    def first(self, requests: int) -> _Buffers:
        """Return the same memory, cut to ``requests`` requests."""
        return _Buffers(seq_lens_B=self.seq_lens_B[:requests], pages_BP=self.pages_BP[:requests])

    def fill(self, step: _Step, req_to_token: torch.Tensor, page_size: int) -> None:
        """Copy the step in, in place: SGLang may reuse its own memory from then on.

        Pages past its longest request keep what they hold.
        """
        self.seq_lens_B.copy_(step.seq_lens_B)
        slots = req_to_token[:, : step.max_seq_len : page_size]
        pages_BP = self.pages_BP[:, : slots.shape[1]]
        torch.index_select(slots, 0, step.req_pool_indices_B, out=pages_BP)
        if page_size > 1:
            pages_BP.div_(page_size, rounding_mode="floor")


class MetadataBuilder:
    """Builds the metadata of one backend from SGLang's batches.

    ``req_to_token``: SGLang's int32 [requests + 1, most tokens] of token slots, read during a build and never after.
    The buffers for captured batches belong to the builder and never move; every captured batch size is a cut of them.
    """

    def __init__(self, *, req_to_token: torch.Tensor, page_size: int) -> None:
        self._req_to_token = req_to_token
        self._page_size = page_size
        self._buffers: _Buffers | None = None
        self._captured: dict[tuple[bool, int | None, int, int], DecodeMetadata | ExtendMetadata] = {}

    @property
    def max_seq_len(self) -> int:
        """Return the most tokens that a request can have."""
        return self._req_to_token.shape[1]

    def allocate_for_graphs(self, max_requests: int) -> None:
        """Allocate what captured batches of up to ``max_requests`` requests read; earlier captures end."""
        self._captured.clear()
        max_pages = -(-self.max_seq_len // self._page_size)
        self._buffers = _Buffers.zeros(max_requests=max_requests, max_pages=max_pages, device=self._req_to_token.device)

    def build(self, forward_batch: Any) -> Metadata:
        """Return the metadata of a batch that runs once, in memory of its own."""
        if _is_idle(forward_batch):
            return IdleMetadata()
        step = _step_of(forward_batch)
        buffers = _Buffers(
            seq_lens_B=torch.empty_like(step.seq_lens_B, dtype=torch.int32),
            pages_BP=self._req_to_token.new_empty(step.requests, -(-step.max_seq_len // self._page_size)),
        )
        buffers.fill(step, self._req_to_token, self._page_size)
        return self._metadata(step, buffers, step.query_bounds(), captured=False)

    def capture(self, forward_batch: Any) -> Metadata:
        """Return the metadata of a batch about to be captured, in the builder's buffers."""
        step = _step_of(forward_batch)
        if self._buffers is None or step.requests > self._buffers.seq_lens_B.shape[0]:
            allocated = 0 if self._buffers is None else self._buffers.seq_lens_B.shape[0]
            raise ValueError(
                f"a graph of {step.requests} requests is captured, init_cuda_graph_state allocated for {allocated}"
            )
        before = self._captured.get(_graph_of(step))
        if before is not None:  # what another capture reads stays where it is
            return self.replay(forward_batch)
        buffers = self._buffers.first(step.requests)
        buffers.fill(step, self._req_to_token, self._page_size)
        metadata = self._metadata(step, buffers, step.query_bounds(), captured=True)
        self._captured[_graph_of(step)] = metadata
        return metadata

    def replay(self, forward_batch: Any) -> Metadata:
        """Refill what the captured graph reads, and return the metadata that it was captured with."""
        step = _step_of(forward_batch)
        metadata = self._captured.get(_graph_of(step))
        if metadata is None:
            raise ValueError(
                f"a graph of {step.requests} requests with {step.num_tokens} tokens is replayed that was never captured"
            )
        assert self._buffers is not None
        self._buffers.first(step.requests).fill(step, self._req_to_token, self._page_size)
        if step.q_len is None:
            metadata.batch.qo_indptr_B1.copy_(step.query_bounds())
        return metadata

    def _metadata(
        self, step: _Step, buffers: _Buffers, qo_indptr_B1: torch.Tensor, *, captured: bool
    ) -> DecodeMetadata | ExtendMetadata:
        batch = PagedBatch(
            qo_indptr_B1=qo_indptr_B1,
            seq_lens_B=buffers.seq_lens_B,
            page_table=PageTable(pages_BP=buffers.pages_BP, page_size=self._page_size),
            max_q_len=step.max_q_len,
            max_seq_len=self.max_seq_len if captured else step.max_seq_len,
            captured=captured,
            one_query_each=step.is_decode,
        )
        if step.is_decode:
            return DecodeMetadata(num_tokens=step.num_tokens, batch=batch)
        return ExtendMetadata(num_tokens=step.num_tokens, batch=batch, q_len=step.q_len)


def _graph_of(step: _Step) -> tuple[bool, int | None, int, int]:
    # with the q_len: a ragged step of as many tokens refills its bounds, and one of equal lengths counts on them
    return step.is_decode, step.q_len, step.requests, step.num_tokens


def _is_idle(forward_batch: Any) -> bool:
    return forward_batch.forward_mode.is_idle() or forward_batch.seq_lens.shape[0] == 0


def _step_of(forward_batch: Any) -> _Step:
    mode, seq_lens_B = forward_batch.forward_mode, forward_batch.seq_lens
    requests = seq_lens_B.shape[0]
    max_seq_len = _longest(seq_lens_B, forward_batch.seq_lens_cpu)
    if mode.is_target_verify():  # seq_lens leaves out the draft tokens
        host.refuse_tree_verify(forward_batch.spec_info)
        q_len = forward_batch.spec_info.draft_token_num
        seq_lens_B, max_seq_len = seq_lens_B + q_len, max_seq_len + q_len
    elif mode.is_draft_extend_v2():
        q_len = forward_batch.spec_info.num_tokens_per_req
    elif mode.is_decode():
        q_len = 1
    else:
        return _ragged_step(forward_batch, max_seq_len)
    return _Step(
        is_decode=mode.is_decode(),
        q_len=q_len,
        seq_lens_B=seq_lens_B,
        req_pool_indices_B=forward_batch.req_pool_indices,
        extend_seq_lens_B=None,
        num_tokens=requests * q_len,
        max_q_len=q_len,
        max_seq_len=max_seq_len,
    )


def _ragged_step(forward_batch: Any, max_seq_len: int) -> _Step:
    if forward_batch.extend_seq_lens is None or forward_batch.extend_seq_lens_cpu is None:
        raise ValueError(f"a batch in {forward_batch.forward_mode.name} mode has no extend_seq_lens")
    return _Step(
        is_decode=False,
        q_len=None,
        seq_lens_B=forward_batch.seq_lens,
        req_pool_indices_B=forward_batch.req_pool_indices,
        extend_seq_lens_B=forward_batch.extend_seq_lens,
        num_tokens=sum(forward_batch.extend_seq_lens_cpu),
        max_q_len=max(forward_batch.extend_seq_lens_cpu),
        max_seq_len=max_seq_len,
    )


def _longest(seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor | None) -> int:
    """Return the longest length; from SGLang's host copy where the lengths are on an accelerator, to wait for none."""
    host_lens = seq_lens if seq_lens.device.type == "cpu" or seq_lens_cpu is None else seq_lens_cpu
    return int(host_lens.max())
