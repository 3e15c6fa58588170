"""The greatest scores of every row, exactly and in the same way every time, in Triton.

A first kernel holds a row, or a segment of one, in registers as integers that are ordered as the
scores are. It narrows down the value of the k-th greatest by counting, then, among keys that equal
it, the column of the last one chosen, and leaves one bit per column. A second kernel turns bits
into columns. Nothing is added with atomics or depends on timing. Twin: best_keys in index_ref.py;
kernels/README.md (9).

Legend: C columns of a line; a block of columns is 32 lines, one bit of a word each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.checks import check_unit_stride
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rotation import on_device_of

# Columns that one program can hold: 32 registers of each of 1024 threads.
MOST_COLUMNS = 1 << 15
# And of candidates, whose addresses (64 bits) pass through shared memory.
MOST_CANDIDATES = 1 << 14

# Below the keys of all scores.
_UNSEEN = tl.constexpr(-(1 << 31))
_GREATEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _key_of(x):
    """int32, ordered as scores are: -0 and 0 are equal, -inf is the least number, NaN above all."""
    x = tl.where(x == 0, 0.0, x)
    x = tl.where(x < -3.4028234663852886e38, -3.4028234663852886e38, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _up_to(row, block, end, C: tl.constexpr):
    """Which columns of a block lie before ``end``, [32, C]."""
    # Lines are constants of a thread, which has all lines of a column: one comparison each.
    left = end - row[2] - block * 32 * C - tl.arange(0, C)
    return (tl.arange(0, 32) * C)[:, None] < left[None, :]


@triton.jit
def _load_block(row, block, C: tl.constexpr, GATHER: tl.constexpr):
    """Keys of a block of a row, [32, C] int32; ``_UNSEEN`` where the row sees nothing.

    Args:
        row: scores, candidates, first column of block 0, end of its columns.
    """
    scores, candidates, base, end = row
    seen = _up_to(row, block, end, C)
    column = base + block * 32 * C + tl.arange(0, 32)[:, None] * C + tl.arange(0, C)[None, :]
    if GATHER:
        column = tl.load(candidates + column, mask=seen, other=-1)
        seen = column >= 0
    x = tl.load(scores + column, mask=seen, other=0.0)
    return tl.where(seen, _key_of(x), _UNSEEN)


@triton.jit
def _count(row, keys, key, blocks, C: tl.constexpr, GATHER: tl.constexpr, STREAM: tl.constexpr):
    """How many keys of the row are ``key`` or greater."""
    # Over the lines first: those are sums of one thread.
    if not STREAM:
        return tl.sum(tl.sum((keys >= key).to(tl.int32), axis=0), axis=0)
    count = 0
    for block in range(blocks):
        keys = _load_block(row, block, C, GATHER)
        count += tl.sum(tl.sum((keys >= key).to(tl.int32), axis=0), axis=0)
    return count


@triton.jit
def _count_equal(
    row, keys, key, end, blocks, C: tl.constexpr, GATHER: tl.constexpr, STREAM: tl.constexpr
):
    """How many keys before column ``end`` equal ``key``."""
    if not STREAM:
        equal = (keys == key) & _up_to(row, 0, end, C)
        return tl.sum(tl.sum(equal.to(tl.int32), axis=0), axis=0)
    count = 0
    for block in range(blocks):
        keys = _load_block(row, block, C, GATHER)
        equal = (keys == key) & _up_to(row, block, end, C)
        count += tl.sum(tl.sum(equal.to(tl.int32), axis=0), axis=0)
    return count


@triton.jit
def _range_of(keys):
    least = tl.min(tl.min(tl.where(keys == _UNSEEN, _GREATEST, keys), axis=0), axis=0)
    return least, tl.max(tl.max(keys, axis=0), axis=0)


@triton.jit
def _store_words(words, row, block, keys, low, end, C: tl.constexpr):
    """Bits of a block: what is greater than ``low``, and equal before column ``end``."""
    chosen = (keys > low) | ((keys == low) & _up_to(row, block, end, C))
    word = tl.sum(chosen.to(tl.int32) << tl.arange(0, 32)[:, None], axis=0)
    tl.store(words + block * C + tl.arange(0, C), word)


@triton.jit
def _next_key(low, high, at_low, above, wanted, step):
    """A key in (low, high] to count at.

    Ties are nearly always those of the zeros that ReLU makes: both sides of zero come first. Then
    turns are taken by a guess, that the logarithm of the count is linear in the score, and by
    halves, which bound the steps. On scores of an indexer these are 11 steps instead of 19.
    """
    half = ((high - low).to(tl.uint32, bitcast=True) + 1) >> 1
    key = low + half.to(tl.int32, bitcast=True)
    log_low = tl.log(at_low.to(tl.float32))
    share = (log_low - tl.log(wanted + 0.5)) / (log_low - tl.log(above + 0.5))
    x, y = _score_of(low), _score_of(high)
    guess = x + (y - x) * share
    usable = (guess - guess == 0) & (step % 2 == 0)
    key = tl.where(usable, tl.minimum(tl.maximum(_key_of(guess), low + 1), high), key)
    key = tl.where((low < 1) & (high >= 1) & (step == 0), 1, key)
    return tl.where((low < 0) & (high == 0), 0, key)


@triton.jit
def _open_row(
    scores, candidates, starts, ends, row_stride, first, zero, num_columns, topk,
    C: tl.constexpr, GATHER: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """The row of this program, its blocks, and whether it has to choose at all."""
    # 64 bits: a row may begin beyond 2**31 elements.
    number = tl.program_id(0).to(tl.int64)
    first_seen, seen_to = tl.load(starts + number), tl.load(ends + number)
    chooses = seen_to - first_seen > topk
    # Not the constant 0: with its alignment known, threads would get pieces of several columns.
    base, end = zero, num_columns
    if not GATHER:
        base = tl.maximum(first_seen - first, 0)
        end = tl.minimum(seen_to - first, num_columns)
    blocks = 1
    if STREAM:
        blocks = tl.cdiv(tl.maximum(end - base, 0), 32 * C)
    else:
        base += tl.program_id(1) * 32 * C
    row = (scores + number * row_stride, candidates + number * num_columns, base, end)
    return number, row, blocks, chooses


@triton.jit(do_not_specialize=["first", "zero", "num_columns", "topk", "num_words"])
def _choose_kernel(
    scores,  # [rows, columns] fp32, last stride 1
    candidates,  # [rows, num_columns] int32, columns to choose from or -1; read when GATHER
    starts,  # [rows] int32
    ends,
    words,  # [rows, num_words] int32, C for each block
    row_stride,
    first,  # key of column 0
    zero,
    num_columns,  # of the scores, or candidates of a row
    topk,
    num_words,
    C: tl.constexpr,
    GATHER: tl.constexpr,
    STREAM: tl.constexpr,
):
    number, row, blocks, chooses = _open_row(
        scores, candidates, starts, ends, row_stride, first, zero, num_columns, topk,
        C, GATHER, STREAM,
    )  # fmt: skip
    if not chooses:
        return
    keys = _load_block(row, 0, C, GATHER)
    low, high = _range_of(keys)
    if STREAM:
        for block in range(1, blocks):
            keys = _load_block(row, block, C, GATHER)
            least, greatest = _range_of(keys)
            low, high = tl.minimum(low, least), tl.maximum(high, greatest)

    # ``at_low`` keys are ``low`` or greater, which is topk or more; ``above`` are greater than
    # ``high``, which is fewer. A segment may see fewer than topk keys and takes all.
    at_low = _count(row, keys, low, blocks, C, GATHER, STREAM)
    above = 0
    step = 0
    while (at_low > topk) & (low < high):
        key = _next_key(low, high, at_low, above, topk, step)
        count = _count(row, keys, key, blocks, C, GATHER, STREAM)
        enough = count >= topk
        low, at_low = tl.where(enough, key, low), tl.where(enough, count, at_low)
        high, above = tl.where(enough, high, key - 1), tl.where(enough, above, count)
        step += 1

    end = row[3]
    if at_low > topk:
        # Of the keys that equal ``low``, topk - above are chosen: before which column?
        before = row[2]
        while end - before > 1:
            middle = before + (end - before) // 2
            count = _count_equal(row, keys, low, middle, blocks, C, GATHER, STREAM)
            enough = count >= topk - above
            before, end = tl.where(enough, before, middle), tl.where(enough, middle, end)

    words += number * num_words + tl.program_id(1) * C
    if STREAM:
        for block in range(blocks):
            keys = _load_block(row, block, C, GATHER)
            _store_words(words, row, block, keys, low, end, C)
    else:
        _store_words(words, row, 0, keys, low, end, C)


@triton.jit(do_not_specialize=["first", "shift", "zero", "num_columns", "topk", "num_words"])
def _emit_kernel(
    candidates,  # as above
    starts,
    ends,
    words,
    out,  # [rows, segments, topk] int32, last two dims contiguous: columns, rising; then -1
    out_stride,
    first,
    shift,  # added to columns
    zero,
    num_columns,
    topk,
    num_words,
    C: tl.constexpr,
    GATHER: tl.constexpr,
    STREAM: tl.constexpr,
    TILE: tl.constexpr,
):
    number, row, blocks, chooses = _open_row(
        words, candidates, starts, ends, 0, first, zero, num_columns, topk, C, GATHER, STREAM
    )
    candidates, base = row[1], row[2]
    out += number * out_stride + tl.program_id(1).to(tl.int64) * topk
    words += number * num_words + tl.program_id(1) * C
    found = 0
    if chooses:
        for block in range(blocks):
            for tile in range(32 * C // TILE):
                place = tile * TILE + tl.arange(0, TILE)
                word = tl.load(words + block * C + place % C)
                bit = (word >> place // C) & 1
                slot = found + tl.cumsum(bit) - bit
                column = base + block * 32 * C + place
                if GATHER:
                    column = tl.load(candidates + column, mask=bit != 0)
                tl.store(out + slot, column + shift, mask=bit != 0)
                found += tl.sum(bit)
    start, end = tl.load(starts + number), tl.load(ends + number)
    for slot in range(found, topk, TILE):
        slots = slot + tl.arange(0, TILE)
        # A row that need not choose takes all it sees.
        key = tl.where(chooses | (start + slots >= end), -1, start + slots)
        tl.store(out + slots, key, mask=slots < topk)


def tiles_of(span: int, topk: int, block: int | None = None) -> tuple[int, bool]:
    """Columns of one program, and whether it goes over its row again for every count.

    A row that does not fit is cut into segments, and what they choose is chosen from; where topk is
    so large that a segment would leave out little, one program reads the row again and again.
    """
    block = block or min(max(triton.next_power_of_2(span), 512), MOST_COLUMNS)
    return block, span > block and 2 * topk > block


def launch_select(
    scores: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    *,
    first: int = 0,
    span: int | None = None,
    block: int | None = None,
    emit_tile: int | None = None,
    **choose,
) -> None:
    """Fill ``out`` [rows, topk] int32, last stride 1, as :func:`select_topk` does.

    Args:
        scores: [rows, columns] fp32 of keys ``first``, ``first + 1``, ...; nothing is read outside
            of a row's keys, nor in a row that sees no more than topk of them.
        starts, ends: [rows] int32, contiguous, keys that each row may see.
        span: the most keys that a row sees; the width of ``scores`` if unknown.
        block: columns of a program, a power of two from 512 to :data:`MOST_COLUMNS`.
        emit_tile: columns that become bits at one time.
        choose: options of the launch that chooses.
    """
    (rows, count), topk = scores.shape, out.shape[1]
    if rows == 0 or topk == 0:
        return
    span = max(1, count if span is None else min(span, count))
    block, stream = tiles_of(span, topk, block)
    # The interpreter is the faster the fewer the steps.
    emit_tile = emit_tile or (1024 if scores.is_cuda else block)
    candidates = None

    def launch(segments: int, target: Tensor, shift: int) -> None:
        lines = max(block // 32, 16)
        blocks = triton.cdiv(span, block)
        words = torch.empty(rows, blocks * lines, dtype=torch.int32, device=scores.device)
        source = starts if candidates is None else candidates
        how = {"C": lines, "GATHER": candidates is not None, "STREAM": stream}
        _choose_kernel[rows, segments](
            scores, source, starts, ends, words, scores.stride(0), first, 0, count, topk,
            words.shape[1], **how, **{"num_warps": min(max(lines // 32, 1), 32), **choose},
        )  # fmt: skip
        _emit_kernel[rows, segments](
            source, starts, ends, words, target, target.stride(0), first, shift, 0, count, topk,
            words.shape[1], **how, TILE=min(emit_tile, block),
            num_warps=4,
        )  # fmt: skip

    with on_device_of(scores):
        while span > block and not stream:
            segments = triton.cdiv(span, block)
            found = torch.empty(rows, segments * topk, dtype=torch.int32, device=scores.device)
            launch(segments, found, 0)
            candidates, count, span = found, segments * topk, segments * topk
            block = min(block, tiles_of(span, topk)[0], MOST_CANDIDATES)
            _, stream = tiles_of(span, topk, block)
        launch(1, out, first)


def _select_topk(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    out = _empty(scores, starts, ends, topk)
    launch_select(scores, starts, ends, out)
    return out


def _empty(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    shape = scores.shape[0], min(topk, scores.shape[1])
    return torch.empty(shape, dtype=torch.int32, device=scores.device)


register(
    "select_topk",
    "(Tensor scores, Tensor starts, Tensor ends, int topk) -> Tensor",
    _select_topk,
    _empty,
)


def check_bounds(starts: Tensor, ends: Tensor, rows: int, device: torch.device) -> None:
    """One start and one end for each row, as the kernels read them."""
    for name, t in (("starts", starts), ("ends", ends)):
        if t.dtype != torch.int32 or t.shape != (rows,) or not t.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 [{rows}], one for each row, got {t.dtype} "
                f"{list(t.shape)} with strides {t.stride()}; take them from Rows.key_bounds"
            )
        if t.device != device:
            raise ValueError(
                f"{name} must be on the device of the other tensors, {device}, got {t.device}; "
                "move it"
            )


def check_topk(topk: int) -> None:
    if topk < 1:
        raise ValueError(f"topk must be positive, got {topk}; set dsa_indexer_topk")


def select_topk(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    """The columns with the greatest scores of every row, equal ones by the lowest index.

    -0 equals 0, NaN is greater than all, and -inf is the least number but still better than a
    column that the row cannot see. The same bits in every run. Extra memory: none up to
    :data:`MOST_COLUMNS` columns, else topk int32 per row and that many columns.

    Args:
        scores: [rows, columns] fp32, last stride 1; what a row cannot see is not read.
        starts, ends: [rows] int32; row i may see columns ``starts[i]`` to ``ends[i] - 1``.
        topk: columns per row.
    Returns:
        [rows, min(topk, columns)] int32, rising; then -1 where a row sees fewer.
    Raises:
        ValueError: an argument does not fit.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise ValueError(
            f"scores must be fp32 [rows, columns], got {scores.dtype} {list(scores.shape)}; call "
            ".float()"
        )
    check_unit_stride("scores", scores)
    check_bounds(starts, ends, scores.shape[0], scores.device)
    check_topk(topk)
    return torch.ops.megatron_mla.select_topk(scores, starts, ends, topk)
