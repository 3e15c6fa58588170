"""Rows shared by ranks: who owns what, how partial results merge, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_mla.inference import dcp
from megatron_mla.inference.attention import attend_to_rows
from tests.helpers.close import assert_close

SPLITS = [(world, interleave) for world in (1, 2, 3, 4) for interleave in (1, 3, 4)]
LENGTHS = range(71)
by_split = pytest.mark.parametrize(("world", "interleave"), SPLITS)


def deal(length: int, world: int, interleave: int) -> list[list[int]]:
    """Positions of every rank, dealt out by hand like cards."""
    hands: list[list[int]] = [[] for _ in range(world)]
    turn = 0
    for position in range(length):
        hands[turn].append(position)
        if position % interleave == interleave - 1:
            turn = (turn + 1) % world
    return hands


@by_split
def test_ownership_is_that_of_dealing(world, interleave):
    for length in LENGTHS:
        for rank, hand in enumerate(deal(length, world, interleave)):
            assert dcp.owned_count(length, rank, world, interleave) == len(hand)
            got = dcp.owned_positions(length, rank, world, interleave)
            assert got.dtype == torch.int32
            assert got.tolist() == hand
            for row, position in enumerate(hand):
                assert dcp.owner(position, world, interleave) == rank
                assert dcp.local_row(position, world, interleave) == row
                assert dcp.global_position(row, rank, world, interleave) == position


@by_split
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_are_counted_like_numbers(world, interleave, dtype):
    numbers = torch.arange(71, dtype=dtype)
    ranks = torch.arange(world, dtype=dtype)[:, None]
    for function in (dcp.owner, dcp.local_row):
        got = function(numbers, world, interleave)
        assert got.dtype == dtype
        assert got.tolist() == [function(n, world, interleave) for n in LENGTHS]
    counts = dcp.owned_count(numbers, ranks, world, interleave)
    assert counts.dtype == dtype
    assert counts.tolist() == [
        [dcp.owned_count(n, rank, world, interleave) for n in LENGTHS] for rank in range(world)
    ]
    assert counts.sum(0).tolist() == list(LENGTHS)


@by_split
def test_ranges_are_counted(world, interleave):
    hands = deal(70, world, interleave)
    for start in range(0, 71, 3):
        for end in range(start, 71):
            got = [
                dcp.owned_range_count(start, end, rank, world, interleave) for rank in range(world)
            ]
            assert got == [sum(start <= p < end for p in hand) for hand in hands]


@by_split
def test_every_row_knows_its_position(world, interleave):
    lengths = [0, 1, 2, 5, 37, 64]
    rows = dcp.owned_count(64, 0, world, interleave)
    for rank in range(world):
        for given in (lengths, torch.tensor(lengths)):
            got = dcp.key_positions(given, rows, rank, world, interleave)
            assert got.dtype == torch.int32
            want = [deal(length, world, interleave)[rank] for length in lengths]
            assert got.tolist() == [hand + [-1] * (rows - len(hand)) for hand in want]


@by_split
def test_owned_indices_keep_their_order(world, interleave):
    generator = torch.Generator().manual_seed(3)
    indices = torch.stack([torch.randperm(70, generator=generator)[:24] for _ in range(6)])
    indices = indices.masked_fill(torch.rand(6, 24, generator=generator) < 0.2, -1)
    indices[5] = -1
    indices = indices.view(2, 3, 24)
    for rank in range(world):
        for dtype in (torch.int32, torch.int64):
            rows, counts = dcp.owned_indices(indices.to(dtype), rank, world, interleave)
            assert rows.dtype == dtype and counts.dtype == torch.int32
            assert rows.shape == indices.shape and counts.shape == (2, 3)
            hand = deal(70, world, interleave)[rank]
            for got, count, chosen in zip(
                rows.view(6, -1).tolist(),
                counts.flatten().tolist(),
                indices.view(6, -1).tolist(),
                strict=True,
            ):
                want = [hand.index(p) for p in chosen if p in hand]
                assert count == len(want)
                assert got == want + [-1] * (24 - len(want))


def test_a_rank_may_own_no_index():
    rows, counts = dcp.owned_indices(torch.tensor([[0, 8, 4, -1, 12]]), 1, 4, 1)
    assert rows.tolist() == [[-1] * 5] and counts.tolist() == [0]


# Merge ------------------------------------------------------------------------------------------


def parts_of_attention(world, interleave, length, *, base="e", dtype=torch.float64):
    """Attention over each rank's keys and over all: outs [W, s, H, C], lses, whole out and lse.

    Even tokens lie along the queries and odd ones against them, so that the ranks' weights are far
    from 1 / W and differ from head to head.
    """
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 3, 4, 12, generator=generator, dtype=torch.float64)
    along = q.sum((0, 1, 2)) / 6
    sign = 1 - 2 * (torch.arange(length) % 2)
    keys = torch.randn(1, length, 12, generator=generator, dtype=torch.float64)
    keys = (keys * 0.5 + sign[None, :, None] * along).to(dtype)
    where = torch.full((1, 3), length - 1)
    whole = attend_to_rows(q.to(dtype), keys, where, torch.arange(length)[None], scale=0.7, v_dim=8)
    outs, lses = [], []
    for rank in range(world):
        mine = dcp.owned_positions(length, rank, world, interleave).long()
        out, lse = attend_to_rows(q.to(dtype), keys[:, mine], where, mine[None], scale=0.7, v_dim=8)
        outs.append(out)
        lses.append(lse / math.log(2) if base == "2" else lse)
    return torch.stack(outs), torch.stack(lses), *whole


@by_split
@pytest.mark.parametrize("length", [1, 2, 5, 37])
@pytest.mark.parametrize("base", ["e", "2"])
def test_parts_merge_to_the_whole(world, interleave, length, base):
    outs, lses, out, lse = parts_of_attention(world, interleave, length, base=base)
    got, level = dcp.merge_partials(outs, lses, lse_base=base)
    assert got.dtype == level.dtype == torch.float64
    assert_close("out", got, out)
    assert_close("lse", level * math.log(2) if base == "2" else level, lse)


@pytest.mark.parametrize(("base", "wrong"), [("e", "2"), ("2", "e")])
def test_a_wrong_base_would_be_noticed(base, wrong):
    outs, lses, out, _ = parts_of_attention(2, 1, 37, base=base)
    spread = (lses[0] - lses[1]).abs()
    assert spread.max() > 2, "the ranks' weights are too even to tell bases apart"
    assert (dcp.merge_partials(outs, lses, lse_base=wrong)[0] - out).abs().max() > 1e-2


@pytest.mark.parametrize("level", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("base", ["e", "2"])
def test_an_empty_rank_may_hold_anything(level, base):
    outs, lses, out, lse = parts_of_attention(2, 4, 37, base=base)
    outs = torch.cat([outs, torch.full_like(outs[:1], math.nan)])
    lses = torch.cat([lses, torch.full_like(lses[:1], level)])
    got, total = dcp.merge_partials(outs, lses, lse_base=base)
    assert_close("out", got, out)
    assert_close("lse", total * math.log(2) if base == "2" else total, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_no_key_anywhere_is_zero(dtype):
    outs = torch.full((3, 2, 5), math.nan, dtype=dtype)
    lses = torch.tensor([[-math.inf, 1.0], [math.nan, -math.inf], [math.inf, 2.0]])
    outs[0, 1], outs[2, 1] = 1.0, 3.0
    got, total = dcp.merge_partials(outs, lses)
    assert got.dtype == dtype and total.dtype == torch.float32
    assert got[0].tolist() == [0.0] * 5 and total[0] == -math.inf
    share = 1 / (1 + math.e)
    assert_close("out", got[1], torch.full((5,), share + 3 * (1 - share), dtype=torch.float64))


def test_levels_far_from_zero_do_not_overflow():
    outs = torch.tensor([[1.0], [3.0]])
    for level in (-5000.0, 5000.0):
        for base in dcp.LSE_BASES:
            got, total = dcp.merge_partials(outs, torch.full((2,), level), lse_base=base)
            assert_close("out", got, torch.tensor([2.0]))
            assert total == pytest.approx(level + (1 if base == "2" else math.log(2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_narrow_parts_are_wide(dtype):
    """Levels that differ in digits which bf16 does not have."""
    generator = torch.Generator().manual_seed(4)
    outs = torch.randn(8, 6, 5, generator=generator).to(dtype)
    lses = 100 + torch.rand(8, 6, generator=generator)
    got, level = dcp.merge_partials(outs, lses)
    want, total = dcp.merge_partials(outs.double(), lses.double())
    assert got.dtype == dtype and level.dtype == torch.float32
    assert_close("out", got, want)
    assert_close("lse", level, total)


# Cache rows -------------------------------------------------------------------------------------


@by_split
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_stored_by_their_owner_alone(world, interleave, dtype):
    lengths, padded = (9, 0, 37), 40  # tokens of a sequence; rows of the pass
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(padded, 3, 5, generator=generator).to(dtype)
    rows = dcp.owned_count(padded, 0, world, interleave)
    number = torch.arange(padded, dtype=torch.int32)[:, None]
    for rank in range(world):
        memory = torch.full((3, rows, 5), math.nan).to(dtype)
        # In two passes; the second starts inside of what a rank owns in a row.
        for start, end in ((0, 6), (6, padded)):
            positions = torch.where(number < torch.tensor(lengths), number, -1)[start:end]
            dcp.write_owned(memory, values[start:end], positions, rank, world, interleave)
        for sequence, length in enumerate(lengths):
            hand = deal(length, world, interleave)[rank]
            got = memory[sequence].float()
            assert got[: len(hand)].equal(values[hand, sequence].float())
            assert got[len(hand) :].isnan().all()


def test_writing_takes_part_of_a_larger_memory_and_no_gradient():
    memory, values = torch.zeros(4, 2, 3), torch.ones(1, 2, 3, requires_grad=True)
    dcp.write_owned(memory[:2], values, torch.tensor([[2, 3]]), 0, 2, 1)
    assert not memory.requires_grad
    assert memory.sum() == 3 and memory[0, 1].tolist() == [1.0] * 3
    dcp.write_owned(memory[:2], values[:0], torch.zeros(0, 2, dtype=torch.int32), 0, 2, 1)
    assert memory.sum() == 3


@pytest.mark.parametrize(
    ("memory", "values", "positions", "message"),
    [
        pytest.param((2, 4, 3), (5, 2, 4), (5, 2), r"values must be \[s, B, E\]", id="channels"),
        pytest.param((2, 4, 3), (5, 2, 3), (4, 2), r"values must be \[s, B, E\]", id="rows"),
        pytest.param((3, 4, 3), (5, 2, 3), (5, 2), r"pass memory\[:B\]", id="batch"),
        pytest.param((2, 0, 3), (5, 2, 3), (5, 2), "memory must have rows", id="no-rows"),
    ],
)
def test_writes_that_do_not_fit_are_refused(memory, values, positions, message):
    where = torch.zeros(positions, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        dcp.write_owned(torch.zeros(memory), torch.zeros(values), where, 0, 2, 1)


def test_writes_do_not_cast():
    memory = torch.zeros(1, 4, 3, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="values must have the dtype of memory.*clamp"):
        dcp.write_owned(memory, torch.zeros(1, 1, 3), torch.zeros(1, 1).int(), 0, 1, 1)


# The class --------------------------------------------------------------------------------------


@pytest.fixture
def alone(default_group) -> dcp.DecodeContextParallel:
    """A group of one rank."""
    group = dist.group.WORLD
    if dist.get_world_size() > 1:
        pytest.skip("is about one rank; tests/functional/test_dcp.py has more")
    return dcp.DecodeContextParallel(group, interleave=4)


@pytest.mark.parametrize("comm", dcp.COMMS)
def test_one_rank_is_the_identity(alone, comm):
    alone.comm = comm
    q, lse = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 4)
    assert (alone.rank, alone.size, alone.rows_needed(17)) == (0, 1, 17)
    assert alone.gather_queries(q) is q
    out, level = alone.merge(q, lse)
    assert out is q and level is lse
    memory = torch.full((2, 17, 3), math.nan)
    values = torch.randn(17, 2, 3)
    alone.write_owned(memory, values, torch.arange(17)[:, None].expand(17, 2))
    assert memory.equal(values.transpose(0, 1))
    assert alone.gather_rows(memory, [17, 5])[0].equal(memory[0])
    assert alone.key_positions([3, 1], 4).tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]
    rows, counts = alone.owned_indices(torch.tensor([4, -1, 2]))
    assert rows.tolist() == [4, 2, -1] and counts == 2


@by_split
def test_rows_needed_are_the_most_of_any(alone, world, interleave):
    alone.size, alone.interleave = world, interleave
    for length in LENGTHS:
        most = max(len(hand) for hand in deal(length, world, interleave))
        assert alone.rows_needed(length) == most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"group": None}, "group must be a .*ProcessGroup.*new_subgroups", id="none"),
        pytest.param({"group": 4}, "group must be a .*ProcessGroup", id="size"),
        pytest.param({"interleave": 0}, "interleave must be .*at least 1, got 0", id="zero"),
        pytest.param({"interleave": -2}, "interleave must be .*at least 1, got -2", id="negative"),
        pytest.param({"interleave": 1.0}, "interleave must be an integer", id="float"),
        pytest.param({"interleave": True}, "interleave must be an integer", id="bool"),
        pytest.param({"comm": "ring"}, r"comm must be one of \('ag_rs', 'a2a'\)", id="comm"),
    ],
)
def test_bad_options_are_refused(default_group, options, message):
    with pytest.raises(ValueError, match=message):
        dcp.DecodeContextParallel(**{"group": dist.group.WORLD} | options)


@pytest.mark.parametrize("ranks", [[0, 1, 3], [2, 1, 0], [0, 2, 1, 3]])
def test_ranks_that_are_no_neighbours_are_refused(default_group, monkeypatch, ranks):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    with pytest.raises(ValueError, match="group must be consecutive"):
        dcp.DecodeContextParallel(dist.group.WORLD)


@pytest.mark.parametrize(
    ("out", "lse", "base", "message"),
    [
        pytest.param((2, 1, 3, 4), (2, 1, 3), "e", "multiple of 2 heads", id="heads"),
        pytest.param((2, 4, 4), (2, 4), "e", r"out must be \[B, s, heads, C\]", id="dimensions"),
        pytest.param((2, 1, 4, 4), (2, 4, 1), "e", "lse must be of the shape", id="shape"),
        pytest.param((2, 1, 4, 4), (2, 1, 4), "10", "lse_base must be one of", id="base"),
        pytest.param((2, 1, 4, 4), (2, 1, 4), 2, "lse_base must be one of", id="base-number"),
    ],
)
def test_partial_results_that_do_not_fit_are_refused(alone, out, lse, base, message):
    alone.size = 2
    with pytest.raises(ValueError, match=message):
        alone.merge(torch.zeros(out), torch.zeros(lse), lse_base=base)


@pytest.mark.parametrize(
    ("out", "lse"),
    [(torch.float8_e4m3fn, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_partial_results_of_odd_dtypes_are_refused(out, lse):
    with pytest.raises(ValueError, match="out must be one of .* cast them"):
        dcp.merge_partials(torch.zeros(2, 3).to(out), torch.zeros(2).to(lse))


def test_queries_without_heads_are_refused(alone):
    with pytest.raises(ValueError, match=r"q must be \[B, s, h, E\]"):
        alone.gather_queries(torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("lengths", "starts", "message"),
    [
        pytest.param([3], None, "lengths and starts must be 2 numbers", id="batch"),
        pytest.param([3, 4], [0], "lengths and starts must be 2 numbers", id="starts"),
        pytest.param([3, 4], [0, 5], "0 <= start <= length", id="order"),
        pytest.param([3, 4], [-1, 0], "0 <= start <= length", id="negative"),
        pytest.param([3, 9], None, "memory must hold every sequence, got 4 rows", id="rows"),
    ],
)
def test_prefixes_that_do_not_fit_are_refused(alone, lengths, starts, message):
    alone.size, alone.interleave = 2, 1
    with pytest.raises(ValueError, match=message):
        alone.gather_rows(torch.zeros(2, 4, 3), lengths, starts)


def test_nothing_to_gather(alone):
    assert alone.gather_rows(torch.zeros(2, 4, 3), [0, 0]).shape == (2, 0, 3)
    assert alone.gather_rows(torch.zeros(0, 4, 3), []).shape == (0, 0, 3)
    assert alone.gather_rows(torch.zeros(2, 4, 3), [3, 2], [3, 2]).shape == (2, 0, 3)
