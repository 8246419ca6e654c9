"""KV store in Triton: one launch, a few (token, head) rows of k and of v a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_plugin.ops.indices import TokenSlots, slot_stride
from atom_plugin.ops.store_kv.arguments import check

#: Exponent bias of a pool's float8 format, 0 for a pool of wider floats.
FLOAT8_BIAS = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8}
#: What too large a value becomes in e4m3fn: 448 (0x7E) or NaN (0x7F), PyTorch 2.14 and 2.11 differ. Ours is the host's.
_FN_OVERFLOW = tl.constexpr(int(torch.tensor(torch.inf).to(torch.float8_e4m3fn).view(torch.uint8)))
#: Where many programs fit beside each other, one of few elements answers soonest; past this, wide ones move more.
_FEW_ELEMENTS = 1 << 20


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: TokenSlots,
    *,
    k_scale: float,
    v_scale: float,
) -> None:
    """See ``atom_plugin.ops.store_kv.store_kv``."""
    check(k_THD, v_THD, k_pages, v_pages, slots)
    tokens, heads, dim = k_THD.shape
    if tokens == 0:
        return
    k_pool, v_pool = pool_memory(k_pages), pool_memory(v_pages)
    v_dim = v_THD.shape[2]
    block_k, block_v = triton.next_power_of_2(dim), triton.next_power_of_2(v_dim)
    rows, warps = launch_shape(tokens * heads, max(block_k, block_v))
    _store_kv[(triton.cdiv(tokens * heads, rows),)](
        k_THD,
        v_THD,
        k_pool,
        v_pool,
        slots.slots_T,
        tokens,
        k_pages.shape[0] * k_pages.shape[1],
        k_THD.stride(0),
        k_THD.stride(1),
        v_THD.stride(0),
        v_THD.stride(1),
        slot_stride(k_pages),
        k_pages.stride(2),
        slot_stride(v_pages),
        v_pages.stride(2),
        k_scale,
        v_scale,
        heads,
        dim,
        v_dim,
        k_scale != 1.0 or v_scale != 1.0,
        FLOAT8_BIAS.get(k_pages.dtype, 0),
        rows,
        block_k,
        block_v,
        num_warps=warps,
    )


def pool_memory(pages: torch.Tensor) -> torch.Tensor:
    """Return ``pages`` as a kernel takes it: float8 as bytes, which every target and the interpreter can write."""
    return pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages


def launch_shape(num_rows: int, block_dim: int) -> tuple[int, int]:
    """Return (rows, warps) of a program: 16 elements a thread while all programs fit a GPU at once, else 32."""
    elements, warps = (512, 1) if num_rows * block_dim <= _FEW_ELEMENTS else (4096, 4)
    return max(1, elements // block_dim), warps


@triton.jit
def float8_bytes(x, BIAS: tl.constexpr):
    """Round float32 to e4m3 of exponent bias ``BIAS`` (7: fn, 8: fnuz), ties to even: PyTorch's conversion.

    In integers, since a GPU has one of the two formats at most, and the interpreter neither.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x7F800000)
    # Three of the 23 bits of the mantissa stay: add half of what goes, less one where the last bit that stays is even.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    # Below the smallest normal, 2^(1 - BIAS), floats lie 2^(-2 - BIAS) apart, as float32 does from 2^(21 - BIAS) on.
    lifted = magnitude.to(tl.float32, bitcast=True) + float(2 ** (21 - BIAS))
    subnormal = lifted.to(tl.int32, bitcast=True) - ((148 - BIAS) << 23)
    byte = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    if BIAS == 7:
        byte = tl.where(is_nan, 0x7F, tl.minimum(byte, _FN_OVERFLOW)) | sign
    else:  # fnuz has no infinity, one zero, and one NaN: the byte that would be a negative zero
        byte = tl.minimum(byte, 0x80)
        byte = tl.where((byte == 0) | (byte == 0x80), byte, byte | sign)
    return byte.to(tl.uint8)


@triton.jit
def stored(x, scale, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Return ``x`` (of the dtype of k) as the pool holds it, before the rounding that a store to a float pool does."""
    if SCALED:
        x = tl.div_rn(x.to(tl.float32), scale).to(x.dtype)
    return float8_bytes(x.to(tl.float32), BIAS) if BIAS != 0 else x


@triton.jit
def token_and_head(block, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return (token in int64, head, whether there is such a row) of the rows of ``block``, [ROWS] each."""
    row = block * ROWS + tl.arange(0, ROWS)
    return (row // HEADS).to(tl.int64), row % HEADS, row < tokens * HEADS


@triton.jit
def slot_of(slots_ptr, token, live, num_slots):
    """Return (slot, whether it may be written) of each token; a slot outside of the pool may not."""
    slot = tl.load(slots_ptr + token, mask=live, other=-1).to(tl.int64)
    return slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def store_rows(x, pool_ptr, slot, writable, head, slot_stride, head_stride, scale,
               DIM: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the rows ``x`` [ROWS, BLOCK] of ``head`` to their slots."""
    i = tl.arange(0, BLOCK)[None, :]
    out_ptr = pool_ptr + (slot * slot_stride + head * head_stride)[:, None] + i
    kept = writable[:, None] & (i < DIM)
    tl.store(out_ptr, stored(x, scale, SCALED, BIAS).to(pool_ptr.dtype.element_ty), mask=kept)


@triton.jit
def load_rows(x_ptr, token, head, live, token_stride, head_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows [ROWS, BLOCK] of ``head`` of ``token``."""
    i = tl.arange(0, BLOCK)[None, :]
    x_ptr += (token * token_stride + head * head_stride)[:, None]
    return tl.load(x_ptr + i, mask=live[:, None] & (i < DIM), other=0.0)


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def _store_kv(k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, tokens, num_slots,
              k_token_stride, k_head_stride, v_token_stride, v_head_stride,
              k_slot_stride, k_pool_head_stride, v_slot_stride, v_pool_head_stride, k_scale, v_scale,
              HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
              ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    token, head, live = token_and_head(tl.program_id(0), tokens, HEADS, ROWS)
    k = load_rows(k_ptr, token, head, live, k_token_stride, k_head_stride, DIM, BLOCK_K)
    v = load_rows(v_ptr, token, head, live, v_token_stride, v_head_stride, V_DIM, BLOCK_V)
    slot, writable = slot_of(slots_ptr, token, live, num_slots)
    store_rows(k, k_pool_ptr, slot, writable, head, k_slot_stride, k_pool_head_stride, k_scale,
               DIM, SCALED, BIAS, BLOCK_K)  # fmt: skip
    store_rows(v, v_pool_ptr, slot, writable, head, v_slot_stride, v_pool_head_stride, v_scale,
               V_DIM, SCALED, BIAS, BLOCK_V)  # fmt: skip
