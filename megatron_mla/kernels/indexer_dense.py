"""Target, scores and slopes of the indexer over all keys that rows see, in tiles of rows and keys.

Equation: kernels/README.md (11); gradients from the slopes: indexer_dense_grads.py. Tensors of rows
and keys are those of one chunk of rows.

Legend: T query rows, W keys from the first to the last that a row sees, H heads of this rank, E
channels of a key (A + B of them in two blocks), n indexer heads, D channels of one, M rows and N
keys of a tile. ``starts`` and ``ends`` count from the first of the W keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.indexer_dense_grads import dense_tile, spans
from megatron_mla.kernels.indexer_target import (
    LEAST,
    REDUCTION_BYTES,
    TINY,
    blocks_of,
    rectify,
    rows_of,
)
from megatron_mla.kernels.products import LN_2, LOG2_E, product, shared_bytes
from megatron_mla.kernels.rotation import on_device_of


@triton.jit
def _log_sum_exp_kernel(
    query,  # [T, H, E]
    key,  # [W, E]
    starts,  # [T] int32
    ends,
    out,  # [T, H] fp32, contiguous
    query_strides,
    key_stride,
    num_rows,
    num_heads,
    num_keys,
    scale,  # times log2(e)
    E: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    row = tl.program_id(0) // num_heads * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    start, end, seeing = spans(starts, ends, row, num_rows)
    q = query + head * query_strides[1]
    q_a = rows_of(q, row, seeing, query_strides[0], 0, A, E)
    q_b = q_a
    if B > 0:
        q_b = rows_of(q, row, seeing, query_strides[0], A, B, E)
    # Finite, or a tile that a row does not see makes -inf - -inf.
    most = tl.full([BLOCK_M], LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    least = tl.min(start, 0) // BLOCK_N * BLOCK_N
    for first in tl.range(least, tl.max(end, 0), BLOCK_N, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK_N).to(tl.int64)
        keys = rows_of(key, col, col < num_keys, key_stride, 0, A, E)
        x = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        x = product(q_a, tl.trans(keys), x, "ieee")
        if B > 0:
            keys_b = rows_of(key, col, col < num_keys, key_stride, A, B, E)
            x = product(q_b, tl.trans(keys_b), x, "ieee")
        seen = (col[None, :] >= start[:, None]) & (col[None, :] < end[:, None])
        x = tl.where(seen, x * scale, -float("inf"))
        more = tl.maximum(most, tl.max(x, 1))
        total = total * tl.exp2(most - more) + tl.sum(tl.exp2(x - more[:, None]), 1)
        most = more
    # Without a key the sum is 0; a NaN stays one.
    result = (most + tl.log2(tl.where(seeing, total, 1.0))) * LN_2
    result = tl.where(seeing, result, -float("inf"))
    tl.store(out + row * num_heads + head, result, mask=row < num_rows)


@triton.jit
def _tile_kernel(
    x,  # [T, H, E] queries of the attention or of the indexer
    y,  # [W, E] their keys
    level,  # [T, H] log-sum-exp, or weights of the indexer's heads
    starts,  # [T] int32
    ends,
    out,  # [T, W] fp32, contiguous
    x_strides,
    y_stride,
    level_strides,
    num_rows,
    num_heads,
    num_keys,
    scale,  # of the attention's products, times log2(e)
    E: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    SCORES: tl.constexpr,  # of the indexer, or target of the attention
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``sum_h exp(scale * x[h] . y - level[h])`` or ``sum_h level[h] * relu(x[h] . y)``; else 0."""
    across = tl.cdiv(num_keys, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    start, end, seeing = spans(starts, ends, row, num_rows)
    seen = (col[None, :] >= start[:, None]) & (col[None, :] < end[:, None])
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
        y_a = rows_of(y, col, col < num_keys, y_stride, 0, A, E)
        y_b = y_a
        if B > 0:
            y_b = rows_of(y, col, col < num_keys, y_stride, A, B, E)
        for head in tl.range(0, num_heads, num_stages=STAGES):
            q = x + tl.cast(head, tl.int64) * x_strides[1]
            factor = level + row * level_strides[0] + tl.cast(head, tl.int64) * level_strides[1]
            factor = tl.load(factor, mask=seeing, other=0.0).to(tl.float32)[:, None]
            q_a = rows_of(q, row, seeing, x_strides[0], 0, A, E)
            s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            s = product(q_a, tl.trans(y_a), s, "ieee")
            if B > 0:
                q_b = rows_of(q, row, seeing, x_strides[0], A, B, E)
                s = product(q_b, tl.trans(y_b), s, "ieee")
            if SCORES:
                if RELU:
                    s = rectify(s)
                sums += s * factor
            else:
                sums += tl.exp2(s * scale - factor * LOG2_E)
    at = out + row[:, None] * num_keys + col[None, :]
    mask = (row < num_rows)[:, None] & (col < num_keys)[None, :]
    tl.store(at, tl.where(seen, sums, 0.0), mask=mask)


@triton.jit
def _slope_kernel(
    scores,  # [T, W] fp32, contiguous; becomes the slopes
    target,  # [T, W] fp32, contiguous
    starts,  # [T] int32
    ends,
    loss,  # [T] fp32, out
    num_keys,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    most = tl.full([BLOCK], LEAST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        col = first + tl.arange(0, BLOCK)
        score = tl.load(scores + row * num_keys + col, mask=col < end, other=-float("inf"))
        more = tl.maximum(most, score)
        total = total * tl.exp2((most - more) * LOG2_E) + tl.exp2((score - more) * LOG2_E)
        most = more
        mass += tl.load(target + row * num_keys + col, mask=col < end, other=0.0)
    highest = tl.max(most, 0)
    total = tl.sum(total * tl.exp2((most - highest) * LOG2_E), 0)
    level = highest + tl.log2(tl.where(end > start, total, 1.0)) * LN_2
    norm = tl.maximum(tl.sum(mass, 0), TINY, propagate_nan=tl.PropagateNan.ALL)
    divergence = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_keys, BLOCK):
        col = first + tl.arange(0, BLOCK)
        live = (col >= start) & (col < end)
        log_p = tl.load(scores + row * num_keys + col, mask=live, other=0.0) - level
        share = tl.load(target + row * num_keys + col, mask=live, other=0.0) / norm
        # 0 log 0 is 0, and nothing is added inside a logarithm.
        term = share * (tl.log2(tl.where(share > 0.0, share, 1.0)) * LN_2 - log_p)
        divergence += tl.where(live & (share != 0.0), term, 0.0)
        slope = tl.where(live, tl.exp2(log_p * LOG2_E) - share, 0.0)
        # The place that another thread may still have to read.
        tl.debug_barrier()
        tl.store(scores + row * num_keys + col, slope, mask=col < num_keys)
    tl.store(loss + row, tl.sum(divergence, 0))


def target_tile(width: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Rows and keys of a tile of the target, stages of the loads of queries, warps."""
    row = sum(blocks_of(width)) * dtype.itemsize
    if (
        device.type == "cpu"
        or dtype == torch.float32
        or 192 * row > shared_bytes(device) - REDUCTION_BYTES
    ):
        return {"rows": 16, "keys": 16, "stages": 1, "warps": 4}
    return {"rows": 64, "keys": 64, "stages": 2, "warps": 4}


def launch_dense_log_sum_exp(
    query: Tensor, key: Tensor, starts: Tensor, ends: Tensor, scale: float, *, tile=None
) -> Tensor:
    """Log-sum-exp of every head over the keys that a row sees, -inf without any: [T, H] fp32.

    Args:
        query: [T, H, E]. key: [W, E]. starts, ends: [T] int32.
        tile: as from :func:`target_tile`, chosen when None.
    """
    rows, heads, width = query.shape
    out = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    tile = tile or target_tile(width, query.dtype, query.device)
    a, b = blocks_of(width)
    with on_device_of(query):
        _log_sum_exp_kernel[(triton.cdiv(rows, tile["rows"]) * heads,)](
            query,
            key,
            starts,
            ends,
            out,
            (query.stride(0), query.stride(1)),
            key.stride(0),
            rows,
            heads,
            key.shape[0],
            scale * LOG2_E.value,
            E=width,
            A=a,
            B=b,
            BLOCK_M=tile["rows"],
            BLOCK_N=tile["keys"],
            STAGES=tile["stages"],
            num_warps=tile["warps"],
        )
    return out


def launch_tiles(
    x: Tensor,
    y: Tensor,
    level: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    scale: float | None = None,
    relu: bool = True,
    tile: dict | None = None,
) -> Tensor:
    """Target of the attention or, without ``scale``, scores of the indexer; 0 where unseen.

    Args:
        x: [T, H, E] queries. y: [W, E] keys. starts, ends: [T] int32.
        level: [T, H], log-sum-exp of the attention or weights of the indexer, any strides.
        tile: as from :func:`target_tile` or :func:`dense_tile`, chosen when None.
    Returns:
        [T, W] fp32.
    """
    (rows, heads, width), keys = x.shape, y.shape[0]
    out = torch.empty(rows, keys, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    tile = tile or (dense_tile if scale is None else target_tile)(width, x.dtype, x.device)
    a, b = blocks_of(width)
    with on_device_of(x):
        _tile_kernel[(triton.cdiv(rows, tile["rows"]) * triton.cdiv(keys, tile["keys"]),)](
            x,
            y,
            level,
            starts,
            ends,
            out,
            (x.stride(0), x.stride(1)),
            y.stride(0),
            (level.stride(0), level.stride(1)),
            rows,
            heads,
            keys,
            0.0 if scale is None else scale * LOG2_E.value,
            E=width,
            A=a,
            B=b,
            SCORES=scale is None,
            RELU=relu,
            BLOCK_M=tile["rows"],
            BLOCK_N=tile["keys"],
            STAGES=tile["stages"],
            num_warps=tile["warps"],
        )
    return out


def launch_slopes(
    scores: Tensor, target: Tensor, starts: Tensor, ends: Tensor, loss: Tensor
) -> None:
    """Losses of rows into ``loss`` [T]; ``scores`` [T, W] becomes what they change by with them."""
    rows, keys = scores.shape
    if rows:
        with on_device_of(scores):
            _slope_kernel[(rows,)](scores, target, starts, ends, loss, keys, BLOCK=1024)
