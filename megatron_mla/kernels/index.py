"""Indexer scores of queries and keys, and the keys that they choose, in Triton.

Twin: index_ref.py; selection: topk.py. Equations: kernels/README.md (8) and (9). Legend: T query
rows, S key rows, n indexer heads, D channels of one, K chosen keys; M rows and N keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.checks import check_same, check_tensor, check_unit_stride
from megatron_mla.kernels.chunks import KeyBounds
from megatron_mla.kernels.products import precision_of, product
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rotation import on_device_of
from megatron_mla.kernels.topk import check_bounds, check_topk, launch_select

# Scores that exist at one time: 256 MiB in fp32, unless a single row has more.
SCORE_ELEMENTS = 1 << 26


@triton.jit
def _load_heads(tile, channel, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[M, BLOCK_D] of pointers of that shape; 0 beyond D channels."""
    if D == BLOCK_D:
        return tl.load(tile)
    return tl.load(tile, mask=(channel < D)[None, :], other=0.0)


@triton.jit
def _store_tile(out, tile, row, column, stride, num_rows, num_keys):
    mask = (row < num_rows)[:, None] & (column < num_keys)[None, :]
    # 64 bits: real shapes pass 2**31 elements.
    tl.store(out + row.to(tl.int64)[:, None] * stride + column[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "first", "num_keys", "enough"])
def _scores_kernel(
    q,  # [rows, n, D], last stride 1
    k,  # [S, D], last stride 1
    w,  # [rows, n]
    starts,  # [rows] int32
    ends,
    out,  # [rows, num_keys] fp32, last stride 1: keys first, first + 1, ...
    q_strides,
    k_stride,
    w_strides,
    out_stride,
    num_rows,
    num_heads,
    first,
    num_keys,
    enough,  # rows that see no more keys need no scores
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    RELU: tl.constexpr,
    FILL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Programs that run at one time share rows, whose queries are larger than a block of keys.
    # The last rows first: those see the most.
    across = tl.cdiv(num_keys, N)
    block = tl.cdiv(num_rows, M) - 1 - tl.program_id(0) // across
    row = block * M + tl.arange(0, M)
    column = tl.program_id(0) % across * N + tl.arange(0, N)
    start = tl.load(starts + row, mask=row < num_rows, other=0)
    end = tl.load(ends + row, mask=row < num_rows, other=0)
    needs = end - start > enough
    lowest = tl.min(tl.where(needs, start, 0x7FFFFFFF)) - first
    highest = tl.max(tl.where(needs, end, 0)) - first
    tile_start = tl.program_id(0) % across * N
    if (lowest >= tile_start + N) | (highest <= tile_start):
        if FILL:
            nothing = tl.full([M, N], -float("inf"), tl.float32)
            _store_tile(out, nothing, row, column, out_stride, num_rows, num_keys)
        return

    channel = tl.arange(0, BLOCK_D)
    # Rows and keys beyond the last are copies of it.
    place = first + tl.minimum(column, num_keys - 1).to(tl.int64)
    k_tile = k + place[:, None] * k_stride + channel[None, :]
    query = tl.minimum(row, num_rows - 1).to(tl.int64)
    q_tile = q + query[:, None] * q_strides[0] + channel[None, :]
    w += query * w_strides[0]
    keys = tl.trans(_load_heads(k_tile, channel, D, BLOCK_D))  # [BLOCK_D, N]
    total = tl.zeros([M, N], tl.float32)
    for head in tl.range(0, num_heads, num_stages=STAGES):
        queries = _load_heads(q_tile + head * q_strides[1], channel, D, BLOCK_D)
        weight = tl.load(w + head * w_strides[1]).to(tl.float32)
        products = product(queries, keys, tl.zeros([M, N], tl.float32), PRECISION)
        if RELU:
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total += products * weight[:, None]
    if FILL:
        key = (first + column)[None, :]
        seen = (key >= start[:, None]) & (key < end[:, None]) & needs[:, None]
        total = tl.where(seen, total, -float("inf"))
    _store_tile(out, total, row, column, out_stride, num_rows, num_keys)


def tile_of(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows M and keys N of a program, warps and stages.

    Two programs of four warps fit on a multiprocessor of a H200: the tensor cores work for one
    while the other adds up a head. Products in fp32 are not for tensor cores.
    """
    if dtype == torch.float32:
        return {"M": 32, "N": 32, "num_warps": 4, "num_stages": 1}
    narrow = triton.next_power_of_2(width) <= 128
    return {"M": 64, "N": 128 if narrow else 32, "num_warps": 4, "num_stages": 3 if narrow else 2}


def launch_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    *,
    first: int = 0,
    relu: bool = True,
    enough: int = 0,
    fill: bool = False,
    tile: dict[str, int] | None = None,
) -> None:
    """Fill ``out`` [rows, keys] fp32, last stride 1, with scores of keys ``first`` and on.

    Args:
        q: [rows, n, D]. k: [S, D]. w: [rows, n]. starts, ends: [rows] int32.
        enough: rows that see no more keys than this need no scores.
        fill: -inf where a row sees no key or needs no scores; else anything may stand there.
        tile: instead of that of :func:`tile_of`; may hold other options of a launch, too.
    """
    (rows, heads, width), keys = q.shape, out.shape[1]
    if rows == 0 or keys == 0:
        return
    tile = dict(tile or tile_of(width, q.dtype))
    stages = tile.pop("num_stages")
    grid = (triton.cdiv(rows, tile["M"]) * triton.cdiv(keys, tile["N"]),)
    with on_device_of(q):
        _scores_kernel[grid](
            q,
            k,
            w,
            starts,
            ends,
            out,
            q.stride(),
            k.stride(0),
            w.stride(),
            out.stride(0),
            rows,
            heads,
            first,
            keys,
            enough,
            D=width,
            BLOCK_D=max(triton.next_power_of_2(width), 16),
            RELU=relu,
            FILL=fill,
            PRECISION=precision_of(q),
            STAGES=stages,
            **tile,
        )


def _score_chunks(host: Tensor, topk: int) -> Iterator[tuple[slice, slice, int]]:
    """Rows whose scores fit in :data:`SCORE_ELEMENTS`, one at least; the keys that those of them
    see which have to choose, and the most keys that one of these sees.

    Args:
        host: [2, T] starts and ends on the CPU.
    """
    starts, ends = host.to(torch.int64)
    chooses = ends - starts > topk
    low = torch.where(chooses, starts, torch.iinfo(torch.int64).max)
    high = torch.where(chooses, ends, 0)
    seen = torch.where(chooses, ends - starts, 0)
    row = 0
    while row < len(starts):
        # A bound of what is looked at again for every chunk.
        window = slice(row, row + (1 << 14))
        lows, highs = low[window].cummin(0).values, high[window].cummax(0).values
        area = _padded((highs - lows).clamp(min=0)) * torch.arange(1, len(lows) + 1)
        count = max(1, int((area <= SCORE_ELEMENTS).sum()))
        if count < len(lows) and count > 128:
            count -= count % 128  # whole tiles
        rows = slice(row, row + count)
        found = int(highs[count - 1])
        keys = slice(int(lows[count - 1]), found) if found else slice(0, 0)
        yield rows, keys, int(seen[rows].max())
        row += count


def _padded(width):
    """Rows of scores that begin at a multiple of 128 bytes."""
    return (width + 31) // 32 * 32


def _index_topk(q, k, w, starts, ends, host, topk, relu) -> Tensor:
    out = _empty(q, k, w, starts, ends, host, topk, relu)
    if out.numel() == 0:
        return out
    chunks = list(_score_chunks(host, out.shape[1]))
    most = max((r.stop - r.start) * _padded(s.stop - s.start) for r, s, _ in chunks)
    buffer = torch.empty(most, dtype=torch.float32, device=q.device)
    for rows, keys, span in chunks:
        count, num_keys = rows.stop - rows.start, keys.stop - keys.start
        stride = _padded(num_keys)
        scores = buffer[: count * stride].view(count, stride)[:, :num_keys]
        bounds = starts[rows], ends[rows]
        how = {"first": keys.start}
        launch_scores(q[rows], k, w[rows], *bounds, scores, **how, relu=relu, enough=out.shape[1])
        launch_select(scores, *bounds, out[rows], **how, span=span)
    return out


def _empty(q, k, w, starts, ends, host, topk, relu) -> Tensor:
    shape = q.shape[0], min(topk, k.shape[0])
    return torch.empty(shape, dtype=torch.int32, device=q.device)


register(
    "index_topk",
    "(Tensor q, Tensor k, Tensor w, Tensor starts, Tensor ends, Tensor host, int topk, bool relu)"
    " -> Tensor",
    _index_topk,
    _empty,
)


def _check(q: Tensor, k: Tensor, w: Tensor, bounds: KeyBounds) -> None:
    check_tensor("q", q, dims=(3,))
    check_tensor("k", k, dims=(2,))
    check_tensor("w", w, dims=(2,))
    check_same("k", k, "q", q)
    if q.dtype == torch.float64 or q.shape[-1] > 512:
        raise ValueError(
            f"q must be bfloat16, float16 or float32 and no more than 512 wide, got {q.dtype} "
            f"{list(q.shape)}; take index_ref.py"
        )
    for name, t, want in (("k", k, (k.shape[0], q.shape[2])), ("w", w, q.shape[:2])):
        if t.shape != want or t.device != q.device:
            raise ValueError(
                f"{name} must be {list(want)} on {q.device} to fit q, {list(q.shape)}, got "
                f"{list(t.shape)} on {t.device}; check heads and width of the indexer"
            )
    for name, t in (("q", q), ("k", k)):
        check_unit_stride(name, t)
    check_bounds(bounds.starts, bounds.ends, q.shape[0], q.device)
    if bounds.host.device.type != "cpu" or bounds.host.shape != (2, q.shape[0]):
        raise ValueError(
            f"bounds.host must be [2, {q.shape[0]}] on the CPU, got {list(bounds.host.shape)} on "
            f"{bounds.host.device}; take bounds from Rows.key_bounds"
        )


@torch.no_grad()
def index_scores(
    q: Tensor, k: Tensor, w: Tensor, bounds: KeyBounds, *, relu: bool = True
) -> Tensor:
    """``sum_h w[t, h] * relu(q[t, h] . k[s])`` of the keys that a row sees, else -inf.

    Args: those of :func:`index_topk`.
    Returns:
        [T, S] fp32. All of it: hand chunks of rows. There are no gradients.
    """
    _check(q, k, w, bounds)
    out = torch.empty(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
    launch_scores(q, k, w, bounds.starts, bounds.ends, out, relu=relu, fill=True)
    return out


@torch.no_grad()
def index_topk(
    q: Tensor, k: Tensor, w: Tensor, bounds: KeyBounds, *, topk: int, relu: bool = True
) -> Tensor:
    """Keys with the greatest scores of every row, equal ones by the lowest index.

    The set is that of :func:`megatron_mla.kernels.index_ref.index_topk_ref` but for the rounding of
    sums; its order is that of the keys. A row that sees no more than topk keys takes all without
    scores. Memory: :data:`SCORE_ELEMENTS` fp32 scores and 1/32 of it, and nothing of T x S; for
    rows of more than 32768 keys also topk int32 for each 32768.

    Args:
        q: [T, n, D] bf16 | fp16 | fp32, D <= 512. k: [S, D] like it. Last strides 1.
        w: [T, n] of any float dtype.
        bounds: keys that each row may see. Nothing waits for the device.
        topk: keys per row.
        relu: without, plain products are summed.
    Returns:
        [T, min(topk, S)] int32, rising; then -1 where a row sees fewer.
    Raises:
        ValueError: an argument does not fit.
    """
    _check(q, k, w, bounds)
    check_topk(topk)
    return torch.ops.megatron_mla.index_topk(
        q, k, w, bounds.starts, bounds.ends, bounds.host, topk, relu
    )
