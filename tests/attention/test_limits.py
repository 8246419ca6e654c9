"""What the backend does not serve is refused before anything runs, with every reason and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from atom_plugin import device, host
from atom_plugin.attention.kv_layout import KVScales, as_pages, is_fp8_kv, why_not_pool
from atom_plugin.attention.limits import LayerOutline, why_no_row, why_not_backend, why_not_layer
from atom_plugin.attention.tables import LayerProblems
from atom_plugin.dispatch import NoKernelError
from tests.attention.world import Shape, World, make_layer

SERVED: dict[str, Any] = {"kv_cache_dtype": "auto", "page_size": 16}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 1024])
def test_launches_that_have_to_be_served(kv_cache_dtype: str, page_size: int) -> None:
    assert why_not_backend(**{**SERVED, "kv_cache_dtype": kv_cache_dtype, "page_size": page_size}) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: use one of auto, bfloat16"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1: use one of auto, bfloat16"),
        ({"page_size": 24}, "--page-size 24: use a power of two"),
        ({"page_size": 0}, "--page-size 0: use a power of two"),
        ({"is_sparse": True}, "the model's attention picks keys by an indexer: drop --attention-backend atom"),
        ({"is_encoder_decoder": True}, "the model has cross attention: drop --attention-backend atom"),
        (
            {"is_hybrid_swa": True},
            "the sliding-window layers have a KV pool of their own: use --disable-hybrid-swa-memory",
        ),
    ],
)
def test_every_launch_reason(flags: dict[str, Any], reason: str) -> None:
    reasons = why_not_backend(**{**SERVED, **flags})
    assert len(reasons) == 1 and reasons[0].startswith(reason)


def test_rows_are_asked_before_anything_is_built() -> None:
    """Some row runs the layer on a CPU and on a GPU; where none does, the message says why of each."""
    outline = LayerOutline(tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=64, v_head_dim=64, fused=True)
    how: dict[str, Any] = {"q_dtype": torch.bfloat16, "pool_dtype": torch.bfloat16, "page_size": 1}
    for arch in ("cpu", "gfx942"):
        assert why_no_row(LayerProblems(layer=outline, arch=arch, **how), captures=True) == []
    outline.tp_q_head_num = 34
    reasons = why_no_row(LayerProblems(layer=outline, arch="gfx942", **how), captures=False)
    assert len(reasons) == 2, "one for decode, one for extend"
    assert "17 query heads a KV head: takes up to 16" in reasons[0]
    assert "eager" in reasons[0] and "reference" in reasons[0] and "gfx942" in reasons[0]


def test_rows_that_a_graph_cannot_hold_are_refused_with_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "paged_attention=eager")
    outline = LayerOutline(tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=64, v_head_dim=64, fused=True)
    layer = LayerProblems(layer=outline, arch="sm90", q_dtype=torch.bfloat16, pool_dtype=torch.bfloat16, page_size=1)
    assert why_no_row(layer, captures=False) == []
    assert "reads lengths on the host" in why_no_row(layer, captures=True)[0]


def test_launch_reasons_come_all_at_once() -> None:
    assert len(why_not_backend(kv_cache_dtype="fp8_e5m2", page_size=3, is_sparse=True)) == 3


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("is_cross_attention", True, "attention layer 3 is cross attention"),
        ("attn_type", AttentionType.ENCODER_ONLY, "attention layer 3 is encoder_only, and the backend is causal"),
        (
            "attn_type",
            AttentionType.DECODER_BIDIRECTIONAL,
            "attention layer 3 is decoder_bidirectional, and the backend is causal",
        ),
        ("logit_capping_method", "rsqrt", "attention layer 3 caps its logits by rsqrt, and the backend by tanh"),
        ("xai_temperature_len", 8, "attention layer 3 has xai_temperature_len 8"),
    ],
)
def test_every_layer_reason_ends_the_launch(attribute: str, value: Any, reason: str) -> None:
    layer = make_layer(Shape(logit_cap=5.0), layer_id=3)
    assert why_not_layer(layer) == []
    setattr(layer, attribute, value)
    assert why_not_layer(layer) == [reason]
    world = World()
    world.runner.model.append(layer)
    with pytest.raises(ValueError, match=f"--attention-backend atom cannot serve this model:\n  {reason}"):
        world.backend()


def test_a_layer_that_the_model_did_not_show_is_checked_at_its_first_call() -> None:
    world = World()
    backend = world.backend()
    hidden = make_layer(Shape(), layer_id=3)
    hidden.is_cross_attention = True
    with pytest.raises(ValueError, match="attention layer 3 is cross attention"):
        backend._kernels_of(hidden)


def test_no_kernel_ends_the_launch_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for CPUs is never taken in silence on an accelerator."""
    monkeypatch.setattr(device, "arch", lambda: "gfx942")
    with pytest.raises(NoKernelError) as error:
        World(Shape(num_q_heads=34)).backend()
    assert "17 query heads a KV head: takes up to 16" in str(error.value)
    assert "runs on gfx942 only when forced by name" in str(error.value)
    assert "eager:" in str(error.value) and "reference:" in str(error.value)


def test_a_captured_mode_without_a_kernel_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "arch", lambda: "gfx942")
    forced = "paged_attention=eager,store_kv=eager,qk_norm_rope_store_kv=eager"
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", forced)
    backend = World().backend()
    with pytest.raises(
        NoKernelError, match="reads lengths on the host, which a graph captured on gfx942 cannot repeat"
    ):
        backend.init_cuda_graph_state(4, 4)


def mha_pool(**changes: Any) -> MHATokenToKVPool:
    how: dict[str, Any] = {
        "size": 64,
        "page_size": 16,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 16,
        **changes,
    }
    return MHATokenToKVPool(**how, layer_num=1, device="cpu", enable_memory_saver=False, enable_alt_stream=False)


def test_pools_that_have_to_be_served() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        assert why_not_pool(mha_pool(dtype=dtype)) == [] and why_not_pool(mla_pool(dtype)) == []


def mla_pool(dtype: torch.dtype = torch.bfloat16) -> MLATokenToKVPool:
    how: dict[str, Any] = {"size": 64, "page_size": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    return MLATokenToKVPool(**how, dtype=dtype, layer_num=1, device="cpu", enable_memory_saver=False)


def test_every_pool_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    mla = mla_pool()
    mla.kv_cache_dim = 656
    assert why_not_pool(mla) == [
        "the KV pool's rows have 656 columns: takes kv_lora_rank 32 + qk_rope_head_dim 16",
    ]
    mla.__class__ = type("PicksKeys", (MLATokenToKVPool,), {})
    assert why_not_pool(mla)[0].startswith(
        "the KV pool is a PicksKeys: takes MHATokenToKVPool and MLATokenToKVPool, alone"
    )
    assert why_not_pool(mla_pool(torch.float8_e5m2)) == [
        "the KV pool holds torch.float8_e5m2: takes float32, bfloat16, float16, float8_e4m3"
    ]
    assert why_not_pool(mha_pool(dtype=torch.float8_e5m2)) == [
        "the KV pool holds torch.float8_e5m2: takes float32, bfloat16, float16, float8_e4m3"
    ]
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    reasons = why_not_pool(mha_pool())
    assert len(reasons) == 1 and reasons[0].startswith(
        "the KV pool's layout is hnd: takes NHD only; unset SGLANG_USE_HND"
    )


def test_a_subclass_of_the_pool_is_not_taken_for_the_pool() -> None:
    class StoresInAnotherWay(MHATokenToKVPool):
        pass

    world = World()
    world.pool.__class__ = StoresInAnotherWay
    assert not host.is_plain_mha_pool(world.pool)
    with pytest.raises(ValueError, match="the KV pool is a StoresInAnotherWay"):
        world.backend()


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("fp8", True),
        ("fp8_e4m3", True),
        ("fp8_e5m2", True),
        (torch.float8_e4m3fn, True),
        (torch.float8_e4m3fnuz, True),
        (torch.float8_e5m2, True),
        (torch.float8_e5m2fnuz, True),
        ("auto", False),
        ("bf16", False),
        ("bfloat16", False),
        (torch.bfloat16, False),
        (torch.uint8, False),
        (None, False),
    ],
)
def test_every_spelling_of_fp8(spelling: Any, expected: bool) -> None:
    """Fault 2."""
    assert is_fp8_kv(spelling) is expected


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_pages_are_the_pools_own_memory(page_size: int, dtype: torch.dtype) -> None:
    """Round trip: token slot s is place s % page_size of page s // page_size, written by SGLang, read through pages."""
    pool = mha_pool(size=2 * page_size, page_size=page_size, dtype=dtype, v_head_dim=8)
    slots = torch.tensor(sorted({page_size, 2 * page_size - 1, 2 * page_size, 2 * page_size + page_size // 2}))
    k, v = torch.randn(len(slots), 2, 16, dtype=torch.bfloat16), torch.randn(len(slots), 2, 8, dtype=torch.bfloat16)
    pool.set_kv_buffer(make_layer(Shape()), slots, k.clone(), v.clone())
    for buffer, rows in zip(pool.get_kv_buffer(0), (k, v), strict=True):
        pages = as_pages(buffer, page_size)
        assert pages.data_ptr() == buffer.data_ptr() and pages.dtype == dtype
        assert pages.shape[:2] == (buffer.shape[0] // page_size, page_size)
        assert torch.equal(pages[slots // page_size, slots % page_size].float(), rows.to(dtype).float())


def test_slots_that_fill_no_page_are_left_out() -> None:
    buffer = torch.zeros(37, 2, 16)
    assert as_pages(buffer, 16).shape == (2, 16, 2, 16)


def scaled_layer(**scales: Any) -> Any:
    layer = make_layer(Shape())
    for name, value in scales.items():
        setattr(layer, name, value)
    return layer


def test_kv_scales() -> None:
    fp8 = torch.float8_e4m3fn
    assert KVScales.of(scaled_layer(), fp8) == KVScales(k=1.0, v=1.0)
    both = {"k_scale": torch.tensor(0.5), "k_scale_float": 0.5, "v_scale": torch.tensor(2.0), "v_scale_float": 2.0}
    assert KVScales.of(scaled_layer(**both), fp8) == KVScales(k=0.5, v=2.0)
    assert KVScales.of(scaled_layer(**both), torch.bfloat16) == KVScales(k=1.0, v=1.0)
    only_tensor = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(2.0)}
    assert KVScales.of(scaled_layer(**only_tensor), fp8) == KVScales(k=0.5, v=2.0)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            {"k_scale": torch.tensor(0.5), "k_scale_float": 1.0},
            "layer 0: k_scale is 0.5 as a tensor and 1.0 as a float; the checkpoint's loader set only one of them",
        ),
        ({"v_scale": torch.tensor(-1.0)}, "layer 0: v_scale is -1.0, a KV scale has to be positive"),
        ({"v_scale_float": 0.0}, "layer 0: v_scale is 0.0, a KV scale has to be positive"),
    ],
)
def test_wrong_kv_scales_are_refused(scales: dict[str, Any], message: str) -> None:
    """Fault 20."""
    with pytest.raises(ValueError, match=message):
        KVScales.of(scaled_layer(**scales), torch.float8_e4m3fn)
