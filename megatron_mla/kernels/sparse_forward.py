"""Forward of attention over chosen keys, on tensor cores. Equation: kernels/README.md (10).

Legend: T query rows, S key rows, H heads, C latent channels (the value), R = D - C positional
channels, K slots of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.products import (
    LN_2,
    LOG2_E,
    precision_of,
    product,
    rounded,
    shared_bytes,
)
from megatron_mla.kernels.rotation import on_device_of

# Of shared memory, what reductions take.
REDUCTION_BYTES = 3 * 1024
# Of a block at most: the rows that one instruction of Hopper's tensor cores takes.
HEADS = 64


@triton.jit
def slot_range(index, num_slots, num_keys, SLOTS: tl.constexpr):
    """The first slot of a row without a key, and the slots up to the last one with a key."""
    slot = tl.arange(0, SLOTS)
    chosen = tl.load(index + slot, mask=slot < num_slots, other=-1)
    live = (chosen >= 0) & (chosen < num_keys)
    first_empty = tl.min(tl.where(live, SLOTS, slot), axis=0)
    return first_empty, tl.max(tl.where(live, slot + 1, 0), axis=0)


@triton.jit
def _attend(
    first, top, total, sums, q_c, q_r, index, key, stride_k, num_keys, num_slots, scale_log2,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Online softmax over one block of slots; FULL: each holds a key, nothing is masked."""
    slot = first + tl.arange(0, BLOCK_K)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    if FULL:
        chosen = tl.load(index + slot)
        place = key + chosen.to(tl.int64)[:, None] * stride_k
    else:
        chosen = tl.load(index + slot, mask=slot < num_slots, other=-1)
        live = (chosen >= 0) & (chosen < num_keys)
        place = key + tl.where(live, chosen, 0).to(tl.int64)[:, None] * stride_k
    if FULL and C == BLOCK_C:
        k_c = tl.load(place + c[None, :])
    elif FULL:
        k_c = tl.load(place + c[None, :], mask=(c < C)[None, :], other=0.0)
    else:
        k_c = tl.load(place + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
    scores = product(q_c, tl.trans(k_c), None, PRECISION)
    if R > 0:
        if FULL and R == BLOCK_R:
            k_r = tl.load(place + C + r[None, :])
        elif FULL:
            k_r = tl.load(place + C + r[None, :], mask=(r < R)[None, :], other=0.0)
        else:
            k_r = tl.load(place + C + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
        scores = product(q_r, tl.trans(k_r), scores, PRECISION)
    scores = scores * scale_log2
    if not FULL:
        scores = tl.where(live[None, :], scores, -float("inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    # Before the first key: -inf less -inf would be NaN.
    base = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = sums * shrink[:, None]
    sums = product(rounded(weights, k_c.dtype), k_c, sums, PRECISION)
    return highest, total, sums


@triton.jit
def _forward(
    query, key, indices, out, lse,
    stride_qt, stride_qh, stride_k, stride_it, stride_ot, stride_oh, stride_lt,
    num_heads, num_keys, num_slots, scale_log2,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row and a block of its heads."""
    across = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // across).to(tl.int64)
    head = (tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    of_head = (head < num_heads)[:, None]
    row = query + token * stride_qt + head[:, None] * stride_qh
    q_c = tl.load(row + c[None, :], mask=of_head & (c < C)[None, :], other=0.0)
    q_r = q_c
    if R > 0:
        q_r = tl.load(row + C + r[None, :], mask=of_head & (r < R)[None, :], other=0.0)
    index = indices + token * stride_it
    first_empty, end = slot_range(index, num_slots, num_keys, SLOTS)
    full = first_empty // BLOCK_K * BLOCK_K
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    # Two loops: a mask costs a pass through shared memory, and few blocks need one.
    for first in tl.range(0, full, BLOCK_K, num_stages=STAGES):
        top, total, sums = _attend(
            first, top, total, sums, q_c, q_r, index, key, stride_k, num_keys, num_slots,
            scale_log2, C, R, BLOCK_C, BLOCK_R, BLOCK_K, PRECISION, True,
        )  # fmt: skip
    for first in tl.range(full, end, BLOCK_K, num_stages=STAGES):
        top, total, sums = _attend(
            first, top, total, sums, q_c, q_r, index, key, stride_k, num_keys, num_slots,
            scale_log2, C, R, BLOCK_C, BLOCK_R, BLOCK_K, PRECISION, False,
        )  # fmt: skip
    answer = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    place = out + token * stride_ot + head[:, None] * stride_oh + c[None, :]
    tl.store(place, rounded(answer, out.dtype.element_ty), mask=of_head & (c < C)[None, :])
    level = (top + tl.log2(total)) * LN_2
    tl.store(lse + token * stride_lt + head, level, mask=head < num_heads)


def blocks_of(c: int, r: int) -> dict[str, int]:
    """Widths and the powers of two they fit in; tensor cores take 16 at least."""
    return {
        "C": c,
        "R": r,
        "BLOCK_C": max(16, triton.next_power_of_2(c)),
        "BLOCK_R": max(16, triton.next_power_of_2(r)),
    }


def head_block(num_heads: int, largest: int) -> int:
    """Heads of a block: few heads do not pay for many."""
    return min(largest, max(16, triton.next_power_of_2(num_heads)))


def device_limits(device: torch.device) -> tuple[int, int]:
    """Shared memory that a program may have, and heads of a block."""
    heads = HEADS
    # Blackwell keeps sums where Triton cannot scale them, and takes them through shared memory.
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10:
        heads //= 2
    return shared_bytes(device), heads


def forward_tile(
    num_heads: int, c: int, r: int, itemsize: int, limits: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Heads and slots of a block, warps, stages: the largest that shared memory takes."""
    widths = blocks_of(c, r)
    room = limits[0] - REDUCTION_BYTES
    # Sums of a block have to fit into the registers of eight warps.
    fitting = HEADS * 512 // widths["BLOCK_C"] * 2 // max(2, itemsize)
    heads = head_block(num_heads, max(16, min(limits[1], fitting)))
    width = (widths["BLOCK_C"] + (widths["BLOCK_R"] if r else 0)) * itemsize
    slots, stages = 64, 2
    # 64 slots have no equal on tensor cores, two buffers none in hiding copies.
    while (heads + slots * stages) * width > room and (stages > 1 or slots > 16):
        slots, stages = (slots // 2, stages) if slots > 32 or stages == 1 else (slots, stages - 1)
    while (heads + slots) * width > room and heads > 16:
        heads //= 2
    return heads, slots, 8 if heads * widths["BLOCK_C"] >= 64 * 256 else 4, stages


def launch_forward(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    tile: tuple[int, int, int, int] | None = None,
) -> None:
    """Fill ``out`` [T, H, C] and ``lse`` [T, H], the natural log-sum-exp.

    Args:
        tile: as of :func:`forward_tile`, which chooses when it is None.
    """
    num_rows, num_heads, width = query.shape
    c = out.shape[-1]
    limits = device_limits(query.device)
    tile = tile or forward_tile(num_heads, c, width - c, query.element_size(), limits)
    block_h, block_k, warps, stages = tile
    with on_device_of(query):
        _forward[(num_rows * triton.cdiv(num_heads, block_h),)](
            query, key, indices, out, lse,
            *query.stride()[:2], key.stride(0), indices.stride(0), *out.stride()[:2],
            lse.stride(0), num_heads, key.shape[0], indices.shape[1], scale * LOG2_E.value,
            **blocks_of(c, width - c), BLOCK_H=block_h, BLOCK_K=block_k,
            SLOTS=triton.next_power_of_2(indices.shape[1]), PRECISION=precision_of(query),
            STAGES=stages, num_warps=warps,
        )  # fmt: skip
