"""Chosen keys that travel with a forward pass: shared, recorded, replayed, never left behind."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention.index_sharing import (
    IndexBook,
    index_book_of,
    install_index_books,
    shares_indices,
    source_layer,
    with_index_book,
)
from megatron_mla.parallel.microbatch import rows_of_microbatch
from megatron_mla.specs import mla_block_spec
from tests.helpers.layers import (
    DSA,
    INDEXER,
    assert_close_answers,
    assert_same_bits,
    dense_twin,
    dsa_layer,
    hidden,
    packed,
    small_config,
    trained_gradients,
    without_indexer,
)

pytestmark = pytest.mark.usefixtures("single_rank")

layouts = pytest.mark.parametrize("lengths", [None, [10, 0, 1, 11]], ids=["sbhd", "thd"])
SHARED = {"num_layers": 2, "dsa_indexer_topk_freq": 2}


def solve(layer, lengths, given=None):
    """Output, input and weight gradients, and the keys that the layer has noted."""
    x, grad = (hidden(24, 1 if lengths else 2, seed) for seed in (0, 1))
    book = IndexBook(given=given or {})
    params = with_index_book(packed(lengths) if lengths else None, book)
    return trained_gradients(layer, x, grad, packed_seq_params=params), book.chosen


# --- which layer chooses ---


@pytest.mark.parametrize(
    ("freq", "offset", "sources"),
    [
        (4, 3, [1, 2, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11]),
        (4, 0, [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]),
        (4, 1, [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]),
        (3, 2, [1, 2, 2, 2, 5, 5, 5, 8, 8, 8, 11, 11]),
        (2, 0, [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]),
        (2, 12, list(range(1, 13))),
        (1, 0, list(range(1, 13))),
        (1, 3, list(range(1, 13))),
    ],
)
def test_source_layers(freq, offset, sources) -> None:
    numbers = range(1, 13)
    assert [source_layer(n, offset, freq) for n in numbers] == sources
    shared = [n for n, source in zip(numbers, sources, strict=True) if n != source]
    assert [n for n in numbers if shares_indices(n, offset, freq)] == shared


@pytest.mark.parametrize(("freq", "offset", "choosing"), [(4, 3, [1, 2, 3]), (2, 0, [1, 3, 5])])
def test_layers_that_share_have_no_indexer(freq, offset, choosing) -> None:
    changes = {"num_layers": 6, "dsa_indexer_topk_freq": freq}
    changes["dsa_indexer_skip_topk_offset"] = offset
    for number in range(1, 7):
        layer = dsa_layer(number, **changes)
        has = any(name.startswith(INDEXER) for name, _ in layer.named_parameters())
        assert has == (number in choosing), number
        assert has == (layer.core_attention.indexer is not None)
        assert has == any(name.startswith(INDEXER) for name in layer.state_dict())


# --- sharing ---


@layouts
def test_second_layer_uses_the_keys_of_the_first(lengths) -> None:
    first, second = dsa_layer(1, **SHARED), dsa_layer(2, **SHARED)
    x, grad = (hidden(24, 1 if lengths else 2, seed) for seed in (0, 1))
    book = IndexBook()
    params = with_index_book(packed(lengths) if lengths else None, book)
    first(x, None, packed_seq_params=params)
    got = trained_gradients(second, 3 * x.flip(0), grad, packed_seq_params=params)
    assert book.chosen.keys() == {1}
    twin = dense_twin(second, book.chosen[1])
    plain = packed(lengths) if lengths else None
    want = trained_gradients(twin, 3 * x.flip(0), grad, packed_seq_params=plain)
    assert_close_answers(got, want)


def test_packed_batch_carries_its_book_without_installation() -> None:
    first, second = dsa_layer(1, **SHARED), dsa_layer(2, **SHARED)
    params, x = packed([10, 14]), hidden(24, 1)
    first(x, None, packed_seq_params=params)
    chosen = index_book_of(params).chosen
    assert chosen.keys() == {1} and chosen[1].shape == (24, 1, 5)
    second(x, None, packed_seq_params=params)
    with pytest.raises(ValueError, match="layer 2 .* layer 1 .*got none"):
        second(x, None, packed_seq_params=packed([10, 14]))


@pytest.mark.parametrize("params", [None, with_index_book(None)], ids=["none", "empty book"])
def test_layer_that_finds_no_indices_says_what_to_do(params) -> None:
    with pytest.raises(ValueError, match="install_index_books"):
        dsa_layer(2, **SHARED)(hidden(), None, packed_seq_params=params)


def test_forwards_do_not_see_each_others_indices() -> None:
    first, second = dsa_layer(1, **SHARED), dsa_layer(2, **SHARED)

    def run(x, params):
        for layer in (first, second):
            x = layer(x, None, packed_seq_params=params)[0]
        return x

    inputs = hidden(24, 2), hidden(9, 2, seed=1), hidden(24, 2, seed=2)
    alone = [run(x, with_index_book(None)) for x in inputs]
    params = [with_index_book(None) for _ in inputs]
    states = [first(x, None, packed_seq_params=p)[0] for x, p in zip(inputs, params, strict=True)]
    for state, p, want in zip(states, params, alone, strict=True):
        assert torch.equal(second(state, None, packed_seq_params=p)[0], want)
    assert [index_book_of(p).chosen[1].shape[0] for p in params] == [24, 9, 24]


# --- books ---


def test_with_index_book_copies() -> None:
    params, where = packed([10, 14]), {"cp_rank": 0, "cp_size": 1, "tp_chunks": 1}
    where["device"] = params.cu_seqlens_q.device
    rows = rows_of_microbatch(24, **where, packed_seq_params=params)
    book = IndexBook()
    one, two = with_index_book(params, book), with_index_book(params)
    assert index_book_of(one) is book
    assert isinstance(index_book_of(two), IndexBook) and index_book_of(two) is not book
    assert index_book_of(params) not in (book, index_book_of(two))  # of its own
    for copy in (one, two):
        assert copy is not params
        assert copy.cu_seqlens_q is params.cu_seqlens_q
        assert rows_of_microbatch(24, **where, packed_seq_params=copy) is rows
    unpacked = with_index_book(None)
    assert unpacked.qkv_format == "sbhd" and index_book_of(unpacked).chosen == {}
    assert index_book_of(None) is None


# --- replay ---


@layouts
@pytest.mark.parametrize("modules", [[], ["core_attn"], ["mla_up_proj"]], ids=str)
@pytest.mark.parametrize("sparse_loss", [False, True])
def test_replay_has_the_bits_of_the_record(sparse_loss, modules, lengths) -> None:
    again = {"recompute_granularity": "selective", "recompute_modules": modules}
    layer = dsa_layer(dsa_indexer_use_sparse_loss=sparse_loss, **(again if modules else {}))
    first, chosen = solve(layer, lengths)
    for given in (chosen[1], chosen[1].cpu().long()):
        replayed, noted = solve(layer, lengths, {1: given})
        assert_same_bits(replayed, first)
        assert torch.equal(noted[1], chosen[1])


@layouts
@pytest.mark.parametrize("coeff", [0.5, None])
def test_given_keys_are_used_but_for_those_a_row_may_not_see(coeff, lengths) -> None:
    batch = 1 if lengths else 2
    generator = torch.Generator().manual_seed(4)
    # Any keys: later ones, those of other sequences, none, and beyond both ends.
    ranks = torch.rand(24, batch, 24, generator=generator).argsort(-1)[..., :9]
    given = ranks.where(torch.rand(ranks.shape, generator=generator) > 0.2, -1)
    given[:, :, 8] = torch.tensor([-7, 24, 25, 10**6]).repeat(6)[:, None]
    given[5] = -1  # a row without any key
    layer = dsa_layer(dsa_indexer_loss_coeff=coeff)
    device, calls = torch.cuda.current_device(), []
    layer.core_attention.indexer.register_forward_hook(lambda *_: calls.append(1))
    got, noted = solve(layer, lengths, {1: given.to(device)})
    assert len(calls) == (coeff is not None)  # it scores nothing in vain
    starts = torch.zeros(24, dtype=torch.long)
    ends = torch.arange(1, 25)
    if lengths:  # of 10, 0, 1 and 11 rows, and two behind them
        starts = torch.tensor([0] * 10 + [10] + [11] * 11 + [0] * 2)
        ends[22:] = 0
    seen = (given >= starts[:, None, None]) & (given < ends[:, None, None])
    kept = given.where(seen, -1)
    assert 0 < int((kept >= 0).sum()) < int((given >= 0).sum())
    assert noted[1].dtype == torch.int32 and torch.equal(noted[1].cpu().long(), kept)
    want, _ = solve(dense_twin(layer, kept.to(device)), lengths)
    assert_close_answers(without_indexer(got), want)
    assert not got[0][5].any()


def test_layers_that_share_take_the_given_keys_of_their_source() -> None:
    second = dsa_layer(2, **SHARED)
    _, chosen = solve(dsa_layer(1, **SHARED), None)
    given = chosen[1].flip(1)
    got, noted = solve(second, None, {1: given})
    assert not noted  # it has not chosen
    want, _ = solve(dense_twin(second, given), None)
    assert_close_answers(got, want)


def test_given_keys_of_other_layers_are_not_read() -> None:
    layer = dsa_layer(1, num_layers=2)
    first, chosen = solve(layer, None)
    given = torch.zeros(24, 2, 5, dtype=torch.int32, device=chosen[1].device)
    other, noted = solve(layer, None, {2: given})
    assert_same_bits(other, first)
    assert torch.equal(noted[1], chosen[1])


# --- models ---


def small_model(**changes):
    from megatron.core.models.gpt import GPTModel

    extra = {"num_layers": 3, "dsa_indexer_topk_freq": 2, "ffn_hidden_size": 64}
    config = small_config(**{**DSA, **extra, **changes})
    model = GPTModel(
        config,
        transformer_layer_spec=mla_block_spec(config, pp_rank=0),
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    ).to(torch.cuda.current_device())
    install_index_books(model)
    books = []
    for layer in model.decoder.layers:
        layer.self_attention.register_forward_pre_hook(
            lambda _, args, kwargs: books.append(index_book_of(kwargs["packed_seq_params"])),
            with_kwargs=True,
        )
    return model, books


def tokens(rows, seed, batch=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (batch, rows), generator=generator).to(torch.cuda.current_device())


@pytest.mark.parametrize("lengths", [None, [10, 6]], ids=["sbhd", "thd"])
def test_every_forward_of_a_model_gets_a_book(lengths) -> None:
    model, books = small_model()
    params = packed(lengths) if lengths else None
    ids = tokens(16, 0, batch=1)
    outputs = [model(ids, None, None, packed_seq_params=params) for _ in range(2)]
    assert torch.equal(*outputs)
    assert [books.count(book) for book in books] == [3] * 6  # all layers of a forward share one
    assert books[0] is not books[3]
    assert books[0].chosen.keys() == books[3].chosen.keys() == {1, 3}
    given = with_index_book(params, IndexBook(given={1: books[0].chosen[1].flip(-1)}))
    books.clear()
    model(ids, None, None, packed_seq_params=given)
    assert set(books) == {index_book_of(given)}


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("recompute", [{}, SELECTIVE, FULL], ids=["none", "selective", "full"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["fifo", "lifo"])
def test_interleaved_micro_batches_have_the_gradients_of_separate_runs(order, recompute) -> None:
    model, books = small_model(**recompute)
    batches = [tokens(16, 0), tokens(12, 1)]

    def loss(ids):
        return model(ids, None, None, labels=ids.flip(1)).float().sum()

    def gradients_of_steps(step):
        model.zero_grad(set_to_none=True)
        step()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    def separate():
        for which in order:
            loss(batches[which]).backward()

    def interleaved():
        losses = [loss(ids) for ids in batches]
        for which in order:
            losses[which].backward()

    want, got = gradients_of_steps(separate), gradients_of_steps(interleaved)
    assert want.keys() == got.keys()
    for name, grad in want.items():
        assert grad.abs().max() > 0 and torch.equal(got[name], grad), name
    assert len(set(books)) == 4
