"""layout.py against loops over chunks that nobody has to think about."""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_mla.parallel.layout import (
    check_cu_seqlens,
    check_divisible,
    gather_order,
    padding_multiple,
    rows_of_rank,
    sbhd_positions,
    thd_positions,
    thd_rows,
)

CP_SIZES = (1, 2, 4)
INDEX_DTYPES = [pytest.param(torch.int32, id="int32"), pytest.param(torch.int64, id="int64")]


# --- the oracle: cut every sequence in 2 * cp_size chunks and deal them out ---


def zigzag(length: int, cp_rank: int, cp_size: int) -> list[int]:
    if cp_size == 1:
        return list(range(length))
    size = length // (2 * cp_size)
    chunks = [list(range(c * size, (c + 1) * size)) for c in range(2 * cp_size)]
    return chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]


def packed_rows(
    lengths: list[int], tail: int, cp_rank: int, cp_size: int
) -> list[tuple[int, int, int]]:
    """(sequence, position, token) of every row; ``tail`` rows per rank belong to no sequence."""
    rows, start = [], 0
    for sequence, length in enumerate(lengths):
        rows += [(sequence, p, start + p) for p in zigzag(length, cp_rank, cp_size)]
        start += length
    return rows + [(len(lengths), 0, start + cp_rank * tail + i) for i in range(tail)]


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@st.composite
def packed_batches(draw) -> tuple[list[int], int, int, torch.dtype]:
    """Lengths that every cp rank can cut (zero among them), tail rows per rank, cp size, dtype."""
    cp_size = draw(st.sampled_from(CP_SIZES))
    unit = 2 * cp_size if cp_size > 1 else 1
    lengths = draw(st.lists(st.integers(0, 5).map(lambda n: n * unit), max_size=6))
    tail = draw(st.integers(0, 7))
    return lengths, tail, cp_size, draw(st.sampled_from([torch.int32, torch.int64]))


# --- unpacked ---


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("offset", [0, 5])
def test_sbhd_positions_match_the_loop(cp_size, chunk, offset):
    length = chunk * 2 * cp_size
    for rank in range(cp_size):
        got = sbhd_positions(length // cp_size, rank, cp_size, offset=offset)
        assert got.dtype == torch.int32
        assert got.tolist() == [p + offset for p in zigzag(length, rank, cp_size)]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_sbhd_positions_without_cp_take_any_length(length):
    assert sbhd_positions(length).tolist() == list(range(length))


# --- packed ---


@given(packed_batches())
@example(([], 3, 2, torch.int32))
@example(([0, 0, 4, 0], 0, 2, torch.int64))
@example(([0], 1, 4, torch.int32))
def test_thd_rows_match_the_loop(batch):
    lengths, tail, cp_size, dtype = batch
    local = sum(lengths) // cp_size + tail
    for rank in range(cp_size):
        sequence, position, token = thd_rows(cumulative(lengths, dtype), local, rank, cp_size)
        expected = packed_rows(lengths, tail, rank, cp_size)
        got = list(zip(sequence.tolist(), position.tolist(), token.tolist(), strict=True))
        assert got == expected
        assert (sequence.dtype, position.dtype, token.dtype) == (
            torch.int64,
            torch.int32,
            torch.int64,
        )
        again = thd_positions(cumulative(lengths, dtype), local, rank, cp_size)
        assert again.dtype == torch.int32 and torch.equal(again, position)


@given(packed_batches())
def test_ranks_partition_the_packed_rows(batch):
    lengths, tail, cp_size, dtype = batch
    total = sum(lengths) + tail * cp_size
    rows = [
        rows_of_rank(total, rank, cp_size, cumulative(lengths, dtype)) for rank in range(cp_size)
    ]
    assert all(r.dtype == torch.int64 and r.numel() == total // cp_size for r in rows)
    assert sorted(torch.cat(rows).tolist()) == list(range(total))


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_ranks_partition_the_unpacked_rows(cp_size):
    rows = [rows_of_rank(24, rank, cp_size) for rank in range(cp_size)]
    assert [r.tolist() for r in rows] == [zigzag(24, rank, cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(rows).tolist()) == list(range(24))


@given(packed_batches(), st.integers(0, 5))
def test_past_the_end_of_the_last_sequence_nothing_reads_the_table_further(batch, extra):
    """B12: a buffer longer than cu_seqlens[-1] stays inside the rows of the longest sequence."""
    lengths, tail, cp_size, dtype = batch
    local = sum(lengths) // cp_size + tail + extra
    for rank in range(cp_size):
        position = thd_positions(cumulative(lengths, dtype), local, rank, cp_size)
        assert position.numel() == local
        assert (position >= 0).all()
        assert (position < max([1, *lengths])).all()


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_tail_of_the_published_case(dtype):
    """B12 as it was found: 136 rows, the last sequence ends at 128."""
    cu = torch.tensor([0, 27, 54, 99, 128], dtype=dtype)
    sequence, position, token = thd_rows(cu, 136)
    assert position[120:].tolist() == [*range(21, 29), *[0] * 8]
    assert sequence[120:].tolist() == [3] * 8 + [4] * 8
    assert token.tolist() == list(range(136))


def test_longer_table_than_the_sequence_changes_no_position():
    """B14: positions say which rows of a table are read; they know nothing of its length."""
    table = torch.arange(16)
    ranks = [table[sbhd_positions(4, rank, 2).long()] for rank in range(2)]
    assert [r.tolist() for r in ranks] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert torch.cat(ranks)[gather_order(4, 2)].tolist() == list(range(8))


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize(
    ("rank", "packed", "restarting"),
    [
        pytest.param(0, [0, 3, 4, 7], [0, 3, 0, 3], id="rank0"),
        pytest.param(1, [1, 2, 5, 6], [1, 2, 1, 2], id="rank1"),
    ],
)
def test_packed_and_restarting_tables_are_told_apart(dtype, rank, packed, restarting):
    """B23: `token` indexes a table over the whole packed batch, `position` one per sequence."""
    _, position, token = thd_rows(torch.tensor([0, 4, 8], dtype=dtype), 4, rank, 2)
    assert token.tolist() == packed
    assert position.tolist() == restarting


@pytest.mark.parametrize("cp_size", [1, 2])
def test_tiny_odd_lengths_are_cut_by_the_padded_table(cp_size):
    """B26: lengths [5, 3, 1] padded to multiples of 4; every padded row has a place."""
    lengths = [8, 4, 4]
    assert all(n % padding_multiple(1, 2, False) == 0 for n in lengths)
    for rank in range(cp_size):
        rows = thd_rows(cumulative(lengths), 16 // cp_size, rank, cp_size)
        got = list(zip(*(r.tolist() for r in rows), strict=True))
        assert got == packed_rows(lengths, 0, rank, cp_size)


# --- gather ---


@given(packed_batches())
@example(([], 3, 2, torch.int32))
def test_gather_order_puts_packed_rows_back(batch):
    lengths, tail, cp_size, dtype = batch
    cu = cumulative(lengths, dtype)
    local = sum(lengths) // cp_size + tail
    gathered = torch.cat([rows_of_rank(local * cp_size, r, cp_size, cu) for r in range(cp_size)])
    order = gather_order(local, cp_size, cu)
    assert order.dtype == torch.int64
    assert gathered[order].tolist() == list(range(local * cp_size))


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("tp_chunks", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
def test_gather_order_of_sequence_parallel_parts(cp_size, tp_chunks, packed):
    # 12 rows on each rank; the gather over tp x cp comes tp-major.
    local = 12
    total = local * cp_size
    lengths = [2 * cp_size * n for n in (1, 0, 3, 2)] if packed else None
    cu = cumulative(lengths) if packed else None
    part = local // tp_chunks
    gathered = torch.cat(
        [
            rows_of_rank(total, rank, cp_size, cu)[tp * part : (tp + 1) * part]
            for tp in range(tp_chunks)
            for rank in range(cp_size)
        ]
    )
    order = gather_order(local, cp_size, cu, tp_chunks=tp_chunks)
    assert gathered[order].tolist() == list(range(total))


def test_gather_order_of_uncuttable_lengths_is_safe_to_index_with():
    # Their refusal comes with the first look at cu_seqlens on the host, after this.
    order = gather_order(6, 2, torch.tensor([0, 5, 12]))
    assert sorted(order.tolist()) == list(range(12))


def test_gather_order_names_rows_that_tp_cannot_share():
    with pytest.raises(ValueError, match=r"local_len must be a multiple of tp_chunks = 4, got 6"):
        gather_order(6, 2, tp_chunks=4)


# --- padding ---


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "tile", "expected"),
    [
        pytest.param(1, 1, False, 1, 1, id="one-rank"),
        pytest.param(2, 1, False, 1, 1, id="tp-alone-cuts-no-rows"),
        pytest.param(2, 1, True, 1, 2, id="tp2-sp"),
        pytest.param(1, 2, False, 1, 4, id="cp2"),
        pytest.param(2, 2, True, 1, 4, id="tp2-cp2-sp"),
        pytest.param(3, 2, True, 1, 12, id="tp3-cp2-sp"),
        pytest.param(8, 2, True, 1, 16, id="tp8-cp2-sp"),
        pytest.param(2, 3, True, 16, 48, id="fp8-tile"),
    ],
)
def test_padding_multiple(tp, cp, sequence_parallel, tile, expected):
    assert padding_multiple(tp, cp, sequence_parallel, tile=tile) == expected


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.sampled_from([1, 8, 16]), st.data())
def test_padded_batches_fit_every_cut(tp, cp, sequence_parallel, tile, data):
    """B27: one multiple serves the zigzag cut, sequence parallelism and the tile alike."""
    multiple = padding_multiple(tp, cp, sequence_parallel, tile=tile)
    wanted = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    lengths = [-(-n // multiple) * multiple for n in wanted]
    check_cu_seqlens(cumulative(lengths), cp, total=sum(lengths))
    for length in lengths:
        assert length % tile == 0
        rows = rows_of_rank(length, cp - 1, cp).numel()
        assert not sequence_parallel or rows % tp == 0


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.sampled_from([1, 8, 16]))
def test_padding_multiple_is_the_least(tp, cp, sequence_parallel, tile):
    def fits(length: int) -> bool:
        zigzag_fits = cp == 1 or length % (2 * cp) == 0
        shared_fits = not sequence_parallel or (length // cp) % tp == 0 and length % cp == 0
        return zigzag_fits and shared_fits and length % tile == 0

    least = next(n for n in range(1, 10_000) if fits(n))
    assert padding_multiple(tp, cp, sequence_parallel, tile=tile) == least


# --- refusals ---


def test_uncuttable_sequence_is_refused_by_name():
    message = r"seq_len must be a multiple of 2 \* context_parallel_size = 8, got 36; pad .* lower"
    with pytest.raises(ValueError, match=message):
        check_divisible(36, 4)
    with pytest.raises(ValueError, match=message):
        rows_of_rank(36, 0, 4)
    check_divisible(37, 1)


def test_odd_local_rows_are_refused():
    with pytest.raises(ValueError, match=r"rows per context-parallel rank must be even.* got 3"):
        sbhd_positions(3, 0, 2)


@pytest.mark.parametrize(
    ("cu_seqlens", "cp_size", "total", "message"),
    [
        pytest.param([0, 4, 10], 2, None, r"packed sequence 1 must be .* = 4, got 6", id="cut"),
        pytest.param([1, 5], 1, None, r"cu_seqlens must start at 0", id="start"),
        pytest.param([0, 5, 3], 1, None, r"cu_seqlens must start at 0 and never fall", id="falls"),
        pytest.param([0, 8], 1, 7, r"7 tokens .*cu_seqlens\[-1\] = 8", id="past-the-end"),
        pytest.param([0, 8], 2, 9, r"context_parallel_size = 2", id="odd-total"),
        pytest.param([], 1, None, r"cu_seqlens must be a 1-D int32 or int64", id="empty"),
        pytest.param([[0, 8]], 1, None, r"cu_seqlens must be a 1-D int32 or int64", id="2-d"),
        pytest.param(
            [0.0, 8.0], 1, None, r"cu_seqlens must be a 1-D int32 .* got torch.float32", id="float"
        ),
        pytest.param(
            [False, True], 1, None, r"cu_seqlens must be a 1-D int32 .* got torch.bool", id="bool"
        ),
    ],
)
def test_bad_cu_seqlens_are_refused_by_name(cu_seqlens, cp_size, total, message):
    tensor = torch.tensor(cu_seqlens)
    if not cu_seqlens:
        tensor = tensor.to(torch.int32)
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(tensor, cp_size, total)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_good_cu_seqlens_pass(dtype):
    check_cu_seqlens(cumulative([4, 0, 8], dtype), 2, total=14)
    check_cu_seqlens(cumulative([1, 0, 2], dtype), 1, total=3)
    check_cu_seqlens(cumulative([], dtype), 4)
