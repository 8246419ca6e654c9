"""Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434, section 2.1): one latent a token is cached.

Keys and values of all heads are linear in the latent c: k = W_UK c, beside one rotated part that the heads share, and
v = W_UV c; ``kv_b_proj`` holds both matrices. So scores can be taken in either of two forms, which are equal:

* un-absorbed: keys and values are computed, and attended to as in multi-head attention, with N + R + V multiplications
  for each pair of a query and a key, and C * (N + V) for each key that comes from the cache;
* absorbed: W_UK is applied to the query and W_UV to the output, so that the cached latents themselves are attended to,
  with 2 C + R multiplications for each pair, and none for a cached key.

Shape suffixes: T tokens, H heads of this rank, C kv_lora_rank, R, N and V the parts of a head with positions, without
them, and of a value.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from torch import nn

from atom_plugin import device, host
from atom_plugin.attention.active import takes_rotated_apart
from atom_plugin.attention.tables import choose, forced_rows
from atom_plugin.configs import KimiK2Spec
from atom_plugin.layers.parallel import heads_per_rank, reduce_attention
from atom_plugin.layers.prefix_chunks import attend_with_prefix, may_expand_prefixes
from atom_plugin.ops import latent_norm_rope

#: Of the norms inside MLA: the published model code leaves them at this, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Projections, norms, rope and attention of one MLA layer; q goes through a latent of its own.

    ``attn_mqa`` attends in the absorbed form and stores the latents, ``attn_mha`` in the un-absorbed form over what it
    is given; both are the same layer of the cache.
    """

    def __init__(
        self,
        spec: KimiK2Spec,
        *,
        rotary_emb: nn.Module,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.heads, _ = heads_per_rank(spec.num_attention_heads, spec.num_attention_heads)
        self.rotary_emb = rotary_emb
        latent_dim = spec.kv_lora_rank + spec.qk_rope_head_dim
        self.fused_qkv_a_proj_with_mqa = ReplicatedLinear(
            spec.hidden_size,
            spec.q_lora_rank + latent_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.fused_qkv_a_proj_with_mqa",
        )
        self.q_a_layernorm = RMSNorm(spec.q_lora_rank, eps=LATENT_NORM_EPS)
        self.q_b_proj = _by_head(
            spec.q_lora_rank, spec.num_attention_heads * spec.qk_head_dim, quant_config, f"{prefix}.q_b_proj"
        )
        self.kv_a_layernorm = RMSNorm(spec.kv_lora_rank, eps=LATENT_NORM_EPS)
        # never quantised: the absorbed form multiplies by its parts, and FP8 blocks need not end where a part does
        up_dim = spec.qk_nope_head_dim + spec.v_head_dim
        self.kv_b_proj = _by_head(spec.kv_lora_rank, spec.num_attention_heads * up_dim, None, f"{prefix}.kv_b_proj")
        self.o_proj = RowParallelLinear(
            spec.num_attention_heads * spec.v_head_dim,
            spec.hidden_size,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            **host.attention_tp_group(),
        )
        self.norm_rope = self.choose_norm_rope()
        self.attn_mqa = self.make_attention(layer_id, f"{prefix}.attn_mqa", absorbed=True)
        self.attn_mqa.norms_latents = True  # the backend names the row of latent_norm_rope beside its own
        self.attn_mha = self.make_attention(layer_id, f"{prefix}.attn_mha", absorbed=False)

    def choose_norm_rope(self) -> latent_norm_rope.LatentNormRope:
        """Return the row that norms and rotates; NoKernelError where there is none."""
        problem = latent_norm_rope.LatentNormRopeProblem(
            arch=device.arch(),
            dtype=torch.get_default_dtype(),
            num_heads=self.heads,
            kv_lora_rank=self.spec.kv_lora_rank,
            rope_dim=self.spec.qk_rope_head_dim,
        )
        row: latent_norm_rope.LatentNormRope = choose(latent_norm_rope.TABLE, problem, forced_rows()).load()
        return row

    def make_attention(self, layer_id: int, prefix: str, *, absorbed: bool) -> RadixAttention:
        """Return the attention over rows of the cache, or over keys and values of every head."""
        spec = self.spec
        return RadixAttention(
            self.heads,
            spec.kv_lora_rank + spec.qk_rope_head_dim if absorbed else spec.qk_head_dim,
            spec.softmax_scale,
            num_kv_heads=1 if absorbed else self.heads,
            layer_id=layer_id,
            v_head_dim=spec.kv_lora_rank if absorbed else spec.v_head_dim,
            prefix=prefix,
        )

    def forward(self, positions_T: torch.Tensor, hidden_TD: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Return [tokens, hidden_size], summed over the attention-TP group."""
        if hidden_TD.shape[0] == 0:
            return hidden_TD
        query, kv = self.project(hidden_TD)
        if is_unabsorbed(self.spec, forward_batch):
            attended = self.attend_unabsorbed(positions_T, query, kv, forward_batch)
        else:
            attended = self.attend_absorbed(positions_T, query, kv, forward_batch)
        partial_TD, _ = self.o_proj(attended)
        return reduce_attention(partial_TD)

    def project(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [T, H, N + R] and what rows of the cache are made of [T, C + R], un-normed and un-rotated."""
        spec = self.spec
        both, _ = self.fused_qkv_a_proj_with_mqa(hidden_TD)
        q_latent, kv = both.split([spec.q_lora_rank, spec.kv_lora_rank + spec.qk_rope_head_dim], dim=-1)
        query, _ = self.q_b_proj(self.q_a_layernorm(q_latent))
        return query.view(-1, self.heads, spec.qk_head_dim), kv

    def cache_rows(
        self, positions_T: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, rotated: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows of the cache [T, 1, C + R], and write the rotated part of ``query`` to ``rotated``."""
        rows: torch.Tensor = self.norm_rope(
            query[..., self.spec.qk_nope_head_dim :],
            kv,
            rotated,
            positions_T=positions_T,
            cos_sin_cache=self.rotary_emb.get_buffer("cos_sin_cache"),
            kv_weight_C=self.kv_a_layernorm.weight,
            eps=LATENT_NORM_EPS,
        )
        return rows

    def attend_absorbed(
        self, positions_T: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [T, H * V]; the backend stores the new rows of the cache and attends to all that are in it."""
        spec, tokens = self.spec, len(query)
        up_k, up_v = self.up_projections()
        absorbed = query.new_empty(tokens, self.heads, spec.kv_lora_rank + spec.qk_rope_head_dim)
        by_head = absorbed[..., : spec.kv_lora_rank].transpose(0, 1)
        torch.bmm(query[..., : spec.qk_nope_head_dim].transpose(0, 1), up_k, out=by_head)
        latents = self.cache_rows(positions_T, query, kv, absorbed[..., spec.kv_lora_rank :])
        latent, rotated = latents.split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        if takes_rotated_apart(get_attn_backend(), forward_batch.forward_mode):
            q_latent, q_rotated = absorbed.split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
            mixed = self.attn_mqa(q_latent, latent, latent, forward_batch, q_rope=q_rotated, k_rope=rotated)
        else:
            mixed = self.attn_mqa(absorbed.flatten(1), latents, latent, forward_batch)
        attended = query.new_empty(tokens, self.heads, spec.v_head_dim)
        mixed_by_head = mixed.view(tokens, self.heads, spec.kv_lora_rank).transpose(0, 1)
        torch.bmm(mixed_by_head, up_v.transpose(1, 2), out=attended.transpose(0, 1))
        return attended.flatten(1)

    def attend_unabsorbed(
        self, positions_T: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [T, H * V] after storing the new rows; keys of cached prefixes are computed chunk by chunk."""
        latents = self.cache_rows(positions_T, query, kv, query[..., self.spec.qk_nope_head_dim :])
        get_token_to_kv_pool().set_kv_buffer(
            self.attn_mqa, forward_batch.out_cache_loc, latents, latents[..., : self.spec.kv_lora_rank]
        )
        key, value = self.expand(latents)
        return attend_with_prefix(self.attn_mha, query, key, value, forward_batch, expand=self.expand).flatten(1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [T, H, N + R] and values [T, H, V] of rows of the cache [T, 1, C + R]."""
        spec, tokens = self.spec, len(latents)
        both, _ = self.kv_b_proj(latents[:, 0, : spec.kv_lora_rank].contiguous())
        both = both.view(tokens, self.heads, spec.qk_nope_head_dim + spec.v_head_dim)
        key = both.new_empty(tokens, self.heads, spec.qk_head_dim)
        key[..., : spec.qk_nope_head_dim] = both[..., : spec.qk_nope_head_dim]
        key[..., spec.qk_nope_head_dim :] = latents[..., spec.kv_lora_rank :]
        return key, both[..., spec.qk_nope_head_dim :].contiguous()

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_UK [H, N, C] and W_UV [H, V, C], as views of ``kv_b_proj``: a new weight is in force at once."""
        spec = self.spec
        weight = self.kv_b_proj.get_parameter("weight").view(self.heads, -1, spec.kv_lora_rank)
        return weight[:, : spec.qk_nope_head_dim], weight[:, spec.qk_nope_head_dim :]


def _by_head(
    in_features: int, out_features: int, quant_config: QuantizationConfig | None, prefix: str
) -> ColumnParallelLinear:
    """Return a projection whose heads are split over the attention-TP group."""
    return ColumnParallelLinear(
        in_features, out_features, bias=False, quant_config=quant_config, prefix=prefix, **host.attention_tp_group()
    )


def is_unabsorbed(spec: KimiK2Spec, forward_batch: ForwardBatch) -> bool:
    """Return whether a batch is attended to in the un-absorbed form: new prompts, and long parts of them.

    Speculation and captured prefill keep to one form, the absorbed one. Without a cached prefix the un-absorbed form
    multiplies less. With prefixes, where SGLang and the backend expand them in chunks, the cross-over is where the
    pairs of queries and keys save as much as the keys of the prefixes cost to compute (see ``crossover``).
    """
    if not forward_batch.forward_mode.is_extend_without_speculative() or host.is_capturing_prefill():
        return False
    new, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    if not any(cached):
        return True
    if not may_expand_prefixes():
        return False
    pairs = sum(length * (prefix + length / 2) for length, prefix in zip(new, cached, strict=True))
    return pairs >= crossover(spec) * sum(cached)


def crossover(spec: KimiK2Spec) -> float:
    """Return how many queries must read each cached key, on average, for expanding it to be worth its cost.

    171 in a Kimi-K2 (C 512, N 128, R 64, V 128). Multiplications only; in time, on an H200 with 8,192 and 32,768 cached
    keys, it is 250 with 8 heads and 190 with 12 (``benchmarks/gpu/mla_prefill.py``), and 10% are lost between.
    """
    nope, value = spec.qk_nope_head_dim, spec.v_head_dim
    saved_by_a_pair = 2 * spec.kv_lora_rank - nope - value
    if saved_by_a_pair <= 0:
        return float("inf")
    return spec.kv_lora_rank * (nope + value) / saved_by_a_pair
