"""The plan of a launch, and the attention layers of a model under it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from atom_plugin.attention.kv_layout import pool_dtype_of
from atom_plugin.attention.limits import LayerOutline, latent_outlines, why_not_backend
from atom_plugin.attention.tables import LayerProblems
from atom_plugin.configs import Qwen3MoeSpec, Qwen3Spec, ServedSpec
from atom_plugin.configs.latent_moe import LatentMoeSpec
from atom_plugin.ops.few_token_experts import QUANTISED, SPLIT, FewTokenExpertsProblem

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GIB = 1 << 30

#: MLA has two attention layers a layer, on a pool of latent rows; the others have one, on keys and values.
ExplainedSpec = Qwen3Spec | Qwen3MoeSpec | LatentMoeSpec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where and how a model is to be served; names and units as SGLang's flags.

    ``ep``, ``dp``: of the ``tp`` ranks, over how many experts and attention's requests are split. ``query_len``: new
    tokens a request, None for every mode. ``aiter``: the version there, "here" for what is installed on this machine.
    ``graphs``: decode graphs are captured. ``memory_gib``: of one device, None where nobody asks what fits.
    ``mem_fraction``: SGLang's --mem-fraction-static, the share of it for weights and KV cache.
    """

    arch: str
    tp: int = 1
    ep: int = 1
    dp: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    page_size: int = 1
    query_len: int | None = None
    aiter: str = "main"
    graphs: bool = True
    memory_gib: float | None = None
    mem_fraction: float = 0.85

    @property
    def attention_tp(self) -> int:
        """Return how many ranks share the attention heads."""
        return self.tp // self.dp

    @property
    def q_dtype(self) -> torch.dtype:
        """Return the dtype of activations and of weights that are not quantised."""
        return DTYPES[self.dtype]

    @property
    def pool_dtype(self) -> torch.dtype:
        """Return what the KV cache holds."""
        return pool_dtype_of(self.kv_cache_dtype, self.q_dtype, fnuz=self.arch == "gfx942")

    def on(self, arch: str) -> Plan:
        """Return the same plan for this machine, which is ``arch``, and the AITER that is installed on it."""
        return replace(self, arch=arch, aiter="here")

    def problems(self) -> list[str]:
        """Return why no launch of any model could have this plan; empty if one could."""
        problems = why_not_backend(kv_cache_dtype=self.kv_cache_dtype, page_size=self.page_size)
        if self.query_len is not None and self.query_len < 1:
            problems.append(f"--query-len {self.query_len}: takes 1 for decode, or more")
        for name, ranks in (("dp", self.dp), ("ep", self.ep)):
            if ranks < 1 or (self.tp > 0 and self.tp % ranks):
                problems.append(f"--{name} {ranks} does not divide --tp {self.tp}")
        if self.memory_gib is not None and not 0 < self.memory_gib < float("inf"):
            problems.append(f"--memory {self.memory_gib}: takes GiB of one device")
        if not 0 < self.mem_fraction < 1:
            problems.append(f"--mem-fraction-static {self.mem_fraction}: takes a share between 0 and 1")
        return problems


def outlines_of(spec: ExplainedSpec, attention_tp: int) -> list[LayerOutline]:
    """Return the attention layers of one layer of ``spec`` on one of ``attention_tp`` ranks.

    Raises ValueError where the ranks cannot share its heads.
    """
    heads = spec.num_attention_heads
    if isinstance(spec, LatentMoeSpec):
        if attention_tp < 1 or heads % attention_tp:
            raise ValueError(f"--tp {attention_tp} does not divide {heads} query heads")
        return latent_outlines(
            heads=heads // attention_tp,
            kv_lora_rank=spec.kv_lora_rank,
            rope_dim=spec.qk_rope_head_dim,
            unabsorbed=(spec.qk_head_dim, spec.v_head_dim),
            ours=isinstance(spec, ServedSpec),
        )
    kv_heads = spec.num_key_value_heads
    if attention_tp < 1 or heads % attention_tp or (kv_heads % attention_tp and attention_tp % kv_heads):
        raise ValueError(f"--tp {attention_tp} does not divide {heads} query heads and {kv_heads} KV heads")
    outline = LayerOutline(
        tp_q_head_num=heads // attention_tp,
        tp_k_head_num=max(1, kv_heads // attention_tp),
        qk_head_dim=spec.head_dim,
        v_head_dim=spec.head_dim,
        fused=True,
    )
    return [outline]


def layers_of(spec: ExplainedSpec, plan: Plan) -> list[LayerProblems]:
    """Return what the attention layers of one layer of ``spec`` ask of the tables; all layers of a model are alike.

    Raises ValueError for a plan that no launch could have.
    """
    problems = plan.problems()
    if problems:
        raise ValueError("; ".join(problems))
    return [
        LayerProblems(
            layer=outline,
            arch=plan.arch,
            q_dtype=plan.q_dtype,
            pool_dtype=plan.pool_dtype,
            page_size=plan.page_size,
            kv_lora_rank=spec.kv_lora_rank if isinstance(spec, LatentMoeSpec) else None,
        )
        for outline in outlines_of(spec, plan.attention_tp)
    ]


def experts_of(spec: ExplainedSpec, plan: Plan) -> FewTokenExpertsProblem | None:
    """Return the experts of one rank as our models ask for them, None where the model has none or is SGLang's own."""
    if not (isinstance(spec, ServedSpec) and isinstance(spec, Qwen3MoeSpec | LatentMoeSpec)):
        return None
    reasons = [QUANTISED] if spec.quantization is not None else []
    return FewTokenExpertsProblem(
        arch=plan.arch,
        dtype=plan.q_dtype,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe_intermediate_size * plan.ep // plan.tp,
        num_experts=spec.num_experts // plan.ep,
        top_k=spec.num_experts_per_tok,
        why_not_plain=tuple(reasons + [SPLIT] * (plan.ep > 1)),
    )
