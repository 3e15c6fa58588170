"""Samples are (seed, index) alone, ranks share them exactly, packing keeps documents apart."""

import numpy as np
import pytest
import torch

from megatron_mla.parallel.layout import rows_of_rank
from megatron_mla.recipe.batches import Batches, Samples, Share, packed_sample
from megatron_mla.recipe.text import Part, open_stream

CPU = torch.device("cpu")


class Numbers:
    """A stream whose token at place i is i, with documents of growing length."""

    name = "numbers"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.starts = np.cumsum([0, *range(3, 40)])
        self.starts = self.starts[self.starts < num_tokens]

    def read(self, start: int, length: int) -> np.ndarray:
        return np.arange(start, start + length, dtype=np.int64)


def samples(seq_length=16, *, seed=1, shuffle=True, num_tokens=500):
    part = Part(stream=Numbers(num_tokens), start=20, end=num_tokens)
    return Samples(part, seq_length, seed=seed, shuffle=shuffle)


def batches(share=None, *, packing=False, micro_batch_size=2, **kwargs):
    return Batches(
        samples(**kwargs),
        share or Share(),
        micro_batch_size=micro_batch_size,
        vocab_size=1000,
        packing=packing,
        device=CPU,
    )


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_an_epoch_reads_every_window_once_and_the_next_one_elsewhere():
    source = samples()
    epochs = [
        sorted(source.start_of(i) for i in range(e * source.per_epoch, (e + 1) * source.per_epoch))
        for e in range(3)
    ]
    for starts in epochs:
        assert np.all(np.diff(starts) == 16)
        assert starts[0] >= 20 and starts[-1] + 17 <= 500
    assert len({starts[0] for starts in epochs}) > 1
    assert [source.start_of(i) for i in range(29)] != sorted(source.start_of(i) for i in range(29))


def test_held_out_windows_are_the_same_every_time():
    source = samples(shuffle=False)
    starts = [source.start_of(i) for i in range(2 * source.per_epoch)]
    assert starts[: source.per_epoch] == starts[source.per_epoch :]
    assert starts[:3] == [20, 36, 52]


def test_position_is_seed_and_index():
    straight = take(batches().from_sample(0), 40)
    resumed = take(batches().from_sample(30), 5)
    for got, expected in zip(resumed, straight[15:20], strict=True):
        assert torch.equal(got.tokens, expected.tokens)
    other = next(batches(seed=2).from_sample(0))
    assert not torch.equal(other.tokens, straight[0].tokens)


def test_labels_are_the_next_tokens():
    batch = next(batches().from_sample(0))
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.loss_mask.sum() == batch.tokens.numel() == 32
    assert batch.packed is None


def test_data_parallel_ranks_share_the_samples_of_one():
    whole = torch.cat([b.tokens for b in take(batches().from_sample(8), 4)])
    shared = [
        [b.tokens for b in take(batches(Share(dp_rank=rank, dp_size=2)).from_sample(8), 2)]
        for rank in (0, 1)
    ]
    assert torch.equal(torch.cat([t for pair in zip(*shared, strict=True) for t in pair]), whole)


@pytest.mark.parametrize("packing", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_hold_the_rows_of_one(packing, cp_size):
    def batch(rank, size):
        share = Share(cp_rank=rank, cp_size=size, pad_multiple=2 * cp_size)
        return next(batches(share, packing=packing).from_sample(6))

    whole = batch(0, 1)
    cu = whole.packed.cu_seqlens_q_padded if packing else None
    for rank in range(cp_size):
        part = batch(rank, cp_size)
        rows = rows_of_rank(whole.tokens.shape[1], rank, cp_size, cu)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, rows]), name
        if packing:
            assert torch.equal(part.packed.cu_seqlens_q_padded, cu)


def test_packed_sample_pads_and_masks():
    window = np.arange(100, 117)
    tokens, labels, mask, lengths, padded = packed_sample(window, np.array([3, 8]), 4)
    assert lengths == [3, 5, 4] and padded == [4, 8, 4]
    assert tokens.tolist() == [100, 101, 102, 0, *range(103, 108), 0, 0, 0, *range(108, 112)]
    assert labels[:3].tolist() == [101, 102, 103] and labels[12:].tolist() == [109, 110, 111, 112]
    # The last token of a whole document predicts nothing; the one cut by the end of room does.
    assert mask.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]


def test_packed_sample_ends_with_a_document():
    tokens, _, mask, lengths, padded = packed_sample(np.arange(9), np.array([8]), 2)
    assert lengths == padded == [8]
    assert tokens.tolist() == list(range(8)) and mask.tolist() == [1] * 7 + [0]


def test_packed_batch_describes_its_sequences():
    batch = next(batches(Share(pad_multiple=4), packing=True, micro_batch_size=3).from_sample(0))
    packed = batch.packed
    assert packed.qkv_format == "thd" and batch.tokens.shape == (1, 48)
    cu, cu_padded = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_q_padded.tolist()
    assert cu_padded[-1] == 48 and len(cu) == len(cu_padded) > 4
    assert packed.max_seqlen_q == max(np.diff(cu_padded))
    lengths, padded = np.diff(cu), np.diff(cu_padded)
    assert np.all(padded % 4 == 0) and np.all(padded - lengths < 4) and np.all(lengths > 0)
    for start, length in zip(cu_padded, lengths, strict=False):
        own = batch.tokens[0, start : start + length]
        assert torch.equal(own, own[0] + torch.arange(length))  # one document, in order
        assert batch.position_ids[0, start] == 0
        assert torch.all(batch.loss_mask[0, start : start + length - 1] == 1)


def test_packed_documents_of_the_default_text_are_unequal():
    stream = open_stream(None, 256)
    source = Samples(Part(stream=stream, start=0, end=stream.num_tokens), 256, seed=1, shuffle=True)
    lengths = {
        length
        for index in range(20)
        for length in packed_sample(source.window(index), source.boundaries(index), 4)[3]
    }
    assert len(lengths) > 20


def test_token_outside_the_vocabulary_is_refused():
    source = batches()
    source.vocab_size = 30
    with pytest.raises(ValueError, match=r"outside data\.vocab_size = 30; set --vocab-size"):
        next(source.from_sample(0))
