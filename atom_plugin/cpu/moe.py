"""SGLang's PyTorch experts, made to serve one rank's share of the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def skip_experts_of_other_ranks(
    original: Callable[..., torch.Tensor], layer: Any, hidden_TD: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """Return the sum over this rank's experts, [tokens, hidden]; expert -1 is on another rank and adds nothing.

    Every (token, expert) pair that is ours goes through SGLang's own loop as a token with one expert and weight 1, so
    activations, biases and roundings stay its own; weighting and summing in the weights' dtype then follow its order.
    """
    if layer.w13_weight.dtype != hidden_TD.dtype:
        raise ValueError(
            f"experts in {layer.w13_weight.dtype} cannot be computed on a CPU with activations in {hidden_TD.dtype}: "
            "SGLang's PyTorch experts read no scales. Serve an unquantised checkpoint, or this one on a GPU."
        )
    ids_TK, weights_TK = topk_output.topk_ids, topk_output.topk_weights
    ours_TK = ids_TK >= 0
    if ids_TK.numel() and bool(ours_TK.all()):
        return original(layer, hidden_TD, topk_output, config)
    rows, slots = ours_TK.nonzero(as_tuple=True)
    result_TKD = hidden_TD.new_zeros((*ids_TK.shape, hidden_TD.shape[-1]))
    if len(rows):
        pairs = topk_output._replace(
            topk_ids=ids_TK[rows, slots].unsqueeze(1),
            topk_weights=torch.ones_like(weights_TK[rows, slots]).unsqueeze(1),
        )
        result_TKD[rows, slots] = original(layer, hidden_TD[rows], pairs, config)
    weighted_TKD = result_TKD.to(weights_TK.dtype) * weights_TK.masked_fill(~ours_TK, 0).unsqueeze(-1)
    return weighted_TKD.sum(dim=1).to(hidden_TD.dtype)
