"""Gradients of the indexer from slopes [rows, keys]: tiles of rows and keys, no atomics.

Equation: kernels/README.md (11). With ``s[i, j] = q[i, h] . k[j]``, and slopes 0 where i does not
see j:

    dq[i, h] = w[i, h] sum_j slope[i, j] (s[i, j] > 0) k[j]
    dw[i, h] = sum_j slope[i, j] relu(s[i, j])
    dk[j] = sum_i sum_h slope[i, j] w[i, h] (s[i, j] > 0) q[i, h]

Legend: T query rows, n indexer heads, D channels of one, W keys from the first that a row sees,
M rows and N keys of a tile, P parts that rows are split in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.indexer_target import rows_of
from megatron_mla.kernels.products import product, rounded
from megatron_mla.kernels.rotation import on_device_of

# Elements of the sums of all parts of the rows: 64 MiB in fp32.
PARTIAL_ELEMENTS = 1 << 24


@triton.jit
def _gradient_product(slopes, x, acc):
    """``acc + slopes @ x`` with slopes in the precision of ``x``, whose exponents fp16 lacks."""
    if x.dtype == tl.float16:
        return tl.dot(slopes, x.to(tl.float32), acc, input_precision="tf32")
    return product(rounded(slopes, x.dtype), x, acc, "ieee")


@triton.jit
def _key_grad_kernel(
    q,  # [T, n, D]
    k,  # [W, D]
    w,  # [T, n]
    slopes,  # [T, W] fp32, contiguous
    out,  # [P, W, D] fp32, contiguous
    q_strides,
    k_stride,
    w_strides,
    num_rows,
    num_heads,
    num_keys,
    rows_of_part,
    D: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    part = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    keys = rows_of(k, col, col < num_keys, k_stride, 0, BLOCK_D, D)
    sums = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    end = tl.minimum((part + 1) * rows_of_part, num_rows)
    for first in range(part * rows_of_part, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M).to(tl.int64)
        tile = slopes + row[None, :] * num_keys + col[:, None]
        slope = tl.load(tile, mask=(row < end)[None, :] & (col < num_keys)[:, None], other=0.0)
        # Most tiles of a long sequence are empty, and rows without a key may hold anything.
        seeing = tl.max((slope != 0.0).to(tl.int32), 0)  # [M]
        if tl.max(seeing, 0) > 0:
            real = seeing > 0
            for head in tl.range(0, num_heads, num_stages=STAGES):
                heads = q + tl.cast(head, tl.int64) * q_strides[1]
                queries = rows_of(heads, row, real, q_strides[0], 0, BLOCK_D, D)
                weight = w + row * w_strides[0] + tl.cast(head, tl.int64) * w_strides[1]
                weight = tl.load(weight, mask=real, other=0.0).to(tl.float32)
                change = slope * weight[None, :]
                if RELU:
                    s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    s = product(keys, tl.trans(queries), s, "ieee")
                    change = tl.where(s <= 0.0, 0.0, change)  # a NaN shows
                sums = _gradient_product(change, queries, sums)
    channel = tl.arange(0, BLOCK_D)
    at = out + (part.to(tl.int64) * num_keys + col)[:, None] * D + channel[None, :]
    tl.store(at, sums, mask=(col < num_keys)[:, None] & (channel < D)[None, :])


@triton.jit
def _query_grad_kernel(
    q,  # [T, n, D]
    k,  # [W, D], finite also where no row sees it
    w,  # [T, n]
    slopes,  # [T, W] fp32, contiguous
    starts,  # [T] int32, keys that a row sees, counted from the first of k
    ends,
    dq,  # [T, n, D] fp32, out, contiguous
    dw,  # [T, n] fp32, out, contiguous
    q_strides,
    k_stride,
    w_strides,
    num_rows,
    num_heads,
    num_keys,
    D: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0) % num_heads
    row = tl.program_id(0) // num_heads * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    start, end, seeing = spans(starts, ends, row, num_rows)
    queries = rows_of(
        q + tl.cast(head, tl.int64) * q_strides[1], row, seeing, q_strides[0], 0, BLOCK_D, D
    )
    weight = w + row * w_strides[0] + tl.cast(head, tl.int64) * w_strides[1]
    weight = tl.load(weight, mask=seeing, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_weight = tl.zeros([BLOCK_M], tl.float32)
    least = tl.min(start, 0) // BLOCK_N * BLOCK_N
    for first in tl.range(least, tl.max(end, 0), BLOCK_N, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK_N).to(tl.int64)
        keys = rows_of(k, col, col < num_keys, k_stride, 0, BLOCK_D, D)
        tile = slopes + row[:, None] * num_keys + col[None, :]
        slope = tl.load(tile, mask=seeing[:, None] & (col < num_keys)[None, :], other=0.0)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        s = product(queries, tl.trans(keys), s, "ieee")
        passed = slope
        if RELU:
            passed = tl.where(s <= 0.0, 0.0, slope)  # a NaN shows
        of_weight += tl.sum(passed * s, 1)
        sums = _gradient_product(passed, keys, sums)
    live = row < num_rows
    tl.store(dw + row * num_heads + head, of_weight, mask=live)
    channel = tl.arange(0, BLOCK_D)
    at = dq + (row * num_heads + head)[:, None] * D + channel[None, :]
    tl.store(at, sums * weight[:, None], mask=live[:, None] & (channel < D)[None, :])


@triton.jit
def spans(starts, ends, row, num_rows):
    """First key and one past the last of these rows, and whether they see any.

    Those of a row that sees none are such that neither a minimum nor a maximum minds them.
    """
    start = tl.load(starts + row, mask=row < num_rows, other=0)
    end = tl.load(ends + row, mask=row < num_rows, other=0)
    seeing = end > start
    return tl.where(seeing, start, 0x7FFFFFFF), tl.where(seeing, end, 0), seeing


def dense_tile(width: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Rows and keys of a tile, stages of the loads, warps."""
    if device.type == "cpu":
        return {"rows": 16, "keys": 16, "stages": 1, "warps": 4}
    if dtype == torch.float32 or width > 256:
        return {"rows": 16, "keys": 16, "stages": 1, "warps": 4}
    return {"rows": 64, "keys": 128, "stages": 2, "warps": 8}


def launch_key_grad(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    slopes: Tensor,
    dk: Tensor,
    *,
    relu: bool,
    tile: dict | None = None,
    parts: int | None = None,
) -> None:
    """Add the gradient of the keys to ``dk``; the same bits in every run.

    Args:
        q: [T, n, D]. k: [W, D]. w: [T, n]. slopes: [T, W] fp32, contiguous; 0 where a row does not
            see a key.
        dk: [W, D] fp32.
        tile: as from :func:`dense_tile`, chosen when None.
        parts: of the rows, which have programs and sums of their own; chosen when None.
    """
    rows, heads, width = q.shape
    keys = k.shape[0]
    if rows == 0 or keys == 0 or width == 0:
        return
    tile = tile or dense_tile(width, q.dtype, q.device)
    across = triton.cdiv(keys, tile["keys"])
    if parts is None:
        # Some rounds of programs, whose work differs with what rows see.
        parts = min(triton.cdiv(1024, across), PARTIAL_ELEMENTS // (keys * width))
    rows_of_part = triton.cdiv(triton.cdiv(rows, max(1, parts)), tile["rows"]) * tile["rows"]
    parts = triton.cdiv(rows, rows_of_part)
    sums = torch.empty(parts, keys, width, dtype=torch.float32, device=q.device)
    with on_device_of(q):
        _key_grad_kernel[(across, parts)](
            q,
            k,
            w,
            slopes,
            sums,
            (q.stride(0), q.stride(1)),
            k.stride(0),
            (w.stride(0), w.stride(1)),
            rows,
            heads,
            keys,
            rows_of_part,
            D=width,
            RELU=relu,
            BLOCK_M=tile["rows"],
            BLOCK_N=tile["keys"],
            BLOCK_D=max(16, triton.next_power_of_2(width)),
            STAGES=tile["stages"],
            num_warps=tile["warps"],
        )
    dk += sums.sum(0) if parts > 1 else sums[0]


def launch_query_grad(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    slopes: Tensor,
    starts: Tensor,
    ends: Tensor,
    dq: Tensor,
    dw: Tensor,
    *,
    relu: bool,
    tile: dict | None = None,
) -> None:
    """Gradients of queries and weights into ``dq`` and ``dw``, fp32 and contiguous.

    Args:
        q, k, w, slopes, tile: as in :func:`launch_key_grad`; k is finite also where no row sees it.
        starts, ends: [T] int32, keys that a row sees, counted from the first of k.
    """
    rows, heads, width = q.shape
    if rows == 0 or heads == 0:
        return
    tile = tile or dense_tile(width, q.dtype, q.device)
    # More rows than keys: queries stay.
    block_m, block_n = max(tile["rows"], tile["keys"]), min(tile["rows"], tile["keys"])
    with on_device_of(q):
        _query_grad_kernel[(triton.cdiv(rows, block_m) * heads,)](
            q,
            k,
            w,
            slopes,
            starts,
            ends,
            dq,
            dw,
            (q.stride(0), q.stride(1)),
            k.stride(0),
            (w.stride(0), w.stride(1)),
            rows,
            heads,
            k.shape[0],
            D=width,
            RELU=relu,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=max(16, triton.next_power_of_2(width)),
            STAGES=tile["stages"],
            num_warps=tile["warps"],
        )
