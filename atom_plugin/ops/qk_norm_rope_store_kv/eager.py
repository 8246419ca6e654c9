"""q/k norm, rope and store in PyTorch for CPUs: q and k as one tensor of heads, all tokens at once.

For a decode batch nearly all of the time is the cost of a PyTorch call (5 us each in a server, where little of PyTorch
is still in the caches), so the fewest calls win.
"""

from __future__ import annotations

import functools

import torch

from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv.eager import store_kv


def qk_norm_rope_store_kv(
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
    num_q_heads, num_k_heads = q_THD.shape[1], k_THD.shape[1]
    x_THD = torch.cat([q_THD, k_THD], dim=1).float()  # q and k heads take the same steps: one tensor, half the calls
    if q_weight is not None and k_weight is not None:
        norm_TH1 = torch.linalg.vector_norm(x_THD, dim=-1, keepdim=True)
        x_THD.mul_(torch.addcmul(_scalar(eps, x_THD.device), norm_TH1, norm_TH1, value=1 / x_THD.shape[2]).rsqrt_())
        x_THD.mul_(torch.cat([q_weight.expand(num_q_heads, -1), k_weight.expand(num_k_heads, -1)]))
    done_THD = _rotated(x_THD, *_cos_sin(cos_sin_cache, positions, axis_of_frequency), is_neox).to(q_THD.dtype)
    done_q_THD, done_k_THD = done_THD.split_with_sizes([num_q_heads, num_k_heads], dim=1)
    store_kv(done_k_THD, v_THD, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale)
    return done_q_THD


@functools.lru_cache(maxsize=16)
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


def _cos_sin(
    cos_sin_cache: torch.Tensor, positions: torch.Tensor, axis_of_frequency: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 cosines and sines, [tokens, 1, rotary dim / 2] each."""
    half = cos_sin_cache.shape[1] // 2
    if positions.dim() == 1:
        cos_T1F, sin_T1F = cos_sin_cache.index_select(0, positions).float().view(-1, 1, 2, half).unbind(2)
        return cos_T1F, sin_T1F
    if axis_of_frequency is None:
        raise ValueError(f"positions of shape {tuple(positions.shape)} need axis_of_frequency")
    position_TF = positions[axis_of_frequency].T
    frequency_F = torch.arange(half, device=positions.device)
    cos_TF, sin_TF = cos_sin_cache[position_TF, frequency_F], cos_sin_cache[position_TF, half + frequency_F]
    return cos_TF.float()[:, None], sin_TF.float()[:, None]


def _rotated(x_THD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Return float32 ``x_THD`` with its leading dims rotated, in new memory."""
    tokens, heads, dim = x_THD.shape
    half = cos_T1F.shape[2]
    turned_THR = x_THD if 2 * half == dim else x_THD[..., : 2 * half].contiguous()
    member = 2 if is_neox else 3  # the axis of the two members of a pair
    pairs = turned_THR.view((tokens, heads, 2, half) if is_neox else (tokens, heads, half, 2))
    out_pairs = pairs * cos_T1F.unsqueeze(member)
    (first, second), (out_first, out_second) = pairs.unbind(member), out_pairs.unbind(member)
    out_first.addcmul_(second, sin_T1F, value=-1)
    out_second.addcmul_(first, sin_T1F)
    out_THR = out_pairs.view(turned_THR.shape)
    return out_THR if 2 * half == dim else torch.cat([out_THR, x_THD[..., 2 * half :]], dim=-1)
