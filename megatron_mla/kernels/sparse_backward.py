"""Backward of attention over chosen keys, on tensor cores. Equation: kernels/README.md (10).

Rows are worked in chunks. One kernel makes the probabilities and the slopes of the scores of a
chunk, rounded to the dtype of the arguments; a second multiplies them by queries, incoming
gradients and keys. The products of the first are those of a plain matrix product of a row's queries
and its gathered keys, and keep no sums: that is why two kernels are faster than one. Legend: T
query rows, S key rows, H heads, C latent channels (the value), D channels of a key, K slots of a
row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.ordered_sum import add_rows_in_order_
from megatron_mla.kernels.products import LOG2_E, precision_of, product, rounded
from megatron_mla.kernels.rotation import on_device_of
from megatron_mla.kernels.sparse_forward import head_block, slot_range

# Slots of one program of the first kernel; rows of the buffer between the kernels hold a multiple.
SLOT_BLOCK = 128
# Elements of the buffer between the kernels, 512 MiB in bf16, and of what is summed in order.
BUFFER_ELEMENTS = 1 << 28
# Heads whose queries one program of the second kernel holds.
HEADS_AT_ONCE = 128


@triton.jit
def _mean(grad, out, mean, stride_gt, stride_gh, stride_ot, stride_oh, stride_mt, num_heads,
          C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """``grad . out`` of every head of one row."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = (head < num_heads)[:, None] & (c < C)[None, :]
    g = tl.load(grad + token * stride_gt + head[:, None] * stride_gh + c[None, :], mask, 0.0)
    o = tl.load(out + token * stride_ot + head[:, None] * stride_oh + c[None, :], mask, 0.0)
    sums = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(mean + token * stride_mt + head, sums, mask=head < num_heads)


@triton.jit
def _slopes(
    query, key, indices, grad, lse, mean, buffer,
    stride_qt, stride_qh, stride_k, stride_it, stride_gt, stride_gh, stride_lt,
    stride_bt, stride_bp, stride_bh,
    num_heads, num_keys, num_slots, scale, scale_log2,
    C: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Probabilities and slopes of a row, for blocks of its heads and slots; 0 without a key."""
    blocks = tl.cdiv(num_slots, BLOCK_K)
    across = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // (blocks * across)).to(tl.int64)
    rest = tl.program_id(0) % (blocks * across)
    slot = rest // across * BLOCK_K + tl.arange(0, BLOCK_K)
    head = (rest % across * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    of_head = head < num_heads
    chosen = tl.load(indices + token * stride_it + slot, mask=slot < num_slots, other=-1)
    live = (chosen >= 0) & (chosen < num_keys)
    save = buffer + token * stride_bt + head[:, None] * stride_bh + slot[None, :]
    element = buffer.dtype.element_ty
    if tl.max(live.to(tl.int32), axis=0) == 0:
        none = tl.zeros([BLOCK_H, BLOCK_K], element)
        tl.store(save, none, mask=of_head[:, None])
        tl.store(save + stride_bp, none, mask=of_head[:, None])
        return
    n = tl.arange(0, BLOCK_N)
    at_k = key + tl.where(live, chosen, 0).to(tl.int64)[:, None] * stride_k + n[None, :]
    at_q = query + token * stride_qt + head[:, None] * stride_qh + n[None, :]
    at_g = grad + token * stride_gt + head[:, None] * stride_gh + n[None, :]
    scores = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
    of_weights = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
    for first in tl.range(0, D, BLOCK_N, num_stages=STAGES):
        in_d, in_c = (first + n < D)[None, :], (first + n < C)[None, :]
        k = tl.load(at_k + first, mask=live[:, None] & in_d, other=0.0)
        q = tl.load(at_q + first, mask=of_head[:, None] & in_d, other=0.0)
        g = tl.load(at_g + first, mask=of_head[:, None] & in_c, other=0.0)
        scores = product(q, tl.trans(k), scores, PRECISION)
        of_weights = product(g, tl.trans(k), of_weights, PRECISION)
    level = tl.load(lse + token * stride_lt + head, mask=of_head, other=0.0) * LOG2_E
    delta = tl.load(mean + token * stride_lt + head, mask=of_head, other=0.0)
    weights = tl.where(live[None, :], tl.exp2(scores * scale_log2 - level[:, None]), 0.0)
    slopes = tl.where(live[None, :], weights * (of_weights - delta[:, None]) * scale, 0.0)
    tl.store(save, rounded(weights, element), mask=of_head[:, None])
    tl.store(save + stride_bp, rounded(slopes, element), mask=of_head[:, None])


@triton.jit
def _grads(
    query, key, indices, grad, buffer, grad_query, grad_key,
    stride_qt, stride_qh, stride_k, stride_it, stride_gt, stride_gh,
    stride_bt, stride_bp, stride_bh, stride_dt, stride_dh, stride_kt, stride_ks,
    num_heads, num_keys, num_slots,
    C: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N channels of a row's query gradient, and what the row adds to the keys it has chosen.

    That is added to ``grad_key`` [S, D] or, without ATOMIC, written to ``grad_key`` [T, K, D].
    """
    pieces = tl.cdiv(D, BLOCK_N)
    token = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK_N + tl.arange(0, BLOCK_N)
    index = indices + token * stride_it
    _, end = slot_range(index, num_slots, num_keys, SLOTS)
    if not ATOMIC:
        end = num_slots
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    of_head = (head < num_heads)[:, None]
    in_d = (column < D)[None, :]
    at_q = query + token * stride_qt + head[:, None] * stride_qh + column[None, :]
    at_g = grad + token * stride_gt + head[:, None] * stride_gh + column[None, :]
    q = tl.load(at_q, mask=of_head & in_d, other=0.0)
    g = tl.load(at_g, mask=of_head & (column < C)[None, :], other=0.0)
    saved = buffer + token * stride_bt + head[:, None] * stride_bh
    sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    for first in tl.range(0, end, BLOCK_K, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK_K)
        chosen = tl.load(index + slot, mask=slot < num_slots, other=-1)
        live = (chosen >= 0) & (chosen < num_keys)
        row = tl.where(live, chosen, 0).to(tl.int64)[:, None]
        # Masked by head alone: a mask of slots would cut the loads to single elements.
        slopes = tl.load(saved + stride_bp + slot[None, :], mask=of_head, other=0.0)
        k = tl.load(key + row * stride_k + column[None, :], mask=live[:, None] & in_d, other=0.0)
        sums = product(slopes, k, sums, PRECISION)
        weights = tl.load(saved + slot[None, :], mask=of_head, other=0.0)
        adds = product(tl.trans(slopes), q, None, PRECISION)
        adds = product(tl.trans(weights), g, adds, PRECISION)
        if ATOMIC:
            place = grad_key + row * stride_ks + column[None, :]
            tl.atomic_add(place, adds, mask=live[:, None] & in_d, sem="relaxed")
        else:
            place = grad_key + token * stride_kt + slot.to(tl.int64)[:, None] * stride_ks
            tl.store(place + column[None, :], adds, mask=(slot < num_slots)[:, None] & in_d)
    place = grad_query + token * stride_dt + head[:, None] * stride_dh + column[None, :]
    tl.store(place, rounded(sums, grad_query.dtype.element_ty), mask=of_head & in_d)


def launch_mean(grad: Tensor, out: Tensor, mean: Tensor) -> None:
    """Fill ``mean`` [T, H] from ``grad`` and ``out`` [T, H, C]."""
    num_rows, num_heads, c = out.shape
    heads = min(8, triton.next_power_of_2(num_heads))
    with on_device_of(grad):
        _mean[(num_rows, triton.cdiv(num_heads, heads))](
            grad, out, mean, *grad.stride()[:2], *out.stride()[:2], mean.stride(0), num_heads,
            C=c, BLOCK_C=triton.next_power_of_2(c), BLOCK_H=heads,
        )  # fmt: skip


def launch_slopes(query, key, indices, grad, lse, mean, buffer, scale, *, tile=None) -> None:
    """Fill ``buffer`` [T, 2, H, slots]: probabilities and slopes, slots a multiple of SLOT_BLOCK.

    Args:
        tile: heads, channels, warps, stages.
    """
    num_rows, num_heads, width = query.shape
    wide = query.element_size() > 2
    tile = tile or (head_block(num_heads, 32 if wide else 64), 32 if wide else 64, 4, 3)
    block_h, block_n, warps, stages = tile
    blocks = triton.cdiv(indices.shape[1], SLOT_BLOCK) * triton.cdiv(num_heads, block_h)
    with on_device_of(query):
        _slopes[(num_rows * blocks,)](
            query, key, indices, grad, lse, mean, buffer,
            *query.stride()[:2], key.stride(0), indices.stride(0), *grad.stride()[:2],
            lse.stride(0), *buffer.stride()[:3],
            num_heads, key.shape[0], indices.shape[1], scale, scale * LOG2_E.value,
            C=grad.shape[-1], D=width, BLOCK_N=block_n, BLOCK_H=block_h, BLOCK_K=SLOT_BLOCK,
            PRECISION=precision_of(query), STAGES=stages, num_warps=warps,
        )  # fmt: skip


def launch_grads(query, key, indices, grad, buffer, grad_query, grad_key, *, tile=None) -> None:
    """Fill ``grad_query`` [T, H, D]; add to ``grad_key`` [S, D] or fill ``grad_key`` [T, K, D].

    Args:
        tile: channels, slots, warps, stages.
    """
    num_rows, num_heads, width = query.shape
    wide = query.element_size() > 2
    tile = tile or ((32, 32, 4, 2) if wide else (64, 64, 4, 3))
    block_n, block_k, warps, stages = tile
    atomic = grad_key.dim() == 2
    with on_device_of(query):
        _grads[(num_rows * triton.cdiv(width, block_n),)](
            query, key, indices, grad, buffer, grad_query, grad_key,
            *query.stride()[:2], key.stride(0), indices.stride(0), *grad.stride()[:2],
            *buffer.stride()[:3], *grad_query.stride()[:2],
            0 if atomic else grad_key.stride(0), grad_key.stride(-2),
            num_heads, key.shape[0], indices.shape[1],
            C=grad.shape[-1], D=width, BLOCK_N=block_n,
            BLOCK_H=head_block(num_heads, HEADS_AT_ONCE), BLOCK_K=block_k,
            SLOTS=triton.next_power_of_2(indices.shape[1]), ATOMIC=atomic,
            PRECISION=precision_of(query), STAGES=stages, num_warps=warps,
        )  # fmt: skip


def sparse_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of query [T, H, D] and key [S, D].

    Args:
        deterministic: what rows add to a key is summed in order, through a buffer, and not by
            atomics in any order.
    """
    num_rows, num_heads, width = query.shape
    num_keys, num_slots = key.shape[0], indices.shape[1]
    mean = torch.empty_like(lse)
    launch_mean(grad, out, mean)
    padded = triton.cdiv(num_slots, SLOT_BLOCK) * SLOT_BLOCK
    per_row = 2 * num_heads * padded
    if deterministic:
        per_row = max(per_row, num_slots * width)
    step = min(num_rows, max(1, BUFFER_ELEMENTS // per_row))
    how = {"dtype": query.dtype, "device": query.device}
    buffer = torch.empty(step, 2, num_heads, padded, **how)
    grad_query = torch.empty(query.shape, **how)
    sums = torch.zeros(num_keys, width, dtype=torch.float32, device=query.device)
    added = sums
    if deterministic:
        added = torch.empty(step, num_slots, width, dtype=torch.float32, device=query.device)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        some = rows.stop - rows.start
        launch_slopes(
            query[rows], key, indices[rows], grad[rows], lse[rows], mean[rows], buffer, scale
        )
        for head in range(0, num_heads, HEADS_AT_ONCE):
            heads = slice(head, head + HEADS_AT_ONCE)
            launch_grads(
                query[rows, heads], key, indices[rows], grad[rows, heads], buffer[:some, :, heads],
                grad_query[rows, heads], added[:some] if deterministic else sums,
            )  # fmt: skip
            if deterministic:
                add_rows_in_order_(sums, indices[rows].flatten(), added[:some].flatten(0, 1))
    return grad_query, sums.to(key.dtype)
