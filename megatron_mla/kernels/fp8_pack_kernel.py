"""Kernel of fp8_pack.py, in Triton; a file of its own because that one works without Triton.

Equations: kernels/README.md (12) to (14). Legend: T tokens and H heads of queries or of keys, N
unrotated and d positional channels, h = d / 2, P rows of the rope table; in shapes of tiles T and H
are the tile's, R is h padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels import rotation
from megatron_mla.kernels.rotation import load_angle, load_two, turn

# A program holds four times the elements of the other kernels, 64 heads of 128 + 64 channels: even
# of a half of 32 channels each of its 128 threads then has 16 in a row, what a 16-byte store takes.
_WIDER = 4

INTERPRETED = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _encoded(x, dtype: tl.constexpr):
    """fp32 in ``dtype``, by hand: the interpreter rounds half away from zero, loses carries and
    subnormal numbers, and wraps (seen in Triton 3.6 to 3.8)."""
    MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
    BIAS: tl.constexpr = 7 if dtype == tl.float8e4nv else 15
    LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size < LIMIT, size, LIMIT)
    code = size.to(tl.int32, bitcast=True)
    code = (code + (1 << (DROPPED - 1)) - 1 + ((code >> DROPPED) & 1)) >> DROPPED
    code = code - ((127 - BIAS) << MANTISSA)
    # Subnormal ones are multiples of the least; 1.5 * 2**23 has an ulp of 1.
    PER_ONE: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    is_small = size < 2.0 ** (1 - BIAS)
    small = (tl.where(is_small, size, 0.0) * PER_ONE + 12582912.0) - 12582912.0
    code = tl.where(is_small, small.to(tl.int32), code)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def _rounded(x, scale, dtype: tl.constexpr):
    """``x * scale`` in FP8: saturated, NaN stays NaN."""
    x = x.to(tl.float32) * scale
    if _INTERPRETED:
        return _encoded(x, dtype)
    if dtype == tl.float8e5:
        # Comparisons, for tl.clamp drops NaN. e4m3 saturates by itself.
        x = tl.where(x > 57344.0, 57344.0, x)
        x = tl.where(x < -57344.0, -57344.0, x)
    return x.to(dtype)


@triton.jit
def _pack(
    program,
    nope,
    pe,
    out,
    positions,
    scale,
    nope_strides,
    pe_strides,
    num_tokens,
    num_heads,
    cos,
    sin,
    table_stride,
    table_rows,
    N: tl.constexpr,
    PE: tl.constexpr,
    ROTATES: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,
):
    """One tile of queries or of keys. All loads come before the first store."""
    dtype: tl.constexpr = out.dtype.element_ty
    across = tl.cdiv(num_heads, BLOCK_H)
    token = program // across * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (program % across * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[None, :]
    live = token < num_tokens
    mask = live[:, None] & (head < num_heads)  # [T, H]
    # 64 bits: real shapes pass 2**31 elements.
    row = token.to(tl.int64)
    target = out + (row[:, None] * num_heads + head) * (N + PE)
    factor = tl.load(scale) if LOAD_SCALE else scale

    channel = tl.arange(0, BLOCK_N)[None, None, :]
    kept_mask = mask[:, :, None] & (channel < N)
    if N > 0:
        offset = row[:, None] * nope_strides[0] + head * nope_strides[1]
        offset = offset[:, :, None] + channel.to(tl.int64) * nope_strides[2]
        kept = tl.load(nope + offset, mask=kept_mask)

    if SHARED:
        offset, seen = row[:, None] * pe_strides[0], live[:, None]  # [T, 1]
    else:
        offset, seen = row[:, None] * pe_strides[0] + head * pe_strides[1], mask
    if ROTATES:
        c, sn = load_angle(cos, sin, positions, row, live, table_stride, table_rows, PE // 2, R)
        x1, x2 = load_two(pe, offset, seen, pe_strides[2], PE // 2, R, PAIRS)
    elif PE > 0:
        place = tl.arange(0, 2 * R)[None, None, :]
        offset = offset[:, :, None] + place.to(tl.int64) * pe_strides[2]
        x = tl.load(pe + offset, mask=seen[:, :, None] & (place < PE))

    if N > 0:
        tl.store(target[:, :, None] + channel, _rounded(kept, factor, dtype), mask=kept_mask)
    if ROTATES:
        left, right = turn(x1, x2, c, sn, tl.float32, False, False, False)
        if PAIRS:
            x = tl.reshape(tl.join(left, right), [left.shape[0], left.shape[1], 2 * R])
        else:
            _store(target + N, _rounded(left, factor, dtype), mask, PE // 2, BLOCK_T, BLOCK_H, R)
            right = _rounded(right, factor, dtype)
            _store(target + N + PE // 2, right, mask, PE // 2, BLOCK_T, BLOCK_H, R)
    if PE > 0 and not (ROTATES and not PAIRS):
        _store(target + N, _rounded(x, factor, dtype), mask, PE, BLOCK_T, BLOCK_H, 2 * R)


@triton.jit
def _store(
    target, x, mask, WIDTH: tl.constexpr, T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    """[T, H | 1, BLOCK], of which WIDTH channels, to pointers [T, H]."""
    place = tl.arange(0, BLOCK)[None, None, :]
    x = tl.broadcast_to(x, [T, H, BLOCK])
    tl.store(target[:, :, None] + place, x, mask=mask[:, :, None] & (place < WIDTH))


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "q_programs", "table_rows"])
def _fp8_pack_kernel(
    q_nope,  # [T, H, N] in, any strides; parts of no width are not read
    q_pe,  # [T, H, d] in, any strides
    q_out,  # [T, H, N + d] out, contiguous
    k_nope,
    k_pe,  # [T, 1 | H, d] in
    k_out,
    cos,  # [P, h] fp32, last stride 1
    sin,
    positions,  # [T] int32 | int64
    positions_k,
    scale_q,  # fp32, or a pointer to one
    scale_kv,
    q_nope_strides,
    q_pe_strides,
    k_nope_strides,
    k_pe_strides,
    table_stride,
    table_rows,
    q_tokens,
    q_heads,
    k_tokens,
    k_heads,
    q_programs,
    NQ: tl.constexpr,
    NK: tl.constexpr,
    PE: tl.constexpr,
    ROTATES: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    LOAD_SCALE_Q: tl.constexpr,
    LOAD_SCALE_KV: tl.constexpr,
    BLOCK_TQ: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_NQ: tl.constexpr,
    BLOCK_TK: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_NK: tl.constexpr,
    R: tl.constexpr,
):
    program = tl.program_id(0)
    if program < q_programs:
        _pack(
            program, q_nope, q_pe, q_out, positions, scale_q, q_nope_strides, q_pe_strides,
            q_tokens, q_heads, cos, sin, table_stride, table_rows, NQ, PE, ROTATES, PAIRS, False,
            LOAD_SCALE_Q, BLOCK_TQ, BLOCK_HQ, BLOCK_NQ, R,
        )  # fmt: skip
    else:
        _pack(
            program - q_programs, k_nope, k_pe, k_out, positions_k, scale_kv, k_nope_strides,
            k_pe_strides, k_tokens, k_heads, cos, sin, table_stride, table_rows, NK, PE, ROTATES,
            PAIRS, SHARED, LOAD_SCALE_KV, BLOCK_TK, BLOCK_HK, BLOCK_NK, R,
        )  # fmt: skip


def tile_of(nope: Tensor, pe: Tensor) -> tuple[int, int]:
    """Tokens and heads of one program: powers of two. No choice changes a bit of any result."""
    tokens, heads, _ = nope.shape
    padded = sum(triton.next_power_of_2(t.shape[-1]) for t in (nope, pe) if t.shape[-1])
    return rotation.tile_of(max(tokens, 1), max(heads, 1), padded // _WIDER, nope.device)


def launch_fp8_pack(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    table: Tensor | None,
    positions: Tensor | None,
    positions_k: Tensor | None,
    is_neox_style: bool,
    scale_q: float | Tensor,
    scale_kv: float | Tensor,
    q_out: Tensor,
    k_out: Tensor,
    *,
    tiles: tuple[tuple[int, int], tuple[int, int]] | None = None,
    num_warps: int = 4,
) -> None:
    """Write both outputs; arguments as :func:`megatron_mla.kernels.fp8_pack_ref.checked` has them.

    Args:
        tiles: tokens and heads of one program, for queries and for keys; chosen when None.
    """
    q_tile, k_tile = tiles or (tile_of(q_nope, q_pe), tile_of(k_nope, k_pe))
    grids = [
        rotation.grid_of(*out.shape[:2], tile)[0] if out.numel() else 0
        for out, tile in ((q_out, q_tile), (k_out, k_tile))
    ]
    if sum(grids) == 0:
        return
    pe = q_pe.shape[-1]
    rotates = table is not None
    if k_pe.shape[1] > 1 and k_pe.stride(1) == 0:
        k_pe = k_pe[:, :1]  # expanded: one row for all heads
    if rotates:
        cos, sin = table[:, : pe // 2], table[:, pe // 2 :]
    else:  # not read
        cos = sin = positions = positions_k = q_out
    with rotation.on_device_of(q_nope):
        _fp8_pack_kernel[(sum(grids),)](
            q_nope,
            q_pe,
            q_out,
            k_nope,
            k_pe,
            k_out,
            cos,
            sin,
            positions,
            positions_k,
            scale_q,
            scale_kv,
            q_nope.stride(),
            q_pe.stride(),
            k_nope.stride(),
            k_pe.stride(),
            cos.stride(0),
            cos.shape[0],
            *q_out.shape[:2],
            *k_out.shape[:2],
            grids[0],
            NQ=q_nope.shape[-1],
            NK=k_nope.shape[-1],
            PE=pe,
            ROTATES=rotates,
            PAIRS=not is_neox_style,
            SHARED=k_pe.shape[1] == 1 and k_out.shape[1] > 1,
            LOAD_SCALE_Q=isinstance(scale_q, torch.Tensor),
            LOAD_SCALE_KV=isinstance(scale_kv, torch.Tensor),
            BLOCK_TQ=q_tile[0],
            BLOCK_HQ=q_tile[1],
            BLOCK_NQ=triton.next_power_of_2(max(q_nope.shape[-1], 1)),
            BLOCK_TK=k_tile[0],
            BLOCK_HK=k_tile[1],
            BLOCK_NK=triton.next_power_of_2(max(k_nope.shape[-1], 1)),
            R=triton.next_power_of_2(max((pe + 1) // 2, 1)),
            num_warps=num_warps,
            **rotation.EXACT,
        )
