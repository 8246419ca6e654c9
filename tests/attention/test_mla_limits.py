"""What MLA on our backend does not serve is refused with what was asked and what is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context

from atom_plugin import device
from atom_plugin.attention.limits import latent_outlines, why_no_row
from atom_plugin.attention.tables import LayerProblems
from atom_plugin.dispatch import NoKernelError
from tests.attention.mla_world import NOPE, RANK, ROPE, V_DIM, MlaStep, MlaWorld, latent_shape

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
FP8 = torch.float8_e4m3fn


def per_head_call(world: MlaWorld, step: MlaStep, **changes: Any) -> Any:
    """Call the un-absorbed layer on the step, with some of its arguments changed."""
    backend = world.backend()
    backend.init_forward_metadata(step.batch)
    k, v = world.per_head_kv(step.k)
    call = {"k": k, "v": v, "save_kv_cache": False, **changes}
    return backend.forward(step.per_head_q, layer=world.per_head, forward_batch=step.batch, **call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_kv_cache": True}, "attention layer 0 takes no save_kv_cache in this call"),
        ({"q_rope": torch.zeros(5, 4, ROPE)}, "attention layer 0 takes no q_rope in this call"),
        ({"sinks": torch.zeros(4)}, "attention layer 0 takes no sinks in this call"),
        ({"cos_sin_cache": torch.zeros(8, ROPE), "is_neox": True}, "attention layer 0 takes no cos_sin_cache in this"),
        ({"k": None, "v": None}, "it attends in extends that no graph captures, to the k and v that it is handed"),
        (
            {"k": torch.zeros(25, 4, NOPE + ROPE), "v": torch.zeros(25, 4, V_DIM)},
            "got 25 keys and 25 values: takes 5 of both, those of the new tokens",
        ),
        ({"v": torch.zeros(4, 4, V_DIM)}, "got 5 keys and 4 values: takes 5 of both"),
    ],
)
def test_unabsorbed_calls_that_are_refused(changes: dict[str, Any], message: str) -> None:
    """Keys of the whole sequence (SGLang's one-shot form) are not taken for those of the new tokens."""
    world = MlaWorld()
    step = world.mla_step(EXTEND, [(world.add(20), 5)])
    with pytest.raises(ValueError, match=message):
        per_head_call(world, step, **changes)


def test_an_unabsorbed_call_of_a_decode_is_refused() -> None:
    world = MlaWorld()
    step = world.mla_step(DECODE, [(world.add(20), 1)])
    with pytest.raises(ValueError, match="has keys of 4 heads, and the pool holds latent rows"):
        per_head_call(world, step)


def test_a_chunk_of_another_size_is_refused() -> None:
    world = MlaWorld()
    step = world.mla_step(EXTEND, [(world.add(20), 5)])
    backend = world.backend()
    world.run_per_head(backend, step)
    k, v = world.per_head_kv(step.k)
    with pytest.raises(ValueError, match="got 5 keys and 5 values: takes 20 of both, those of one chunk of the prefix"):
        backend.forward(step.per_head_q, k, v, world.per_head, step.batch, save_kv_cache=False)


@pytest.mark.parametrize("alone", ["q_rope", "k_rope"])
def test_one_rotated_part_alone_is_refused(alone: str) -> None:
    world = MlaWorld()
    step = world.mla_step(DECODE, [(world.add(20), 1)])
    rows = {"q_rope": torch.zeros(1, 4, ROPE), "k_rope": torch.zeros(1, 1, ROPE)}
    with pytest.raises(ValueError, match=f"got {alone} alone: q_rope and k_rope belong together"):
        world.run(world.backend(), step, **{alone: rows[alone]})


@pytest.mark.parametrize("how", [{"sinks": torch.zeros(4)}, {"cos_sin_cache": torch.zeros(8, ROPE), "is_neox": True}])
def test_what_absorbed_attention_does_not_take(how: dict[str, Any]) -> None:
    world = MlaWorld()
    step = world.mla_step(DECODE, [(world.add(20), 1)])
    with pytest.raises(ValueError, match=f"attention layer 0 takes no {next(iter(how))} in this call"):
        world.run(world.backend(), step, **how)


def layer_of(**how: Any) -> RadixAttention:
    values = {"num_heads": 4, "head_dim": RANK + ROPE, "scaling": 1.0, "num_kv_heads": 1, "layer_id": 7}
    return RadixAttention(**{**values, "v_head_dim": RANK, **how})


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (
            layer_of(num_kv_heads=2),
            "attention layer 7 has 4 query and 2 KV heads with values of 32 on a pool of latent rows: takes one KV "
            "head with values of 32, or as many KV heads as query heads",
        ),
        (layer_of(sliding_window_size=5), "attention layer 7 has a sliding window on a pool of latent rows"),
        (layer_of(logit_cap=5.0), "attention layer 7 caps its logits on a pool of latent rows"),
        (layer_of(layer_id=0), "two attention layers of one layer_id have one KV head with values as wide as latent"),
    ],
)
def test_layers_that_end_the_launch(layer: RadixAttention, reason: str) -> None:
    world = MlaWorld()
    world.runner.model.append(layer)
    with pytest.raises(ValueError, match=f"--attention-backend atom cannot serve this model:\n  {reason}"):
        world.backend()


def test_a_scale_that_only_one_of_the_two_layers_has_ends_the_launch() -> None:
    """Fault 20: SGLang's loader sets the absorbed one, its writer of latent rows divides by none."""
    world = MlaWorld(latent_shape(kv_dtype=FP8, k_scale=0.5))
    world.per_head.k_scale = world.per_head.k_scale_float = None
    message = "layer 0 has a k_scale of 0.5 where it is absorbed, and 1.0 where the model stores latent rows itself"
    with pytest.raises(ValueError, match=message):
        world.backend()
    world = MlaWorld(latent_shape(k_scale=0.5))
    world.per_head.k_scale = world.per_head.k_scale_float = None
    world.backend()  # a pool of floats has no scale


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fp8_read_with_another_scale_is_seen_by_these_tests(scale: float) -> None:
    world = MlaWorld(latent_shape(kv_dtype=FP8, k_scale=0.5))
    step = world.mla_step(EXTEND, [(world.add(20), 9)])
    world.run(world.backend(), step)
    for layer in (world.layer, world.per_head):
        layer.k_scale_float, layer.k_scale = scale, torch.tensor(scale)
    out = world.run(world.backend(), step, save_kv_cache=False)
    assert (out - step.expected).abs().max() > 0.1


def test_the_cpu_platforms_pool_for_hosts_that_ask_for_one() -> None:
    """Up to 0.5.21 SGLang builds it with the width of an indexer's keys, which its own class does not take."""
    from atom_plugin.cpu.srt_platform import _latent_pool

    how: dict[str, Any] = {"page_size": 1, "dtype": torch.float32, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    how |= {"layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    assert type(_latent_pool(64, index_head_dim=None, **how)) is MLATokenToKVPool
    assert type(_latent_pool(size=64, **how)) is MLATokenToKVPool  # as HybridLinearKVPool does
    with pytest.raises(ValueError, match="sparse attention \\(index_head_dim 128\\) cannot be served on a CPU"):
        _latent_pool(64, index_head_dim=128, **how)


def test_modes_are_resolved_at_launch() -> None:
    world = MlaWorld()
    with get_context().override_server_args(speculative_num_draft_tokens=4):
        backend = super(MlaWorld, world).backend()
    backend.init_cuda_graph_state(4, 16)
    rows = [set(backend._kernels_of(layer).rows) for layer in (world.layer, world.per_head)]
    assert rows == [
        {
            "store_kv",
            "mla_attention decode",
            "mla_attention verify of 4",
            "mla_attention extend",
            "mla_attention decode in a graph",
            "mla_attention verify of 4 in a graph",
        },
        {"paged_attention extend", "paged_attention extend lse", "paged_attention chunk of prefixes lse"},
    ]


def test_no_kernel_ends_the_launch_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "arch", lambda: "gfx942")
    world = MlaWorld()
    world.backend()
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "mla_attention=eager,store_kv=eager,paged_attention=eager")
    backend = world.backend()
    message = "reads lengths on the host, which a graph captured on gfx942 cannot repeat"
    with pytest.raises(NoKernelError, match=message):
        backend.init_cuda_graph_state(4, 4)
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "mla_attention=aiter_mla_decode_fwd")
    with pytest.raises(NoKernelError, match="pool_bytes=786624"):
        world.backend()


@pytest.mark.parametrize("arch", ["cpu", "sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize("heads", [4, 8, 12, 64])
def test_rows_are_there_for_kimi_before_anything_is_built(arch: str, heads: int) -> None:
    outlines = latent_outlines(heads=heads, kv_lora_rank=512, rope_dim=64, unabsorbed=(192, 128), ours=False)
    float8 = torch.float8_e4m3fnuz if arch == "gfx942" else FP8
    for pool_dtype in (torch.bfloat16, float8):
        for outline in outlines:
            how: dict[str, Any] = {"q_dtype": torch.bfloat16, "pool_dtype": pool_dtype, "page_size": 64}
            layer = LayerProblems(layer=outline, arch=arch, kv_lora_rank=512, **how)
            assert why_no_row(layer, captures=True, verify_len=16) == []
