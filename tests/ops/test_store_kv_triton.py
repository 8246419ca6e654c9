"""The Triton row of store_kv leaves the bytes that reference.py defines; and what store_kv refuses, in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.indices import TokenSlots
from atom_plugin.ops.store_kv import TABLE, StoreKVProblem, store_kv

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
HALF, SINGLE = torch.float16, torch.float32


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bytes_of = [x.contiguous().view(torch.uint8) for x in (actual, expected)]
    assert torch.equal(*bytes_of), f"{(bytes_of[0] != bytes_of[1]).sum()} of {bytes_of[0].numel()} bytes differ"


def assert_triton_is_the_reference(
    k: torch.Tensor, v: torch.Tensor, pool_dtype: torch.dtype, slots: torch.Tensor, *, page_size: int = 4, **how: Any
) -> None:
    """Store into two equal pools whose every other byte is NaN; both have to end with the same bytes."""
    pools = []
    given = k.clone(), v.clone()
    for row in ("triton", "reference"):
        pages = [
            torch.full((24 // page_size, page_size, *x.shape[1:]), float("nan"), dtype=SINGLE).to(pool_dtype)
            for x in (k, v)
        ]
        store_kv(k, v, *pages, TokenSlots(slots_T=slots), **how, forced=row)
        pools.append(pages)
    for actual, expected in zip((k, v), given, strict=True):
        assert_same_bytes(actual, expected)  # the op changed its arguments
    for actual, expected in zip(*pools, strict=True):
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(SINGLE, SINGLE), (HALF, HALF), (SINGLE, HALF), (HALF, FN), (SINGLE, FN), (HALF, FNUZ)]
)
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_only_the_given_slots_change(
    triton_interpreter: None, dtype: torch.dtype, pool_dtype: torch.dtype, page_size: int, index_dtype: torch.dtype
) -> None:
    qkv = (3 * torch.randn(5, 3 * 80 + 3 * 24 + 7)).to(dtype)  # rows of k and v as a projection leaves them
    k, v = qkv[:, 7:247].view(5, 3, 80), qkv[:, 247:].view(5, 3, 24)
    slots = torch.tensor([23, 0, 7, 8, 16], dtype=index_dtype)
    assert_triton_is_the_reference(k, v, pool_dtype, slots, page_size=page_size, k_scale=0.3, v_scale=1.7)


def test_more_rows_than_one_program_takes(triton_interpreter: None) -> None:
    k, v = torch.randn(21, 3, 128), torch.randn(21, 3, 96)
    assert_triton_is_the_reference(k, v, HALF, torch.randperm(24)[:21])


def test_slots_outside_of_the_pool_are_skipped(triton_interpreter: None) -> None:
    """The pool is the middle of a larger buffer, so that a write past either end would show."""
    memory = torch.zeros(2, 30, 2, 16)
    k_pages, v_pages = (memory[side, 4:20].view(4, 4, 2, 16) for side in (0, 1))
    slots = torch.tensor([-1, 16, 3, -4, 2**31, -(2**33), 17, 15])
    k = torch.ones(8, 2, 16)
    store_kv(k, k, k_pages, v_pages, TokenSlots(slots_T=slots), forced="triton")
    for side in (0, 1):
        assert memory[side].sum(dim=(1, 2)).nonzero().flatten().tolist() == [4 + 3, 4 + 15]


@pytest.mark.parametrize("pool_dtype", [FN, FNUZ])
def test_every_float8_value_is_stored_as_itself(triton_interpreter: None, pool_dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(pool_dtype)
    pages = [torch.zeros(1, 1, 2, 128).to(pool_dtype) for _ in "kv"]
    store_kv(*[every.float().view(1, 2, 128)] * 2, *pages, TokenSlots(slots_T=torch.tensor([0])), forced="triton")
    nan = every.float().isnan()
    assert nan.sum() == (2 if pool_dtype == FN else 1)
    for x in pages:
        assert torch.equal(x.view(torch.uint8).flatten()[~nan], every.view(torch.uint8)[~nan])
        assert x.float().flatten()[nan].isnan().all()


@pytest.mark.parametrize("pool_dtype", [FN, FNUZ])
def test_every_rounding_to_float8_is_pytorchs(triton_interpreter: None, pool_dtype: torch.dtype) -> None:
    """All values of float16 and of bfloat16, the ties between float8 values and their neighbours, random bits."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = torch.arange(256, dtype=torch.uint8).view(pool_dtype).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat([ties, *(ties.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))])
    bits = torch.randint(-(2**31), 2**31, (2**15 - near.numel(),)).to(torch.int32).view(SINGLE)
    k = torch.cat([every.view(HALF).float(), near, bits]).view(1, -1, 512)
    v = torch.cat([every.view(torch.bfloat16).float(), bits, near]).view(1, -1, 512)
    assert_triton_is_the_reference(k, v, pool_dtype, torch.tensor([5]), k_scale=1.0, v_scale=3.0)


@pytest.mark.parametrize("row", ["triton", "eager", "reference"])
def test_no_tokens(triton_interpreter: None, row: str) -> None:
    k, pages = torch.empty(0, 2, 16), torch.zeros(2, 4, 2, 16)
    store_kv(k, k, pages, pages, TokenSlots(slots_T=torch.empty(0, dtype=torch.int64)), forced=row)
    assert pages.eq(0).all()


K, PAGES = torch.zeros(5, 2, 16), torch.zeros(6, 4, 2, 16)
SLOTS = torch.arange(5)


@pytest.mark.parametrize("row", ["triton", "eager", "reference"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"k_THD": K.view(5, 32)}, r"k_THD of shape \(5, 32\): takes \[tokens, heads, head dim\]"),
        ({"v_THD": K.to(torch.int32)}, "v_THD of torch.int32: takes float32, bfloat16, float16"),
        ({"v_THD": K.half()}, r"v_THD is \(5, 2, 16\) of torch.float16: takes the tokens, KV heads and dtype of k_THD"),
        ({"k_THD": K[:4]}, r"v_THD is \(5, 2, 16\) of torch.float32: takes the tokens, .* which is \(4, 2, 16\)"),
        ({"k_THD": K.new_zeros(5, 16, 2).mT}, r"k_THD has strides \(32, 1, 2\): the last one has to be 1"),
        ({"k_pages": PAGES[..., :8]}, r"k_pages of shape \(6, 4, 2, 8\): takes .* k_THD, which is \(5, 2, 16\)"),
        ({"k_pages": PAGES.flatten(0, 1)}, r"k_pages of shape \(24, 2, 16\): takes \[pages, page size, KV heads"),
        ({"v_pages": PAGES[:, :3]}, r"v_pages of shape \(6, 3, 2, 16\) has strides .* one distance from each other"),
        ({"v_pages": PAGES[:5]}, r"v_pages is \(5, 4, 2, 16\) of .*takes the pages, page size and dtype of k_pages"),
        ({"v_pages": PAGES.half()}, r"v_pages is .* of torch.float16: takes .* \(6, 4, 2, 16\) of torch.float32"),
        ({"slots_T": SLOTS.float()}, "slots_T of torch.float32: takes int64, int32"),
        ({"slots_T": SLOTS[:4]}, r"slots_T of shape \(4,\): takes \(5,\)"),
        ({"slots_T": SLOTS[:, None]}, r"slots_T of shape \(5, 1\): takes \(5,\)"),
        ({"slots_T": torch.arange(10)[::2]}, r"slots_T has strides \(2,\): the last one has to be 1"),
        ({"k_THD": K[:1].expand(2**30, 2, 16)}, r"takes fewer than 2\*\*31 \(token, head\) rows"),
    ],
)
def test_arguments_that_do_not_fit(triton_interpreter: None, row: str, bad: dict[str, Any], message: str) -> None:
    given = {"k_THD": K, "v_THD": K, "k_pages": PAGES, "v_pages": PAGES, "slots_T": SLOTS, **bad}
    slots = TokenSlots(slots_T=given.pop("slots_T"))
    with pytest.raises(ValueError, match=message):
        store_kv(*given.values(), slots, forced=row)


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "pool_dtype"),
    [
        ("sm90", torch.bfloat16, torch.bfloat16),
        ("sm90", torch.bfloat16, FN),
        ("gfx942", torch.bfloat16, FNUZ),
        ("gfx950", torch.float16, FN),
        ("gfx950", torch.float32, torch.bfloat16),
    ],
)
def test_cells_that_a_gpu_has_to_serve(arch: str, kv_dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    assert TABLE.choose(StoreKVProblem(arch=arch, kv_dtype=kv_dtype, pool_dtype=pool_dtype)).name == "triton"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (("sm90", torch.bfloat16, FNUZ), "float8_e4m3fnuz on sm90: it is the FP8 of gfx942 alone"),
        (("gfx950", torch.bfloat16, FNUZ), "float8_e4m3fnuz on gfx950: it is the FP8 of gfx942 alone"),
        (("gfx942", torch.int8, FN), "keys and values of torch.int8: takes float32, bfloat16, float16"),
        (("sm90", HALF, torch.float8_e5m2), "KV cache of torch.float8_e5m2: takes float32, bfloat16, float16, float8"),
        (("cpu", HALF, HALF), "runs on GPUs; on cpu only interpreted: TRITON_INTERPRET=1, and forced by name"),
    ],
)
def test_every_reason(problem: tuple[str, torch.dtype, torch.dtype], reason: str) -> None:
    arch, kv_dtype, pool_dtype = problem
    with pytest.raises(NoKernelError) as error:
        TABLE.choose(StoreKVProblem(arch=arch, kv_dtype=kv_dtype, pool_dtype=pool_dtype, forced="triton"), "triton")
    assert reason in str(error.value)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, HALF), (HALF, torch.bfloat16)])
def test_bfloat16_is_not_interpreted(triton_interpreter: None, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    problem = StoreKVProblem(arch="cpu", kv_dtype=dtypes[0], pool_dtype=dtypes[1], forced="triton")
    with pytest.raises(NoKernelError, match="bfloat16 interpreted: Triton's interpreter rounds it towards zero"):
        TABLE.choose(problem, "triton")
