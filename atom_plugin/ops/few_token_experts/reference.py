"""The definition: one token and one of its experts at a time, in fp32."""

from __future__ import annotations

import torch


def few_token_experts(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, D] of the dtype of ``hidden_TD``, new memory.

    An expert is ``w2 (silu(w1 x) * (w3 x))`` (Shazeer, https://arxiv.org/abs/2002.05202). ``hidden_TD``: [tokens,
    hidden_size], the last stride 1. ``weights_TK``: fp32, what each expert counts; ``ids_TK``: int32 or int64, an
    expert a place, -1 for none, as SGLang pads graphs; both contiguous. ``w13_EFD``: [experts, 2 * I, D], w1 above w3;
    ``w2_EDI``: [experts, D, I]; contiguous. Sums are fp32 and rounded once.
    """
    width = w2_EDI.shape[2]
    out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
    for token, experts in enumerate(ids_TK.tolist()):
        for place, expert in enumerate(experts):
            if expert < 0:
                continue
            gate_up = w13_EFD[expert].float() @ hidden_TD[token].float()
            inner = torch.nn.functional.silu(gate_up[:width]) * gate_up[width:]
            out_TD[token] += weights_TK[token, place].float() * (w2_EDI[expert].float() @ inner)
    return out_TD.to(hidden_TD.dtype)
