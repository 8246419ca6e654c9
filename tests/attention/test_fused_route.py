"""With cos_sin_cache the backend norms, rotates and stores, each once, and the result is that of the model doing it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context

from atom_plugin.attention import tables
from atom_plugin.attention.active import takes_qk_norm_rope
from atom_plugin.attention.qk_norm_rope import QKNormRope
from tests.attention.graph_contract import StaticBatch
from tests.attention.test_backend import set_real_tokens
from tests.attention.world import Shape, Step, World

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
EPS = 1e-6


def rope_of(head_dim: int, rotary_dim: int, is_neox: bool = True) -> Any:
    """Return SGLang's rope; 0.5.17 asks a launch's flags for it."""
    with get_context().override_server_args(attention_backend="atom"):
        return get_rope(head_dim, rotary_dim, max_position=1024, base=1e4, is_neox_style=is_neox, dtype=torch.float32)


class FusedWorld(World):
    """A world whose layer declares norm and rope; steps bring raw q and k, the log keeps finished keys."""

    def __init__(
        self, shape: Shape | None = None, *, rotary_dim: int = 16, is_neox: bool = True, normed: bool = True
    ) -> None:
        super().__init__(shape or Shape())
        self.rope = rope_of(self.shape.head_dim, rotary_dim, is_neox)
        weights = [torch.rand(self.shape.head_dim).to(self.shape.dtype) + 0.5 for _ in "qk"] if normed else [None, None]
        self.layer.qk_norm_rope = QKNormRope(
            q_weight=weights[0], k_weight=weights[1], eps=EPS, rotary_dim=rotary_dim, position_source="positions"
        )

    def kwargs(self) -> dict[str, Any]:
        return {"cos_sin_cache": self.rope.cos_sin_cache, "is_neox": self.rope.is_neox_style}

    def finished(self, x: torch.Tensor, weight: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Norm by the formula of RMSNorm and rotate by SGLang's own rope: [tokens, heads * dim]."""
        heads = x.view(x.shape[0], -1, self.shape.head_dim).float()
        if weight is not None:
            heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
        flat = heads.flatten(1)
        return self.rope.forward_native(positions, flat, flat.clone())[0].to(self.shape.dtype)

    def fused_step(self, mode: ForwardMode, news: list[tuple[Any, int]]) -> Step:
        """Return a step with raw q and k, and the expectation for their finished forms."""
        step = self.step(mode, news)
        declared, positions = self.layer.qk_norm_rope, step.batch.positions
        q = self.finished(step.q, declared.q_weight, positions)
        k = self.finished(step.k, declared.k_weight, positions).view(-1, self.shape.num_kv_heads, self.shape.head_dim)
        first = 0
        for request, num in news:
            request.k[len(request) - num :] = k[first : first + num]
            first += num
        step.expected, step.expected_lse = self.oracle(q, news)
        return step


def assert_fused(world: FusedWorld, backend: Any, step: Step, rtol: float = 1e-5) -> None:
    q, k, v = step.q.clone(), step.k.clone(), step.v.clone()
    out = world.run(backend, step, **world.kwargs())
    torch.testing.assert_close(out, step.expected, rtol=rtol, atol=rtol)
    assert torch.equal(step.q, q) and torch.equal(step.k, k) and torch.equal(step.v, v)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_extend_chunk_and_decode(page_size: int, rotary_dim: int, is_neox: bool, normed: bool) -> None:
    world = FusedWorld(Shape(page_size=page_size), rotary_dim=rotary_dim, is_neox=is_neox, normed=normed)
    backend, requests = world.backend(), [world.add(length) for length in (0, 15, 64)]
    assert_fused(world, backend, world.fused_step(EXTEND, [(request, 20) for request in requests]))
    assert_fused(world, backend, world.fused_step(EXTEND, [(request, 1 + 5 * i) for i, request in enumerate(requests)]))
    for _token in range(2):
        assert_fused(world, backend, world.fused_step(DECODE, [(request, 1) for request in requests]))


def test_bf16() -> None:
    world = FusedWorld(Shape(dtype=torch.bfloat16))
    backend, requests = world.backend(), [world.add(length) for length in (0, 15)]
    assert_fused(world, backend, world.fused_step(EXTEND, [(request, 20) for request in requests]), rtol=2e-2)
    assert_fused(world, backend, world.fused_step(DECODE, [(request, 1) for request in requests]), rtol=2e-2)


def test_the_pool_holds_the_bytes_that_sglangs_writer_leaves() -> None:
    """The same normed, rotated keys through the pool's own writer and through the fused store."""
    for shape in (Shape(), Shape(kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0), Shape(dtype=torch.bfloat16)):
        world = FusedWorld(shape, rotary_dim=16)
        step = world.fused_step(EXTEND, [(world.add(9), 12)])
        world.run(world.backend(), step, **world.kwargs())
        slots = step.batch.out_cache_loc
        fused = [buffer[0][slots].clone() for buffer in (world.pool.k_buffer, world.pool.v_buffer)]
        finished = world.requests[0].k[-12:].clone(), world.requests[0].v[-12:].clone()
        world.pool.set_kv_buffer(world.layer, slots, *finished, shape.k_scale, shape.v_scale)
        plain = [buffer[0][slots] for buffer in (world.pool.k_buffer, world.pool.v_buffer)]
        assert torch.equal(fused[1], plain[1])
        if shape.dtype == torch.bfloat16 or shape.kv_dtype is not None:
            # k is computed in another order than the oracle's: all but a few roundings agree
            assert (fused[0] != plain[0]).float().mean() < 0.02
        else:
            torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_norm_rope_and_store_run_once_each(monkeypatch: pytest.MonkeyPatch, mode: ForwardMode) -> None:
    world = FusedWorld()
    backend, runs = world.backend(), []
    step = world.fused_step(mode, [(world.add(9), 1)])
    kernels = backend._kernels_of(world.layer)
    row = kernels.norm_rope_store(world.layer.qk_norm_rope)
    monkeypatch.setattr(kernels, "_norm_rope_store", lambda *a, **k: runs.append("fused") or row(*a, **k))
    monkeypatch.setattr(kernels, "store", lambda *a, **k: runs.append("store"))
    monkeypatch.setattr(world.pool, "set_kv_buffer", lambda *a, **k: runs.append("pool"))
    world.run(backend, step, **world.kwargs())
    assert runs == ["fused"]
    runs.clear()
    world.run(backend, step)
    assert runs == ["store"]


def test_positions_are_narrowed_to_the_rows_of_q() -> None:
    """0.5.17's prefill graph narrows q, k, v and out_cache_loc to the real rows, and leaves the positions padded."""
    world = FusedWorld()
    step = world.fused_step(EXTEND, [(world.add(9), 5)])
    step.batch.positions = torch.nn.functional.pad(step.batch.positions, (0, 11), value=900)
    assert_fused(world, world.backend(), step)


def test_rows_that_mlp_sync_padded_are_neither_rotated_nor_stored() -> None:
    world = FusedWorld()
    step = world.fused_step(EXTEND, [(world.add(9), 5)])
    set_real_tokens(step.batch, 5)
    for name in ("positions", "out_cache_loc"):
        setattr(step.batch, name, torch.nn.functional.pad(getattr(step.batch, name), (0, 3)))
    step.q, step.k, step.v = (torch.nn.functional.pad(x, (0, 0, 0, 3)) for x in (step.q, step.k, step.v))
    before = world.pool.get_key_buffer(0)[0].clone()
    out = world.run(world.backend(), step, **world.kwargs())
    torch.testing.assert_close(out[:5], step.expected, rtol=1e-5, atol=1e-5)
    assert out[5:].eq(0).all()
    assert torch.equal(world.pool.get_key_buffer(0)[0].nan_to_num(7), before.nan_to_num(7))


def test_in_a_captured_decode_with_padding() -> None:
    world = FusedWorld()
    for buffer in (world.pool.get_key_buffer(0), world.pool.get_value_buffer(0)):
        buffer[0] = 0.0
    backend = world.backend()
    backend.init_cuda_graph_state(4, 4)
    static = StaticBatch(DECODE, 4, 1)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    requests = [world.add(length) for length in (17, 40, 3)]
    step = world.fused_step(DECODE, [(request, 1) for request in requests])
    backend.init_forward_metadata_out_graph(static.fill(step))
    out = backend.forward(static.q, static.k, static.v, world.layer, static.batch, **world.kwargs())
    torch.testing.assert_close(out[:3], step.expected, rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()


def test_cos_sin_cache_for_a_layer_that_declares_nothing_is_refused() -> None:
    world = FusedWorld()
    step = world.fused_step(EXTEND, [(world.add(9), 5)])
    del world.layer.qk_norm_rope
    with pytest.raises(ValueError, match="layer 0 got cos_sin_cache, and has no qk_norm_rope"):
        world.run(world.backend(), step, **world.kwargs())


def test_a_cos_sin_cache_of_another_width_is_refused() -> None:
    world = FusedWorld(rotary_dim=8)
    step = world.fused_step(EXTEND, [(world.add(9), 5)])
    with pytest.raises(ValueError, match="got a cos_sin_cache of 16 columns, its qk_norm_rope says rotary_dim=8"):
        world.run(world.backend(), step, cos_sin_cache=rope_of(16, 16).cos_sin_cache, is_neox=True)


@pytest.mark.parametrize("alone", ["cos_sin_cache", "is_neox"])
def test_half_of_the_kwargs_is_refused(alone: str) -> None:
    world = FusedWorld()
    step = world.fused_step(EXTEND, [(world.add(9), 5)])
    with pytest.raises(ValueError, match=f"layer 0 got {alone} alone: cos_sin_cache and is_neox belong together"):
        world.run(world.backend(), step, **{alone: world.kwargs()[alone]})


def test_cos_sin_cache_without_a_store_is_refused() -> None:
    world = FusedWorld()
    step = world.fused_step(EXTEND, [(world.add(9), 5)])
    with pytest.raises(ValueError, match=r"got cos_sin_cache without k and v to store \(save_kv_cache=False\)"):
        world.run(world.backend(), step, save_kv_cache=False, **world.kwargs())


def test_mrope_positions_that_the_batch_lacks_are_refused() -> None:
    world = FusedWorld()
    axes = torch.zeros(8, dtype=torch.int64)
    declared = dataclasses.replace(world.layer.qk_norm_rope, position_source="mrope_positions", axis_of_frequency=axes)
    world.layer.qk_norm_rope = declared
    step = world.step(EXTEND, [(world.add(9), 5)])
    with pytest.raises(ValueError, match="attention layer 0 rotates by mrope_positions, the batch has none"):
        world.run(world.backend(), step, **world.kwargs())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_weight": None}, "needs the weights of both q and k, or of neither"),
        ({"position_source": "mrope"}, "position_source='mrope': positions or mrope_positions"),
        ({"position_source": "mrope_positions"}, "takes axis_of_frequency with mrope_positions, and only with them"),
        (
            {"position_source": "mrope_positions", "axis_of_frequency": torch.zeros(3)},
            r"axis_of_frequency has shape \(3,\), rotary_dim=16 needs \(8,\)",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(changes: dict[str, Any], message: str) -> None:
    declared = {
        "q_weight": torch.ones(16),
        "k_weight": torch.ones(16),
        "eps": EPS,
        "rotary_dim": 16,
        "position_source": "positions",
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        QKNormRope(**declared)


def test_a_declaration_of_another_type_is_refused() -> None:
    world = FusedWorld()
    world.layer.qk_norm_rope = {"eps": EPS}
    with pytest.raises(TypeError, match="attention layer 0: qk_norm_rope is a dict"):
        world.backend()


def test_who_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The active backend is looked up through SGLang's wrappers, by mode."""
    world = World()
    world.runner.device = "cpu"
    ours, native = world.backend(), TorchNativeAttnBackend(world.runner)
    assert takes_qk_norm_rope(ours, DECODE)
    assert not takes_qk_norm_rope(native, DECODE)
    split = object.__new__(HybridAttnBackend)
    split.prefill_backend, split.decode_backend, split.spec_attn_is_decode = native, ours, True
    assert takes_qk_norm_rope(split, DECODE) and takes_qk_norm_rope(split, ForwardMode.TARGET_VERIFY)
    assert not takes_qk_norm_rope(split, EXTEND)
    overlap = TboAttnBackend(primary=ours, children=[])
    assert takes_qk_norm_rope(overlap, EXTEND)
    monkeypatch.setenv("ATOM_PLUGIN_FUSE_QK_NORM_ROPE", "0")
    assert not takes_qk_norm_rope(world.backend(), DECODE)


def test_forced_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "paged_attention=reference,qk_norm_rope_store_kv=reference")
    world = FusedWorld(Shape(max_context=64))
    backend = world.backend()
    assert_fused(world, backend, world.fused_step(EXTEND, [(world.add(5), 3)]))
    chosen = backend._kernels_of(world.layer).attend(
        tables.AttendKey(phase="extend", captured=False, return_lse=False, has_sinks=False)
    )
    assert chosen.__module__ == "atom_plugin.ops.paged_attention.reference"


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ("attention=eager", "names the op 'attention'; the ops are: paged_attention, mla_attention, store_kv, qk_norm"),
        (
            "store_kv=cutlass",
            "names the row store_kv=cutlass; its rows are: aiter_reshape_and_cache_flash, triton, eager, reference",
        ),
    ],
)
def test_an_unknown_forced_name_ends_the_launch(monkeypatch: pytest.MonkeyPatch, forced: str, message: str) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", forced)
    with pytest.raises(ValueError, match=message):
        World().backend()
