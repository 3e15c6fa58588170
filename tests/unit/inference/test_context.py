"""Where the tokens of a forward pass go, and what is refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_mla.inference.context import LatentInferenceContext, latent_context
from megatron_mla.inference.rows import read_flat, write_rows

CPU = torch.device("cpu")


def positions(step) -> list[list[int]]:
    """By sequence."""
    return step.positions.t().tolist()


def test_sequences_of_unequal_lengths_go_on_where_they_ended() -> None:
    context = LatentInferenceContext(3, 10)
    step = context.begin([3, 0, 2]).step(3, 3, CPU)
    assert step.is_first and step.longest == 3 and step.positions.dtype == torch.int32
    assert positions(step) == [[0, 1, 2], [-1, -1, -1], [0, 1, -1]]
    assert context.step(3, 3, CPU) is step
    context.advance()
    step = context.begin([1, 2, 0]).step(2, 3, CPU)
    assert not step.is_first
    assert (step.starts, step.ends) == ((3, 0, 2), (4, 2, 2))
    assert positions(step) == [[3, -1], [0, 1], [-1, -1]]
    assert step.key_positions().tolist() == [[0, 1, 2, 3], [0, 1, -1, -1], [0, 1, -1, -1]]
    row, sequence, position = step.tokens
    assert row.tolist() == [0, 1, 4]
    assert (sequence.tolist(), position.tolist()) == ([0, 1, 1], [3, 0, 1])
    assert step.rows.positions.tolist() == [3, 0, 0, 0, 1, 0]
    bounds = step.key_bounds(10)
    assert bounds.host.tolist() == [[0, 0, 10, 10, 20, 20], [4, 0, 11, 12, 20, 20]]
    assert bounds.num_rows == 3
    context.advance()
    # Without begin() every row belongs to every sequence.
    assert positions(context.step(1, 3, CPU)) == [[4], [2], [2]]


def test_fewer_sequences_than_the_cache_holds() -> None:
    context = LatentInferenceContext(4, 5)
    context.begin([2]).step(2, 1, CPU)
    context.advance()
    assert context.lengths == [2, 0, 0, 0]


def test_reset_forgets_sequences_and_memory() -> None:
    context = LatentInferenceContext(1, 4)
    context.memory(1, "state", (1, 2), torch.ones(1)).fill_(7)
    context.begin([4]).step(4, 1, CPU)
    context.advance()
    context.reset()
    assert context.step(1, 1, CPU).is_first
    assert not context.memory(1, "state", (1, 2), torch.ones(1)).any()


def test_memory_is_of_a_layer_and_a_name_and_no_inference_tensor() -> None:
    context = LatentInferenceContext(1, 4)
    like = torch.ones(1, dtype=torch.bfloat16)
    with torch.inference_mode():
        one = context.memory(1, "a", (2, 3), like)
        wide = context.memory(1, "b", (2, 3), like, torch.float32)
    assert not one.is_inference() and one.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert context.memory(1, "a", (2, 3), like) is one
    assert context.memory(2, "a", (2, 3), like) is not one


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda c: c.begin([1, -1]), "new_lengths must be 1 to 2 numbers"),
        (lambda c: c.begin([]), "new_lengths must be 1 to 2 numbers"),
        (lambda c: c.begin([1, 1, 1]), r"new_lengths must be 1 to 2 .*got \[1, 1, 1\]"),
        (lambda c: c.begin([3, 1]).step(2, 2, CPU), "new_lengths must describe the batch"),
        (lambda c: c.begin([1]).step(2, 2, CPU), "2 sequences of 2 rows, got .1.; call begin"),
        (lambda c: c.step(6, 2, CPU), "max_sequence_length must hold .* got 5 for 6 tokens"),
        (lambda c: c.advance(), "advance.. must follow a forward pass"),
        (lambda c: LatentInferenceContext(0, 5), "max_batch_size must be at least 1, got 0"),
        (lambda c: LatentInferenceContext(1, 0), "max_sequence_length must be at least 1"),
        (lambda c: LatentInferenceContext(1, 1, cache_dtype=torch.int8), "cache_dtype must be"),
    ],
)
def test_refusals_name_what_is_wrong(act, message) -> None:
    with pytest.raises(ValueError, match=message):
        act(LatentInferenceContext(2, 5))


def test_more_sequences_than_the_cache_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size must hold the batch, got 2 for 3"):
        LatentInferenceContext(2, 5).step(1, 3, CPU)


def test_a_driver_of_megatron_core_counts_all_sequences() -> None:
    context = LatentInferenceContext(2, 9)
    context.step(4, 2, CPU)
    context.increment_sequence_len_offset(4)
    assert context.lengths == [4, 4] and context.sequence_len_offset == 4
    assert positions(context.step(1, 2, CPU)) == [[4], [4]]
    context.begin([1, 0]).step(1, 2, CPU)
    context.advance()
    with pytest.raises(ValueError, match="sequence_len_offset must be of sequences .* advance"):
        context.increment_sequence_len_offset(1)


def test_static_context_has_one_cache_that_follows_its_offset() -> None:
    static = StaticInferenceContext(2, 9)
    cache = latent_context(static)
    assert latent_context(static) is cache
    memory = cache.memory(1, "state", (1,), torch.ones(1)).fill_(7)
    first = cache.step(3, 2, CPU)
    static.increment_sequence_len_offset(3)
    step = latent_context(static).step(3, 2, CPU)
    assert step is not first and step.starts == (3, 3) and memory.item() == 7
    static.reset()
    assert latent_context(static).step(3, 2, CPU).is_first and memory.item() == 0
    static.batch_size_offset = 1
    with pytest.raises(ValueError, match="batch_size_offset must be 0, got 1"):
        latent_context(static)


def test_dynamic_context_is_refused_with_a_way_out() -> None:
    class DynamicInferenceContext:
        pass

    with pytest.raises(ValueError, match=r"got DynamicInferenceContext, whose .*generate\.py"):
        latent_context(DynamicInferenceContext())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_written_at_their_positions_and_padding_is_not(dtype) -> None:
    context = LatentInferenceContext(3, 6)
    context.lengths = [2, 0, 1]
    step = context.begin([1, 2, 0]).step(2, 3, CPU)
    memory = torch.full((3, 6, 2), 5.0).to(dtype)
    rows = torch.arange(12.0).view(6, 2).requires_grad_()
    write_rows(memory, rows, step)
    want = torch.full((3, 6, 2), 5.0)
    want[0, 2], want[1, 0], want[1, 1] = rows[0], rows[1], rows[4]
    assert torch.equal(memory.float(), want) and not memory.requires_grad
    flat, stride = read_flat(memory, step, step.longest, torch.float32)
    assert stride == (6 if dtype == torch.float32 else 3)
    assert torch.equal(flat.view(3, stride, 2), want[:, :stride])


def test_fp8_saturates_and_keeps_nan() -> None:
    context = LatentInferenceContext(1, 4)
    step = context.step(4, 1, CPU)
    memory = torch.zeros(1, 4, 1, dtype=torch.float8_e4m3fn)
    write_rows(memory, torch.tensor([[1e4], [-1e4], [float("nan")], [0.3]]), step)
    got = memory.float().flatten()
    assert got[:2].tolist() == [448, -448] and got[2].isnan() and abs(got[3] - 0.3) < 0.02
