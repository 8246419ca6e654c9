"""Each row of the CPU ledger is needed by this SGLang (the test fails once it is not), and does its job."""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput

from atom_plugin import host
from atom_plugin.cpu import communication, install
from atom_plugin.cpu.moe import skip_experts_of_other_ranks
from atom_plugin.hooks import Hook
from tests.platform.test_processes import TINY


def unhooked(row: Hook) -> Any:
    """Return what SGLang has at the row's target, without any hook."""
    return inspect.unwrap(pkgutil.resolve_name(row.target))


def needed(row: Hook) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not row.applies(), reason=f"this SGLang is outside of {row.versions}")


@needed(install.TRITON)
def test_triton_is_needed() -> None:
    assert unhooked(install.TRITON)("atom") is True
    assert install.TRITON.hook("atom") is False


def test_triton_versions() -> None:
    """The row covers just the versions that do not ask the platform."""
    from sglang.srt.platforms import interface

    assert install.TRITON.applies() == ("PlatformCapabilities" not in vars(interface))


@needed(install.UNPADDED)
def test_widths_are_padded_without_the_row(tmp_path: Path) -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig

    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **moe, "moe_intermediate_size": 48}))
    config = ModelConfig(str(tmp_path))
    assert install.UNPADDED.hook(unhooked(install.UNPADDED), config, LoadConfig(), 1) is config
    assert config.hf_config.moe_intermediate_size == 48
    unhooked(install.UNPADDED)(config, LoadConfig(), 1)
    assert config.hf_config.moe_intermediate_size == 64


@needed(install.COPY)
@pytest.mark.parametrize("offset_is_in_src", [False, True])
def test_copy(offset_is_in_src: bool) -> None:
    src, dst = torch.arange(12.0).view(6, 2), torch.zeros(6, 2)
    arguments = (dst, src, 0, torch.tensor(2), torch.tensor(3), offset_is_in_src)
    with pytest.raises((ValueError, RuntimeError)):  # a Triton launch without a driver, or on host pointers
        unhooked(install.COPY)(*arguments)
    communication.copy_rows(*arguments)
    expected = torch.zeros(6, 2)
    if offset_is_in_src:
        expected[:3] = src[2:5]
    else:
        expected[2:5] = src[:3]
    assert torch.equal(dst, expected)


@pytest.mark.parametrize(("offset", "size", "rows"), [(4, 5, 2), (0, 0, 0), (9, 1, 0)])
def test_copy_stays_inside_both_tensors(offset: int, size: int, rows: int) -> None:
    dst = torch.zeros(6, 2)
    communication.copy_rows(dst, torch.ones(6, 2), 0, offset, size, False)
    assert int(dst[:, 0].sum()) == rows


def test_copy_refuses_rows_of_other_widths() -> None:
    with pytest.raises(ValueError, match="cannot be copied"):
        communication.copy_rows(torch.zeros(2, 3), torch.zeros(2, 4), 0, 0, 1, False)


@needed(install.PADDING)
def test_padding_is_needed() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    with pytest.raises(NotImplementedError):
        unhooked(install.PADDING)(backend)
    assert install.PADDING.hook(backend) == 1


@needed(install.PINNED)
def test_pinned_memory_is_dropped() -> None:
    """SGLang's function needs a running server; what it does is in its source, what PyTorch says to it is here."""
    source = inspect.getsource(unhooked(install.PINNED))
    assert "pin_memory=True" in source or "self.use_pin_memory = not _is_cpu" in source

    def pin(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, pin_memory=True)

    with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA driver"):
        pin([1, 2])
    assert communication.prepare_in_pageable_memory(pin, [1, 2]).tolist() == [1, 2]


def experts(
    *, num_experts: int = 4, dtype: torch.dtype = torch.float32, hidden: int = 16, inner: int = 8
) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(num_experts, 2 * inner, hidden, generator=generator)
    w2 = torch.randn(num_experts, hidden, inner, generator=generator)
    return SimpleNamespace(num_experts=num_experts, w13_weight=w13.to(dtype), w2_weight=w2.to(dtype))


def routing(ids_TK: torch.Tensor) -> StandardTopKOutput:
    weights = torch.rand(ids_TK.shape, generator=torch.Generator().manual_seed(1))
    return StandardTopKOutput(topk_weights=weights, topk_ids=ids_TK, router_logits=torch.empty(0))


def distinct_experts(num_tokens: int) -> torch.Tensor:
    return torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(2)).topk(2).indices


def dense(layer: SimpleNamespace, x_TD: torch.Tensor, topk: StandardTopKOutput) -> torch.Tensor:
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t in range(x_TD.shape[0]):
        for k in range(topk.topk_ids.shape[1]):
            e = int(topk.topk_ids[t, k])
            if e >= 0:
                gate, up = (layer.w13_weight[e].double() @ x_TD[t].double()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out_TD[t] += float(topk.topk_weights[t, k]) * (layer.w2_weight[e].double() @ inner)
    return out_TD


CONFIG = MoeRunnerConfig(activation="silu")


@pytest.fixture(scope="module", autouse=True)
def published() -> None:
    """Let SGLang's activation layers be built: 0.5.17 and 0.5.21 ask a server's flags for that."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    if not host.since("0.5.23"):
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def test_experts_of_other_ranks_are_needed() -> None:
    layer, x, topk = experts(), torch.randn(3, 16), routing(torch.tensor([[0, -1], [-1, -1], [3, 1]]))
    with pytest.raises(RuntimeError):
        unhooked(install.EXPERTS)(layer, x, topk, CONFIG)
    torch.testing.assert_close(
        skip_experts_of_other_ranks(unhooked(install.EXPERTS), layer, x, topk, CONFIG).double(),
        dense(layer, x, topk),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_of_one_rank_are_sglangs_own(dtype: torch.dtype) -> None:
    layer, x, topk = experts(dtype=dtype), torch.randn(9, 16).to(dtype), routing(distinct_experts(9))
    original = unhooked(install.EXPERTS)
    assert torch.equal(skip_experts_of_other_ranks(original, layer, x, topk, CONFIG), original(layer, x, topk, CONFIG))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_add_up_to_sglangs_own(dtype: torch.dtype) -> None:
    """Two halves of the experts, each with the other's ids at -1, sum to the whole; bf16 rounds once a rank."""
    whole, x, topk = experts(dtype=dtype), torch.randn(33, 16).to(dtype), routing(distinct_experts(33))
    original = unhooked(install.EXPERTS)
    parts = []
    for first in (0, 2):
        local = topk.topk_ids - first
        local = torch.where((local >= 0) & (local < 2), local, -1)
        half = SimpleNamespace(
            num_experts=4, w13_weight=whole.w13_weight[first : first + 2], w2_weight=whole.w2_weight[first : first + 2]
        )
        parts.append(skip_experts_of_other_ranks(original, half, x, topk._replace(topk_ids=local), CONFIG))
    expected = original(whole, x, topk, CONFIG).float()
    tolerance = float(expected.abs().max()) * (1e-6 if dtype is torch.float32 else 2**-7)
    torch.testing.assert_close(parts[0].float() + parts[1].float(), expected, rtol=0, atol=tolerance)


def test_no_tokens_are_an_empty_sum() -> None:
    layer, x, topk = experts(), torch.empty(0, 16), routing(torch.empty(0, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError):
        unhooked(install.EXPERTS)(layer, x, topk, CONFIG)
    assert skip_experts_of_other_ranks(unhooked(install.EXPERTS), layer, x, topk, CONFIG).shape == (0, 16)


def test_scaled_experts_are_refused() -> None:
    layer, x, topk = experts(dtype=torch.float8_e4m3fn), torch.randn(1, 16), routing(torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"experts in torch\.float8_e4m3fn cannot be computed on a CPU"):
        skip_experts_of_other_ranks(unhooked(install.EXPERTS), layer, x, topk, CONFIG)
