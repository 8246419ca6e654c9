"""What the attention backend does not serve, as lists of reasons for the launch to stop on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom_plugin.attention.qk_norm_rope import QKNormRope
from atom_plugin.attention.tables import LayerProblems, choose, forced_rows, modes_of
from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.paged_attention import NO_WINDOW

_KV_CACHE_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32", "fp8", "fp8_e4m3")
_WAY_OUT = "or another --attention-backend"


def why_not_backend(
    *,
    kv_cache_dtype: str,
    page_size: int,
    is_sparse: bool = False,
    is_encoder_decoder: bool = False,
    is_hybrid_swa: bool = False,
) -> list[str]:
    """Return why ``--attention-backend atom`` cannot serve a launch with these resolved options; empty if it can.

    ``page_size``: tokens. ``is_sparse``: the model's attention is DeepSeek's sparse one. ``is_hybrid_swa``: SGLang
    would give its sliding-window layers a pool of their own.
    """
    reasons = []
    if kv_cache_dtype not in _KV_CACHE_DTYPES:
        reasons.append(f"--kv-cache-dtype {kv_cache_dtype}: use one of {', '.join(_KV_CACHE_DTYPES)}, {_WAY_OUT}")
    if page_size < 1 or page_size & (page_size - 1):
        reasons.append(f"--page-size {page_size}: use a power of two")
    if is_sparse:
        reasons.append("the model's attention picks keys by an indexer: drop --attention-backend atom")
    if is_encoder_decoder:
        reasons.append("the model has cross attention: drop --attention-backend atom")
    if is_hybrid_swa:
        reasons.append("the sliding-window layers have a KV pool of their own: use --disable-hybrid-swa-memory")
    return reasons


def why_not_latent_layer(problems: LayerProblems) -> list[str]:
    """Return why the backend cannot run a RadixAttention over a pool of latent rows; empty if it can, or has none."""
    layer, reasons = problems.layer, []
    name = f"attention layer {layer.layer_id}"
    if problems.kind == "unabsorbed" and layer.tp_k_head_num != layer.tp_q_head_num:
        reasons.append(
            f"{name} has {layer.tp_q_head_num} query and {layer.tp_k_head_num} KV heads with values of "
            f"{layer.v_head_dim} on a pool of latent rows: takes one KV head with values of {problems.kv_lora_rank}, "
            f"or as many KV heads as query heads"
        )
    if problems.kind != "dense" and problems.window != NO_WINDOW:
        reasons.append(f"{name} has a sliding window on a pool of latent rows")
    if problems.kind != "dense" and layer.logit_cap > 0:
        reasons.append(f"{name} caps its logits on a pool of latent rows")
    return reasons


@dataclass(kw_only=True)
class LayerOutline:
    """What a launch knows of a RadixAttention before it is built, under RadixAttention's own names, heads of one rank.

    ``fused``: the model hands norm and rope over.
    """

    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    fused: bool
    layer_id: int = 0
    sliding_window_size: int = -1
    logit_cap: float = 0.0
    k_scale: None = None
    v_scale: None = None
    k_scale_float: None = None
    v_scale_float: None = None
    qk_norm_rope: QKNormRope | None = None
    norms_latents: bool = False

    def __post_init__(self) -> None:
        if self.fused:
            weight = torch.empty(self.qk_head_dim, device="meta")
            self.qk_norm_rope = QKNormRope(
                q_weight=weight, k_weight=weight, eps=1e-6, rotary_dim=self.qk_head_dim, position_source="positions"
            )


def latent_outlines(
    *, heads: int, kv_lora_rank: int, rope_dim: int, unabsorbed: tuple[int, int] | None, ours: bool
) -> list[LayerOutline]:
    """Return the attention layers of an MLA layer with ``heads`` query heads: the absorbed and the un-absorbed one.

    ``ours``: of a model of ours, not of SGLang's. ``unabsorbed``: head dims of queries and keys, and of values; None
    where a model is always absorbed.
    """
    absorbed = LayerOutline(
        tp_q_head_num=heads, tp_k_head_num=1, qk_head_dim=kv_lora_rank + rope_dim, v_head_dim=kv_lora_rank, fused=False,
        norms_latents=ours,
    )  # fmt: skip
    if unabsorbed is None:
        return [absorbed]
    qk_head_dim, v_head_dim = unabsorbed
    per_head = LayerOutline(
        tp_q_head_num=heads, tp_k_head_num=heads, qk_head_dim=qk_head_dim, v_head_dim=v_head_dim, fused=False
    )
    return [absorbed, per_head]


def why_no_row(layer: LayerProblems, *, captures: bool, verify_len: int | None = None) -> list[str]:
    """Return why a dispatch table has no row for the layers of a launch, an entry a mode; empty if it has.

    ``captures``: the launch captures graphs. ``verify_len``: as in ``modes_of``. Nothing is loaded.
    """
    try:
        forced = forced_rows()
    except ValueError as error:
        return [str(error)]
    reasons = []
    for captured in (False, True) if captures else (False,):
        for _, table, problem, _ in modes_of(layer, captured=captured, has_sinks=False, verify_len=verify_len):
            try:
                choose(table, problem, forced)
            except NoKernelError as error:
                reasons.append(str(error))
    return list(dict.fromkeys(reasons))


def why_not_layer(layer: Any) -> list[str]:
    """Return why the backend cannot run a RadixAttention; empty if it can."""
    reasons = []
    name = f"attention layer {layer.layer_id}"
    if layer.is_cross_attention:
        reasons.append(f"{name} is cross attention")
    if layer.attn_type.value != "decoder":
        reasons.append(f"{name} is {layer.attn_type.value}, and the backend is causal")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        reasons.append(f"{name} caps its logits by {layer.logit_capping_method}, and the backend by tanh")
    if layer.xai_temperature_len > 0:
        reasons.append(f"{name} has xai_temperature_len {layer.xai_temperature_len}")
    return reasons
