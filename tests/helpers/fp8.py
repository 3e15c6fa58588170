"""Equality of FP8 tensors, and problems of their packing."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_fp8(name: str, got: Tensor, want: Tensor, *, zeros: bool = True) -> None:
    """Assert equality of shape, dtype and every byte; NaN is NaN, for its sign means nothing.

    Args:
        zeros: -0 is not +0.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, not {want.dtype}"
    values = got.float(), want.float()
    if zeros:
        same = got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)
    else:
        same = values[0] == values[1]
    same |= values[0].isnan() & values[1].isnan()
    if not same.all():
        at = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(
            f"{name} {got.dtype} {tuple(got.shape)}: {int((~same).sum())} of {same.numel()} values "
            f"differ, first at {list(at)}: got {values[0][at]}, expected {values[1][at]}"
        )


def joint_table(length: int, rotated: int, device) -> Tensor:
    """[length, rotated] fp32: cosines, then sines; row 0 turns nothing."""
    half = rotated // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float().to(device)
