"""Every row of paged_attention computes what reference.py defines, within the tolerance that the row declares."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.paged_attention import NO_WINDOW, TABLE, PagedAttentionProblem, PagedBatch, eager, paged_attention
from atom_plugin.ops.paged_attention.scratch import Scratch
from tests.ops.batches import make_batch

EAGER = next(kernel for kernel in TABLE.kernels if kernel.name == "eager")


def assert_rows_agree(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, **how: Any) -> None:
    out, lse = paged_attention(q, k, v, batch, forced="eager", **how)
    expected, expected_lse = paged_attention(q, k, v, batch, forced="reference", **how)
    tolerance = EAGER.tolerance[q.dtype]
    assert out.dtype == q.dtype
    torch.testing.assert_close(out, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    assert (lse is None) == (not how.get("return_lse", False))
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 2, 5, 17, 40]), st.sampled_from([0, 1, 15, 16, 17, 33])),
        min_size=1,
        max_size=5,
    ),
    page_size=st.sampled_from([1, 4, 16, 64]),
    groups=st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]),
    dims=st.sampled_from([(16, 16), (16, 8), (8, 24)]),
    window=st.sampled_from([NO_WINDOW, 1, 7, 100]),
    logit_cap=st.sampled_from([0.0, 5.0]),
    return_lse=st.booleans(),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_eager_is_the_reference_on_random_batches(
    requests: list[tuple[int, int]],
    page_size: int,
    groups: tuple[int, int],
    dims: tuple[int, int],
    window: int,
    logit_cap: float,
    return_lse: bool,
    causal: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    q_lens = [new for new, _ in requests]
    seq_lens = [new + cached for new, cached in requests]
    if max(seq_lens) == 0:
        seq_lens[0] = 1
    kv_heads, group = groups
    heads_and_dims = {"kv_heads": kv_heads, "dim": dims[0], "v_dim": dims[1]}
    k, v, batch = make_batch(q_lens, seq_lens, page_size=page_size, **heads_and_dims, causal=causal)
    window = window if causal else NO_WINDOW
    q = 3 * torch.randn(sum(q_lens), kv_heads * group, dims[0])
    assert_rows_agree(
        q, k, v, batch, scale=0.3, k_scale=0.5, v_scale=2.0, window=window, logit_cap=logit_cap, return_lse=return_lse
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 30, 1]], ids=["decode", "extend"])
def test_every_dtype(dtype: torch.dtype, kv_dtype: torch.dtype | None, q_lens: list[int]) -> None:
    k, v, batch = make_batch(q_lens, [90, 31, 7], page_size=16, dtype=kv_dtype or dtype)
    q = torch.randn(sum(q_lens), 4, 16, dtype=dtype)
    assert_rows_agree(q, k, v, batch, scale=0.25, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [7, 30, 2, 300]], ids=["one query", "queries"])
@pytest.mark.parametrize("row", ["eager", "reference"])
def test_not_causal_is_attention_to_every_key(row: str, q_lens: list[int]) -> None:
    """PyTorch's own attention without a mask; a request without keys gets zeros and -inf."""
    seq_lens = [3, 40, 0, 65]
    k, v, batch = make_batch(q_lens, seq_lens, causal=False)
    q = torch.randn(sum(q_lens), 4, 16)
    out, lse = paged_attention(q, k, v, batch, scale=0.25, return_lse=True, forced=row)
    assert lse is not None
    first = 0
    for request, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        rows = slice(first, first + q_len)
        first += q_len
        if not seq_len:
            assert not out[rows].any() and (lse[rows] == -torch.inf).all()
            continue
        pages = batch.page_table.pages_BP[request, :seq_len].long()
        keys, values = (x[pages, 0].repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
        queries = q[rows].transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, scale=0.25)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
        scores = 0.25 * queries @ keys.transpose(1, 2)
        torch.testing.assert_close(lse[rows].T, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_keys_that_are_parts_of_wider_rows() -> None:
    """As a model hands them over."""
    k, v, batch = make_batch([3, 5], [3, 5])
    wide = torch.cat([k, v], dim=-1)
    q = torch.randn(8, 4, 16)
    assert_rows_agree(q, wide[..., :16], wide[..., 16:], batch, scale=0.25)


@pytest.mark.parametrize("return_lse", [False, True])
def test_queries_that_see_no_key_get_zeros(return_lse: bool) -> None:
    """A padded draft-extend row of a graph: 4 queries, 1 key; and rows that belong to no request at all."""
    k, v, batch = make_batch([4, 1, 2, 20], [1, 0, 5, 3], page_size=4)
    q = torch.randn(27 + 3, 4, 16)
    assert_rows_agree(q, k, v, batch, scale=0.3, return_lse=return_lse)
    out, lse = paged_attention(q, k, v, batch, scale=0.3, return_lse=return_lse)
    assert out[:3].eq(0).all() and out[4].eq(0).all() and out[27:].eq(0).all()
    if lse is not None:
        assert lse[:3].eq(-torch.inf).all() and lse[27:].eq(-torch.inf).all()


def test_decode_makes_as_many_calls_for_32_requests_as_for_2(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or fused(*args, **kwargs),
    )
    for requests in (2, 32):
        k, v, batch = make_batch([1] * requests, [100 + request % 7 for request in range(requests)])
        assert_rows_agree(torch.randn(requests, 4, 16), k, v, batch, scale=0.3)
    assert len(calls) == 2


def test_a_long_request_does_not_pad_the_short_ones() -> None:
    seq_lens = [900, 5, 6, 880, 7, 8, 4, 3]
    k, v, batch = make_batch([1] * 8, seq_lens)
    tiles = eager.cut_into_tiles(batch, window=NO_WINDOW, max_keys=1 << 20)
    assert sum(tile.num_keys * tile.num_requests for tile in tiles) < 1.5 * sum(seq_lens) + 256
    assert_rows_agree(torch.randn(8, 4, 16), k, v, batch, scale=0.3)


@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 20, 3, 60]], ids=["decode", "extend"])
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_scratch_stays_under_its_bound(monkeypatch: pytest.MonkeyPatch, q_lens: list[int], logit_cap: float) -> None:
    monkeypatch.setattr(eager, "MAX_SCRATCH_BYTES", 16 << 10)
    monkeypatch.setattr(eager, "_SCRATCH", Scratch())
    gathered: list[int] = []
    gather = eager._gather

    def recording(*args: Any) -> torch.Tensor:
        rows = gather(*args)
        gathered.append(rows.numel() * rows.element_size())
        return rows

    monkeypatch.setattr(eager, "_gather", recording)
    k, v, batch = make_batch(q_lens, [133, 200, 150, 101])
    assert_rows_agree(torch.randn(sum(q_lens), 4, 16), k, v, batch, scale=0.3, logit_cap=logit_cap)
    assert max(gathered) <= 16 << 10
    assert sum(buffer.numel() for buffer in eager._SCRATCH.buffers.values()) <= 16 << 10


@pytest.mark.parametrize("logit_cap", [0.0, 5.0], ids=["fused", "blocked"])
def test_no_call_reads_what_an_earlier_one_left_in_the_scratch(
    monkeypatch: pytest.MonkeyPatch, logit_cap: float
) -> None:
    """Calls of falling and rising sizes, dtypes and head dims, as layers of a model; the scratch is NaN before each."""
    monkeypatch.setattr(eager, "_SCRATCH", Scratch())
    seq_lens = [[40, 33, 38], [5, 7, 6], [90, 31, 7]]
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    calls = [(lens, dtype, dim) for lens in seq_lens for dtype in dtypes for dim in (16, 8)]
    for lens, dtype, dim in calls:
        for q_lens in ([1, 1, 1], [3, 5, 2]):
            k, v, batch = make_batch(q_lens, lens, page_size=4, dtype=dtype, dim=dim)
            q = torch.randn(sum(q_lens), 4, dim, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
            for buffer in eager._SCRATCH.buffers.values():
                buffer.fill_(0xFF)  # NaN in every float dtype, float8 too
            assert_rows_agree(q, k, v, batch, scale=0.3, logit_cap=logit_cap)
    assert set(eager._SCRATCH.buffers) == {"k", "v", "stored"}


def test_the_scratch_stays_for_the_next_layer_and_serves_a_result_that_outlives_it() -> None:
    k, v, batch = make_batch([1, 1], [40, 39])
    q = torch.randn(2, 4, 16)
    first, _ = paged_attention(q, k, v, batch, scale=0.3)
    kept, addresses = first.clone(), {name: buffer.data_ptr() for name, buffer in eager._SCRATCH.buffers.items()}
    paged_attention(-q, k, -v, batch, scale=0.3)
    assert torch.equal(first, kept)
    assert {name: buffer.data_ptr() for name, buffer in eager._SCRATCH.buffers.items()} == addresses


def test_threads_do_not_share_scratch() -> None:
    scratch = Scratch()
    ours = scratch.take("k", (4, 4), torch.float32, torch.device("cpu")).fill_(1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: scratch.take("k", (4, 4), torch.float32, torch.device("cpu")).fill_(2)).result()
    assert ours.eq(1).all()


def test_scratch_made_in_inference_mode_serves_outside_of_it() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        scratch.take("k", (4, 1), torch.float32, torch.device("cpu")).fill_(1)
    assert scratch.take("k", (2, 2), torch.float32, torch.device("cpu")).fill_(2).eq(2).all()


def test_a_captured_batch_is_read_anew_at_every_call() -> None:
    k, v, batch = make_batch([1, 1], [40, 9], captured=True)
    q = torch.randn(2, 4, 16)
    before, _ = paged_attention(q, k, v, batch, scale=0.3)
    batch.seq_lens_B.copy_(torch.tensor([9, 5]))
    after, _ = paged_attention(q, k, v, batch, scale=0.3)
    assert not torch.equal(before, after)
    assert_rows_agree(q, k, v, batch, scale=0.3)


def test_an_eager_batch_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    plan = eager.cut_into_tiles
    monkeypatch.setattr(eager, "cut_into_tiles", lambda *args, **kwargs: plans.append(1) or plan(*args, **kwargs))
    k, v, batch = make_batch([1, 1], [40, 9])
    for _layer in range(3):
        paged_attention(torch.randn(2, 4, 16), k, v, batch, scale=0.3)
    assert len(plans) == 1


PROBLEM = PagedAttentionProblem(
    arch="cpu",
    phase="decode",
    captured=False,
    q_dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_q_heads=8,
    num_kv_heads=2,
    qk_head_dim=64,
    v_head_dim=64,
    page_size=1,
    window=NO_WINDOW,
    logit_cap=0.0,
    return_lse=False,
    has_sinks=False,
)


@pytest.mark.parametrize(
    "cell",
    [
        {},
        {"phase": "extend", "captured": True, "page_size": 1024},
        {"q_dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn},
        {"q_dtype": torch.float16, "kv_dtype": torch.float8_e4m3fnuz, "return_lse": True},
        {"num_q_heads": 5, "num_kv_heads": 5, "v_head_dim": 32, "window": 128, "logit_cap": 30.0},
    ],
)
def test_cells_that_a_cpu_has_to_serve(cell: dict[str, Any]) -> None:
    assert TABLE.choose(dataclasses.replace(PROBLEM, **cell)).name == "eager"


@pytest.mark.parametrize("arch", ["sm89", "sm90", "gfx942", "gfx950"])
@pytest.mark.parametrize(
    "cell",
    [
        {"captured": True, "return_lse": True, "has_sinks": True},
        {"phase": "extend", "num_kv_heads": 8, "qk_head_dim": 192, "v_head_dim": 128, "return_lse": True},
        {"phase": "extend", "causal": False, "return_lse": True},
        {"phase": "extend", "page_size": 1024, "window": 128, "logit_cap": 30.0},
        {"q_dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "qk_head_dim": 256, "v_head_dim": 256},
        {"q_dtype": torch.float16, "kv_dtype": torch.float16, "num_q_heads": 96, "num_kv_heads": 6, "qk_head_dim": 80},
    ],
)
def test_cells_that_a_gpu_has_to_serve(arch: str, cell: dict[str, Any]) -> None:
    assert TABLE.choose(dataclasses.replace(PROBLEM, arch=arch, **cell)).name == "triton"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (
            {"arch": "gfx942", "v_head_dim": 512},
            "runs on gfx942 only when forced by name: it is PyTorch for CPUs",
        ),
        (
            {"arch": "sm90", "captured": True, "page_size": 3},
            "reads lengths on the host, which a graph captured on sm90 cannot repeat",
        ),
        ({"q_dtype": torch.float8_e4m3fn}, "queries of torch.float8_e4m3fn: takes float32, bfloat16, float16"),
        (
            {"kv_dtype": torch.float8_e5m2},
            "KV cache of torch.float8_e5m2: takes float32, bfloat16, float16, float8_e4m3",
        ),
        ({"num_kv_heads": 3}, "8 query heads do not divide over 3 KV heads"),
        ({"arch": "gfx942", "page_size": 3}, "runs only when forced by name: it is the slow definition"),
        ({"arch": "gfx942", "page_size": 3}, "pages of 3 tokens: takes powers of two"),
        ({"arch": "gfx950", "v_head_dim": 512}, "head dims 64 and 512: takes up to 256"),
        ({"arch": "sm90", "num_q_heads": 34}, "17 query heads a KV head: takes up to 16"),
        ({"arch": "sm90", "kv_dtype": torch.float8_e4m3fnuz}, "float8_e4m3fnuz on sm90: it is the FP8 of gfx942"),
        ({"arch": "sm80", "kv_dtype": torch.float8_e4m3fn}, "float8_e4m3fn on sm80: NVIDIA computes it from sm89 on"),
        (
            {"arch": "sm90", "kv_dtype": torch.float8_e4m3fn, "v_head_dim": 63},
            "odd head dims 64 and 63 of float8: takes even ones",
        ),
        ({"num_kv_heads": 3}, "bfloat16 interpreted: Triton's interpreter rounds it towards zero"),
        ({"num_kv_heads": 3}, "runs on GPUs; on cpu only interpreted: TRITON_INTERPRET=1, and forced by name"),
    ],
)
def test_every_reason(cell: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoKernelError) as error:
        TABLE.choose(dataclasses.replace(PROBLEM, **cell))
    assert reason in str(error.value)


@pytest.mark.parametrize("row", ["eager", "reference"])
def test_an_accelerator_runs_the_pytorch_rows_when_they_are_forced(row: str) -> None:
    assert TABLE.choose(dataclasses.replace(PROBLEM, arch="gfx942", forced=row), row).name == row
