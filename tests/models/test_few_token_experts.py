"""Layers of experts take the row of few_token_experts up to MOST_TOKENS tokens and SGLang's layer past them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config
from torch import nn

from atom_plugin import host
from atom_plugin.dispatch import NoKernelError
from atom_plugin.layers.moe import SigmoidRoutedExperts, SoftmaxRoutedExperts
from atom_plugin.ops.few_token_experts import MOST_TOKENS, QUANTISED, SPLIT
from tests.models import latent_world
from tests.ops.interpreted import triton_interpreter

__all__ = ["triton_interpreter"]

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 40, "num_experts": 8, "top_k": 3, "renormalize": True}
OF_SIGMOID = {"num_shared_experts": 1, "num_groups": 1, "groups_per_token": 1, "routed_scaling_factor": 2.5}
KINDS = [(SoftmaxRoutedExperts, {}), (SigmoidRoutedExperts, OF_SIGMOID)]


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with latent_world.one_process():
        yield


def make_layer(kind: type[nn.Module], more: dict[str, Any]) -> Any:
    """Return a layer of drawn weights."""
    layer = kind(**SIZES, **more, layer_id=0, quant_config=None, prefix="mlp")
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


@pytest.mark.parametrize(("kind", "more"), KINDS)
@pytest.mark.usefixtures("triton_interpreter")
def test_the_row_gives_what_sglangs_layer_gives(
    kind: type[nn.Module], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make_layer(kind, more)
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "few_token_experts=triton")
    ours = make_layer(kind, more)
    asked = []
    ours.experts.register_forward_pre_hook(lambda _layer, given: asked.append(len(given[0])))
    for tokens in (1, 2, MOST_TOKENS, MOST_TOKENS + 1):
        x = 2 * torch.randn(tokens, SIZES["hidden_size"])
        with torch.no_grad():
            expected = theirs(x.clone())
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(ours(x.clone()), expected, rtol=1e-4, atol=1e-4)
    assert asked == [MOST_TOKENS + 1]


def test_what_the_row_cannot_run_is_refused_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weight is loaded."""
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "few_token_experts=triton")
    with pytest.raises(NoKernelError, match="on cpu only interpreted"):
        make_layer(SoftmaxRoutedExperts, {})


def test_experts_that_are_not_plain() -> None:
    experts = make_layer(SoftmaxRoutedExperts, {}).experts
    assert host.why_not_plain_experts(experts) == []
    experts.moe_ep_size = 2
    assert host.why_not_plain_experts(experts) == [SPLIT]
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128}
    fp8 = Fp8Config.from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    quantised = SoftmaxRoutedExperts(**sizes, layer_id=0, quant_config=fp8, prefix="mlp")
    assert host.why_not_plain_experts(quantised.experts) == [QUANTISED]
