"""A world of MLA: SGLang's pool of latent rows, its two attention layers, and the weights between the two forms.

A latent row is one KV head whose value is its own first columns, so the absorbed form is the world's own oracle. The
un-absorbed form, keys and values of every head made of the latents, is an oracle by itself.

Shape suffixes: T tokens, L keys, H heads, C kv_lora_rank, R rotated columns, D = C + R, N un-rotated columns of a
head, V v head dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context
from torch import nn

from atom_plugin.attention.backend import AtomAttentionBackend
from tests.attention.world import Request, Shape, Step, World, as_stored, scale_of

RANK, ROPE, NOPE, V_DIM = 32, 16, 24, 20


def latent_shape(*, heads: int = 4, k_scale: float | None = None, **how: Any) -> Shape:
    """Return the shape of absorbed attention: one KV head of RANK + ROPE, values of RANK."""
    return Shape(
        num_q_heads=heads,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        v_head_dim=RANK,
        k_scale=k_scale,
        v_scale=k_scale,
        **how,
    )


class MlaWorld(World):
    """``layer`` is the absorbed attention layer, ``per_head`` the un-absorbed one; ``hybrid``: in a hybrid pool."""

    def __init__(self, shape: Shape | None = None, *, hybrid: bool = False, seed: int = 0) -> None:
        self.hybrid = hybrid
        super().__init__(shape or latent_shape(), seed=seed)
        shape = self.shape
        self.layer.scaling = (NOPE + ROPE) ** -0.5
        self.per_head = RadixAttention(
            num_heads=shape.num_q_heads,
            head_dim=NOPE + ROPE,
            scaling=self.layer.scaling,
            num_kv_heads=shape.num_q_heads,
            layer_id=self.layer.layer_id,
            v_head_dim=V_DIM,
        )
        self.per_head.k_scale, self.per_head.k_scale_float = self.layer.k_scale, self.layer.k_scale_float
        self.runner.model = nn.ModuleList([self.layer, self.per_head])
        self.w_uk_HNC = torch.randn(shape.num_q_heads, NOPE, RANK).to(shape.dtype) / RANK**0.5
        self.w_uv_HVC = torch.randn(shape.num_q_heads, V_DIM, RANK).to(shape.dtype) / RANK**0.5

    def backend(self) -> AtomAttentionBackend:
        """Return a new backend over this world's pools, in a process that publishes its flags."""
        with get_context().override_server_args(attention_backend="atom"):
            return super().backend()

    def make_pool(self, size: int) -> Any:
        """Return SGLang's pool of latent rows; ``hybrid``: of layer 3 alone, others being linear."""
        shape = self.shape
        how: dict[str, Any] = {
            "size": size,
            "page_size": shape.page_size,
            "dtype": shape.kv_dtype or shape.dtype,
            "kv_lora_rank": RANK,
            "qk_rope_head_dim": shape.head_dim - RANK,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if not self.hybrid:
            return MLATokenToKVPool(**how, layer_num=1)
        self.layer.layer_id = 3
        return HybridLinearKVPool(
            **how, head_num=1, head_dim=0, full_attention_layer_ids=[3], mamba_pool=None, use_mla=True
        )

    def new_rows(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent rows, which a float8 pool holds exactly, and their values."""
        shape = self.shape
        rows = 2 * torch.randn(num, 1, shape.head_dim).to(shape.dtype)
        rows = as_stored(rows, shape, shape.k_scale).to(shape.dtype)
        return rows, rows[..., :RANK]

    def mla_step(self, mode: ForwardMode, news: list[tuple[Request, int]]) -> MlaStep:
        """Return a step whose absorbed queries come of un-absorbed ones."""
        step = self.step(mode, news)
        q_THD = 2 * torch.randn(step.num_real, self.shape.num_q_heads, NOPE + ROPE).to(self.shape.dtype)
        step.q = torch.cat([self.absorb(q_THD[..., :NOPE]), q_THD[..., NOPE:]], dim=-1).flatten(1)
        step.expected, step.expected_lse = self.oracle(step.q, news)
        per_head_THV, lse_TH = self.per_head_oracle(q_THD, news)
        torch.testing.assert_close(self.expand(step.expected), per_head_THV, rtol=2e-3, atol=2e-3)  # both are right
        torch.testing.assert_close(step.expected_lse, lse_TH, rtol=1e-4, atol=1e-4)
        values = {field.name: getattr(step, field.name) for field in dataclasses.fields(Step)}
        return MlaStep(**values, per_head_q=q_THD, per_head=per_head_THV)

    def absorb(self, q_THN: torch.Tensor) -> torch.Tensor:
        """Return un-rotated queries that met W_UK: [T, H, C]."""
        return torch.einsum("thn,hnc->thc", q_THN.float(), self.w_uk_HNC.float()).to(q_THN.dtype)

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """Return absorbed attention's output, [T, H * C], after W_UV: [T, H, V]."""
        out_THC = out.view(out.shape[0], -1, RANK).float()
        return torch.einsum("thc,hvc->thv", out_THC, self.w_uv_HVC.float()).to(out.dtype)

    def per_head_kv(self, rows_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [L, H, N + R] and values [L, H, V] of latent rows; the values are part of wider rows."""
        latent, heads = rows_LD[:, :RANK], self.shape.num_q_heads
        w_HWC = torch.cat([self.w_uk_HNC, self.w_uv_HVC], dim=1).to(rows_LD.dtype)
        both_LHW = torch.einsum("lc,hwc->lhw", latent, w_HWC)
        rotated_LHR = rows_LD[:, None, RANK:].expand(-1, heads, -1)
        return torch.cat([both_LHW[..., :NOPE], rotated_LHR], dim=-1), both_LHW[..., NOPE:]

    def per_head_oracle(
        self, q_THD: torch.Tensor, news: list[tuple[Request, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense attention of every head in float64: ([T, H, V] in the dtype of q, lse [T, H])."""
        outs, lses, first = [], [], 0
        for request, num in news:
            k_LHD, v_LHV = self.per_head_kv(request.k[:, 0].double())
            scores = torch.einsum("thd,lhd->htl", q_THD[first : first + num].double(), k_LHD) * self.layer.scaling
            hidden = torch.arange(len(request) - num, len(request))[:, None] < torch.arange(len(request))
            scores = scores.masked_fill(hidden, -torch.inf)
            outs.append(torch.einsum("htl,lhv->thv", scores.softmax(-1), v_LHV))
            lses.append(scores.logsumexp(-1).T)
            first += num
        return torch.cat(outs).to(q_THD.dtype), torch.cat(lses).float()

    def run_split(self, backend: Any, step: Step, **kwargs: Any) -> Any:
        """Run absorbed attention with the rotated parts apart."""
        backend.init_forward_metadata(step.batch)
        q_THD = step.q.view(step.num_real, -1, self.shape.head_dim)
        k_T1D = step.k.view(-1, 1, self.shape.head_dim)
        return backend.forward(
            q_THD[..., :RANK].contiguous(), k_T1D[..., :RANK], k_T1D[..., :RANK], self.layer, step.batch,
            q_rope=q_THD[..., RANK:], k_rope=k_T1D[..., RANK:], **kwargs,
        )  # fmt: skip

    def run_per_head(self, backend: Any, step: MlaStep, *, capacity: int = 1 << 20) -> torch.Tensor:
        """Run un-absorbed attention as a model does, prefixes in chunks of up to ``capacity`` tokens: [T, H, V]."""
        backend.init_forward_metadata(step.batch)
        self.store(step)
        return self.attend_per_head(backend, step, capacity=capacity)

    def store(self, step: Step) -> None:
        """Store the step's latent rows by the pool's own writer, divided by the scale, of which it knows nothing."""
        rows = step.k.view(-1, 1, self.shape.head_dim) / scale_of(self.shape, self.shape.k_scale)
        with get_context().override_server_args(attention_backend="atom"):  # it asks for the launch's parallel sizes
            self.pool.set_kv_buffer(self.layer, step.batch.out_cache_loc, rows, rows[..., :RANK])

    def attend_per_head(self, backend: Any, step: MlaStep, *, capacity: int) -> torch.Tensor:
        """Attend to the new tokens, then to each chunk of the prefixes, and merge."""
        batch = step.batch
        has_prefix = any(batch.extend_prefix_lens_cpu)
        batch.mha_return_lse = has_prefix
        batch.set_attn_attend_prefix_cache(False)
        k, v = self.per_head_kv(step.k)
        got = backend.forward(step.per_head_q, k, v, self.per_head, batch, save_kv_cache=False)
        if not has_prefix:
            return got.view(step.num_real, -1, V_DIM)
        out, lse = got
        self.prepare_chunks(backend, batch, capacity)
        batch.set_attn_attend_prefix_cache(True)
        scale = scale_of(self.shape, self.shape.k_scale)
        for chunk in range(batch.num_prefix_chunks):
            batch.set_prefix_chunk_idx(chunk)
            rows_LD = self.pool.get_key_buffer(self.layer.layer_id)[batch.prefix_chunk_kv_indices[chunk].long()][:, 0]
            k, v = self.per_head_kv(rows_LD.to(self.shape.dtype) * scale)
            chunk_out, chunk_lse = backend.forward(step.per_head_q, k, v, self.per_head, batch, save_kv_cache=False)
            out, lse = merged(out, lse, chunk_out, chunk_lse)
        return out

    def prepare_chunks(self, backend: Any, batch: Any, capacity: int) -> None:
        """Let SGLang cut the prefixes into chunks; the slots, which a Triton kernel gathers, come from its table."""

        def gather(*_args: Any, **_kwargs: Any) -> None:
            table = self.req_to_token_pool.req_to_token
            starts, lens = batch.prefix_chunk_starts.tolist(), batch.prefix_chunk_seq_lens.tolist()
            batch.prefix_chunk_kv_indices = [
                torch.cat(
                    [
                        table[row, start : start + length]
                        for row, start, length in zip(batch.req_pool_indices.tolist(), *chunk, strict=True)
                    ]
                )
                for chunk in zip(starts, lens, strict=True)
            ]

        batch.prepare_chunked_kv_indices = gather
        batch.get_max_chunk_capacity = lambda: capacity
        with forward_context(ForwardContext(attn_backend=backend)):
            batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))


@dataclasses.dataclass(kw_only=True)
class MlaStep(Step):
    """A step with its un-absorbed queries [T, H, N + R], and what attention should return after W_UV, [T, H, V]."""

    per_head_q: torch.Tensor
    per_head: torch.Tensor


def merged(
    out_THV: torch.Tensor, lse_TH: torch.Tensor, other_THV: torch.Tensor, other_lse_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the keys of both: the formula of SGLang's merge_state."""
    lse = torch.logaddexp(lse_TH, other_lse_TH)
    share, other_share = (torch.exp(part - lse).unsqueeze(-1) for part in (lse_TH, other_lse_TH))
    return (out_THV * share + other_THV * other_share).to(out_THV.dtype), lse
