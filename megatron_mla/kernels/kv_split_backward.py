"""Gradients of kv_split.py: packed heads again, and the shared key's summed over heads.

Twin: kv_split_ref.py. Equations: kernels/README.md (6). Legend: T tokens of this rank, S rows and
B batch (T = S * B, B = 1 when packed), H heads of this rank, N unrotated and d rotated key
channels, h = d / 2, V value channels, P rows of the rope table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels import rotation
from megatron_mla.kernels.kv_split_ref import SUM_LANES
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rotation import (
    copy,
    load_angle,
    load_two,
    round_to,
    store_two,
    turn,
    widths_of,
)


@triton.jit
def _sum_lanes(x, T: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr):
    """[T, LANES, R] -> [T, 1, R], lane j plus lane j + LANES / 2, and so on LEVELS times."""
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, [T, 2, LANES >> (level + 1), R])
        lower, upper = tl.split(tl.permute(x, [0, 2, 3, 1]))
        x = lower + upper
    return x


@triton.jit(do_not_specialize=["num_tokens", "table_rows"])
def _kv_split_backward_kernel(
    grad_key,  # [S, B, H, N + d] in, last stride 1
    grad_value,  # [S, B, H, V] in, last stride 1; not read unless HAS_V
    grad_kv,  # [T, H, N + V] out, contiguous
    grad_pe,  # [T, d] out, contiguous
    cos,  # [P, h], last stride 1
    sin,
    positions,  # [S] int32 | int64
    key_strides,
    value_strides,
    table_stride,
    num_tokens,
    batch,
    table_rows,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    R: tl.constexpr,
):
    dtype: tl.constexpr = grad_kv.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    row = (token // batch).to(tl.int64)
    s = row[:, None]
    b = (token % batch).to(tl.int64)[:, None]
    left = tl.zeros([BLOCK_T, LANES, R], wide)
    right = tl.zeros([BLOCK_T, LANES, R], wide)
    # One program holds all heads of its tokens: running sum j takes heads j, j + LANES, ...
    for first in range(0, H, LANES):
        head = (first + tl.arange(0, LANES)).to(tl.int64)[None, :]
        mask = live[:, None] & (head < H)  # [T, LANES]
        offset = s * key_strides[0] + b * key_strides[1] + head * key_strides[2]
        x1, x2 = load_two(grad_key, offset + N, mask, 1, HALF, R, PAIRS_OUT)
        target = grad_kv + (token.to(tl.int64)[:, None] * H + head) * (N + V)
        if N > 0:
            copy(grad_key + offset, target, mask, N, BLOCK_N)
        if HAS_V:
            offset = s * value_strides[0] + b * value_strides[1] + head * value_strides[2]
            copy(grad_value + offset, target + N, mask, V, BLOCK_V)
        elif V > 0:
            channel = tl.arange(0, BLOCK_V)[None, None, :]
            zeros = tl.zeros([BLOCK_T, LANES, BLOCK_V], dtype)
            tl.store((target + N)[:, :, None] + channel, zeros, mask[:, :, None] & (channel < V))
        left += x1.to(wide)
        right += x2.to(wide)

    x1 = round_to(_sum_lanes(left, BLOCK_T, LANES, LEVELS, R), dtype)
    x2 = round_to(_sum_lanes(right, BLOCK_T, LANES, LEVELS, R), dtype)
    c, sn = load_angle(cos, sin, positions, row, live, table_stride, table_rows, HALF, R)
    y1, y2 = turn(x1, x2, c, sn, dtype, ROUND, True, True)
    target = token.to(tl.int64)[:, None] * (2 * HALF)
    store_two(grad_pe, target, live[:, None], y1, y2, HALF, R, True)


def launch_kv_split_backward(
    grad_key: Tensor,
    grad_value: Tensor | None,
    grad_kv: Tensor,
    grad_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    k_dim: int,
    pairs_out: bool = False,
    block_t: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Fill ``grad_kv`` and ``grad_pe``, both contiguous; values without a gradient get zeros."""
    grad_key = rotation.with_batch(grad_key)
    rows, batch, heads, width = grad_key.shape
    if grad_pe.numel() == 0:
        return
    values = grad_kv.shape[-1] - k_dim
    has_value = grad_value is not None and values > 0
    grad_value = rotation.with_batch(grad_value) if has_value else grad_key
    tokens = rows * batch
    lanes = min(SUM_LANES, triton.next_power_of_2(max(heads, 1)))
    moved = lanes * max(k_dim, values, width - k_dim)  # of one token at one time
    if block_t is None:
        block_t, _ = rotation.tile_of(tokens, 1, moved, grad_key.device)
    if num_warps is None:
        # 16 elements per thread, all of which hold two running sums as well.
        num_warps = min(16, max(4, triton.next_power_of_2(moved) // 512))
    with rotation.on_device_of(grad_key):
        _kv_split_backward_kernel[(triton.cdiv(tokens, block_t),)](
            grad_key,
            grad_value,
            grad_kv,
            grad_pe,
            cos,
            sin,
            positions,
            grad_key.stride(),
            grad_value.stride(),
            cos.stride(0),
            tokens,
            batch,
            cos.shape[0],
            H=heads,
            **widths_of(k_dim, values, width - k_dim),
            PAIRS_OUT=pairs_out,
            ROUND=cos.dtype == grad_key.dtype,
            HAS_V=has_value,
            BLOCK_T=block_t,
            LANES=lanes,
            LEVELS=lanes.bit_length() - 1,
            num_warps=num_warps,
            **rotation.EXACT,
        )


def _empty_grads(grad_key, grad_value, cos, sin, positions, k_dim, v_dim, pairs_out):
    heads = grad_key.shape[:-1]
    like = {"dtype": grad_key.dtype, "device": grad_key.device}
    grad_kv = torch.empty((*heads, k_dim + v_dim), **like)
    return grad_kv, torch.empty((*heads[:-1], 1, grad_key.shape[-1] - k_dim), **like)


def _rope_kv_split_backward(grad_key, grad_value, cos, sin, positions, k_dim, v_dim, pairs_out):
    grads = _empty_grads(grad_key, grad_value, cos, sin, positions, k_dim, v_dim, pairs_out)
    if grad_key.shape[-2] == 0:
        grads[1].zero_()
        return grads
    grad_key = _unit_stride(grad_key)
    if grad_value is not None:
        grad_value = _unit_stride(grad_value)
    launch_kv_split_backward(
        grad_key, grad_value, *grads, cos, sin, positions, k_dim=k_dim, pairs_out=pairs_out
    )
    return grads


def _unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


register(
    "rope_kv_split_backward",
    "(Tensor grad_key, Tensor? grad_value, Tensor cos, Tensor sin, Tensor positions, int k_dim, "
    "int v_dim, bool pairs_out) -> (Tensor, Tensor)",
    _rope_kv_split_backward,
    _empty_grads,
)


def kv_split_grads(
    grad_key: Tensor,
    grad_value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_dim: int,
    v_dim: int,
    pairs_out: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``kv`` and ``k_pe``.

    Args:
        grad_key: [S, (B,) H, N + d], any strides.
        grad_value: [S, (B,) H, V], any strides; zeros when None.
        cos, sin, positions: those of the forward.
        pairs_out: the forward wrote pairs.
    Returns:
        [S, (B,) H, N + V] and [S, (B,) 1, d], both contiguous.
    """
    return torch.ops.megatron_mla.rope_kv_split_backward(
        grad_key, grad_value, cos, sin, positions, k_dim, v_dim, pairs_out
    )
