"""What the attention backend does not serve, as lists of reasons for the launch to stop on."""

from __future__ import annotations

from typing import Any

_KV_CACHE_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32", "fp8", "fp8_e4m3")
_WAY_OUT = "or another --attention-backend"


def why_not_backend(
    *,
    kv_cache_dtype: str,
    page_size: int,
    use_mla: bool,
    is_encoder_decoder: bool = False,
    is_hybrid_swa: bool = False,
    speculative_eagle_topk: int | None = None,
    dcp_size: int = 1,
) -> list[str]:
    """Return why ``--attention-backend atom`` cannot serve a launch with these resolved options; empty if it can.

    ``page_size``: tokens. ``use_mla``: the model's attention is MLA. ``is_hybrid_swa``: SGLang would give its
    sliding-window layers a pool of their own. ``dcp_size``: ranks that share one request's KV cache.
    """
    reasons = []
    if kv_cache_dtype not in _KV_CACHE_DTYPES:
        reasons.append(f"--kv-cache-dtype {kv_cache_dtype}: use one of {', '.join(_KV_CACHE_DTYPES)}, {_WAY_OUT}")
    if page_size < 1 or page_size & (page_size - 1):
        reasons.append(f"--page-size {page_size}: use a power of two")
    if use_mla:
        reasons.append("the model's attention is MLA: drop --attention-backend atom")
    if is_encoder_decoder:
        reasons.append("the model has cross attention: drop --attention-backend atom")
    if is_hybrid_swa:
        reasons.append("the sliding-window layers have a KV pool of their own: use --disable-hybrid-swa-memory")
    if speculative_eagle_topk is not None and speculative_eagle_topk > 1:
        reasons.append(f"--speculative-eagle-topk {speculative_eagle_topk}: tree masks; use 1, {_WAY_OUT}")
    if dcp_size > 1:
        reasons.append(f"--dcp-size {dcp_size}: the KV cache of a request is on one rank only; use 1, {_WAY_OUT}")
    return reasons


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
