"""What the indexer is taught: attention summed over heads, of keys that every row has chosen.

Equation: kernels/README.md (11); twin: ``summed_attention`` in indexer_loss_ref.py. One program per
row walks its slots, gathers their keys and has the products of a block of slots with all heads as
[slots, heads]: heads are summed inside a few lanes, and few heads are a narrow product.

Legend: T query rows, S key rows, H heads of this rank, E channels of a key (A + B of them in two
blocks that are powers of two, as 576 = 512 + 64), K slots of a row, J slots and G heads of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.products import LN_2, LOG2_E, product, shared_bytes
from megatron_mla.kernels.rotation import on_device_of

# Least normal number of fp32, and less than any score: finite, also times log2(e).
TINY = tl.constexpr(1.1754943508222875e-38)
LEAST = tl.constexpr(-2e38)
# Of shared memory, what reductions and barriers take.
REDUCTION_BYTES = 1024


@triton.jit
def rectify(x):
    """relu, which leaves a NaN one."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def slots_in_use(indices, row, stride, num_slots, num_keys, BLOCK: tl.constexpr):
    """One past the last slot that holds a key: those after it need no work."""
    last = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        index = tl.load(indices + row * stride + slot, mask=slot < num_slots, other=-1)
        last = tl.where((index >= 0) & (index < num_keys), slot + 1, last)
    return tl.max(last, 0)


@triton.jit
def chosen(indices, row, stride, slot, num_slots, num_keys):
    """Rows of the keys in these slots (0 for none), 64 bits, and which slots hold one."""
    index = tl.load(indices + row * stride + slot, mask=slot < num_slots, other=-1)
    live = (index >= 0) & (index < num_keys)
    return tl.where(live, index, 0).to(tl.int64), live


@triton.jit
def rows_of(base, place, live, stride, FIRST: tl.constexpr, BLOCK: tl.constexpr, END: tl.constexpr):
    """Channels FIRST to FIRST + BLOCK of these rows, 0 from channel END on and where not live."""
    channel = FIRST + tl.arange(0, BLOCK)
    mask = live[:, None]
    if FIRST + BLOCK > END:
        mask = mask & (channel < END)[None, :]
    return tl.load(base + place[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _products(
    q_a, q_b, key, place, live, stride, A: tl.constexpr, B: tl.constexpr, E: tl.constexpr
):
    """[J, G] fp32 products of these keys with the heads in ``q_a`` [G, A] and ``q_b`` [G, B]."""
    keys = rows_of(key, place, live, stride, 0, A, E)
    found = tl.zeros([place.shape[0], q_a.shape[0]], tl.float32)
    found = product(keys, tl.trans(q_a), found, "ieee")
    if B > 0:
        keys = rows_of(key, place, live, stride, A, B, E)
        found = product(keys, tl.trans(q_b), found, "ieee")
    return found


@triton.jit
def _log_sum_exp_kernel(
    query,  # [T, H, E]
    key,  # [S, E]
    indices,  # [T, K]
    out,  # [T, H] fp32, contiguous
    query_strides,
    key_stride,
    index_stride,
    num_heads,
    num_slots,
    num_keys,
    scale,  # times log2(e)
    E: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    used = slots_in_use(indices, row, index_stride, num_slots, num_keys, 1024)
    for first_head in range(0, num_heads, BLOCK_G):
        head = first_head + tl.arange(0, BLOCK_G)
        q = query + row * query_strides[0]
        q_a = rows_of(q, head.to(tl.int64), head < num_heads, query_strides[1], 0, A, E)
        q_b = q_a
        if B > 0:
            q_b = rows_of(q, head.to(tl.int64), head < num_heads, query_strides[1], A, B, E)
        # Every place of the block has a sum of its own, so that no step reduces over slots. The
        # first maximum is finite: an empty slot must not make -inf - -inf.
        most = tl.full([BLOCK_J, BLOCK_G], LEAST, tl.float32)
        total = tl.zeros([BLOCK_J, BLOCK_G], tl.float32)
        for first in tl.range(0, used, BLOCK_J, num_stages=STAGES):
            slot = first + tl.arange(0, BLOCK_J)
            place, live = chosen(indices, row, index_stride, slot, num_slots, num_keys)
            x = _products(q_a, q_b, key, place, live, key_stride, A, B, E) * scale
            x = tl.where(live[:, None], x, -float("inf"))
            more = tl.maximum(most, x)
            total = total * tl.exp2(most - more) + tl.exp2(x - more)
            most = more
        highest = tl.max(most, 0)  # [G]
        sums = tl.sum(total * tl.exp2(most - highest[None, :]), 0)
        # Without a key the sum is 0; a NaN stays one.
        result = (highest + tl.log2(tl.where(used > 0, sums, 1.0))) * LN_2
        result = tl.where(used > 0, result, -float("inf"))
        tl.store(out + row * num_heads + head, result, mask=head < num_heads)


@triton.jit
def _target_kernel(
    query,  # [T, H, E]
    key,  # [S, E]
    indices,  # [T, K]
    lse,  # [T, H] fp32
    out,  # [T, K] fp32, contiguous and zero
    query_strides,
    key_stride,
    index_stride,
    lse_strides,
    num_heads,
    num_slots,
    num_keys,
    scale,  # times log2(e)
    E: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    used = slots_in_use(indices, row, index_stride, num_slots, num_keys, 1024)
    for first_head in range(0, num_heads, BLOCK_G):
        head = first_head + tl.arange(0, BLOCK_G)
        q = query + row * query_strides[0]
        q_a = rows_of(q, head.to(tl.int64), head < num_heads, query_strides[1], 0, A, E)
        q_b = q_a
        if B > 0:
            q_b = rows_of(q, head.to(tl.int64), head < num_heads, query_strides[1], A, B, E)
        # Heads that there are not have no weight.
        level = lse + row * lse_strides[0] + head * lse_strides[1]
        level = tl.load(level, mask=head < num_heads, other=float("inf")) * LOG2_E
        for first in tl.range(0, used, BLOCK_J, num_stages=STAGES):
            slot = first + tl.arange(0, BLOCK_J)
            place, live = chosen(indices, row, index_stride, slot, num_slots, num_keys)
            x = _products(q_a, q_b, key, place, live, key_stride, A, B, E)
            weight = tl.sum(tl.exp2(x * scale - level[None, :]), 1)  # [J]
            at = out + row * num_slots + slot
            if not ONE_BLOCK:
                weight += tl.load(at, mask=live, other=0.0)
            tl.store(at, weight, mask=live)
        if not ONE_BLOCK:
            # The next heads read what other threads may have stored.
            tl.debug_barrier()


def blocks_of(width: int) -> tuple[int, int]:
    """Two powers of two, of 16 at least or 0, that hold ``width`` channels: 576 is 512 + 64."""
    whole = max(16, triton.next_power_of_2(width))
    if whole in (16, width):
        return whole, 0
    return whole // 2, max(16, triton.next_power_of_2(width - whole // 2))


def target_tile(num_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Slots and heads of a block, stages of the loads, warps.

    Gathered keys are what takes time, so the next block has to be on its way: three stages, of
    which indices take one. What does not fit in shared memory has less of everything.
    """
    heads = min(64, max(16, triton.next_power_of_2(num_heads)))
    if device.type == "cpu":
        return {"slots": 16, "heads": 16, "stages": 1, "warps": 4}
    row = sum(blocks_of(width)) * dtype.itemsize
    if dtype != torch.float32:
        for slots, stages in ((64, 3), (64, 1)):
            if (slots * max(1, stages - 1) + heads) * row <= shared_bytes(device) - REDUCTION_BYTES:
                return {"slots": slots, "heads": heads, "stages": stages, "warps": 4}
    return {"slots": 16, "heads": 16, "stages": 1, "warps": 4}


def _launch(kernel, query, key, indices, *rest, scale, strides=(), tile, **constants) -> None:
    a, b = blocks_of(query.shape[2])
    with on_device_of(query):
        kernel[(query.shape[0],)](
            query,
            key,
            indices,
            *rest,
            (query.stride(0), query.stride(1)),
            key.stride(0),
            indices.stride(0),
            *strides,
            query.shape[1],
            indices.shape[1],
            key.shape[0],
            scale * LOG2_E.value,
            E=query.shape[2],
            A=a,
            B=b,
            BLOCK_J=tile["slots"],
            BLOCK_G=tile["heads"],
            STAGES=tile["stages"],
            num_warps=tile["warps"],
            **constants,
        )


def launch_log_sum_exp(
    query: Tensor, key: Tensor, indices: Tensor, scale: float, *, tile: dict | None = None
) -> Tensor:
    """Log-sum-exp of every head over the slots that hold a key, -inf without any: [T, H] fp32.

    Args:
        query: [T, H, E]. key: [S, E]. indices: [T, K]; last strides 1.
        tile: as from :func:`target_tile`, chosen when None.
    """
    out = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    tile = tile or target_tile(*query.shape[1:], query.dtype, query.device)
    if out.numel():
        _launch(_log_sum_exp_kernel, query, key, indices, out, scale=scale, tile=tile)
    return out


def launch_target(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    lse: Tensor,
    scale: float,
    *,
    tile: dict | None = None,
) -> Tensor:
    """``sum_h exp(scale * query . key - lse)``, 0 in slots without a key: [T, K] fp32.

    Args:
        query, key, indices, tile: as in :func:`launch_log_sum_exp`.
        lse: [T, H] fp32, any strides.
    """
    out = torch.zeros(indices.shape, dtype=torch.float32, device=query.device)
    tile = tile or target_tile(*query.shape[1:], query.dtype, query.device)
    if out.numel() and query.shape[1]:
        _launch(
            _target_kernel,
            query,
            key,
            indices,
            lse,
            out,
            scale=scale,
            strides=((lse.stride(0), lse.stride(1)),),
            tile=tile,
            ONE_BLOCK=query.shape[1] <= tile["heads"],
        )
    return out
