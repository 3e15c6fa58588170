"""Rotary embedding in plain PyTorch: the specification of rope.py, and the path without it.

Equations: kernels/README.md (1) to (3). Legend: S rows and B batch (absent when packed), H heads,
N unrotated and d rotated channels, h = d / 2, P rows of the rope table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_positions, check_table


def _split(t: Tensor, paired: bool) -> tuple[Tensor, Tensor]:
    if paired:
        return t[..., 0::2], t[..., 1::2]
    return t.chunk(2, dim=-1)


def _join(x1: Tensor, x2: Tensor, paired: bool) -> Tensor:
    if paired:
        return torch.stack((x1, x2), dim=-1).flatten(-2)
    return torch.cat((x1, x2), dim=-1)


def turn_ref(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairs_in: bool = True,
    pairs_out: bool = False,
    inverse: bool = False,
    backward: bool = False,
) -> Tensor:
    """Rotate all channels of ``t`` by tables with a row for each of its rows.

    Args:
        t: [S, ..., d].
        cos, sin: [S, 1.., h]; fp32 tables lift narrower activations to fp32 until the end.
        backward: -0 becomes +0, as in autograd's accumulation.
    """
    x1, x2 = _split(t, pairs_in)
    if cos.dtype == torch.float32:
        wide = torch.promote_types(t.dtype, torch.float32)
        x1, x2 = x1.to(wide), x2.to(wide)
    if inverse:
        sin = -sin
    left, right = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    left, right = left.to(t.dtype), right.to(t.dtype)
    if backward:
        left, right = left + 0.0, right + 0.0
    return _join(left, right, pairs_out)


def rows_of_tables(t: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every row of ``t``, [S, 1.., h]."""
    shape = (positions.shape[0], *(1,) * (t.dim() - 2), cos.shape[-1])
    index = positions.long()
    return cos[index].view(shape), sin[index].view(shape)


class _Rope(torch.autograd.Function):
    """Backward is the rotation back; orders of channels change places, others are copied."""

    @staticmethod
    def forward(ctx, t, cos, sin, start, pairs_in, pairs_out, inverse):
        ctx.save_for_backward(cos, sin)
        ctx.arguments = start, pairs_in, pairs_out, inverse
        return _turn_slice(
            t, cos, sin, start, pairs_in=pairs_in, pairs_out=pairs_out, inverse=inverse
        )

    @staticmethod
    def backward(ctx, grad):
        start, pairs_in, pairs_out, inverse = ctx.arguments
        grad = _turn_slice(
            grad,
            *ctx.saved_tensors,
            start,
            pairs_in=pairs_out,
            pairs_out=pairs_in,
            inverse=not inverse,
            backward=True,
        )
        return grad, *(None,) * 6


def _turn_slice(t: Tensor, cos: Tensor, sin: Tensor, start: int, **how) -> Tensor:
    """Rotate channels [start, start + d) and copy the others."""
    end = start + 2 * cos.shape[-1]
    rotated = turn_ref(t[..., start:end], cos, sin, **how)
    kept = [part for part in (t[..., :start], t[..., end:]) if part.shape[-1]]
    if not kept:
        return rotated
    return torch.cat((t[..., :start], rotated, t[..., end:]), dim=-1)


def rope_ref(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    nope_dim: int,
    rope_first: bool = False,
    interleaved: bool = True,
    inverse: bool = False,
    remove_interleaving: bool = False,
    partial: bool = False,
) -> Tensor:
    """Rotate one end of every head and copy the other channels bit for bit.

    Args:
        t: [S, (B,) H, N + d] bf16 | fp16 | fp32 | fp64; heads ``[nope | pe]``, or ``[pe | nope]``
            with ``rope_first``.
        cos, sin: [P, d / 2]. Tables in the dtype of ``t`` round every product to it ("megatron"
            numerics), fp32 tables round once ("fp32" numerics).
        positions: [S] int32 | int64, index of each row inside its own sequence, below P.
        nope_dim: N, may be 0.
        interleaved: channels come in as pairs (0, 1), (2, 3), ...; else as halves.
        inverse: rotate back.
        remove_interleaving: with ``interleaved``, write pairs again instead of halves.
        partial: the tables may be narrower than ``pe``, which then keeps its last channels
            (``rotary_percent < 1``); the kernels refuse this.
    Returns:
        Shape and dtype of ``t``.
    Raises:
        ValueError: a table or the positions do not fit ``t``.
    Gradients: t yes; cos, sin, positions none.
    """
    rotated = 2 * cos.shape[-1] if partial else t.shape[-1] - nope_dim
    check_table(cos, sin, t, rotated, "t")
    check_positions(positions, t, cos, "t")
    tables = rows_of_tables(t, cos, sin, positions)
    start = 0 if rope_first else nope_dim
    return _Rope.apply(t, *tables, start, interleaved, interleaved and remove_interleaving, inverse)
