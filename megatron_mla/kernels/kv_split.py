"""Keys and values of every head from packed heads and one shared key, in Triton.

Twin: kv_split_ref.py; gradients: kv_split_backward.py. Equations: kernels/README.md (5). Legend:
T tokens of this rank, S rows and B batch (T = S * B, B = 1 when packed), H heads of this rank,
N unrotated and d rotated key channels, h = d / 2, V value channels, P rows of the rope table.
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
from megatron_mla.kernels.kv_split_backward import kv_split_grads
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rotation import (
    copy,
    load_angle,
    load_two,
    place,
    store_two,
    turn,
    widths_of,
)


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
    token, head = place(num_heads, BLOCK_T, BLOCK_H)
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
        copy(source, key + target, mask, N, BLOCK_N)
    if PACK_V:
        copy(source + N, value + slot * V, mask, V, BLOCK_V)

    c, sn = load_angle(cos, sin, positions, row, live, table_stride, table_rows, HALF, R)
    shared = s * k_pe_strides[0] + b * k_pe_strides[1]  # [T, 1]
    x1, x2 = load_two(k_pe, shared, live[:, None], 1, HALF, R, True)
    left, right = turn(x1, x2, c, sn, key.dtype.element_ty, ROUND, False, False)
    left = tl.broadcast_to(left, [BLOCK_T, BLOCK_H, R])
    right = tl.broadcast_to(right, [BLOCK_T, BLOCK_H, R])
    store_two(key, target + N, mask, left, right, HALF, R, PAIRS_OUT)


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
    kv, k_pe = rotation.with_batch(kv), rotation.with_batch(k_pe)
    rows, batch, heads, width = kv.shape
    rotated = k_pe.shape[-1]
    if key.numel() == 0:
        return
    pack = value is not None and value.numel() > 0
    tokens = rows * batch
    moved = k_dim + rotated + (width - k_dim if pack else 0)
    tile = tile or rotation.tile_of(tokens, heads, moved, kv.device)
    with rotation.on_device_of(kv):
        _kv_split_kernel[rotation.grid_of(tokens, heads, tile)](
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
            **widths_of(k_dim, width - k_dim, rotated),
            PAIRS_OUT=pairs_out,
            ROUND=cos.dtype == kv.dtype,
            PACK_V=pack,
            BLOCK_T=tile[0],
            BLOCK_H=tile[1],
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


def _setup_context(ctx, inputs, output) -> None:
    kv, _, cos, sin, positions, k_dim, pairs_out = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.arguments = k_dim, kv.shape[-1] - k_dim, pairs_out


def _backward(ctx, grad_key, grad_value=None):
    grads = kv_split_grads(grad_key, grad_value, *ctx.saved_tensors, *ctx.arguments)
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
        Key [S, (B,) H, N + d], contiguous, and value [S, (B,) H, V], a view of ``kv`` unless
        packed.
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
