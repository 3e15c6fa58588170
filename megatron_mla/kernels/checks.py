"""Arguments that no kernel can take, refused on the host before a launch; nothing is synchronised.

Every message names the argument, its value, the condition and a way out.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_tensor(name: str, t: Tensor, dims: tuple[int, ...] = (3, 4)) -> None:
    """A [S, H, width] or [S, B, H, width] tensor of floats."""
    if t.dim() not in dims:
        shapes = {2: "[rows, width]", 3: "[tokens, heads, width]", 4: "[rows, batch, heads, width]"}
        raise ValueError(
            f"{name} must be {' or '.join(shapes[d] for d in dims)}, got {list(t.shape)}; add a "
            "heads dimension of 1 where there is one head"
        )
    if t.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be bfloat16, float16, float32 or float64, got {t.dtype}; cast it first"
        )


def check_unit_stride(name: str, t: Tensor) -> None:
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(
            f"{name} must have last stride 1, got strides {t.stride()}; call .contiguous() first"
        )


def check_same(name: str, t: Tensor, other_name: str, other: Tensor) -> None:
    """Two tensors of one dtype on one device."""
    if t.dtype != other.dtype or t.device != other.device:
        raise ValueError(
            f"{name} must have dtype and device of {other_name}, {other.dtype} on {other.device}, "
            f"got {t.dtype} on {t.device}; move or cast it"
        )


def check_table(cos: Tensor, sin: Tensor, t: Tensor, rotated: int, name: str) -> None:
    """Half-width tables that fit ``rotated`` channels of ``t``, called ``name``."""
    if rotated <= 0 or rotated % 2:
        raise ValueError(
            f"rotated channels of {name} must be an even, positive number, got {rotated}; "
            f"{name} is {t.shape[-1]} wide, check nope_dim"
        )
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[-1] * 2 != rotated:
        raise ValueError(
            f"cos and sin must be [positions, {rotated // 2}] for {rotated} rotated channels of "
            f"{name}, got {list(cos.shape)} and {list(sin.shape)}; a partial rotation "
            "(rotary_percent < 1) has to take the unfused path, --no-rope-fusion"
        )
    for label, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (t.dtype, torch.float32) or table.dtype != cos.dtype:
            raise ValueError(
                f"{label} must be {t.dtype} ('megatron' numerics) or float32 ('fp32' numerics) "
                f"like the other table, got {table.dtype}; take both from RopeTables.get"
            )
        if table.device != t.device:
            raise ValueError(
                f"{label} must be on the device of {name}, {t.device}, got {table.device}; move it"
            )
        check_unit_stride(label, table)
    if cos.stride(0) != sin.stride(0):
        raise ValueError(
            f"cos and sin must have the same strides, got {cos.stride()} and {sin.stride()}; call "
            ".contiguous() on both"
        )


def check_positions(positions: Tensor, t: Tensor, table: Tensor, name: str) -> None:
    """One integer per row of ``t``; an empty table has no row for any of them."""
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape != t.shape[:1]:
        raise ValueError(
            f"positions must be int32 or int64 [{t.shape[0]}], one for each row of {name}, got "
            f"{positions.dtype} {list(positions.shape)}; see megatron_mla.parallel.layout"
        )
    if positions.device != t.device or not positions.is_contiguous():
        raise ValueError(
            f"positions must be contiguous on the device of {name}, {t.device}, got strides "
            f"{positions.stride()} on {positions.device}; move it or call .contiguous()"
        )
    if table.shape[0] == 0 and positions.numel():
        raise ValueError("cos and sin must have a row for every position, got empty tables")


def check_rope(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    nope_dim: int,
    in_place: bool = False,
    name: str = "t",
) -> None:
    """Arguments of a rotation of heads ``[nope | pe]``."""
    check_tensor(name, t)
    check_unit_stride(name, t)
    if nope_dim < 0:
        raise ValueError(f"nope_dim must not be negative, got {nope_dim}")
    check_table(cos, sin, t, t.shape[-1] - nope_dim, name)
    check_positions(positions, t, cos, name)
    if in_place:
        check_written(name, t)


def check_written(name: str, t: Tensor) -> None:
    """A tensor with storage of its own for every element."""
    if any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True)):
        raise ValueError(
            f"{name} must not overlap itself to be written, got strides {t.stride()}; expanded "
            "tensors have to be copied first, by .contiguous()"
        )


def check_flat(t: Tensor, num_heads: int) -> None:
    """Heads in one dimension."""
    width = t.shape[-1] if t.dim() else 0
    if num_heads < 1 or width % num_heads or t.stride(-1) != 1:
        raise ValueError(
            f"num_heads must be positive and divide the width of t, whose last stride is 1; got "
            f"{num_heads}, shape {list(t.shape)} and strides {t.stride()}"
        )


def check_out(t: Tensor, out: Tensor) -> None:
    """An ``out`` buffer that fits ``t``, is no part of it and needs no gradients."""
    if torch.is_grad_enabled() and (t.requires_grad or out.requires_grad):
        raise ValueError(
            "out cannot be given where gradients are needed; leave it out, or use torch.no_grad()"
        )
    if out.shape != t.shape:
        raise ValueError(f"out must have the shape of t, {list(t.shape)}, got {list(out.shape)}")
    check_same("out", out, "t", t)
    check_unit_stride("out", out)
    check_written("out", out)
