"""Sums of rows by the place they go to, in one order: what atomics would add in any order.

Twin: chunks.add_rows_. Legend: N rows, D channels, S places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.rotation import on_device_of


@triton.jit
def _add(
    total, rows, order, ends, stride_t, stride_r, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add to one place the rows of its list, BLOCK_N at a time."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(ends + place - 1, mask=place > 0, other=0)
    end = tl.load(ends + place)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for at in tl.range(first, end, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        row = tl.load(order + entry, mask=entry < end, other=0)
        mask = (entry < end)[:, None] & (column < D)[None, :]
        sums += tl.sum(tl.load(rows + row[:, None] * stride_r + column[None, :], mask, 0.0), axis=0)
    if end > first:
        at_total = total + place * stride_t + column
        tl.store(at_total, tl.load(at_total, mask=column < D) + sums, mask=column < D)


def add_rows_in_order_(total: Tensor, place: Tensor, rows: Tensor) -> None:
    """``total[place[n]] += rows[n]`` with the same bits every time; nothing is synchronised.

    Args:
        total: [S, D] fp32.
        place: [N] integer; rows whose place is outside [0, S) are left out.
        rows: [N, D] fp32.
    """
    num_places, width = total.shape
    if 0 in (num_places, width, place.numel()):
        return
    outside = (place < 0) | (place >= num_places)
    # Stable: rows of one place stay in their order.
    place, order = place.masked_fill(outside, num_places).sort(stable=True)
    every = torch.arange(num_places, dtype=place.dtype, device=place.device)
    ends = torch.searchsorted(place, every, right=True)
    block = min(256, triton.next_power_of_2(width))
    with on_device_of(total):
        _add[(num_places, triton.cdiv(width, block))](
            total, rows, order, ends, total.stride(0), rows.stride(0),
            D=width, BLOCK_D=block, BLOCK_N=8,
        )  # fmt: skip
