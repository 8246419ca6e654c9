"""Residual sum and RMSNorm, in one call of SGLang's fused layer."""

from __future__ import annotations

import torch
from torch import nn


def add_and_norm(
    norm: nn.Module, hidden_TD: torch.Tensor, residual_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(hidden + residual), hidden + residual), both [tokens, hidden_size].

    SGLang's RMSNorm may write its results over both inputs. ``residual_TD`` None starts the stream. An idle rank of
    attention DP has no rows, and kernels with an empty grid fail.
    """
    if residual_TD is None:
        return (norm(hidden_TD) if hidden_TD.shape[0] else hidden_TD), hidden_TD
    if hidden_TD.shape[0] == 0:
        return hidden_TD, residual_TD
    normed_TD, residual_TD = norm(hidden_TD, residual_TD)
    return normed_TD, residual_TD
