"""What a model's attention layer declares so that the backend does q/k norm, rope and the KV store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class QKNormRope:
    """The constants of q/k norm and rope of one layer, set as ``layer.qk_norm_rope`` on its RadixAttention.

    ``q_weight``, ``k_weight``: [head dim] of the RMS norm over each head, both None for no norm. ``rotary_dim``:
    leading dims of a head that turn. ``position_source``: the ForwardBatch field with the positions, int64 [tokens] or
    [3, tokens]. ``axis_of_frequency``: int64 [rotary_dim / 2], which of the three rows of mrope_positions drives each
    frequency; needed with mrope_positions only.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    rotary_dim: int
    position_source: Literal["positions", "mrope_positions"]
    axis_of_frequency: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.q_weight is None) != (self.k_weight is None):
            raise ValueError("qk_norm_rope needs the weights of both q and k, or of neither")
        if self.position_source not in ("positions", "mrope_positions"):
            raise ValueError(f"qk_norm_rope.position_source={self.position_source!r}: positions or mrope_positions")
        if (self.position_source == "mrope_positions") != (self.axis_of_frequency is not None):
            raise ValueError("qk_norm_rope takes axis_of_frequency with mrope_positions, and only with them")
        if self.axis_of_frequency is not None and self.axis_of_frequency.shape != (self.rotary_dim // 2,):
            raise ValueError(
                f"qk_norm_rope.axis_of_frequency has shape {tuple(self.axis_of_frequency.shape)}, "
                f"rotary_dim={self.rotary_dim} needs ({self.rotary_dim // 2},)"
            )


def declared_by(layer: Any) -> QKNormRope | None:
    """Return what a RadixAttention declares as ``qk_norm_rope``; None where it declares nothing."""
    constants = vars(layer).get("qk_norm_rope")
    if constants is not None and not isinstance(constants, QKNormRope):
        raise TypeError(f"attention layer {layer.layer_id}: qk_norm_rope is a {type(constants).__name__}")
    return constants
