"""Keys and values of every head from packed heads and one shared key, in Triton.

Twin: kv_split_ref.py. Equations: kernels/README.md (5) and (6). Legend: T tokens of this rank, S rows
and B batch (T = S * B, B = 1 when packed), H heads of this rank, N unrotated and d rotated key
channels, h = d / 2, V value channels, P rows of the rope table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels import rotation
from megatron_mla.kernels.checks import (
    check_positions,
    check_same,
    check_table,
    check_tensor,
    check_unit_stride,
)
from megatron_mla.kernels.kv_split_ref import SUM_LANES
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rotation import load_angle, load_two, store_two, turn


@triton.jit
def _copy(source, target, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy WIDTH channels from pointers [T, H] to pointers [T, H]."""
    channel = tl.arange(0, BLOCK)[None, None, :]
    mask = mask[:, :, None] & (channel < WIDTH)
    tl.store(target[:, :, None] + channel, tl.load(source[:, :, None] + channel, mask), mask)


@triton.jit(do_not_specialize=["num_tokens", "table_rows"])
def _kv_split_kernel(
    kv,  # [S, B, H, N + V] in, last stride 1
    k_pe,  # [S, B, 1, d] in, last stride 1
    key,  # [T, H, N + d] out, contiguous
    value,  # [T, H, V] out, contiguous; not written unless PACK_V
    cos,  # [P, h], last stride 1
    sin,
    positions,  # [S] int32 | int64
    kv_strides,
    k_pe_strides,
    table_stride,
    num_tokens,
    num_heads,
    batch,
    table_rows,
    N: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    PACK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    R: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[None, :]
    live = token < num_tokens
    mask = live[:, None] & (head < num_heads)  # [T, H]
    # 64 bits: real shapes pass 2**31 elements.
    row = (token // batch).to(tl.int64)
    s = row[:, None]
    b = (token % batch).to(tl.int64)[:, None]
    slot = token.to(tl.int64)[:, None] * num_heads + head  # [T, H]

    source = kv + s * kv_strides[0] + b * kv_strides[1] + head * kv_strides[2]
    target = slot * (N + 2 * HALF)
    if N > 0:
        _copy(source, key + target, mask, N, BLOCK_N)
    if PACK_V:
        _copy(source + N, value + slot * V, mask, V, BLOCK_V)

    c, sn = load_angle(cos, sin, positions, row, live, table_stride, table_rows, HALF, R)
    shared = s * k_pe_strides[0] + b * k_pe_strides[1]  # [T, 1]
    x1, x2 = load_two(k_pe, shared, live[:, None], 1, HALF, R, True)
    left, right = turn(x1, x2, c, sn, key.dtype.element_ty, ROUND, False, False)
    left = tl.broadcast_to(left, [BLOCK_T, BLOCK_H, R])
    right = tl.broadcast_to(right, [BLOCK_T, BLOCK_H, R])
    store_two(key, target + N, mask, left, right, HALF, R, PAIRS_OUT)


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
    num_heads,
    batch,
    table_rows,
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
    # One program holds all heads of its tokens: running sum j takes heads j, j + LANES, ... in turn.
    for first in range(0, num_heads, LANES):
        head = (first + tl.arange(0, LANES)).to(tl.int64)[None, :]
        mask = live[:, None] & (head < num_heads)  # [T, LANES]
        offset = s * key_strides[0] + b * key_strides[1] + head * key_strides[2]
        x1, x2 = load_two(grad_key, offset + N, mask, 1, HALF, R, PAIRS_OUT)
        target = grad_kv + (token.to(tl.int64)[:, None] * num_heads + head) * (N + V)
        if N > 0:
            _copy(grad_key + offset, target, mask, N, BLOCK_N)
        if HAS_V:
            offset = s * value_strides[0] + b * value_strides[1] + head * value_strides[2]
            _copy(grad_value + offset, target + N, mask, V, BLOCK_V)
        elif V > 0:
            channel = tl.arange(0, BLOCK_V)[None, None, :]
            zeros = tl.zeros([BLOCK_T, LANES, BLOCK_V], dtype)
            tl.store((target + N)[:, :, None] + channel, zeros, mask[:, :, None] & (channel < V))
        left += x1.to(wide)
        right += x2.to(wide)

    x1 = _sum_lanes(left, BLOCK_T, LANES, LEVELS, R).to(dtype)
    x2 = _sum_lanes(right, BLOCK_T, LANES, LEVELS, R).to(dtype)
    c, sn = load_angle(cos, sin, positions, row, live, table_stride, table_rows, HALF, R)
    y1, y2 = turn(x1, x2, c, sn, dtype, ROUND, True, True)
    target = token.to(tl.int64)[:, None] * (2 * HALF)
    store_two(grad_pe, target, live[:, None], y1, y2, HALF, R, True)


def _widths(n: int, v: int, rotated: int) -> dict[str, int]:
    half = rotated // 2
    return {
        "N": n,
        "V": v,
        "HALF": half,
        "BLOCK_N": triton.next_power_of_2(max(n, 1)),
        "BLOCK_V": triton.next_power_of_2(max(v, 1)),
        "R": triton.next_power_of_2(half),
    }


def _with_batch(t: Tensor) -> Tensor:
    """[S, B, H, ...] of packed rows too."""
    return t.unsqueeze(1) if t.dim() == 3 else t


def launch_kv_split(
    kv: Tensor,
    k_pe: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    k_dim: int,
    pairs_out: bool = False,
    tile: tuple[int, int] | None = None,
    num_warps: int = 4,
) -> None:
    """Fill ``key`` and, when given, ``value``, both contiguous."""
    kv, k_pe = _with_batch(kv), _with_batch(k_pe)
    rows, batch, heads, width = kv.shape
    rotated = k_pe.shape[-1]
    if key.numel() == 0:
        return
    pack = value is not None and value.numel() > 0
    tokens = rows * batch
    moved = k_dim + rotated + (width - k_dim if pack else 0)
    block_t, block_h = tile or rotation.tile_of(tokens, heads, moved, kv.device)
    with rotation.on_device_of(kv):
        _kv_split_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(heads, block_h))](
            kv,
            k_pe,
            key,
            value if pack else key,
            cos,
            sin,
            positions,
            kv.stride(),
            k_pe.stride(),
            cos.stride(0),
            tokens,
            heads,
            batch,
            cos.shape[0],
            **_widths(k_dim, width - k_dim, rotated),
            PAIRS_OUT=pairs_out,
            ROUND=cos.dtype == kv.dtype,
            PACK_V=pack,
            BLOCK_T=block_t,
            BLOCK_H=block_h,
            num_warps=num_warps,
            **rotation.EXACT,
        )


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
    num_warps: int = 4,
) -> None:
    """Fill ``grad_kv`` and ``grad_pe``, both contiguous; values without a gradient get zeros."""
    grad_key = _with_batch(grad_key)
    rows, batch, heads, width = grad_key.shape
    if grad_pe.numel() == 0:
        return
    values = grad_kv.shape[-1] - k_dim
    has_value = grad_value is not None and values > 0
    grad_value = _with_batch(grad_value) if has_value else grad_key
    tokens = rows * batch
    lanes = min(SUM_LANES, triton.next_power_of_2(max(heads, 1)))
    if block_t is None:
        block_t, _ = rotation.tile_of(tokens, 1, lanes * max(k_dim, values), grad_key.device)
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
            heads,
            batch,
            cos.shape[0],
            **_widths(k_dim, values, width - k_dim),
            PAIRS_OUT=pairs_out,
            ROUND=cos.dtype == grad_key.dtype,
            HAS_V=has_value,
            BLOCK_T=block_t,
            LANES=lanes,
            LEVELS=lanes.bit_length() - 1,
            num_warps=num_warps,
            **rotation.EXACT,
        )


def _empty_key(kv, k_pe, cos, sin, positions, k_dim, pairs_out) -> Tensor:
    shape = (*kv.shape[:-1], k_dim + k_pe.shape[-1])
    return torch.empty(shape, dtype=kv.dtype, device=kv.device)


def _empty_key_value(kv, k_pe, cos, sin, positions, k_dim, pairs_out) -> tuple[Tensor, Tensor]:
    shape = (*kv.shape[:-1], kv.shape[-1] - k_dim)
    value = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    return _empty_key(kv, k_pe, cos, sin, positions, k_dim, pairs_out), value


def _rope_key(kv, k_pe, cos, sin, positions, k_dim, pairs_out) -> Tensor:
    key = _empty_key(kv, k_pe, cos, sin, positions, k_dim, pairs_out)
    launch_kv_split(kv, k_pe, key, None, cos, sin, positions, k_dim=k_dim, pairs_out=pairs_out)
    return key


def _rope_kv_split(kv, k_pe, cos, sin, positions, k_dim, pairs_out) -> tuple[Tensor, Tensor]:
    key, value = _empty_key_value(kv, k_pe, cos, sin, positions, k_dim, pairs_out)
    launch_kv_split(kv, k_pe, key, value, cos, sin, positions, k_dim=k_dim, pairs_out=pairs_out)
    return key, value


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


def _setup_context(ctx, inputs, output) -> None:
    kv, _, cos, sin, positions, k_dim, pairs_out = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.arguments = k_dim, kv.shape[-1] - k_dim, pairs_out


def _backward(ctx, grad_key, grad_value=None):
    grads = torch.ops.megatron_mla.rope_kv_split_backward(
        grad_key, grad_value, *ctx.saved_tensors, *ctx.arguments
    )
    return *grads, *(None,) * 5


_TABLES = "Tensor cos, Tensor sin, Tensor positions"
_FORWARD = f"(Tensor kv, Tensor k_pe, {_TABLES}, int k_dim, bool pairs_out)"
register(
    "rope_key",
    f"{_FORWARD} -> Tensor",
    _rope_key,
    _empty_key,
    setup_context=_setup_context,
    backward=_backward,
)
register(
    "rope_kv_split",
    f"{_FORWARD} -> (Tensor, Tensor)",
    _rope_kv_split,
    _empty_key_value,
    setup_context=_setup_context,
    backward=_backward,
)
register(
    "rope_kv_split_backward",
    f"(Tensor grad_key, Tensor? grad_value, {_TABLES}, int k_dim, int v_dim, bool pairs_out)"
    " -> (Tensor, Tensor)",
    _rope_kv_split_backward,
    _empty_grads,
)


class _KeyAndView(torch.autograd.Function):
    """The value is a view, which no operator of torch.library may return; one backward for both."""

    @staticmethod
    def forward(ctx, *inputs):
        kv, *_, k_dim, _ = inputs
        _setup_context(ctx, inputs, None)
        return torch.ops.megatron_mla.rope_key(*inputs), kv[..., k_dim:]

    backward = staticmethod(_backward)


def rope_kv_split(
    kv: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    k_dim: int,
    remove_interleaving: bool = False,
    pack_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys with the shared rotated part on every head, and values.

    Args:
        kv: [S, (B,) H, N + V] bf16 | fp16 | fp32 | fp64, last stride 1; heads ``[k nope | v]``.
        k_pe: [S, (B,) 1, d], last stride 1, one for all heads, in pairs.
        cos, sin: [P, d / 2]; their dtype chooses the numerics as in
            :func:`megatron_mla.kernels.rope.rope`.
        positions: [S] int32 | int64.
        k_dim: N; V is the rest and may be 0.
        remove_interleaving: write pairs again instead of halves.
        pack_value: copy the values into a contiguous tensor, in the same launch.
    Returns:
        Key [S, (B,) H, N + d], contiguous, and value [S, (B,) H, V], a view of ``kv`` unless packed.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: kv, and k_pe summed over heads in fp32 in a fixed order and rounded once.
    """
    check_tensor("kv", kv)
    check_tensor("k_pe", k_pe)
    check_unit_stride("kv", kv)
    check_unit_stride("k_pe", k_pe)
    check_same("k_pe", k_pe, "kv", kv)
    if k_pe.shape[:-1] != (*kv.shape[:-2], 1):
        raise ValueError(
            f"k_pe must be [{', '.join(map(str, kv.shape[:-2]))}, 1, d], one head for all of kv, "
            f"got {list(k_pe.shape)}"
        )
    if not 0 <= k_dim <= kv.shape[-1]:
        raise ValueError(
            f"k_dim must be in [0, {kv.shape[-1]}], the width of kv, got {k_dim}; it is the number "
            "of unrotated key channels"
        )
    check_table(cos, sin, k_pe, k_pe.shape[-1], "k_pe")
    check_positions(positions, k_pe, cos, "k_pe")
    inputs = (kv, k_pe, cos, sin, positions, k_dim, remove_interleaving)
    # The compiler's own view of a slice takes no part in a joint backward.
    if pack_value or torch.compiler.is_compiling():
        return torch.ops.megatron_mla.rope_kv_split(*inputs)
    return _KeyAndView.apply(*inputs)
