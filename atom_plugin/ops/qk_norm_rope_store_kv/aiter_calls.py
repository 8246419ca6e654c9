"""Calls of AITER's fused q/k norm, rope and cache writers, always by keyword."""

from __future__ import annotations

from typing import Any

import torch

from atom_plugin.ops.aiter_rows import converted
from atom_plugin.ops.indices import TokenSlots


class NormRopeCache:
    """Calls AITER's ``fused_qk_norm_rope_cache_pts_quant_shuffle``, on NHD pages.

    It takes q, k and v as one tensor, which they are in a model: slices of one projection. Others are copied together.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._one = torch.ones(1, dtype=torch.float32)  # on the host, where the function reads its scales

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: TokenSlots,
        *,
        positions: torch.Tensor,
        axis_of_frequency: torch.Tensor | None,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        k_scale: float,
        v_scale: float,
    ) -> torch.Tensor:
        """See ``atom_plugin.ops.qk_norm_rope_store_kv.qk_norm_rope_store_kv``."""
        _check(q_THD, k_THD, v_THD, k_pages, v_pages, slots, positions, axis_of_frequency, k_scale, v_scale)
        if q_weight is None or k_weight is None:
            raise ValueError("no norm weights: takes both")
        num_tokens, num_q_heads, dim = q_THD.shape
        done_q_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if num_tokens == 0:
            return done_q_THD
        num_kv_heads, dtype = k_THD.shape[1], q_THD.dtype
        self._function(
            qkv=_joined(q_THD, k_THD, v_THD),
            qw=q_weight.to(dtype).contiguous(),
            kw=k_weight.to(dtype).contiguous(),
            cos_sin=converted(cos_sin_cache, dtype),
            positions=positions,
            num_tokens=num_tokens,
            num_heads_q=num_q_heads,
            num_heads_k=num_kv_heads,
            num_heads_v=num_kv_heads,
            head_size=dim,
            is_neox_style=is_neox,
            eps=eps,
            q_out=done_q_THD,
            k_cache=k_pages.view(-1, 1, num_kv_heads, dim),
            v_cache=v_pages.view(-1, 1, num_kv_heads, dim),
            slot_mapping=slots.slots_T,
            per_tensor_k_scale=self._one,
            per_tensor_v_scale=self._one,
            k_out=None,
            v_out=None,
            return_kv=False,
            use_shuffle_layout=False,
            block_size=0,  # slots are rows, whatever the page size
            x=0,
            rotary_dim=cos_sin_cache.shape[1],
        )
        return done_q_THD


class RopeCache:
    """Calls AITER's Triton ``fused_qk_rope_reshape_and_cache``, on NHD pages, for layers without q/k norm."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: TokenSlots,
        *,
        positions: torch.Tensor,
        axis_of_frequency: torch.Tensor | None,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        k_scale: float,
        v_scale: float,
    ) -> torch.Tensor:
        """See ``atom_plugin.ops.qk_norm_rope_store_kv.qk_norm_rope_store_kv``."""
        _check(q_THD, k_THD, v_THD, k_pages, v_pages, slots, positions, axis_of_frequency, k_scale, v_scale)
        if q_weight is not None or k_weight is not None:
            raise ValueError("norm weights: takes none")
        num_kv_heads, dim = k_THD.shape[1:]
        if cos_sin_cache.shape[1] != dim:
            raise ValueError(
                f"a cos_sin_cache of {cos_sin_cache.shape[1]} columns for head dim {dim}: takes equal ones"
            )
        if q_THD.shape[0] == 0:
            return torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        # float32 whatever the dtype of the table: the products are then float32 too, with one rounding
        cos, sin = converted(cos_sin_cache, torch.float32).split(dim // 2, dim=1)
        done: torch.Tensor = self._function(
            q=q_THD,
            k=k_THD,
            v=v_THD,
            key_cache=k_pages.view(-1, 1, num_kv_heads, dim),
            value_cache=v_pages.view(-1, 1, num_kv_heads, dim),
            slot_mapping=slots.slots_T,
            pos=positions,
            cos=cos,
            sin=sin,
            k_scale=None,
            v_scale=None,
            is_neox=is_neox,
            flash_layout=True,
            apply_scale=False,
            output_zeros=False,
        )[0]
        return done


def _joined(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    """Return q, k and v as one contiguous [tokens, all heads, dim]: the memory they are slices of, or a copy."""
    num_tokens, _, dim = q_THD.shape
    heads = q_THD.shape[1] + k_THD.shape[1] + v_THD.shape[1]
    expected = q_THD.data_ptr()
    for part in (q_THD, k_THD, v_THD):
        is_slice = part.stride()[1:] == (dim, 1) and (num_tokens == 1 or part.stride(0) == heads * dim)
        same_memory = part.untyped_storage().data_ptr() == q_THD.untyped_storage().data_ptr()
        if not is_slice or not same_memory or part.data_ptr() != expected:
            return torch.cat([q_THD, k_THD, v_THD], dim=1)
        expected += part.shape[1] * dim * part.element_size()
    return q_THD.as_strided((num_tokens, heads, dim), (heads * dim, dim, 1))


def _check(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: TokenSlots,
    positions: torch.Tensor,
    axis_of_frequency: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    """Raise ValueError for what AITER would abort on, read as something else, or write elsewhere."""
    tensors = (q_THD, k_THD, v_THD, k_pages, v_pages)
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"q, k, v and pages of {', '.join(str(tensor.dtype) for tensor in tensors)}: takes one dtype")
    tokens, dim = q_THD.shape[0], q_THD.shape[2]
    if k_THD.shape != v_THD.shape or (k_THD.shape[0], k_THD.shape[2]) != (tokens, dim):
        raise ValueError(
            f"q {tuple(q_THD.shape)}, k {tuple(k_THD.shape)}, v {tuple(v_THD.shape)}: tokens and head dim have to agree"
        )
    if k_pages.shape != v_pages.shape or k_pages.shape[2:] != k_THD.shape[1:]:
        raise ValueError(f"pages {tuple(k_pages.shape)} and {tuple(v_pages.shape)} for keys {tuple(k_THD.shape)}")
    if not k_pages.is_contiguous() or not v_pages.is_contiguous():
        raise ValueError(f"pages with strides {k_pages.stride()} and {v_pages.stride()}: have to be contiguous")
    if axis_of_frequency is not None or positions.shape != (tokens,) or positions.dtype != torch.int64:
        raise ValueError(f"positions {tuple(positions.shape)} of {positions.dtype}: takes one int64 a token")
    slots_T = slots.slots_T
    if slots_T.shape != (tokens,) or slots_T.dtype != torch.int64 or not slots_T.is_contiguous():
        raise ValueError(
            f"slots {tuple(slots_T.shape)} of {slots_T.dtype} with strides {slots_T.stride()}: takes one int64 a "
            f"token, contiguous"
        )
    if not positions.is_contiguous():
        raise ValueError(f"positions with stride {positions.stride()}: have to be contiguous")
    if (k_scale, v_scale) != (1.0, 1.0):
        raise ValueError(f"scales {k_scale} and {v_scale}: a pool of {k_pages.dtype} takes 1")
