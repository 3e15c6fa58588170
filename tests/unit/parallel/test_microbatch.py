"""Rows of a micro-batch: every query sees exactly its causal keys, whatever the split."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.parallel.collectives import RowMove, move_rows
from megatron_mla.parallel.layout import rows_of_rank
from megatron_mla.parallel.microbatch import rows_of_microbatch
from tests.helpers.layers import packed

CPU = torch.device("cpu")


def rows_of(local, rank=0, size=1, tp_chunks=1, params=None):
    return rows_of_microbatch(
        local, cp_rank=rank, cp_size=size, tp_chunks=tp_chunks, device=CPU, packed_seq_params=params
    )


def visible(rows) -> torch.Tensor:
    """[L, T] mask that the causal blocks describe."""
    mask = torch.zeros(rows.num_local, rows.num_global, dtype=torch.bool)
    for q0, q1, k0, k1 in rows.causal_blocks():
        block = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        assert not mask[q0:q1].any(), "a row is in one block only"
        mask[q0:q1, k0:k1] = block
    return mask


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", [None, [16, 0, 8, 24], [8], [0, 8, 0], []], ids=str)
def test_blocks_are_the_causal_mask_of_each_sequence(cp, lengths) -> None:
    total = 32 if lengths is None else sum(lengths) + 8
    token = torch.arange(total)
    if lengths is None:
        sequence, cu = torch.zeros(total), None
    else:
        params = packed(lengths, device=CPU)
        cu = params.cu_seqlens_q
        sequence = torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)
        )
        sequence = torch.cat((sequence.float(), torch.arange(-8, 0).float()))  # tail: alone
    allowed = (sequence[:, None] == sequence[None]) & (token[:, None] >= token[None])
    if lengths is not None:
        allowed[sum(lengths) :] = False  # tail rows attend to nothing
    for rank in range(cp):
        params = None if lengths is None else packed(lengths, device=CPU)
        rows = rows_of(total // cp, rank, cp, params=params)
        mine = rows_of_rank(total, rank, cp, cu)
        assert torch.equal(visible(rows), allowed[mine])


def test_plan_batches_short_sequences_of_like_length_and_leaves_the_rest() -> None:
    lengths = [100, 2000, 0, 128, 3, 65, 2000, 700]
    plan = rows_of(sum(lengths) + 5, params=packed(lengths, device=CPU)).plan()
    assert plan.batches == [(3, 128)]  # 100, 128 and 65; 3 and 700 have no like
    assert [b.q_end - b.q_start for b in plan.blocks] == [2000, 3, 2000, 700]
    total = sum(lengths)
    assert torch.equal(plan.queries.read, plan.keys.read)
    # The second sequence starts behind the padded first.
    assert plan.queries.read.tolist()[:100] == list(range(100))
    assert plan.queries.blank.tolist()[:28] == list(range(100, 128))
    assert plan.queries.read.tolist()[128:256] == list(range(2100, 2228))
    # There and back again; the tail is of no sequence.
    rows = torch.arange(1.0, total + 6)
    worked = torch.cat([move_rows(rows, plan.queries)] + [rows[b[0] : b[1]] for b in plan.blocks])
    assert move_rows(worked, plan.results).tolist() == [*range(1, total + 1), *[0] * 5]


@pytest.mark.parametrize("blank", [False, True], ids=["whole", "blank"])
def test_moved_rows_and_their_gradients(blank) -> None:
    source = torch.tensor([4, 0, 2] if blank else [2, 0, 1])
    target = torch.tensor([1, 5, 0] if blank else [1, 2, 0])
    num_source, num_target = (6, 7) if blank else (3, 3)
    t = torch.randn(num_source, 2, dtype=torch.float64, requires_grad=True)
    move = RowMove.of(source, target, num_source, num_target)
    want = torch.zeros(num_target, 2, dtype=torch.float64).index_copy(0, target, t[source].detach())
    assert torch.equal(move_rows(t, move), want)
    assert torch.autograd.gradcheck(lambda t: move_rows(t, move), t)
    none = RowMove.of(*(torch.zeros(0, dtype=torch.int64),) * 2, 0, 2)
    assert move_rows(t[:0], none).tolist() == [[0, 0], [0, 0]]


def test_plan_without_likes_is_the_blocks() -> None:
    rows = rows_of(48, params=packed([16, 32], device=CPU))
    assert rows.plan().blocks == rows.causal_blocks() and not rows.plan().batches
    assert rows_of(48).plan().blocks == rows_of(48).causal_blocks()


def test_packed_rows_are_built_once_per_micro_batch() -> None:
    params = packed([4, 4], device=CPU)
    rows = rows_of(8, params=params)
    assert rows_of(8, params=params) is rows
    assert rows_of(12, params=params) is not rows  # another length is another micro-batch
    assert rows_of(8, params=packed([2, 6], device=CPU)) is not rows


def test_params_that_are_filled_anew_are_another_micro_batch() -> None:
    params = packed([4, 4], device=CPU)
    assert rows_of(8, params=params).causal_blocks()[0].q_end == 4
    params.cu_seqlens_q.copy_(torch.tensor([0, 2, 8]))  # one tensor for queries and keys
    assert rows_of(8, params=params).causal_blocks()[0].q_end == 2
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 6, 8])
    assert rows_of(8, params=params).causal_blocks()[0].q_end == 6
    assert rows_of(8, params=params).positions.tolist() == [*range(6), 0, 1]


def test_padded_lengths_say_where_rows_lie() -> None:
    rows = rows_of(12, params=packed([3, 5], padded=[4, 8], device=CPU))
    assert rows.positions.tolist() == [*range(4), *range(8)]


def test_other_formats_than_thd_are_not_packed() -> None:
    params = packed([4, 4], device=CPU)
    params.qkv_format = "sbhd"
    assert not rows_of(8, params=params).packed


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2"):
        rows_of(6, 0, 2, params=packed([5, 7], device=CPU)).causal_blocks()
    with pytest.raises(ValueError, match="cu_seqlens"):
        rows_of(8, params=packed([4, 8], device=CPU)).causal_blocks()
    for other in ([0, 8], [0, 2, 8]):
        params = packed([4, 4], device=CPU)
        params.cu_seqlens_kv = torch.tensor(other)
        with pytest.raises(ValueError, match="cu_seqlens_kv"):
            rows_of(8, params=params).causal_blocks()
    params = packed([4, 4], device=CPU)
    params.cu_seqlens_q = params.cu_seqlens_kv = None
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        rows_of(8, params=params)
    params = packed([4, 4], device=CPU)
    params.local_cp_size = 2
    with pytest.raises(ValueError, match="local_cp_size"):
        rows_of(8, params=params)
