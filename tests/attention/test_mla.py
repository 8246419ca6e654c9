"""MLA: absorbed attention over the pool's latent rows, and un-absorbed attention, are attention of every head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from atom_plugin.attention.backend import AtomAttentionBackend
from tests.attention.graph_contract import check_graph_contract
from tests.attention.mla_world import RANK, ROPE, V_DIM, MlaWorld, latent_shape
from tests.attention.test_backend import idle_batch, pad_decode, set_real_tokens
from tests.attention.test_graph_contract import FreezesLengths
from tests.attention.test_hybrid_linear import DummyLinear

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
FP8 = torch.float8_e4m3fn
PREFIXES = (0, 1, 63, 64, 65)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check(world: MlaWorld, backend: Any, mode: ForwardMode, news: list[tuple[Any, int]]) -> None:
    """One absorbed step."""
    step = world.mla_step(mode, news)
    close(world.run(backend, step), step.expected)


def test_attention_is_peaky_enough_for_these_tests_to_see_anything() -> None:
    """Another row in place of one cached token moves the output by more than 0.1."""
    world = MlaWorld()
    request = world.add(63)
    step = world.mla_step(DECODE, [(request, 1)])
    before = world.run(world.backend(), step)
    slots = world.req_to_token_pool.req_to_token[request.row]
    loudest = int((request.k[:, 0] @ step.q[0, : RANK + ROPE]).argmax())
    pool = world.pool.get_key_buffer(0)
    pool[slots[loudest]] = pool[slots[(loudest + 20) % 60]].clone()
    assert (world.run(world.backend(), step) - before).abs().max() > 0.1


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_absorbed_extends_and_decodes(page_size: int, kv_dtype: torch.dtype | None) -> None:
    world = MlaWorld(latent_shape(page_size=page_size, max_context=256, kv_dtype=kv_dtype, k_scale=0.5))
    backend, requests = world.backend(), [world.add(prefix) for prefix in PREFIXES]
    for new in (1, 2, 7):
        check(world, backend, EXTEND, [(request, new) for request in requests])
    check(world, backend, EXTEND, [(request, 1 + 3 * i) for i, request in enumerate(requests)])
    for _token in range(2):
        check(world, backend, DECODE, [(request, 1) for request in requests])


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_verify_of_a_chain(length: int, page_size: int) -> None:
    """seq_lens leaves the draft tokens out; every request has as many queries."""
    world = MlaWorld(latent_shape(page_size=page_size, max_context=256))
    backend = world.backend()
    check(world, backend, VERIFY, [(world.add(prefix), length) for prefix in (1, 63, 64, 65)])
    check(world, backend, ForwardMode.DRAFT_EXTEND_V2, [(request, length) for request in world.requests])


@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16])
def test_heads(heads: int) -> None:
    world = MlaWorld(latent_shape(heads=heads, page_size=16))
    backend, requests = world.backend(), [world.add(prefix) for prefix in (0, 17)]
    check(world, backend, EXTEND, [(request, 5) for request in requests])
    check(world, backend, DECODE, [(request, 1) for request in requests])
    step = world.mla_step(EXTEND, [(request, 3) for request in requests])
    close(world.run_per_head(backend, step), step.per_head)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("page_size", [1, 64])
def test_a_prefix_of_4000_tokens(page_size: int, kv_dtype: torch.dtype | None) -> None:
    """Absorbed, and un-absorbed in two chunks of the prefix."""
    shape = latent_shape(page_size=page_size, max_context=4096, max_requests=2, kv_dtype=kv_dtype, k_scale=0.5)
    world = MlaWorld(shape)
    backend, request, other = world.backend(), world.add(4000), world.add(65)
    check(world, backend, EXTEND, [(request, 3), (other, 5)])
    check(world, backend, DECODE, [(request, 1), (other, 1)])
    step = world.mla_step(EXTEND, [(request, 7), (other, 1)])
    close(world.run_per_head(backend, step, capacity=5000), step.per_head)
    assert step.batch.num_prefix_chunks == 2


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("capacity", [1 << 20, 200], ids=["one chunk", "chunks"])
def test_both_forms_give_one_answer(capacity: int, kv_dtype: torch.dtype | None) -> None:
    """Without a prefix, with one, and with chunks in which some requests have no key any more; then a decode on top."""
    world = MlaWorld(latent_shape(page_size=16, max_context=256, kv_dtype=kv_dtype, k_scale=0.5))
    backend, requests = world.backend(), [world.add(prefix) for prefix in PREFIXES]
    for news in ([1, 2, 3, 4, 5], [7, 1, 40, 1, 3]):
        step = world.mla_step(EXTEND, list(zip(requests, news, strict=True)))
        close(world.run_per_head(backend, step, capacity=capacity), step.per_head)
        step.batch.set_attn_attend_prefix_cache(None)
        step.batch.mha_return_lse = None
        close(world.run(backend, step, save_kv_cache=False), step.expected)
    assert step.batch.num_prefix_chunks == (1 if capacity > 1000 else 2)
    check(world, backend, DECODE, [(request, 1) for request in requests])


def test_no_prefix_is_no_chunk() -> None:
    world = MlaWorld()
    step = world.mla_step(EXTEND, [(world.add(), 5), (world.add(), 64)])
    close(world.run_per_head(world.backend(), step), step.per_head)
    assert step.batch.num_prefix_chunks is None


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_rotated_parts_apart(mode: ForwardMode) -> None:
    """The form of SGLang's own models for some backends; the same bytes are stored."""
    world = MlaWorld(latent_shape(page_size=16))
    backend = world.backend()
    step = world.mla_step(mode, [(world.add(20), 1), (world.add(64), 1)])
    close(world.run_split(backend, step), step.expected)
    stored = world.pool.get_key_buffer(0)[step.batch.out_cache_loc]
    assert torch.equal(stored, step.k.view_as(stored))


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_the_backend_and_the_pools_writer_store_the_same_bytes(kv_dtype: torch.dtype | None) -> None:
    """And the caller's rows keep their values, whatever the scale is."""
    world = MlaWorld(latent_shape(kv_dtype=kv_dtype, k_scale=0.5))
    step = world.mla_step(EXTEND, [(world.add(20), 9)])
    given = step.k.clone()
    world.run(world.backend(), step)
    assert torch.equal(step.k, given)
    slots, pool = step.batch.out_cache_loc, world.pool.kv_buffer[0].view(torch.uint8)
    ours = pool[slots].clone()
    pool[slots] = 0
    world.store(step)
    assert torch.equal(pool[slots], ours)


def test_only_the_batchs_own_slots_are_written() -> None:
    world = MlaWorld(latent_shape(page_size=16))
    step = world.mla_step(EXTEND, [(world.add(20), 3), (world.add(0), 30)])
    before = world.pool.get_key_buffer(0).clone()
    world.run(world.backend(), step)
    after = world.pool.get_key_buffer(0).clone()
    after[step.batch.out_cache_loc] = before[step.batch.out_cache_loc] = 0
    assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("by", ["keyword", "batch"])
@pytest.mark.parametrize("mode", [EXTEND, DECODE, VERIFY])
def test_return_lse(mode: ForwardMode, by: str) -> None:
    world = MlaWorld()
    step = world.mla_step(mode, [(world.add(20), 1), (world.add(64), 1)])
    step.batch.mha_return_lse = by == "batch"
    out, lse = world.run(world.backend(), step, **({"return_lse": True} if by == "keyword" else {}))
    assert out.shape == (2, 4, RANK) and lse.shape == (2, 4) and lse.dtype == torch.float32
    close(out.flatten(1), step.expected)
    close(lse, step.expected_lse)


def test_bytes_a_token_are_those_of_sglangs_pool() -> None:
    """Fault 4: one latent row a token and layer, nothing a head, and no V."""
    world = MlaWorld(latent_shape(heads=12, page_size=64, kv_dtype=torch.bfloat16))
    pool = world.backend().token_to_kv_pool
    assert type(pool) is MLATokenToKVPool
    assert pool.get_kv_size_bytes() == (pool.size + pool.page_size) * (RANK + ROPE) * 2


def test_idle_batches_and_batches_without_tokens() -> None:
    world = MlaWorld()
    backend, request = world.backend(), world.add(9)
    check(world, backend, DECODE, [(request, 1)])
    for rows in (0, 4):
        backend.init_forward_metadata(batch := idle_batch(rows))
        k = torch.zeros(rows, 1, RANK + ROPE)
        out = backend.forward(torch.zeros(rows, 4 * (RANK + ROPE)), k, k[..., :RANK], world.layer, batch)
        assert out.shape == (rows, 4 * RANK)
    step = world.step(EXTEND, [(request, 0)])
    for layer, dim in ((world.layer, RANK), (world.per_head, V_DIM)):
        backend.init_forward_metadata(step.batch)
        k = torch.zeros(0, layer.tp_k_head_num, layer.qk_head_dim)
        out = backend.forward(k[:, :0], k, k[..., :dim], layer, step.batch, save_kv_cache=False)
        assert out.shape == (0, 4 * dim)
    check(world, backend, EXTEND, [(request, 12)])


def test_padded_decode_rows_see_the_dump_slot_and_write_only_it() -> None:
    world = MlaWorld()
    step = world.mla_step(DECODE, [(world.add(9), 1), (world.add(30), 1)])
    pad_decode(step, 3)
    world.pool.get_key_buffer(0)[0] = 0.0
    before = world.pool.get_key_buffer(0).clone()
    out = world.run(world.backend(), step)
    close(out[:2], step.expected)
    assert out.shape == (5, 4 * RANK) and out.isfinite().all()
    after = world.pool.get_key_buffer(0).clone()
    after[step.batch.out_cache_loc] = before[step.batch.out_cache_loc] = 0
    assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("form", ["absorbed", "per head"])
def test_an_extend_batch_that_mlp_sync_padded(form: str) -> None:
    """0.5.17 and 0.5.21 leave the padded rows to the backend: zeros come back, nothing is stored for them."""
    world = MlaWorld()
    backend = world.backend()
    step = world.mla_step(EXTEND, [(world.add(9), 5), (world.add(0), 2)])
    set_real_tokens(step.batch, 7)
    pad = torch.nn.functional.pad
    step.batch.out_cache_loc = pad(step.batch.out_cache_loc, (0, 3))
    backend.init_forward_metadata(step.batch)
    if form == "absorbed":
        q, k = pad(step.q, (0, 0, 0, 3), value=7.0), pad(step.k, (0, 0, 0, 3), value=7.0).unsqueeze(1)
        out = backend.forward(q, k, k[..., :RANK], world.layer, step.batch)
        close(out[:7], step.expected)
        assert world.pool.get_key_buffer(0)[0].isnan().all(), "the dump slot was written"
    else:
        q = pad(step.per_head_q, (0, 0, 0, 0, 0, 3), value=7.0)
        k, v = (pad(x, (0, 0, 0, 0, 0, 3), value=7.0) for x in world.per_head_kv(step.k))
        out = backend.forward(q, k, v, world.per_head, step.batch, save_kv_cache=False)
        assert out.shape == (10, 4 * V_DIM)
    assert out.shape[0] == 10 and not out[7:].any()


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("mode", "tokens"), [(DECODE, 1), (VERIFY, 4)], ids=["decode", "verify"])
def test_capture_and_replay(mode: ForwardMode, tokens: int, page_size: int) -> None:
    check_graph_contract(
        lambda world: world.backend(),
        mode=mode,
        tokens_per_request=tokens,
        world=MlaWorld(latent_shape(page_size=page_size, max_context=256)),
    )


def test_a_planted_fault_fails_the_graph_check() -> None:
    class Planted(MlaWorld):
        def backend(self) -> AtomAttentionBackend:
            made = super().backend()
            made.__class__ = FreezesLengths
            return made

    with pytest.raises(AssertionError, match="the replay is wrong"):
        check_graph_contract(lambda world: world.backend(), world=Planted(latent_shape(max_context=256)))


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_inside_of_a_hybrid_linear_backend(kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Kimi-Linear: layer 3 of the model is the only one of the pool."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module

    if "check_cuda_graph_backend" in vars(module):  # asks the launch's flags, of which there are none here
        monkeypatch.setattr(module, "check_cuda_graph_backend", lambda phase, backend: False)
    world = MlaWorld(latent_shape(page_size=16, kv_dtype=kv_dtype, k_scale=0.5), hybrid=True)
    assert world.layer.layer_id == world.per_head.layer_id == 3
    backend = module.HybridLinearAttnBackend(world.backend(), DummyLinear(), [3])
    requests = [world.add(20), world.add()]
    for mode, nums in ((EXTEND, (33, 7)), (DECODE, (1, 1))):
        check(world, backend, mode, list(zip(requests, nums, strict=True)))
    step = world.mla_step(DECODE, [(request, 1) for request in requests])
    close(world.run_split(backend, step), step.expected)
    step = world.mla_step(EXTEND, [(request, 5) for request in requests])
    close(world.run_per_head(backend, step, capacity=70), step.per_head)
    assert step.batch.num_prefix_chunks == 2
