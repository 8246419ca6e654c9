"""Layers of experts take the row of few_token_experts up to MOST_TOKENS tokens and SGLang's layer past them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config
from torch import nn

from atom_plugin.dispatch import NoKernelError
from atom_plugin.layers.moe import SigmoidRoutedExperts, SoftmaxRoutedExperts, why_not_plain
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


def test_experts_that_are_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_layer(SoftmaxRoutedExperts, {}).experts
    assert why_not_plain(experts) == []
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "1")  # 0.5.23 mixes rows of gate and up after loading
    assert why_not_plain(experts) != []
    monkeypatch.delenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED")
    experts.moe_ep_size = 2
    assert why_not_plain(experts) == [SPLIT]
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128}
    fp8 = Fp8Config.from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    quantised = SoftmaxRoutedExperts(**sizes, layer_id=0, quant_config=fp8, prefix="mlp")
    assert why_not_plain(quantised.experts) == [QUANTISED]
