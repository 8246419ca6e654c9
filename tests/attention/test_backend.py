"""The backend returns dense attention over the log of keys and values, in every mode, layout and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from atom_plugin import host
from tests.attention.world import Shape, Step, World, as_stored

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
PAGE_SIZES = [1, 16, 64, 128, 1024]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_right(actual: torch.Tensor, step: Step) -> None:
    tolerance = TOLERANCE[step.expected.dtype]
    assert actual.dtype == step.expected.dtype
    torch.testing.assert_close(actual, step.expected, rtol=tolerance, atol=tolerance)


def grow_and_check(world: World, backend: Any, mode: ForwardMode, news: list[tuple[Any, int]]) -> None:
    step = world.step(mode, news)
    assert_right(world.run(backend, step), step)


def test_attention_is_peaky_enough_for_these_tests_to_see_anything() -> None:
    """Swapping two cached tokens moves the output by more than 0.1."""
    world = World()
    request = world.add(63)
    step = world.step(DECODE, [(request, 1)])
    before = world.run(world.backend(), step)
    row = world.req_to_token_pool.req_to_token[request.row]
    loudest = int((request.k[:, 0] @ step.q[0, :16]).argmax())
    swap = [loudest, (loudest + 20) % 60]
    k_pool = world.pool.get_key_buffer(0)
    k_pool[row[swap].long()] = k_pool[row[swap[::-1]].long()].clone()
    assert (world.run(world.backend(), step) - before).abs().max() > 0.1


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("new", [1, 5, 64, 77])
def test_extend_over_every_prefix(page_size: int, new: int) -> None:
    """One batch with cached prefixes around a page's edge, and without one."""
    world = World(Shape(page_size=page_size, max_context=1200 if page_size == 1024 else 256))
    news = [(world.add(prefix), new) for prefix in (0, 1, 63, 64, 65)]
    grow_and_check(world, world.backend(), EXTEND, news)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_on_both_sides_of_a_page_edge(page_size: int) -> None:
    world = World(Shape(page_size=page_size, max_context=1200 if page_size == 1024 else 256))
    requests = [world.add(length) for length in (1, 15, 16, 17, 63, 64, 127)]
    backend = world.backend()
    for _token in range(3):
        grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])


def test_decode_across_an_edge_of_1024_tokens() -> None:
    world = World(Shape(page_size=1024, max_context=2048, max_requests=3))
    requests = [world.add(length) for length in (1022, 1023, 1024)]
    backend = world.backend()
    for _token in range(3):
        grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_in_chunks_is_the_prompt_at_once(page_size: int) -> None:
    """Fault 1: query lengths come from the new tokens only, and the cached prefix is attended to."""
    world = World(Shape(page_size=page_size))
    request, backend = world.add(), world.backend()
    for chunk in (16, 16, 31, 1, 33):
        grow_and_check(world, backend, EXTEND, [(request, chunk)])


def test_prefixes_and_lengths_of_fault_1() -> None:
    world = World(Shape(page_size=16))
    news = [(world.add(0), 7), (world.add(5), 3), (world.add(16), 1)]
    backend = world.backend()
    step = world.step(EXTEND, news)
    assert_right(world.run(backend, step), step)
    batch = backend.forward_metadata.batch
    assert batch.qo_indptr_B1.tolist() == [0, 7, 10, 11]
    assert batch.seq_lens_B.tolist() == [7, 8, 17]


@pytest.mark.parametrize("mode", [EXTEND, MIXED])
def test_chunks_and_decodes_in_one_batch(mode: ForwardMode) -> None:
    """Up to 0.5.21 such a batch stays MIXED, later it is an EXTEND; decodes are extends of one token in both."""
    world = World()
    news = [(world.add(20), 40), (world.add(33), 1), (world.add(0), 18), (world.add(64), 1)]
    grow_and_check(world, world.backend(), mode, news)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
def test_verify_of_a_chain(num_draft_tokens: int) -> None:
    """Fault 12: seq_lens leaves the draft tokens out, every request has as many queries."""
    world = World(Shape(page_size=16))
    backend = world.backend()
    news = [(world.add(length), num_draft_tokens) for length in (1, 15, 16, 40)]
    grow_and_check(world, backend, ForwardMode.TARGET_VERIFY, news)
    batch = backend.forward_metadata.batch
    assert batch.qo_indptr_B1.diff().tolist() == [num_draft_tokens] * 4
    assert batch.seq_lens_B.tolist() == [length + num_draft_tokens for length in (1, 15, 16, 40)]


def test_draft_extend() -> None:
    world = World(Shape(page_size=16))
    news = [(world.add(length), 4) for length in (1, 15, 16, 40)]
    grow_and_check(world, world.backend(), ForwardMode.DRAFT_EXTEND_V2, news)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    world = World(Shape(dtype=dtype, kv_dtype=kv_dtype, page_size=16, k_scale=0.5, v_scale=2.0))
    backend, request, other = world.backend(), world.add(20), world.add()
    grow_and_check(world, backend, EXTEND, [(request, 33), (other, 7)])
    grow_and_check(world, backend, DECODE, [(request, 1), (other, 1)])


def test_fp8_scales_are_used_in_both_directions_and_keep_the_callers_tensors() -> None:
    """Fault 20, with unequal scales so that a swap shows; SGLang's own writer would divide k and v in place."""
    shape = Shape(kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0)
    world = World(shape)
    request = world.add(20)
    step = world.step(EXTEND, [(request, 9)])
    k, v = step.k.clone(), step.v.clone()
    assert_right(world.run(world.backend(), step), step)
    assert torch.equal(step.k, k) and torch.equal(step.v, v)
    slots = step.batch.out_cache_loc
    stored = world.pool.get_key_buffer(0)[slots].double() * 0.5, world.pool.get_value_buffer(0)[slots].double() * 2.0
    assert torch.equal(stored[0], as_stored(k.view(9, 2, 16), shape, 0.5))
    assert torch.equal(stored[1], as_stored(v.view(9, 2, 16), shape, 2.0))


def test_fp8_read_without_the_scales_is_seen_by_these_tests() -> None:
    world = World(Shape(kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0))
    request = world.add(20)
    step = world.step(EXTEND, [(request, 9)])
    world.run(world.backend(), step)
    world.layer.k_scale_float = world.layer.v_scale_float = 1.0
    world.layer.k_scale = world.layer.v_scale = torch.tensor(1.0)
    with pytest.raises(AssertionError, match="not close"):
        assert_right(world.run(world.backend(), step, save_kv_cache=False), step)


@pytest.mark.parametrize("window", [1, 4, 63])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sliding_window(window: int, page_size: int) -> None:
    """SGLang's rule: a query sees its own key and ``window`` keys before it."""
    world = World(Shape(window=window, page_size=page_size))
    backend, requests = world.backend(), [world.add(length) for length in (0, 3, 4, 5, 64, 90)]
    grow_and_check(world, backend, EXTEND, [(request, 7 * (i + 1)) for i, request in enumerate(requests)])
    grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])
    grow_and_check(world, backend, ForwardMode.TARGET_VERIFY, [(request, 3) for request in requests])


def test_logit_cap() -> None:
    world = World(Shape(logit_cap=2.0))
    backend, requests = world.backend(), [world.add(length) for length in (3, 64)]
    grow_and_check(world, backend, EXTEND, [(requests[0], 30), (requests[1], 2)])
    grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])


@pytest.mark.parametrize("by", ["keyword", "batch"])
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_return_lse(mode: ForwardMode, by: str) -> None:
    world = World()
    step = world.step(mode, [(world.add(20), 1), (world.add(64), 1 if mode is DECODE else 30)])
    step.batch.mha_return_lse = by == "batch"
    out, lse = world.run(world.backend(), step, **({"return_lse": True} if by == "keyword" else {}))
    assert out.shape == (step.num_real, 4, 16) and lse.shape == (step.num_real, 4) and lse.dtype == torch.float32
    assert_right(out.flatten(1), step)
    torch.testing.assert_close(lse, step.expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (5, 5)], ids=["mha", "mqa", "gqa", "odd"])
@pytest.mark.parametrize("dims", [(16, 8), (24, 40), (256, 256)])
def test_heads_and_head_dims(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    world = World(Shape(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0], v_head_dim=dims[1]))
    backend, requests = world.backend(), [world.add(length) for length in (0, 31)]
    grow_and_check(world, backend, EXTEND, [(request, 20) for request in requests])
    grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_a_layer_that_shares_another_layers_cache(mode: ForwardMode) -> None:
    """k and v are None: nothing is stored, and what the other layer stored is attended to."""
    world = World()
    step = world.step(mode, [(world.add(20), 1), (world.add(5), 1)])
    backend = world.backend()
    assert_right(world.run(backend, step), step)
    before = world.pool.get_key_buffer(0).clone()
    out = backend.forward(step.q, None, None, world.layer, step.batch, save_kv_cache=False)
    assert_right(out, step)
    assert torch.equal(world.pool.get_key_buffer(0).nan_to_num(7), before.nan_to_num(7))


def test_without_save_kv_cache_nothing_is_written() -> None:
    world = World()
    step = world.step(EXTEND, [(world.add(20), 3)])
    backend = world.backend()
    world.run(backend, step)
    before = world.pool.get_key_buffer(0).clone()
    step.k, step.v = step.k + 5, step.v + 5
    assert_right(world.attend(backend, step, save_kv_cache=False), step)
    assert torch.equal(world.pool.get_key_buffer(0).nan_to_num(7), before.nan_to_num(7))


def test_only_the_batchs_own_slots_are_written() -> None:
    world = World(Shape(page_size=16))
    step = world.step(EXTEND, [(world.add(20), 3), (world.add(0), 30)])
    before = world.pool.get_value_buffer(0).clone()
    world.run(world.backend(), step)
    after = world.pool.get_value_buffer(0).clone()
    after[step.batch.out_cache_loc] = before[step.batch.out_cache_loc] = 0
    assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))


def idle_batch(rows: int) -> ForwardBatch:
    """Return what DP attention gives a rank without work: nothing, or rows of length 1 on the dump slot."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        batch_size=rows,
        input_ids=zeros,
        req_pool_indices=zeros,
        seq_lens=zeros + 1,
        seq_lens_cpu=zeros + 1,
        out_cache_loc=zeros,
        seq_lens_sum=rows,
        positions=zeros,
    )


def test_one_backend_through_decode_idle_padded_idle_and_extend() -> None:
    world = World()
    backend, requests = world.backend(), [world.add(length) for length in (9, 30)]
    before = world.pool.get_key_buffer(0)[0].clone()
    grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])
    for rows in (0, 4):
        backend.init_forward_metadata(batch := idle_batch(rows))
        out = backend.forward(
            torch.zeros(rows, 64), torch.zeros(rows, 2, 16), torch.zeros(rows, 2, 16), world.layer, batch
        )
        assert out.shape == (rows, 64)
    grow_and_check(world, backend, EXTEND, [(request, 12) for request in requests])
    grow_and_check(world, backend, DECODE, [(request, 1) for request in requests])
    assert torch.equal(world.pool.get_key_buffer(0)[0].nan_to_num(7), before.nan_to_num(7)), "the dump slot was written"


@pytest.mark.parametrize("return_lse", [False, True])
def test_an_extend_batch_without_tokens(return_lse: bool) -> None:
    world = World()
    backend = world.backend()
    step = world.step(EXTEND, [(world.add(9), 0), (world.add(5), 0)])
    out = world.run(backend, step, return_lse=return_lse)
    assert (out[0] if return_lse else out).shape[0] == 0
    batch = idle_batch(0)
    batch.forward_mode = EXTEND
    backend.init_forward_metadata(batch)
    nothing = torch.zeros(0, 2, 16)
    out = backend.forward(torch.zeros(0, 64), nothing, nothing, world.layer, batch, return_lse=return_lse)
    assert (out[0] if return_lse else out).shape[0] == 0


def test_padded_decode_rows_see_the_dump_slot_and_write_only_it() -> None:
    """DP attention pads a decode batch before its metadata: row 0, length 1, slot 0."""
    world = World()
    step = world.step(DECODE, [(world.add(9), 1), (world.add(30), 1)])
    pad_decode(step, 3)
    for buffer in (world.pool.get_key_buffer(0), world.pool.get_value_buffer(0)):
        buffer[0] = 0.0
    before = world.pool.get_key_buffer(0).clone()
    backend = world.backend()
    out = world.run(backend, step)
    assert_right(out[:2], step)
    assert out.shape == (5, 64) and out.isfinite().all()
    after = world.pool.get_key_buffer(0).clone()
    after[step.batch.out_cache_loc] = before[step.batch.out_cache_loc] = 0
    assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))


def pad_decode(step: Step, rows: int) -> None:
    batch, pad = step.batch, torch.nn.functional.pad
    batch.batch_size += rows
    for name, value in (
        ("seq_lens", 1),
        ("seq_lens_cpu", 1),
        ("req_pool_indices", 0),
        ("out_cache_loc", 0),
        ("positions", 0),
    ):
        setattr(batch, name, pad(getattr(batch, name), (0, rows), value=value))
    step.q, step.k, step.v = (pad(x, (0, 0, 0, rows)) for x in (step.q, step.k, step.v))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_decode_batch_padded_after_its_metadata_is_refused(rows: int) -> None:
    """Fault 58."""
    world = World()
    step = world.step(DECODE, [(world.add(9), 1)])
    backend = world.backend()
    backend.init_forward_metadata(step.batch)
    pad_decode(step, rows)
    message = f"layer 0 got {1 + rows} query rows, the metadata was built for 1 tokens: the batch was changed or padded"
    with pytest.raises(ValueError, match=message):
        world.attend(backend, step)


@pytest.mark.parametrize("return_lse", [False, True])
def test_an_extend_batch_that_mlp_sync_padded(return_lse: bool) -> None:
    """0.5.17 and 0.5.21 leave the padded rows to the backend: zeros come back, nothing is stored for them."""
    world = World()
    step = world.step(EXTEND, [(world.add(9), 5), (world.add(0), 2)])
    set_real_tokens(step.batch, 7)
    step.batch.out_cache_loc = torch.nn.functional.pad(step.batch.out_cache_loc, (0, 3))
    step.q, step.k, step.v = (torch.nn.functional.pad(x, (0, 0, 0, 3)) for x in (step.q, step.k, step.v))
    before = world.pool.get_key_buffer(0)[0].clone()
    out = world.run(world.backend(), step, return_lse=return_lse)
    if return_lse:
        out, lse = out[0].flatten(1), out[1]
        assert lse[7:].eq(-torch.inf).all()
    assert_right(out[:7], step)
    assert out[7:].eq(0).all()
    assert torch.equal(world.pool.get_key_buffer(0)[0].nan_to_num(7), before.nan_to_num(7))


def set_real_tokens(batch: Any, num: int) -> None:
    name = "global_num_token_non_padded_cpu" if host.since("0.5.20") else "num_token_non_padded_cpu"
    setattr(batch, name, num)


def test_an_extend_batch_with_more_rows_than_anyone_counted_is_refused() -> None:
    world = World()
    step = world.step(EXTEND, [(world.add(9), 5)])
    step.q, step.k, step.v = (torch.nn.functional.pad(x, (0, 0, 0, 3)) for x in (step.q, step.k, step.v))
    with pytest.raises(ValueError, match="got 8 query rows, the metadata was built for 5 tokens"):
        world.run(world.backend(), step)


def test_metadata_of_another_batch_is_refused() -> None:
    world = World()
    backend, request = world.backend(), world.add(9)
    world.run(backend, world.step(DECODE, [(request, 1)]))
    step = world.step(EXTEND, [(request, 5)])
    with pytest.raises(
        ValueError, match="runs extend, the metadata is that of a decode batch: init_forward_metadata was"
    ):
        world.attend(backend, step)


def test_a_tree_to_verify_is_refused_and_names_the_mask() -> None:
    """Fault 59."""
    from tests.attention.world import verify_input

    world = World()
    step = world.step(ForwardMode.TARGET_VERIFY, [(world.add(9), 4)])
    step.batch.spec_info = verify_input(4, topk=2)
    with pytest.raises(ValueError, match=r"verifies EAGLE chains only: topk 2 may be a tree, whose custom_mask"):
        world.run(world.backend(), step)


def test_a_draft_of_another_kind_is_refused() -> None:
    """NGRAM drafts are trees whatever their flags say; DFLASH and others are not tested."""
    world = World()
    step = world.step(ForwardMode.TARGET_VERIFY, [(world.add(9), 4)])
    step.batch.spec_info = None
    with pytest.raises(ValueError, match=r"verifies EAGLE chains only: NoneType may be a tree"):
        world.run(world.backend(), step)


def test_an_extend_batch_without_lengths_is_refused() -> None:
    world = World()
    step = world.step(EXTEND, [(world.add(9), 4)])
    step.batch.extend_seq_lens = None
    with pytest.raises(ValueError, match="a batch in EXTEND mode has no extend_seq_lens"):
        world.run(world.backend(), step)


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_what_is_not_served_is_refused_and_not_swallowed(mode: ForwardMode) -> None:
    world = World()
    step = world.step(mode, [(world.add(9), 1)])
    backend = world.backend()
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk_indices'"):
        world.run(backend, step, topk_indices=torch.zeros(1))
    with pytest.raises(ValueError, match="attention layer 0 takes no q_rope, k_rope in this call"):
        world.run(backend, step, q_rope=torch.zeros(1), k_rope=torch.zeros(1))


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_sinks_take_their_share(mode: ForwardMode) -> None:
    world = World()
    backend = world.backend()
    step = world.step(mode, [(world.add(9), 1)])
    plain = world.run(backend, step)
    none = world.run(backend, step, sinks=torch.full((4,), -1e9), save_kv_cache=False)
    torch.testing.assert_close(none, plain)
    first = world.run(backend, step, sinks=torch.tensor([1e9, -1e9, -1e9, -1e9]), save_kv_cache=False)
    head_dim = plain.shape[1] // 4
    assert first[:, :head_dim].eq(0).all()
    torch.testing.assert_close(first[:, head_dim:], plain[:, head_dim:])


def test_padded_table_entries_and_stale_lengths_do_not_leak_into_the_metadata() -> None:
    """Fault 7: pages are slots // page size; everything past a request's last page is left alone or arbitrary."""
    world = World(Shape(page_size=64))
    requests = [world.add(length) for length in (1, 64, 65)]
    backend = world.backend()
    backend.init_forward_metadata(world.step(DECODE, [(request, 1) for request in requests]).batch)
    table = backend.forward_metadata.batch.page_table
    assert table.page_size == 64
    for row, request in zip(table.pages_BP.tolist(), requests, strict=True):
        assert row[: len(request.pages)] == request.pages


def test_metadata_keeps_no_memory_of_sglangs() -> None:
    """shared_read_ends promises it: once the metadata is built, the scheduler may overwrite its tensors."""
    world = World()
    requests = [world.add(length) for length in (9, 30)]
    step = world.step(DECODE, [(request, 1) for request in requests])
    step.batch.seq_lens = step.batch.seq_lens.to(torch.int32)  # the dtype of ours: a copy has to be made all the same
    backend = world.backend()
    backend.init_forward_metadata(step.batch)
    world.req_to_token_pool.req_to_token.fill_(2**30)
    step.batch.seq_lens.fill_(2**30)
    step.batch.req_pool_indices.fill_(2**30)
    assert_right(world.attend(backend, step), step)


def test_shared_reads_end_before_replay_for_decode_and_verify() -> None:
    if not host.since("0.5.18"):  # the notion came with 0.5.18
        from sglang.srt.layers.attention import base_attn_backend

        assert "SharedReadEnds" not in vars(base_attn_backend)
        return
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    backend = World().backend()
    for mode in (DECODE, ForwardMode.TARGET_VERIFY):
        assert backend.shared_read_ends(mode) is SharedReadEnds.PRE_REPLAY
    assert backend.shared_read_ends(EXTEND) is SharedReadEnds.UNKNOWN
