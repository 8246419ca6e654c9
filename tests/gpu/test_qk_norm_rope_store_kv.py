"""qk_norm_rope_store_kv on a GPU is what reference.py computes on the CPU, in a graph as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atom_plugin import device
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.qk_norm_rope_store_kv import TABLE, qk_norm_rope_store_kv
from tests.ops.poison import poison_empty

pytestmark = pytest.mark.gpu

TOLERANCE = next(kernel for kernel in TABLE.kernels if kernel.name == "triton").tolerance
FLOAT8 = torch.float8_e4m3fnuz if device.fp8_is_fnuz() else torch.float8_e4m3fn
BF16 = torch.bfloat16
NUM_POSITIONS, NUM_SLOTS, PAGE_SIZE = 1000, 256, 16


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    poison_empty(monkeypatch)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make_call(
    tokens: int,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int, int] = (128, 128, 128),
    dtype: torch.dtype = BF16,
    pool_dtype: torch.dtype | None = None,
    num_slots: int = NUM_SLOTS,
    **changes: Any,
) -> dict[str, Any]:
    """Return the arguments of a call on slices of one projection; ``dims``: of a head, rotated, of v. Pools are NaN."""
    (q_heads, kv_heads), (dim, rotary_dim, v_dim) = heads, dims
    widths = [q_heads * dim, kv_heads * dim, kv_heads * v_dim]
    qkv = (2 * torch.randn(tokens, sum(widths), device="cuda")).to(dtype)
    q, k, v = (
        x.view(tokens, heads, x.shape[1] // heads)
        for x, heads in zip(qkv.split(widths, dim=1), (q_heads, kv_heads, kv_heads), strict=True)
    )
    k_pages, v_pages = (
        torch.full((num_slots // PAGE_SIZE, PAGE_SIZE, kv_heads, x), float("nan"), device="cuda").to(
            pool_dtype or dtype
        )
        for x in (dim, v_dim)
    )
    angles = torch.arange(NUM_POSITIONS)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return {
        "q_THD": q,
        "k_THD": k,
        "v_THD": v,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "slots": TokenSlots(slots_T=torch.randperm(num_slots, device="cuda")[:tokens]),
        "positions": torch.randint(NUM_POSITIONS, (tokens,), device="cuda"),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1).cuda(),
        "is_neox": True,
        "q_weight": (torch.rand(dim, device="cuda") + 0.5).to(dtype),
        "k_weight": (torch.rand(dim, device="cuda") + 0.5).to(dtype),
        "eps": 1e-6,
        **changes,
    }


def on_cpu(call: dict[str, Any]) -> dict[str, Any]:
    copied = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    return {**copied, "slots": TokenSlots(slots_T=call["slots"].slots_T.cpu())}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the row's tolerance of ``dtype``; in a float8 pool the neighbouring value is close as well."""
    rtol, atol = TOLERANCE[dtype]
    if expected.dtype.itemsize == 1:
        rtol, atol = 0.126, 2**-9
    torch.testing.assert_close(actual.cpu().float(), expected.cpu().float(), rtol=rtol, atol=atol, equal_nan=True)


def assert_is_the_reference(call: dict[str, Any], row: str = "reference") -> None:
    """Compare a call with ``row`` on the CPU; v has to be equal in every byte, and the arguments stay."""
    theirs, given = on_cpu(call), on_cpu(call)
    out = qk_norm_rope_store_kv(**call, forced="triton")
    torch.cuda.synchronize()
    expected = qk_norm_rope_store_kv(**theirs, forced=row)
    dtype = call["q_THD"].dtype
    assert out.is_contiguous() and out.dtype == dtype
    assert_close(out, expected, dtype)
    assert_close(call["k_pages"], theirs["k_pages"], dtype)
    assert torch.equal(call["v_pages"].cpu().view(torch.uint8), theirs["v_pages"].view(torch.uint8))
    for name in ("q_THD", "k_THD", "v_THD"):
        assert torch.equal(call[name].cpu(), given[name]), f"the op changed {name}"


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dims", [(64, 64, 64), (80, 80, 80), (96, 24, 64), (128, 128, 128), (256, 64, 256)])
def test_head_dims_and_rotated_parts(dtype: torch.dtype, is_neox: bool, dims: tuple[int, int, int]) -> None:
    assert_is_the_reference(make_call(19, dims=dims, dtype=dtype, is_neox=is_neox))


@pytest.mark.parametrize(("tokens", "heads"), [(1, (32, 4)), (64, (64, 4)), (13, (5, 5)), (3, (128, 1)), (9, (12, 3))])
@pytest.mark.parametrize("pool_dtype", [BF16, FLOAT8])
def test_numbers_of_tokens_and_heads(tokens: int, heads: tuple[int, int], pool_dtype: torch.dtype) -> None:
    assert_is_the_reference(make_call(tokens, heads, pool_dtype=pool_dtype, k_scale=0.07, v_scale=0.3))


@pytest.mark.parametrize("heads", [(32, 4), (64, 4)])
@pytest.mark.parametrize("pool_dtype", [BF16, FLOAT8])
@pytest.mark.parametrize("is_neox", [True, False])
def test_a_long_prefill(heads: tuple[int, int], pool_dtype: torch.dtype, is_neox: bool) -> None:
    call = make_call(2049, heads, pool_dtype=pool_dtype, num_slots=4096, is_neox=is_neox, k_scale=0.07)
    assert_is_the_reference(call, row="eager")


def test_float16() -> None:
    assert_is_the_reference(make_call(19, dtype=torch.float16))


def test_norms_are_optional() -> None:
    assert_is_the_reference(make_call(7, q_weight=None, k_weight=None))


@pytest.mark.parametrize("is_neox", [True, False])
def test_three_position_axes(is_neox: bool) -> None:
    positions = torch.randint(NUM_POSITIONS, (3, 40), device="cuda")[:, :31]
    axes = torch.randint(3, (32,), device="cuda")
    call = make_call(31, dims=(256, 64, 256), positions=positions, axis_of_frequency=axes, is_neox=is_neox)
    assert_is_the_reference(call)


@pytest.mark.parametrize("cache_dtype", [BF16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_dtypes_of_the_cache_and_of_the_indices(cache_dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    call = make_call(21)
    call["cos_sin_cache"] = call["cos_sin_cache"].to(cache_dtype)
    call["positions"] = call["positions"].to(index_dtype)
    call["slots"] = TokenSlots(slots_T=call["slots"].slots_T.to(index_dtype))
    assert_is_the_reference(call)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_quantised_k_has_the_references_bytes(is_neox: bool, dtype: torch.dtype) -> None:
    """Without a norm and at angle 0 norm and rope are exact, so that the store alone is compared."""
    call = make_call(50, dtype=dtype, pool_dtype=FLOAT8, is_neox=is_neox, k_scale=0.3, v_scale=0.7)
    call |= {"q_weight": None, "k_weight": None, "positions": torch.zeros(50, dtype=torch.int64, device="cuda")}
    theirs = on_cpu(call)
    qk_norm_rope_store_kv(**call, forced="triton")
    qk_norm_rope_store_kv(**theirs, forced="reference")
    for name in ("k_pages", "v_pages"):
        assert torch.equal(call[name].cpu().view(torch.uint8), theirs[name].view(torch.uint8))


def test_slots_and_positions_outside_of_their_range_read_and_write_nothing() -> None:
    slots = torch.tensor([-1, NUM_SLOTS, 3, 2**40, -(2**33)], device="cuda")
    assert_is_the_reference(make_call(5, slots=TokenSlots(slots_T=slots)))
    positions = torch.tensor([0, NUM_POSITIONS, 1, -1, 2**40], device="cuda")
    out = qk_norm_rope_store_kv(**make_call(5, dims=(128, 64, 128), positions=positions), forced="triton")
    is_nan = out[..., :64].isnan()
    assert is_nan[[1, 3, 4]].all() and not is_nan[[0, 2]].any() and not out[..., 64:].isnan().any()


@pytest.mark.parametrize("pool_dtype", [BF16, FLOAT8])
def test_a_captured_call_is_replayed_with_other_tokens(pool_dtype: torch.dtype) -> None:
    """Rows past the real ones of a replay are padding: position 0, and slot 0 or nowhere."""
    tokens = 48
    call = make_call(tokens, (32, 4), pool_dtype=pool_dtype, k_scale=0.07)
    qk_norm_rope_store_kv(**call, forced="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qk_norm_rope_store_kv(**call, forced="triton")
    slots, positions = call["slots"].slots_T, call["positions"]
    for real, padding in ((48, 0), (1, -1), (17, 0), (33, -1)):
        for name in ("q_THD", "k_THD", "v_THD"):
            call[name].normal_()
        slots.fill_(padding)
        slots[:real] = torch.randperm(NUM_SLOTS - 1, device="cuda")[:real] + 1
        positions.zero_()
        positions[:real] = torch.randint(NUM_POSITIONS, (real,), device="cuda")
        for name in ("k_pages", "v_pages"):
            call[name].view(torch.uint8).fill_(0x7F)
        theirs = on_cpu(call)
        graph.replay()
        torch.cuda.synchronize()
        only_real = {name: theirs[name][:real] for name in ("q_THD", "k_THD", "v_THD", "positions")}
        theirs |= {**only_real, "slots": TokenSlots(slots_T=theirs["slots"].slots_T[:real])}
        expected = qk_norm_rope_store_kv(**theirs, forced="reference")
        assert_close(out[:real], expected, BF16)
        assert not out.isnan().any()
        first = 0 if padding < 0 or real == tokens else 1  # padding may have written slot 0
        for name in ("k_pages", "v_pages"):
            assert_close(call[name].flatten(0, 1)[first:], theirs[name].flatten(0, 1)[first:], BF16)
