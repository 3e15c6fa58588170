"""What the rotating kernels share: the pair arithmetic, loads and stores of both orders, tiles.

Equations: kernels/README.md (1) to (3). Legend: T token tile, H head tile, R half of the rotated
channels padded to a power of two.

Launch every kernel with ``enable_fp_fusion=False`` (:data:`EXACT`): a product contracted into a
fused multiply-add loses the rounding that the eager path does, and casting to the dtype and back
does not keep the compiler from contracting.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}

# Elements of one tile on a GPU: eight 16-byte loads of a 4-warp program in bf16. The interpreter
# runs a tile as one NumPy operation, so there the largest is the fastest.
_GPU_TILE = 4096
_CPU_TILE = 1 << 18


def tile_of(num_tokens: int, num_heads: int, width: int, device: torch.device) -> tuple[int, int]:
    """Tokens and heads of one program: powers of two. No choice changes a bit of any result.

    Args:
        width: channels that a program handles per head.
    """
    budget = _GPU_TILE if device.type == "cuda" else _CPU_TILE
    rows = max(1, budget // triton.next_power_of_2(max(width, 1)))
    heads = min(triton.next_power_of_2(num_heads), rows)
    return min(triton.next_power_of_2(num_tokens), rows // heads), heads


def on_device_of(t: Tensor):
    """Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def widths_of(n: int, v: int, rotated: int) -> dict[str, int]:
    """Widths of a head ``[N | V]`` with ``rotated`` channels and the powers of two they fit in."""
    half = rotated // 2
    return {
        "N": n,
        "V": v,
        "HALF": half,
        "BLOCK_N": triton.next_power_of_2(max(n, 1)),
        "BLOCK_V": triton.next_power_of_2(max(v, 1)),
        "R": triton.next_power_of_2(half),
    }


def with_batch(t: Tensor) -> Tensor:
    """[S, B, H, ...] of packed rows too."""
    return t.unsqueeze(1) if t.dim() == 3 else t


@triton.jit
def place(num_heads, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Tokens [T] and heads [1, H] of this program of :func:`grid_of`.

    Programs of one token follow each other, so that what is read and written at one time lies
    together in memory; the other way round a copy of heads takes about a tenth longer on an H200.
    """
    across = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0)
    token = program // across * BLOCK_T + tl.arange(0, BLOCK_T)
    head = program % across * BLOCK_H + tl.arange(0, BLOCK_H)
    return token, head.to(tl.int64)[None, :]


def grid_of(num_tokens: int, num_heads: int, tile: tuple[int, int]) -> tuple[int]:
    """Programs of ``tile`` tokens and heads each, in the order of :func:`place`."""
    return (triton.cdiv(num_tokens, tile[0]) * triton.cdiv(num_heads, tile[1]),)


@triton.jit
def copy(source, target, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy WIDTH channels from pointers [T, H] to pointers [T, H]."""
    channel = tl.arange(0, BLOCK)[None, None, :]
    mask = mask[:, :, None] & (channel < WIDTH)
    tl.store(target[:, :, None] + channel, tl.load(source[:, :, None] + channel, mask), mask)


@triton.jit
def load_angle(cos, sin, positions, row, live, table_stride, table_rows, HALF, R: tl.constexpr):
    """cos and sin of every token, [T, 1, R]. A position outside the table reads its nearest row."""
    position = tl.load(positions + row, mask=live, other=0).to(tl.int64)  # [T]
    position = tl.minimum(tl.maximum(position, 0), table_rows - 1)
    channel = tl.arange(0, R)[None, None, :]
    offset = (position * table_stride)[:, None, None] + channel  # [T, 1, R]
    mask = live[:, None, None] & (channel < HALF)
    return tl.load(cos + offset, mask=mask, other=0.0), tl.load(sin + offset, mask=mask, other=0.0)


@triton.jit
def load_two(base, offset, mask, stride, HALF: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr):
    """The two channels of every rotation, [T, H, R] each.

    Args:
        offset, mask: [T, H], where a head's rotated channels begin.
        PAIRS: channels lie as (0, 1), (2, 3), ...; else as two halves.
    """
    mask = mask[:, :, None]
    offset = offset[:, :, None]
    if PAIRS:
        # One contiguous load, parted in registers: strided loads of two bytes are slower.
        channel = tl.arange(0, 2 * R).to(tl.int64)[None, None, :]
        x = tl.load(base + offset + channel * stride, mask=mask & (channel < 2 * HALF), other=0.0)
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], R, 2]))
    channel = tl.arange(0, R).to(tl.int64)[None, None, :]
    mask = mask & (channel < HALF)
    left = tl.load(base + offset + channel * stride, mask=mask, other=0.0)
    right = tl.load(base + offset + (channel + HALF) * stride, mask=mask, other=0.0)
    return left, right


@triton.jit
def store_two(
    base, offset, mask, left, right, HALF: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr
):
    """Inverse of :func:`load_two` with unit stride."""
    mask = mask[:, :, None]
    offset = offset[:, :, None]
    if PAIRS:
        channel = tl.arange(0, 2 * R)[None, None, :]
        x = tl.reshape(tl.join(left, right), [left.shape[0], left.shape[1], 2 * R])
        tl.store(base + offset + channel, x, mask=mask & (channel < 2 * HALF))
    else:
        channel = tl.arange(0, R)[None, None, :]
        mask = mask & (channel < HALF)
        tl.store(base + offset + channel, left, mask=mask)
        tl.store(base + offset + channel + HALF, right, mask=mask)


# The interpreter cuts fp32 to bf16 where a GPU rounds to nearest even (seen in Triton 3.6 to 3.8).
_CUTS_BF16 = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """``x`` with the precision of ``dtype`` and the type of before; conversion is then exact."""
    if _CUTS_BF16 and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype).to(x.dtype)


@triton.jit
def turn(
    x1, x2, c, s, dtype: tl.constexpr, ROUND: tl.constexpr, INVERSE: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotate (x1, x2) by the angle and round to ``dtype``: equations (1) and (2).

    Args:
        ROUND: tables are in ``dtype`` ("megatron" numerics): every product is rounded too.
        INVERSE: rotate back.
        BACKWARD: as autograd's accumulation does, turn -0 into +0.
    """
    wide = tl.float64 if dtype == tl.float64 else tl.float32
    x1, x2, c, s = x1.to(wide), x2.to(wide), c.to(wide), s.to(wide)
    a, b, d, e = x1 * c, x2 * s, x2 * c, x1 * s
    if ROUND:
        a, b, d, e = round_to(a, dtype), round_to(b, dtype), round_to(d, dtype), round_to(e, dtype)
    if INVERSE:
        # And not by -s: Triton 3.6 makes of it 0 - s, which turns a sine of +0 into +0.
        left, right = round_to(a + b, dtype), round_to(d - e, dtype)
    else:
        left, right = round_to(a - b, dtype), round_to(d + e, dtype)
    if BACKWARD:
        left, right = left + 0.0, right + 0.0
    return left.to(dtype), right.to(dtype)
