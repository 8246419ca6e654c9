"""The gated feed-forward part: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from torch import nn

from atom_plugin.layers.parallel import reduce_feed_forward


class GatedMLP(nn.Module):
    """SwiGLU MLP, its ``intermediate_size`` split over the whole TP group.

    ``reduce_results`` False: the caller sums the ranks' outputs, together with others.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.reduce_results = reduce_results
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden_size], summed over the TP group unless the caller does that."""
        gate_up, _ = self.gate_up_proj(hidden_TD)
        partial_TD, _ = self.down_proj(self.act_fn(gate_up))
        return reduce_feed_forward(partial_TD) if self.reduce_results else partial_TD
