"""Rotation in plain PyTorch: the specification of the fused kernels, and the path without them.

Legend: T rows of this rank (tokens, or sequence positions), B batch (absent when packed), H heads,
d rotated channels, h = d / 2, N unrotated channels, V value channels, P rows of the rope table.

``left = x1 * c - x2 * s`` and ``right = x2 * c + x1 * s``; the inverse negates ``s``. Channels come
in as pairs ``(0, 1), (2, 3), ...`` and leave as halves ``[left | right]``. With "megatron" numerics
every product and sum is rounded to the activation dtype; with "fp32" the tables are fp32 and the
result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _split(t: Tensor, paired: bool) -> tuple[Tensor, Tensor]:
    if paired:
        return t[..., 0::2], t[..., 1::2]
    return t.chunk(2, dim=-1)


def _join(x1: Tensor, x2: Tensor, paired: bool) -> Tensor:
    if paired:
        return torch.stack((x1, x2), dim=-1).flatten(-2)
    return torch.cat((x1, x2), dim=-1)


def _turn(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by the angle of the table; fp32 tables lift everything to fp32."""
    if cos.dtype == torch.float32:
        x1, x2 = x1.float(), x2.float()
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


class _Rotate(torch.autograd.Function):
    """Backward is the rotation back; ``paired_in`` and ``paired_out`` change places."""

    @staticmethod
    def forward(ctx, t, cos, sin, paired_in, paired_out):
        ctx.save_for_backward(cos, sin)
        ctx.layout = (paired_in, paired_out)
        left, right = _turn(*_split(t, paired_in), cos, sin)
        return _join(left.to(t.dtype), right.to(t.dtype), paired_out)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        paired_in, paired_out = ctx.layout
        left, right = _turn(*_split(grad, paired_out), cos, -sin)
        # + 0.0 as autograd's accumulation does: it turns -0 into +0.
        left, right = left.to(grad.dtype) + 0.0, right.to(grad.dtype) + 0.0
        return _join(left, right, paired_in), None, None, None, None


def rotate(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    numerics: str = "megatron",
    interleaved: bool = True,
    inverse: bool = False,
    remove_interleaving: bool = False,
) -> Tensor:
    """Rotate all channels of ``t``.

    Args:
        t: [T, ..., d] bf16 | fp16 | fp32 | fp64.
        cos, sin: [P, d / 2], in the dtype of ``t`` ("megatron") or fp32 ("fp32").
        positions: [T] int32, index of each row inside its own sequence, below P.
        numerics: "megatron" or "fp32"; says which tables are expected.
        interleaved: channels come in as pairs (True) or halves (False).
        inverse: rotate back.
        remove_interleaving: with ``interleaved``, write pairs again instead of halves.
    Returns:
        Same shape and dtype as ``t``.
    Raises:
        ValueError: a table is not half as wide as ``t``, or its dtype does not fit the numerics.
    Gradients: t yes; cos, sin, positions none.
    """
    half = t.shape[-1] // 2
    if t.shape[-1] % 2 or cos.shape[-1] != half or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must be [positions, {t.shape[-1]} / 2] for rotated channels of width "
            f"{t.shape[-1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}; a partial rotation "
            "slices its channels first"
        )
    expected = torch.float32 if numerics == "fp32" else t.dtype
    if cos.dtype != expected or sin.dtype != expected:
        raise ValueError(
            f"cos and sin must be {expected} with {numerics!r} numerics and {t.dtype} channels, "
            f"got {cos.dtype} and {sin.dtype}; take them from RopeTables.get"
        )
    shape = (positions.shape[0], *(1,) * (t.dim() - 2), half)
    index = positions.long()
    cos, sin = cos[index].view(shape), sin[index].view(shape)
    if inverse:
        sin = -sin
    return _Rotate.apply(t, cos, sin, interleaved, interleaved and remove_interleaving)


def rotate_leading(t: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **kwargs) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` channels of ``t`` and pass the others through."""
    width = 2 * cos.shape[-1]
    if width == t.shape[-1]:
        return rotate(t, cos, sin, positions, **kwargs)
    rotated = rotate(t[..., :width], cos, sin, positions, **kwargs)
    return torch.cat((rotated, t[..., width:]), dim=-1)


def rope_q(
    q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, nope_dim: int, numerics: str
) -> Tensor:
    """Rotate the positional channels of every query head.

    Args:
        q: [T, (B,) H, N + d], heads ``[nope | pe]`` with pe in pairs.
        nope_dim: N.
    Returns:
        Same shape, heads ``[nope | rotated pe]``.
    """
    nope, pe = q[..., :nope_dim], q[..., nope_dim:]
    return torch.cat((nope, rotate_leading(pe, cos, sin, positions, numerics=numerics)), dim=-1)


def rope_kv_split(
    kv: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    k_dim: int,
    numerics: str,
) -> tuple[Tensor, Tensor]:
    """Make keys with the shared rotated part on every head, and values.

    Args:
        kv: [T, (B,) H, k_dim + V], heads ``[k nope | v]``.
        k_pe: [T, (B,) 1, d], one for all heads, in pairs.
    Returns:
        Key [T, (B,) H, k_dim + d] and value [T, (B,) H, V], the latter a view of ``kv``.
    """
    k_nope, value = kv[..., :k_dim], kv[..., k_dim:]
    k_pe = rotate_leading(k_pe, cos, sin, positions, numerics=numerics)
    k_pe = k_pe.expand(*k_nope.shape[:-1], k_pe.shape[-1])
    return torch.cat((k_nope, k_pe), dim=-1), value
