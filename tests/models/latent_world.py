"""One process of SGLang around a tiny Kimi-K2: real layers, pools and batches, and a dense backend that we can trust.

The backend attends in float64 over slots of req_to_token, so it shares nothing with ours. Pools start as NaN: whoever
reads a row that was never stored shows it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_req_to_token_pool
from sglang.srt.runtime_context import get_context, get_schedule, reset_context
from sglang.test.layer_ut_utils import init_single_process_dist
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from atom_plugin.attention.backend import AtomAttentionBackend
from atom_plugin.layers import prefix_chunks
from atom_plugin.models.kimi_k2 import KimiK2ForCausalLM

MAX_REQUESTS, MAX_CONTEXT = 4, 256
CHUNK_TOKENS = 40


@contextmanager
def one_process() -> Iterator[None]:
    """Give SGLang's layers, within, the process groups that they want, of one rank."""
    torch.set_default_dtype(torch.float32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_single_process_dist(port)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()
    reset_context()


def make_ours(config: DeepseekV3Config, oracle: DeepseekV3ForCausalLM) -> KimiK2ForCausalLM:
    """Return our model with the oracle's weights, under the names that the oracle has for them."""
    ours = DeepseekV3Config(**config.to_dict())
    ours.model_type, ours.architectures = "kimi_k2", ["DeepseekV3ForCausalLM"]
    model = KimiK2ForCausalLM(ours)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights((name, tensor.clone()) for name, tensor in oracle.state_dict().items())
    return model


class DenseBackend:
    """What a model needs of a backend, in float64: absorbed over the pool, un-absorbed over what it is given."""

    def __init__(self, pool: MLATokenToKVPool, req_to_token_pool: ReqToTokenPool) -> None:
        self.token_to_kv_pool, self.req_to_token_pool = pool, req_to_token_pool
        self.calls: list[str] = []

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Return what an AttentionBackend returns; raises AssertionError for a call outside of the contract."""
        assert kwargs == {}
        if layer.tp_k_head_num == 1:
            assert save_kv_cache and layer.v_head_dim == self.token_to_kv_pool.kv_lora_rank
            self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
            self.calls.append("absorbed")
            return self.attend(q, layer, batch, self.cached(layer, batch), batch.seq_lens.tolist(), causal=True)[0]
        assert not save_kv_cache
        if batch.attn_attend_prefix_cache:
            chunk = batch.prefix_chunk_idx
            lengths = batch.prefix_chunk_seq_lens[chunk].tolist()
            parts = list(zip(k.split(lengths), v.split(lengths), strict=True))
            self.calls.append("prefix chunk")
            return self.attend(q, layer, batch, parts, lengths, causal=False)
        lengths = list(batch.extend_seq_lens_cpu)
        parts = list(zip(k.split(lengths), v.split(lengths), strict=True))
        self.calls.append("un-absorbed")
        out, lse = self.attend(q, layer, batch, parts, lengths, causal=True)
        return (out, lse) if batch.mha_return_lse else out.flatten(1)

    forward_decode = forward_extend = forward

    def cached(self, layer: Any, batch: ForwardBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of every request, from the pool."""
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        slots = [table[row, :length].long() for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True)]
        keys = [rows[one].expand(-1, layer.tp_q_head_num, -1) for one in slots]
        return [(key, key[..., : layer.v_head_dim]) for key in keys]

    def attend(
        self, q: Any, layer: Any, batch: ForwardBatch, parts: Any, lengths: Sequence[int], *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [T, H, V], lse [T, H]); causal: the last query of a request sees all of its keys."""
        news = [1] * batch.batch_size if batch.forward_mode.is_decode() else list(batch.extend_seq_lens_cpu)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).double().split(news)
        outs, lses = [], []
        for query, (key, value), length, new in zip(queries, parts, lengths, news, strict=True):
            scores = torch.einsum("nhd,lhd->hnl", query, key.double()) * layer.scaling
            if causal:
                hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
                scores = scores.masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1) if length else scores
            outs.append(torch.einsum("hnl,lhd->nhd", weights, value.double()))
            lses.append(scores.logsumexp(-1).T)
        out = torch.cat(outs).to(q.dtype)
        return (out.flatten(1) if layer.tp_k_head_num == 1 else out), torch.cat(lses).float()


class ApartBackend(DenseBackend):
    """As SGLang's FA3: absorbed q and k come without their rotated columns, which come beside them."""

    def forward(  # type: ignore[override]
        self, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch, save_kv_cache: bool = True, q_rope: Any = None,
        k_rope: Any = None,
    ) -> Any:  # fmt: skip
        """Put them together, and return what the other returns."""
        if layer.tp_k_head_num == 1:
            rank = layer.v_head_dim
            q = torch.cat([q.view(-1, layer.tp_q_head_num, rank), q_rope.view(len(q), layer.tp_q_head_num, -1)], dim=-1)
            k = torch.cat([k.view(-1, 1, rank), k_rope.view(len(k), 1, -1)], dim=-1)
        else:
            assert q_rope is None and k_rope is None
        return super().forward(q, k, v, layer, batch, save_kv_cache)

    forward_decode = forward_extend = forward


class World:
    """A pool, requests of up to MAX_CONTEXT tokens in shuffled slots, and batches of them through our model.

    ``expands_prefixes``: what SGLang has settled between the backend and the flags. ``on_atom``: on our backend, with
    pages of so many tokens, instead of ``dense``.
    """

    def __init__(
        self,
        model: KimiK2ForCausalLM,
        *,
        expands_prefixes: bool = False,
        on_atom: int | None = None,
        dense: type[DenseBackend] = DenseBackend,
    ) -> None:
        self.model = model
        self.expands_prefixes = expands_prefixes
        spec = model.spec
        size = MAX_REQUESTS * MAX_CONTEXT
        self.pool = MLATokenToKVPool(
            size=size,
            page_size=on_atom or 1,
            dtype=torch.float32,
            kv_lora_rank=spec.kv_lora_rank,
            qk_rope_head_dim=spec.qk_rope_head_dim,
            layer_num=spec.num_hidden_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in self.pool.kv_buffer:
            buffer.fill_(torch.nan)
        self.table = ReqToTokenPool(
            size=MAX_REQUESTS, max_context_len=MAX_CONTEXT, device="cpu", enable_memory_saver=False
        )
        page = on_atom or 1
        pages = torch.randperm(size // page, generator=torch.Generator().manual_seed(3)) + 1  # page 0 is a dump
        shuffled = pages[:, None] * page + torch.arange(page)
        self.table.req_to_token[:MAX_REQUESTS] = shuffled.view(MAX_REQUESTS, MAX_CONTEXT).int()
        self.backend: Any = self.make_atom(page) if on_atom else dense(self.pool, self.table)
        self.lengths = [0] * MAX_REQUESTS

    def make_atom(self, page_size: int) -> AtomAttentionBackend:
        """Return our backend over the same pool."""
        runner = SimpleNamespace(
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            page_size=page_size,
            dtype=torch.float32,
            model_config=SimpleNamespace(context_len=MAX_CONTEXT),
            model=self.model,
        )
        with get_context().override_server_args(attention_backend="atom"):
            return AtomAttentionBackend(runner)

    def run(self, mode: ForwardMode, news: dict[int, Sequence[int]]) -> list[torch.Tensor]:
        """Append ``news`` (request -> token ids) and return the logprobs [tokens, vocabulary] of each."""
        cached = [self.lengths[row] for row in news]
        nums = [len(ids) for ids in news.values()]
        lens = torch.tensor([before + num for before, num in zip(cached, nums, strict=True)])
        positions = [torch.arange(int(end) - num, int(end)) for end, num in zip(lens, nums, strict=True)]
        rows = torch.tensor(list(news))
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(news),
            input_ids=torch.tensor([token for ids in news.values() for token in ids]),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens,
            out_cache_loc=torch.cat(
                [self.table.req_to_token[row][where].long() for row, where in zip(rows, positions, strict=True)]
            ),
            seq_lens_sum=int(lens.sum()),
            positions=torch.cat(positions),
        )
        if mode.is_extend():
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(nums, dtype=torch.int32), nums
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor(cached, dtype=torch.int32), cached
        with (
            get_schedule().override(disable_chunked_prefix_cache=not self.expands_prefixes),
            forward_context(ForwardContext(attn_backend=self.backend), forward_batch=batch),
            torch.no_grad(),
        ):
            if isinstance(self.backend, AtomAttentionBackend):
                self.backend.init_forward_metadata(batch)
            hidden = self.model.model(batch.input_ids, batch.positions, batch)
        for row, num in zip(news, nums, strict=True):
            self.lengths[row] += num
        vocabulary = self.model.lm_head.weight[: self.model.spec.vocab_size]  # SGLang pads it
        logits = torch.nn.functional.linear(hidden, vocabulary)
        return list(logits.log_softmax(-1).split(nums))

    def extend(self, news: dict[int, Sequence[int]]) -> list[torch.Tensor]:
        """Prefill ``news``, after what is cached of each request."""
        return self.run(ForwardMode.EXTEND, news)

    def decode(self, news: dict[int, int]) -> list[torch.Tensor]:
        """Decode one token of each request."""
        return self.run(ForwardMode.DECODE, {row: [token] for row, token in news.items()})


def chunk_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put PyTorch in the place of the Triton kernels with which SGLang gathers chunks of prefixes and merges them."""

    def gather(batch: ForwardBatch, device: Any, *_: Any) -> None:
        table = get_req_to_token_pool().req_to_token
        batch.prefix_chunk_kv_indices = [
            torch.cat(
                [
                    table[row, start : start + length]
                    for row, start, length in zip(batch.req_pool_indices, starts, lengths, strict=True)
                ]
            )
            for starts, lengths in zip(batch.prefix_chunk_starts, batch.prefix_chunk_seq_lens, strict=True)
        ]

    def merge(a: Any, lse_a: Any, b: Any, lse_b: Any, out: Any, lse_out: Any) -> None:
        torch.logaddexp(lse_a, lse_b, out=lse_out)
        out.copy_(a * (lse_a - lse_out).exp().unsqueeze(-1) + b * (lse_b - lse_out).exp().unsqueeze(-1))

    monkeypatch.setattr(ForwardBatch, "prepare_chunked_kv_indices", gather)
    monkeypatch.setattr(ForwardBatch, "get_max_chunk_capacity", lambda batch: CHUNK_TOKENS)
    monkeypatch.setattr(prefix_chunks, "merge_state", merge)
