"""Forward of attention over chosen keys for Hopper, in Gluon: copies of keys run beside products.

The same arithmetic as sparse_forward.py. There Triton starts the copy of the next keys when the
products with these are done; here two buffers take turns, and a copy has a whole block's products
to arrive. Equation: kernels/README.md (10). Legend: T query rows, S key rows, H heads, C = 512
latent channels (the value), R = 64 positional channels, K slots of a row.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from megatron_mla.kernels.products import LN_2, LOG2_E
from megatron_mla.kernels.rotation import on_device_of

LATENT, POSITIONAL = 512, 64
BLOCK_H, BLOCK_K, WARPS = 64, 64, 8

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name up to Triton 3.6, and later


@gluon.jit
def _copy_keys(
    key, index, first, k_c, k_r, stride_k, num_keys, num_slots,
    LOAD_C: gl.constexpr, LOAD_R: gl.constexpr,
    C: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Start the copy of a block of keys; slots without a key become zeros."""
    slot = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LOAD_C))
    chosen = gl.load(index + slot, mask=slot < num_slots, other=-1)
    live = (chosen >= 0) & (chosen < num_keys)
    row = gl.where(live, chosen, 0).to(gl.int64)
    c = gl.arange(0, C, layout=gl.SliceLayout(0, LOAD_C))
    place = key + (row * stride_k)[:, None] + c[None, :]
    async_copy.async_copy_global_to_shared(k_c, place, mask=live[:, None] & (c >= 0)[None, :])
    slot = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LOAD_R))
    chosen = gl.load(index + slot, mask=slot < num_slots, other=-1)
    live = (chosen >= 0) & (chosen < num_keys)
    row = gl.where(live, chosen, 0).to(gl.int64)
    r = gl.arange(0, R, layout=gl.SliceLayout(0, LOAD_R))
    place = key + (row * stride_k)[:, None] + C + r[None, :]
    async_copy.async_copy_global_to_shared(k_r, place, mask=live[:, None] & (r >= 0)[None, :])
    async_copy.commit_group()


@gluon.jit
def _forward(
    query, key, indices, out, lse,
    stride_qt, stride_qh, stride_k, stride_it, stride_ot, stride_oh, stride_lt,
    num_heads, num_keys, num_slots, scale_log2,
    C: gl.constexpr, R: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_K: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """One row and a block of its heads."""
    LOAD_C: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    LOAD_R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    LOAD_I: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    # Each half of the warps makes the scores of half of the keys, and sums half of the channels.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_K // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    element: gl.constexpr = query.dtype.element_ty
    SHARED_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, C], element)
    SHARED_R: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, R], element)

    across = gl.cdiv(num_heads, BLOCK_H)
    token = (gl.program_id(0) // across).to(gl.int64)
    first_head = gl.program_id(0) % across * BLOCK_H
    index = indices + token * stride_it
    slot = gl.arange(0, SLOTS, layout=LOAD_I)
    chosen = gl.load(index + slot, mask=slot < num_slots, other=-1)
    live = (chosen >= 0) & (chosen < num_keys)
    full = gl.min(gl.where(live, SLOTS, slot), axis=0)  # slots before the first without a key
    end = gl.max(gl.where(live, slot + 1, 0), axis=0)

    k_c = gl.allocate_shared_memory(element, [2, BLOCK_K, C], SHARED_C)
    k_r = gl.allocate_shared_memory(element, [2, BLOCK_K, R], SHARED_R)
    if end > 0:
        _copy_keys(key, index, 0, k_c.index(0), k_r.index(0), stride_k, num_keys, num_slots,
                   LOAD_C, LOAD_R, C, R, BLOCK_K)  # fmt: skip
    head = (first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LOAD_C))).to(gl.int64)
    c = gl.arange(0, C, layout=gl.SliceLayout(0, LOAD_C))
    at_q = query + token * stride_qt + (head * stride_qh)[:, None] + c[None, :]
    q_c = gl.allocate_shared_memory(element, [BLOCK_H, C], SHARED_C)
    q_c.store(gl.load(at_q, mask=(head < num_heads)[:, None] & (c >= 0)[None, :], other=0.0))
    head = (first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LOAD_R))).to(gl.int64)
    r = gl.arange(0, R, layout=gl.SliceLayout(0, LOAD_R))
    at_q = query + token * stride_qt + (head * stride_qh)[:, None] + C + r[None, :]
    q_r = gl.allocate_shared_memory(element, [BLOCK_H, R], SHARED_R)
    q_r.store(gl.load(at_q, mask=(head < num_heads)[:, None] & (r >= 0)[None, :], other=0.0))

    top = gl.full([BLOCK_H], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    # Not summed over keys before the end: that would be a pass through shared memory per block.
    spread = gl.full([BLOCK_H, BLOCK_K], 0.0, gl.float32, layout=SCORES)
    products = warpgroup_mma_init(gl.full([BLOCK_H, C], 0.0, gl.float32, layout=SUMS))
    zero = gl.full([BLOCK_H, BLOCK_K], 0.0, gl.float32, layout=SCORES)
    for first in range(0, end, BLOCK_K):
        this = first // BLOCK_K % 2
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        scores = warpgroup_mma(q_c, k_c.index(this).permute((1, 0)), zero, is_async=True)
        scores = warpgroup_mma(q_r, k_r.index(this).permute((1, 0)), scores, is_async=True)
        # The products with the other buffer are older than these: it is free now, for all warps.
        sums = warpgroup_mma_wait(2, deps=[products])
        _barrier()
        if first + BLOCK_K < end:
            _copy_keys(key, index, first + BLOCK_K, k_c.index(1 - this), k_r.index(1 - this),
                       stride_k, num_keys, num_slots, LOAD_C, LOAD_R, C, R, BLOCK_K)  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = scores * scale_log2
        if first + BLOCK_K > full:
            at = first + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, SCORES))
            listed = gl.load(index + at, mask=at < num_slots, other=-1)
            holds = (listed >= 0) & (listed < num_keys)
            scores = gl.where(holds[None, :], scores, -float("inf"))
        highest = gl.maximum(top, gl.max(scores, axis=1))
        # Before the first key: -inf less -inf would be NaN.
        base = gl.where(highest == -float("inf"), 0.0, highest)
        weights = gl.exp2(scores - base[:, None])
        shrink = gl.exp2(top - base)
        spread = spread * shrink[:, None] + weights
        top = highest
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(weights.to(element), WEIGHTS)
        products = warpgroup_mma(weights, k_c.index(this), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[products])
    total = gl.sum(spread, axis=1)
    part = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, SUMS))
    answer = (sums / part[:, None]).to(element)
    head = (first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, SUMS))).to(gl.int64)
    c = gl.arange(0, C, layout=gl.SliceLayout(0, SUMS))
    at_out = out + token * stride_ot + (head * stride_oh)[:, None] + c[None, :]
    gl.store(at_out, answer, mask=(head < num_heads)[:, None] & (c >= 0)[None, :])
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, SCORES))
    level = (top + gl.log2(total)) * LN_2
    gl.store(lse + token * stride_lt + head, level, mask=head < num_heads)


def fits(query: Tensor, v_dim: int) -> bool:
    """Whether the kernel is for this device, these widths, and so many heads."""
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.dtype in (torch.bfloat16, torch.float16)
        and (v_dim, query.shape[-1] - v_dim) == (LATENT, POSITIONAL)
        and query.shape[1] > BLOCK_H // 2
    )


def launch_forward_hopper(
    query: Tensor, key: Tensor, indices: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """Fill ``out`` [T, H, C] and ``lse`` [T, H], the natural log-sum-exp."""
    num_rows, num_heads, _ = query.shape
    with on_device_of(query):
        _forward[(num_rows * triton.cdiv(num_heads, BLOCK_H),)](
            query, key, indices, out, lse,
            *query.stride()[:2], key.stride(0), indices.stride(0), *out.stride()[:2],
            lse.stride(0), num_heads, key.shape[0], indices.shape[1], scale * LOG2_E.value,
            C=LATENT, R=POSITIONAL, BLOCK_H=BLOCK_H, BLOCK_K=BLOCK_K,
            SLOTS=triton.next_power_of_2(indices.shape[1]), num_warps=WARPS,
        )  # fmt: skip
