"""Routed experts on SGLang's fused MoE."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import RoutingMethodType
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from torch import nn

from atom_plugin import host
from atom_plugin.layers.parallel import reduce_feed_forward


class SoftmaxRoutedExperts(nn.Module):
    """Top-k of a softmax over all experts; experts are split over EP ranks, their width over MoE-TP ranks."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, num_experts, bias=False, prefix=f"{prefix}.gate")
        self.topk = TopK(top_k=top_k, layer_id=layer_id, renormalize=renormalize)
        self.experts = get_moe_impl_class(quant_config)(
            num_experts=num_experts,
            top_k=top_k,
            layer_id=layer_id,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            quant_config=quant_config,
            # runners that route by themselves go by this, and take DeepSeek's routing when it is not said
            routing_method_type=RoutingMethodType.Renormalize if renormalize else RoutingMethodType.Default,
            prefix=f"{prefix}.experts",
        )
        host.bind_topk(self.topk, self.experts)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden_size], summed over the TP group; no rows are an empty routing, not an empty kernel."""
        if hidden_TD.shape[0]:
            router_logits_TE, _ = self.gate(hidden_TD)
            routing = self.topk(hidden_TD, router_logits_TE)
        else:
            routing = self.topk.empty_topk_output(hidden_TD.device)
        return reduce_feed_forward(self.experts(hidden_TD, routing))
