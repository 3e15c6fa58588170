"""Kernels of decode_attention.py: split over the keys, then a merge.

Equation: kernels/README.md (15). A program holds a block of rows, pairs of a new token and a head
of one sequence, and a split of the keys, of which it first reads the positions: tiles that all of
its rows see whole are gone through without a mask, the others one by one, and those that no row
sees are not read.

Legend: B sequences, s new tokens, H heads, M = s H rows, T cached rows, C latent channels (the
value), R = E - C positional channels.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.products import LN_2, LOG2_E, product, rounded
from megatron_mla.kernels.rotation import on_device_of
from megatron_mla.kernels.sparse_forward import (
    REDUCTION_BYTES,
    blocks_of,
    device_limits,
    head_block,
)

# Positions that are read at once.
SCAN = 512
# What a split costs besides its keys, in the time of keys: its start, and for every row of its
# block the partial result that is written and read again.
START, PER_ROW = 64, 1.5
# Keys of a block, warps and stages, by rows. No registers are spilled for 16 rows; with four warps
# and 32 keys two programs share an SM.
TILES = {16: (32, 4, 3), 32: (64, 8, 3), 64: (64, 8, 2)}
# Products of fp32 are made without tensor cores.
FP32_TILE = (16, 8, 2)
# Of the interpreter, which has no use for many.
_CPU_PROGRAMS = 4

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_WIDE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _converted(t, WIDE: tl.constexpr):
    """``t`` in the dtype of products, converted once for both of them.

    Triton would convert for each product anew, in the layout of each: FP8 that comes from shared
    memory byte by byte. It does not repeat what may have side effects.
    """
    t = t.to(WIDE)
    if not _INTERPRETED and WIDE.primitive_bitwidth == 16:
        t = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [t], dtype=t.dtype, is_pure=False, pack=2
        )
    return t


@triton.jit
def _load_keys(
    place, channel, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Channels of a tile of keys [K, BLOCK], as the products take them; 0 where none is live."""
    if FULL and WIDTH == BLOCK:
        t = tl.load(place[:, None] + channel[None, :])
    elif FULL:
        t = tl.load(place[:, None] + channel[None, :], mask=(channel < WIDTH)[None, :], other=0.0)
    else:
        mask = live[:, None] & (channel < WIDTH)[None, :]
        t = tl.load(place[:, None] + channel[None, :], mask=mask, other=0.0)
    if t.dtype != WIDE:
        t = _converted(t, WIDE)
    return t


@triton.jit
def _attend(
    top, total, sums, q_c, q_r, place, live, seen, scale_log2,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Online softmax over a tile of keys; FULL: all rows see all of them, nothing is masked."""
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    k_c = _load_keys(place, c, live, C, BLOCK_C, WIDE, FULL)
    scores = product(q_c, tl.trans(k_c), None, PRECISION)
    if R > 0:
        k_r = _load_keys(place + C, r, live, R, BLOCK_R, WIDE, FULL)
        scores = product(q_r, tl.trans(k_r), scores, PRECISION)
    scores = scores * scale_log2
    if not FULL:
        scores = tl.where(seen, scores, -float("inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    # Before the first key: -inf less -inf would be NaN.
    base = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = product(rounded(weights, WIDE), k_c, sums * shrink[:, None], PRECISION)
    return highest, total, sums


@triton.jit
def _scan(positions, stride, first, stop, low, high, SCAN: tl.constexpr):
    """Of keys [first, stop): the first that not every row sees, and the end of those that some do.

    Args:
        low, high: least and greatest position of the rows.
    """
    hidden = tl.full([SCAN], stop, tl.int32)
    end = tl.full([SCAN], first, tl.int32)
    for start in tl.range(first, stop, SCAN):
        key = start + tl.arange(0, SCAN)
        position = tl.load(positions + key.to(tl.int64) * stride, mask=key < stop, other=-1)
        hidden = tl.where((position >= 0) & (position <= low), hidden, tl.minimum(hidden, key))
        end = tl.where((position >= 0) & (position <= high), tl.maximum(end, key + 1), end)
    return tl.min(hidden, axis=0), tl.max(end, axis=0)


# Lengths change from step to step, and would be compiled again where they are multiples of 16.
_LENGTHS = (
    "num_heads num_rows num_keys num_splits split_keys stride_xb stride_xt stride_pb stride_ps"
)


@triton.jit(do_not_specialize=_LENGTHS.split())
def _decode_kernel(
    query,  # [B, s, H, E] in, any strides but the last
    keys,  # [B, T, E] in, any strides but the last
    query_positions,  # [B, s] int32 | int64 in, any strides
    key_positions,  # [B, T] int32 | int64 in, any strides
    out,  # [B, splits, M, C] out: fp32 parts, or the dtype of the query with one split
    lse,  # [B, splits, M] fp32 out: in powers of two of parts, natural with one split
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_xb, stride_xt, stride_pb,
    stride_ps, num_heads, num_rows, num_keys, num_splits, split_keys, scale_log2,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SCAN: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows over a split of the keys. Blocks of one split follow each other."""
    across = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    split = program // across % num_splits
    batch = (program // across // num_splits).to(tl.int64)
    row = program % across * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    at = query_positions + batch * stride_xb + token * stride_xt
    mine = tl.load(at, mask=row < num_rows, other=-1)
    is_token = mine >= 0
    high = tl.max(mine, axis=0)
    low = tl.min(tl.where(is_token, mine, high), axis=0)

    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    at = query + batch * stride_qb + token * stride_qs + head * stride_qh
    q_c = tl.load(at[:, None] + c[None, :], mask=is_token[:, None] & (c < C)[None, :], other=0.0)
    q_c = q_c.to(WIDE)
    q_r = q_c
    if R > 0:
        mask = is_token[:, None] & (r < R)[None, :]
        q_r = tl.load(at[:, None] + C + r[None, :], mask=mask, other=0.0).to(WIDE)

    positions = key_positions + batch * stride_pb
    first = split * split_keys
    stop = tl.minimum(first + split_keys, num_keys)
    hidden, end = _scan(positions, stride_ps, first, stop, low, high, SCAN)
    full = first + (hidden - first) // BLOCK_K * BLOCK_K
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    in_tile = tl.arange(0, BLOCK_K)
    # 64 bits: real caches pass 2**31 elements.
    of_batch = keys + batch * stride_kb
    for start in tl.range(first, full, BLOCK_K, num_stages=STAGES):
        place = of_batch + (start + in_tile).to(tl.int64) * stride_kt
        top, total, sums = _attend(
            top, total, sums, q_c, q_r, place, None, None, scale_log2,
            C, R, BLOCK_C, BLOCK_R, WIDE, PRECISION, True,
        )  # fmt: skip
    for start in tl.range(full, end, BLOCK_K, num_stages=1):
        key = start + in_tile
        position = tl.load(positions + key.to(tl.int64) * stride_ps, mask=key < stop, other=-1)
        live = (position >= 0) & (position <= high)
        if tl.max(live.to(tl.int32), axis=0) > 0:
            place = of_batch + key.to(tl.int64) * stride_kt
            seen = live[None, :] & (position[None, :] <= mine[:, None])
            top, total, sums = _attend(
                top, total, sums, q_c, q_r, place, live, seen, scale_log2,
                C, R, BLOCK_C, BLOCK_R, WIDE, PRECISION, False,
            )  # fmt: skip

    # Padding saw what its block saw. A total may be NaN, and is then to be seen.
    total = tl.where(is_token, total, 0.0)
    answer = tl.where(is_token[:, None], sums, 0.0) / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (batch * num_splits + split) * num_rows + row
    mask = (row < num_rows)[:, None] & (c < C)[None, :]
    tl.store(out + at[:, None] * C + c[None, :], rounded(answer, out.dtype.element_ty), mask=mask)
    level = tl.where(is_token, top, 0.0) + tl.log2(total)
    if not PARTS:
        level = level * LN_2
    tl.store(lse + at, level, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    parts,  # [B, splits, M, C] fp32 in
    levels,  # [B, splits, M] fp32 in, in powers of two
    out,  # [B, M, C] out
    lse,  # [B, M] fp32 out, natural
    num_rows, num_splits,
    C: tl.constexpr, BLOCK_C: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Some channels of a row, from all splits in their order."""
    across: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    row = (tl.program_id(0) // across).to(tl.int64)
    c = tl.program_id(0) % across * BLOCK_C + tl.arange(0, BLOCK_C)
    first = row // num_rows * num_splits * num_rows + row % num_rows
    split = tl.arange(0, SPLITS).to(tl.int64)
    level = tl.load(levels + first + split * num_rows, mask=split < num_splits, other=-float("inf"))
    top = tl.max(level, axis=0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(level - base), axis=0)
    sums = tl.zeros([BLOCK_C], tl.float32)
    for start in tl.range(0, num_splits, BLOCK_S):
        some = start + tl.arange(0, BLOCK_S).to(tl.int64)
        at = first + some * num_rows
        of_some = tl.load(levels + at, mask=some < num_splits, other=-float("inf"))
        mask = (of_some != -float("inf"))[:, None] & (c < C)[None, :]
        part = tl.load(parts + at[:, None] * C + c[None, :], mask=mask, other=0.0)
        sums += tl.sum(part * tl.exp2(of_some - base)[:, None], axis=0)
    answer = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * C + c, rounded(answer, out.dtype.element_ty), mask=c < C)
    if tl.program_id(0) % across == 0:
        tl.store(lse + row, (base + tl.log2(total)) * LN_2)


def product_dtype(query: torch.dtype, keys: torch.dtype) -> torch.dtype:
    """What products are made of: it holds every query and every key."""
    return query if keys.itemsize == 1 else torch.promote_types(query, keys)


def decode_tile(
    num_rows: int, c: int, r: int, itemsizes: tuple[int, int], limits: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Rows and keys of a block, warps, stages, by :data:`TILES` and what shared memory takes.

    Args:
        num_rows: M. c, r: widths.
        itemsizes: bytes of an element in products, and in the cache.
        limits: as of :func:`~megatron_mla.kernels.sparse_forward.device_limits`.
    """
    item, key_item = itemsizes
    widths = blocks_of(c, r)
    channels = widths["BLOCK_C"] + (widths["BLOCK_R"] if r else 0)
    room = limits[0] - REDUCTION_BYTES
    # Sums of a block have to fit into the registers of eight warps.
    most = 16 if item > 2 else min(limits[1], limits[1] * 512 // widths["BLOCK_C"])
    rows = head_block(num_rows, max(16, most))
    keys, warps, stages = FP32_TILE if item > 2 else TILES[rows]

    def needed() -> int:
        # Products of 64 rows read the buffer while the next copy is under way.
        buffers = stages if rows == 64 else stages - 1
        # What has to be converted lies there twice.
        per_key = buffers * key_item + (item if key_item < item else 0)
        # Behind a mask both products have a copy of their own.
        per_key = max(channels * per_key, 2 * widths["BLOCK_C"] * item)
        return rows * channels * item + keys * per_key

    while needed() > room and stages > 2:
        stages -= 1
    while needed() > room and keys > 16:
        keys //= 2
    while needed() > room and rows > 16:
        rows //= 2
    return rows, keys, warps, stages


@functools.lru_cache(maxsize=4096)
def split_count(num_blocks: int, num_keys: int, programs: int, block_m: int, block_k: int) -> int:
    """Splits of ``num_keys`` keys that should take the least time; shapes alone decide.

    Args:
        num_blocks: blocks of rows of all sequences, each of which goes through all keys.
        programs: that the device runs at one time.
        block_m, block_k: rows and keys of a block.
    """
    tiles = max(1, triton.cdiv(num_keys, block_k))

    def time(splits: int) -> float:
        rounds = triton.cdiv(num_blocks * splits, programs)
        mine = triton.cdiv(tiles, splits) * block_k + START
        merged = num_blocks * splits / programs * PER_ROW * block_m if splits > 1 else 0.0
        return rounds * mine + merged

    most = min(tiles, max(1, triton.cdiv(2 * programs, max(1, num_blocks))))
    return min(range(1, most + 1), key=time)


def programs_of(device: torch.device, warps: int) -> int:
    """Programs that the device runs at one time."""
    if device.type != "cuda":
        return _CPU_PROGRAMS
    per_sm = 2 if warps == 4 else 1
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def launch_decode(
    query: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    tile: tuple[int, int, int, int] | None = None,
    splits: int | None = None,
) -> None:
    """Fill ``out`` [B, s, H, C] and ``lse`` [B, s, H], both contiguous; nothing is empty.

    Args:
        tile: as of :func:`decode_tile`, which chooses when it is None.
        splits: of the keys; None: :func:`split_count` chooses.
    """
    batch, tokens, num_heads, width = query.shape
    num_rows, num_keys, c = tokens * num_heads, keys.shape[1], out.shape[-1]
    wide = product_dtype(query.dtype, keys.dtype)
    if tile is None:
        itemsizes = wide.itemsize, keys.element_size()
        tile = decode_tile(num_rows, c, width - c, itemsizes, device_limits(query.device))
    block_m, block_k, warps, stages = tile
    num_blocks = batch * triton.cdiv(num_rows, block_m)
    if splits is None:
        programs = programs_of(query.device, warps)
        splits = split_count(num_blocks, num_keys, programs, block_m, block_k)
    split_keys = triton.cdiv(triton.cdiv(num_keys, block_k), splits) * block_k
    splits = triton.cdiv(num_keys, split_keys)  # none is empty
    parts, levels = out, lse
    if splits > 1:
        how = {"dtype": torch.float32, "device": query.device}
        parts = torch.empty(batch, splits, num_rows, c, **how)
        levels = torch.empty(batch, splits, num_rows, **how)
    with on_device_of(query):
        _decode_kernel[(num_blocks * splits,)](
            query, keys, query_positions, key_positions, parts, levels,
            *query.stride()[:3], *keys.stride()[:2], *query_positions.stride(),
            *key_positions.stride(), num_heads, num_rows, num_keys, splits, split_keys,
            scale * LOG2_E.value, **blocks_of(c, width - c), BLOCK_M=block_m, BLOCK_K=block_k,
            SCAN=SCAN, WIDE=_WIDE[wide], PRECISION="ieee" if wide == torch.float32 else "tf32",
            PARTS=splits > 1, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        if splits > 1:
            block_c = min(128, blocks_of(c, 0)["BLOCK_C"])
            padded = triton.next_power_of_2(splits)
            _merge_kernel[(batch * num_rows * triton.cdiv(c, block_c),)](
                parts, levels, out, lse, num_rows, splits, C=c, BLOCK_C=block_c,
                SPLITS=padded, BLOCK_S=min(32, padded), num_warps=4,
            )  # fmt: skip
