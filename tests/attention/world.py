"""A small world around the backend: SGLang's real pools, layer and ForwardBatch, and a log of every key and value.

The oracle is dense attention over the log, so it depends on no pool, page or index. Pools start as NaN and index
tables as a huge slot, so that a read of something that was never written shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleVerifyInput
from torch import nn

from atom_plugin.attention.backend import AtomAttentionBackend
from atom_plugin.attention.kv_layout import is_fp8_kv

HUGE_SLOT = 2**30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a world is built from; ``kv_dtype`` None means that of q."""

    page_size: int = 1
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int = -1
    logit_cap: float = 0.0
    k_scale: float | None = None
    v_scale: float | None = None
    max_context: int = 512
    max_requests: int = 8


@dataclass
class Request:
    """One request: its row in req_to_token, its pages, and the log of its keys and values, [tokens, heads, dim]."""

    row: int
    pages: list[int]
    k: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return self.k.shape[0]


@dataclass(kw_only=True)
class Step:
    """A batch with its new q, k, v ([tokens, heads * dim]) and what attention should return."""

    batch: Any
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor
    expected_lse: torch.Tensor
    num_real: int = field(default=0)


class World:
    """Pools, one attention layer, requests that grow, and batches over them."""

    def __init__(self, shape: Shape = Shape(), *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.shape = shape
        self.layer = make_layer(shape)
        pages_per_request = -(-shape.max_context // shape.page_size)
        size = pages_per_request * shape.max_requests * shape.page_size
        self.pool = self.make_pool(size)
        self.req_to_token_pool = ReqToTokenPool(
            size=shape.max_requests, max_context_len=shape.max_context, device="cpu", enable_memory_saver=False
        )
        self.poison()
        self.free_pages = list(range(1, size // shape.page_size + 1))
        self.random.shuffle(self.free_pages)
        self.requests: list[Request] = []
        self.runner = SimpleNamespace(
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.pool,
            page_size=shape.page_size,
            dtype=shape.dtype,
            model_config=SimpleNamespace(context_len=shape.max_context),
            model=nn.ModuleList([self.layer]),
        )

    def make_pool(self, size: int) -> Any:
        """Return SGLang's pool of ``size`` tokens."""
        shape = self.shape
        return MHATokenToKVPool(
            size=size,
            page_size=shape.page_size,
            dtype=shape.kv_dtype or shape.dtype,
            head_num=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )

    def new_rows(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of ``num`` new tokens, [tokens, heads, dim]."""
        shape = self.shape
        k = 3 * torch.randn(num, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        return k, torch.randn(num, shape.num_kv_heads, shape.v_head_dim).to(shape.dtype)

    def poison(self) -> None:
        """Fill pool and index table with what must never be read; row 0 names SGLang's dump slot 0."""
        for buffer in self.pool.get_kv_buffer(self.layer.layer_id):
            if buffer.dtype.itemsize == 1:
                buffer.view(torch.uint8).fill_(0x7F)
            else:
                buffer.fill_(float("nan"))
        self.req_to_token_pool.req_to_token[1:] = HUGE_SLOT
        self.req_to_token_pool.req_to_token[0, 16:] = HUGE_SLOT

    def backend(self) -> AtomAttentionBackend:
        """Return a new backend over this world's pools."""
        return AtomAttentionBackend(self.runner)

    def add(self, cached: int = 0) -> Request:
        """Add a request with ``cached`` tokens in the pool."""
        shape = self.shape
        request = Request(
            row=len(self.requests) + 1,
            pages=[],
            k=torch.empty(0, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype),
            v=torch.empty(0, shape.num_kv_heads, shape.v_head_dim, dtype=shape.dtype),
        )
        self.requests.append(request)
        if cached:
            slots, k, v = self._grow(request, cached)
            k_pool, v_pool = self.pool.get_kv_buffer(self.layer.layer_id)
            write(k_pool, slots, k / scale_of(shape, shape.k_scale))
            write(v_pool, slots, v / scale_of(shape, shape.v_scale))
        return request

    def _grow(self, request: Request, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        k, v = self.new_rows(num)
        slots = []
        for position in range(len(request), len(request) + num):
            if position // shape.page_size == len(request.pages):
                request.pages.append(self.free_pages.pop())
            slots.append(request.pages[position // shape.page_size] * shape.page_size + position % shape.page_size)
        first = len(request)
        self.req_to_token_pool.req_to_token[request.row, first : first + num] = torch.tensor(slots, dtype=torch.int32)
        request.k, request.v = torch.cat([request.k, k]), torch.cat([request.v, v])
        return torch.tensor(slots, dtype=torch.int64), k, v

    def step(self, mode: ForwardMode, news: list[tuple[Request, int]]) -> Step:
        """Return a batch in ``mode`` that brings each request its number of new tokens."""
        parts = [self._grow(request, num) for request, num in news]
        lens = torch.tensor([len(request) for request, _ in news], dtype=torch.int64)
        nums = [num for _, num in news]
        q = 2 * torch.randn(sum(nums), self.shape.num_q_heads * self.shape.head_dim).to(self.shape.dtype)
        stated = lens - nums[0] if mode.is_target_verify() else lens
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(news),
            input_ids=torch.zeros(sum(nums), dtype=torch.int64),
            req_pool_indices=torch.tensor([request.row for request, _ in news], dtype=torch.int64),
            seq_lens=stated.clone(),
            seq_lens_cpu=stated.clone(),
            out_cache_loc=torch.cat([slots for slots, _, _ in parts]),
            seq_lens_sum=int(stated.sum()),
            positions=torch.cat([torch.arange(len(request) - num, len(request)) for request, num in news]),
        )
        if mode.is_target_verify():
            batch.spec_info = verify_input(nums[0], topk=1)
        elif mode.is_draft_extend_v2():
            batch.spec_info = EagleDraftExtendInput(num_tokens_per_req=nums[0])
        if mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify():
            batch.extend_seq_lens = torch.tensor(nums, dtype=torch.int32)
            batch.extend_seq_lens_cpu = nums
            batch.extend_prefix_lens = (lens - torch.tensor(nums)).to(torch.int32)
            batch.extend_prefix_lens_cpu = batch.extend_prefix_lens.tolist()
            batch.extend_num_tokens = sum(nums)
        expected, expected_lse = self.oracle(q, news)
        return Step(
            batch=batch,
            q=q,
            k=torch.cat([k for _, k, _ in parts]).flatten(1),
            v=torch.cat([v for _, _, v in parts]).flatten(1),
            expected=expected,
            expected_lse=expected_lse,
            num_real=sum(nums),
        )

    def oracle(self, q: torch.Tensor, news: list[tuple[Request, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense attention over the log in float64: ([tokens, heads * v dim] in the dtype of q, lse [tokens, heads])."""
        shape = self.shape
        outs, lses, first = [], [], 0
        for request, num in news:
            group = shape.num_q_heads // shape.num_kv_heads
            queries = q[first : first + num].view(num, shape.num_q_heads, shape.head_dim).double()
            k = as_stored(request.k, shape, shape.k_scale).repeat_interleave(group, dim=1)
            v = as_stored(request.v, shape, shape.v_scale).repeat_interleave(group, dim=1)
            scores = torch.einsum("nhd,lhd->hnl", queries, k) * self.layer.scaling
            if shape.logit_cap > 0:
                scores = shape.logit_cap * torch.tanh(scores / shape.logit_cap)
            distance = torch.arange(len(request) - num, len(request))[:, None] - torch.arange(len(request))
            hidden = (distance < 0) | (distance > shape.window if shape.window > 0 else torch.zeros(()).bool())
            scores = scores.masked_fill(hidden, -torch.inf)
            outs.append(torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v).flatten(1))
            lses.append(scores.logsumexp(-1).T)
            first += num
        return torch.cat(outs).to(shape.dtype), torch.cat(lses).float()

    def run(self, backend: Any, step: Step, **kwargs: Any) -> Any:
        """Run the step's one layer as SGLang's eager runner does, and return what the backend returns."""
        backend.init_forward_metadata(step.batch)
        return self.attend(backend, step, **kwargs)

    def attend(self, backend: Any, step: Step, **kwargs: Any) -> Any:
        """Call the backend as RadixAttention does, with k and v as [tokens, heads, dim]."""
        shape = self.shape
        return backend.forward(
            step.q,
            step.k.view(-1, shape.num_kv_heads, shape.head_dim),
            step.v.view(-1, shape.num_kv_heads, shape.v_head_dim),
            self.layer,
            step.batch,
            **kwargs,
        )


def make_layer(shape: Shape, layer_id: int = 0) -> RadixAttention:
    """Return SGLang's attention layer of this shape, with its KV scales set as a checkpoint's loader sets them."""
    layer = RadixAttention(
        num_heads=shape.num_q_heads,
        head_dim=shape.head_dim,
        scaling=shape.head_dim**-0.5,
        num_kv_heads=shape.num_kv_heads,
        layer_id=layer_id,
        logit_cap=shape.logit_cap,
        v_head_dim=shape.v_head_dim,
        sliding_window_size=shape.window,
    )
    if shape.k_scale is not None and shape.v_scale is not None:
        layer.k_scale, layer.k_scale_float = torch.tensor(shape.k_scale), shape.k_scale
        layer.v_scale, layer.v_scale_float = torch.tensor(shape.v_scale), shape.v_scale
    return layer


def verify_input(num_draft_tokens: int, topk: int) -> EagleVerifyInput:
    """Return what SGLang's EAGLE worker hands to a verify batch."""
    nothing = torch.empty(0, dtype=torch.int64)
    return EagleVerifyInput(
        draft_token=nothing,
        custom_mask=torch.empty(0, dtype=torch.bool),
        positions=nothing,
        retrieve_index=nothing,
        retrieve_next_token=nothing,
        retrieve_next_sibling=nothing,
        retrieve_cum_len=nothing,
        spec_steps=num_draft_tokens - 1,
        topk=topk,
        draft_token_num=num_draft_tokens,
        capture_hidden_mode=None,
        seq_lens_sum=0,
        seq_lens_cpu=nothing,
    )


def write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Put rows into a pool buffer, rounded to its dtype."""
    rounded = rows.to(pool.dtype)
    if pool.dtype.itemsize == 1:
        pool.view(torch.uint8)[slots] = rounded.view(torch.uint8)
    else:
        pool[slots] = rounded


def scale_of(shape: Shape, scale: float | None) -> float:
    """Return the scale in force: float8 caches only have one."""
    return scale if scale is not None and is_fp8_kv(shape.kv_dtype) else 1.0


def as_stored(x: torch.Tensor, shape: Shape, scale: float | None) -> torch.Tensor:
    """Return float64 of what comes back from the cache for ``x``."""
    scale = scale_of(shape, scale)
    return (x / scale).to(shape.kv_dtype or shape.dtype).double() * scale
