"""Routed experts on SGLang's fused MoE."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import RoutingMethodType
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import nn

from atom_plugin import device, host
from atom_plugin.attention.tables import choose, forced_rows
from atom_plugin.layers.mlp import GatedMLP
from atom_plugin.layers.parallel import reduce_feed_forward
from atom_plugin.ops import few_token_experts
from atom_plugin.ops.few_token_experts import MOST_TOKENS, FewTokenExpertsProblem

logger = logging.getLogger(__name__)


def why_not_plain(experts: Any) -> list[str]:
    """Return why SGLang's layer of experts does not hold each one whole and as it is in a checkpoint; [] if it does."""
    method = experts.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return [few_token_experts.QUANTISED]
    moe, reasons = method.runner, [few_token_experts.SPLIT] if experts.moe_ep_size > 1 else []
    is_interleaved = os.environ.get("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "0") not in ("0", "false")
    if type(experts) is not FusedMoE or not moe.runner_backend.is_triton() or method._aiter_runner or is_interleaved:
        reasons.append("SGLang lays their weights out for another kernel than Triton's plain one")
    return reasons


def choose_few_token_experts(experts: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """Return what runs ``experts`` for at most MOST_TOKENS tokens and their routing; raises NoKernelError."""
    problem = FewTokenExpertsProblem(
        arch=device.arch(),
        dtype=torch.get_default_dtype(),
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size_per_partition,
        num_experts=experts.num_local_experts,
        top_k=experts.top_k,
        why_not_plain=tuple(why_not_plain(experts)),
    )
    row = choose(few_token_experts.TABLE, problem, forced_rows())
    _say(row.name)
    return functools.partial(row.load(), experts)


@functools.cache
def _say(row: str) -> None:
    logger.info("experts of up to %d tokens: few_token_experts=%s", MOST_TOKENS, row)


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
        self.few_token_experts = choose_few_token_experts(self.experts)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden_size], summed over the TP group; no rows are an empty routing, not an empty kernel."""
        if hidden_TD.shape[0]:
            router_logits_TE, _ = self.gate(hidden_TD)
            routing = self.topk(hidden_TD, router_logits_TE)
        else:
            routing = self.topk.empty_topk_output(hidden_TD.device)
        run = self.few_token_experts if hidden_TD.shape[0] <= MOST_TOKENS else self.experts
        return reduce_feed_forward(run(hidden_TD, routing))


class SigmoidRouter(nn.Module):
    """The scores of DeepSeek-V3's router, and the bias that it adds to choose by and never to weight by."""

    def __init__(self, *, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, experts] in fp32: in bf16 the scores of close experts would be equal."""
        if hidden_TD.dtype != torch.float32 and device.multiplies_into_fp32():
            return torch.mm(hidden_TD, self.weight.t(), out_dtype=torch.float32)
        return nn.functional.linear(hidden_TD.float(), self.weight.float())


class SigmoidRoutedExperts(nn.Module):
    """Experts chosen by sigmoid scores plus a bias, within the best groups, and experts that all tokens share.

    Routed experts are split over EP ranks, their width over MoE-TP ranks; the width of the shared ones over all TP
    ranks, so that one sum over these counts both once. No layer of SGLang's is told the routed scaling factor: some
    would apply it to the weights, some to the output and some not at all.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_shared_experts: int,
        top_k: int,
        num_groups: int,
        groups_per_token: int,
        renormalize: bool,
        routed_scaling_factor: float,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.routed_scaling_factor = routed_scaling_factor
        self.gate = SigmoidRouter(hidden_size=hidden_size, num_experts=num_experts)
        self.topk = TopK(
            top_k=top_k,
            layer_id=layer_id,
            renormalize=renormalize,
            use_grouped_topk=True,
            num_expert_group=num_groups,
            topk_group=groups_per_token,
            scoring_func="sigmoid",
            correction_bias=self.gate.e_score_correction_bias,
        )
        self.experts = get_moe_impl_class(quant_config)(
            num_experts=num_experts,
            top_k=top_k,
            layer_id=layer_id,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            quant_config=quant_config,
            inplace=False,  # the shared experts read the same rows, at the same time in a graph
            routing_method_type=RoutingMethodType.DeepSeekV3,
            prefix=f"{prefix}.experts",
        )
        host.bind_topk(self.topk, self.experts)
        self.few_token_experts = choose_few_token_experts(self.experts)
        self.shared_experts = GatedMLP(
            hidden_size=hidden_size,
            intermediate_size=num_shared_experts * intermediate_size,
            reduce_results=False,
            quant_config=quant_config,
            prefix=f"{prefix}.shared_experts",
        )

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden_size], summed over the TP group; no rows are an empty routing, not an empty kernel."""
        if device.overlaps_in_graph():
            main, side = torch.cuda.current_stream(), device.side_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                shared_TD = self.shared_experts(hidden_TD)
            routed_TD = self.route(hidden_TD)
            main.wait_stream(side)
        else:
            shared_TD, routed_TD = self.shared_experts(hidden_TD), self.route(hidden_TD)
        return reduce_feed_forward(torch.add(shared_TD, routed_TD, alpha=self.routed_scaling_factor))

    def route(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden_size], without the scaling factor."""
        if hidden_TD.shape[0]:
            routing = self.topk(hidden_TD, self.gate(hidden_TD))
        else:
            routing = self.topk.empty_topk_output(hidden_TD.device)
        run = self.few_token_experts if hidden_TD.shape[0] <= MOST_TOKENS else self.experts
        routed_TD: torch.Tensor = run(hidden_TD, routing)
        return routed_TD
