"""Divergence of a row of the indexer from its target, and gradients, over the keys it has chosen.

Equation: kernels/README.md (11). One program per row walks its slots twice, gathers their keys and
has their scores: first for the softmax, then for slopes and gradients. With ``slope = p - target``,
``s[j, h] = q[h] . k[j]`` and j the row's slots:

    dq[h] = w[h] sum_j slope[j] (s[j, h] > 0) k[j]      dw[h] = sum_j slope[j] relu(s[j, h])
    dk[j] += slope[j] sum_h w[h] (s[j, h] > 0) q[h]

Only ``dk`` meets other rows. It is summed one of three ways: by atomics in fp32, whose order is
another in every run; by atomics in fixed point, which no order changes; or later and without
atomics, by indexer_dense_grads.py, from slopes laid out as [rows, S].

Legend: T query rows, S key rows, n indexer heads, D channels of one, K slots of a row, J of them in
a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.indexer_target import (
    LEAST,
    TINY,
    chosen,
    rectify,
    rows_of,
    slots_in_use,
)
from megatron_mla.kernels.products import LN_2, LOG2_E, product, rounded
from megatron_mla.kernels.rotation import on_device_of

# Slopes are rounded to the dtype of the keys to meet them in a product. They are small, 1 at most:
# times this, fp16 holds all that bf16 would keep of them.
LIFT = tl.constexpr(32768.0)
# How gradients of keys are summed.
NONE, ATOMICS, FIXED, DENSE = (tl.constexpr(i) for i in range(4))
# Bits of a sum in fixed point, sign and a guard aside.
FIXED_BITS = 61


@triton.jit
def _grads_kernel(
    q,  # [T, n, D]
    k,  # [S, D]
    w,  # [T, n]
    indices,  # [T, K]
    target,  # [T, K] fp32, not yet normalised, contiguous
    loss,  # [T] fp32, out
    dq,  # [T, n, D] fp32, out, contiguous
    dw,  # [T, n] fp32, out, contiguous
    dk,  # [S, D] fp32 or, in fixed point, int64: added to; DENSE: [T, S] fp32, zero, gets slopes
    unit,  # FIXED: [] fp32, what dk counts 1 as
    q_strides,
    k_stride,
    w_strides,
    index_stride,
    num_heads,
    num_slots,
    num_keys,
    D: tl.constexpr,
    RELU: tl.constexpr,
    WAY: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    used = slots_in_use(indices, row, index_stride, num_slots, num_keys, 1024)
    # A row without a key counts for nothing, whatever it holds.
    head = tl.arange(0, BLOCK_N)
    real = (head < num_heads) & (used > 0)
    queries = rows_of(q + row * q_strides[0], head.to(tl.int64), real, q_strides[1], 0, BLOCK_D, D)
    factor = tl.load(w + row * w_strides[0] + head * w_strides[1], mask=real, other=0.0)
    weight = factor.to(tl.float32)[None, :]  # [1, n]

    none = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)

    # Every place of the block has a softmax of its own, so that no step reduces over slots.
    most = tl.full([BLOCK_J], LEAST, tl.float32)
    total = tl.zeros([BLOCK_J], tl.float32)
    mass = tl.zeros([BLOCK_J], tl.float32)
    for first in tl.range(0, used, BLOCK_J, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK_J)
        place, live = chosen(indices, row, index_stride, slot, num_slots, num_keys)
        keys = rows_of(k, place, live, k_stride, 0, BLOCK_D, D)
        s = product(keys, tl.trans(queries), none, "ieee")  # [J, n]
        if RELU:
            s = rectify(s)
        score = tl.where(live, tl.sum(s * weight, 1), -float("inf"))
        more = tl.maximum(most, score)
        total = total * tl.exp2((most - more) * LOG2_E) + tl.exp2((score - more) * LOG2_E)
        most = more
        mass += tl.load(target + row * num_slots + slot, mask=live, other=0.0)
    highest = tl.max(most, 0)
    total = tl.sum(total * tl.exp2((most - highest) * LOG2_E), 0)
    level = highest + tl.log2(tl.where(used > 0, total, 1.0)) * LN_2
    norm = tl.maximum(tl.sum(mass, 0), TINY, propagate_nan=tl.PropagateNan.ALL)

    divergence = tl.zeros([BLOCK_J], tl.float32)
    if WAY != NONE:
        dq_t = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
        dw_j = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
        channel = tl.arange(0, BLOCK_D)
        if WAY == FIXED:
            one = tl.load(unit)
    for first in tl.range(0, used, BLOCK_J, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK_J)
        place, live = chosen(indices, row, index_stride, slot, num_slots, num_keys)
        keys = rows_of(k, place, live, k_stride, 0, BLOCK_D, D)
        s = product(keys, tl.trans(queries), none, "ieee")
        passed = tl.full([BLOCK_J, BLOCK_N], True, tl.int1)
        if RELU:
            passed = (s > 0.0) | (s != s)  # a NaN shows
            s = rectify(s)
        log_p = tl.sum(s * weight, 1) - level
        share = tl.load(target + row * num_slots + slot, mask=live, other=0.0) / norm
        # 0 log 0 is 0, and nothing is added inside a logarithm.
        term = share * (tl.log2(tl.where(share > 0.0, share, 1.0)) * LN_2 - log_p)
        divergence += tl.where(live & (share != 0.0), term, 0.0)
        if WAY != NONE:
            slope = tl.where(live, tl.exp2(log_p * LOG2_E) - share, 0.0)  # [J]
            dw_j += slope[:, None] * s
            lifted = tl.where(passed, (slope * LIFT)[:, None], 0.0)
            lifted = rounded(lifted, keys.dtype)
            dq_t = product(tl.trans(keys), lifted, dq_t, "ieee")
            if WAY == DENSE:
                # Added, for a key in two slots; both slopes are the same, so order does not matter.
                tl.atomic_add(dk + row * num_keys + place, slope, mask=live, sem="relaxed")
            else:
                # Weights are of the dtype already, so the product holds nothing that is rounded.
                gate = rounded(tl.where(passed, weight, 0.0), keys.dtype)
                change = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
                change = product(gate, queries, change, "ieee") * slope[:, None]
                at = dk + place[:, None] * D + channel[None, :]
                mask = live[:, None]
                if BLOCK_D > D:
                    mask = mask & (channel < D)[None, :]
                if WAY == FIXED:
                    change = (change * one).to(tl.int64)
                tl.atomic_add(at, change, mask=mask, sem="relaxed")

    tl.store(loss + row, tl.sum(divergence, 0))
    if WAY != NONE:
        tl.store(dw + row * num_heads + head, tl.sum(dw_j, 0), mask=head < num_heads)
        at = dq + (row * num_heads + head)[:, None] * D + channel[None, :]
        mask = (head < num_heads)[:, None] & (channel < D)[None, :]
        tl.store(at, tl.trans(dq_t * (weight * (1.0 / LIFT))), mask=mask)


@triton.jit
def _reach_kernel(
    q,  # [T, n, D]
    w,  # [T, n]
    indices,  # [T, K]
    out,  # [T] fp32
    q_strides,
    w_strides,
    index_stride,
    num_heads,
    num_slots,
    num_keys,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The most that a row can add to an element of ``dk``: ``sum_h |w[h]| max |q[h]|``."""
    row = tl.program_id(0).to(tl.int64)
    used = slots_in_use(indices, row, index_stride, num_slots, num_keys, 1024)
    head = tl.arange(0, BLOCK_N)
    real = (head < num_heads) & (used > 0)
    queries = rows_of(q + row * q_strides[0], head.to(tl.int64), real, q_strides[1], 0, BLOCK_D, D)
    weight = tl.load(w + row * w_strides[0] + head * w_strides[1], mask=real, other=0.0)
    largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
    tl.store(out + row, tl.sum(largest * tl.abs(weight.to(tl.float32)), 0))


def grads_tile(
    num_heads: int, width: int, way: int, dtype: torch.dtype, device: torch.device
) -> dict:
    """Slots of a block, stages of the loads, warps: so many that registers do."""
    if device.type == "cpu" or dtype == torch.float32:
        return {"slots": 16, "stages": 1, "warps": 4}
    many = num_heads > 32 or width > 128 or way == FIXED
    return {"slots": 64, "stages": 3, "warps": 8 if many else 4}


def launch_grads(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    target: Tensor,
    loss: Tensor,
    dq: Tensor,
    dw: Tensor,
    dk: Tensor,
    *,
    relu: bool,
    way: int,
    unit: Tensor | None = None,
    tile: dict | None = None,
) -> None:
    """Losses of rows into ``loss``, gradients into ``dq``, ``dw`` and onto ``dk``.

    Args:
        q: [T, n, D]. k: [S, D]. w: [T, n]. indices: [T, K]; last strides of q, k and indices 1.
        target: [T, K] fp32, contiguous.
        loss: [T], dq: [T, n, D], dw: [T, n], fp32 and contiguous.
        dk: by ``way``; contiguous. NONE: not touched, nor are dq and dw. ATOMICS: [S, D] fp32.
            FIXED: [S, D] int64, in which ``unit`` [] fp32 is 1. DENSE: [T, S] fp32, zeros.
        tile: as from :func:`grads_tile`, chosen when None.
    """
    rows, heads, width = q.shape
    tile = tile or grads_tile(heads, width, way, q.dtype, q.device)
    if rows == 0:
        return
    with on_device_of(q):
        _grads_kernel[(rows,)](
            q,
            k,
            w,
            indices,
            target,
            loss,
            dq,
            dw,
            dk,
            loss if unit is None else unit,
            (q.stride(0), q.stride(1)),
            k.stride(0),
            (w.stride(0), w.stride(1)),
            indices.stride(0),
            heads,
            indices.shape[1],
            k.shape[0],
            D=width,
            RELU=relu,
            WAY=way,
            BLOCK_J=tile["slots"],
            BLOCK_N=max(16, triton.next_power_of_2(heads)),
            BLOCK_D=max(16, triton.next_power_of_2(width)),
            STAGES=tile["stages"],
            num_warps=tile["warps"],
        )


def fixed_unit(q: Tensor, w: Tensor, indices: Tensor, num_keys: int) -> Tensor:
    """A power of two by which all sums of ``dk`` over these rows fit in an int64: [] fp32.

    NaN where weights or queries are not finite: then all of ``dk`` is.
    """
    rows, heads, width = q.shape
    reach = torch.empty(rows, dtype=torch.float32, device=q.device)
    with on_device_of(q):
        _reach_kernel[(rows,)](
            q,
            w,
            indices,
            reach,
            (q.stride(0), q.stride(1)),
            (w.stride(0), w.stride(1)),
            indices.stride(0),
            heads,
            indices.shape[1],
            num_keys,
            D=width,
            BLOCK_N=max(16, triton.next_power_of_2(heads)),
            BLOCK_D=max(16, triton.next_power_of_2(width)),
        )
    most = reach.amax()
    exponent = FIXED_BITS - rows.bit_length() - torch.frexp(most).exponent
    # As far as a power of two and its inverse are normal numbers.
    unit = torch.ldexp(torch.ones_like(most), exponent.clamp(-120, 120))
    return torch.where(most.isfinite(), unit, torch.nan)
