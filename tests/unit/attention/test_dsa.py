"""Sparse attention on one rank: oracles, leaks, padding, evaluation, replay, recompute."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention import dsa
from megatron_mla.attention.index_sharing import IndexBook, with_index_book
from megatron_mla.attention.indexer_loss import IndexerLossLog
from tests.helpers.close import assert_close
from tests.helpers.layers import (
    INDEXER,
    assert_close_answers,
    assert_same_bits,
    dense_twin,
    dsa_layer,
    hidden,
    packed,
    small_layer,
    trained_gradients,
    without_indexer,
)

pytestmark = pytest.mark.usefixtures("single_rank")

LENGTHS = [10, 0, 1, 11]  # and two rows behind the last sequence
layouts = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["sbhd", "thd"])
FORMS = {"expanded": small_layer, "dsa": dsa_layer}
FORMS["absorbed"] = lambda **changes: small_layer(mla_form="absorbed", **changes)
forms = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


def problem(lengths, rows=24):
    return tuple(hidden(rows, 1 if lengths else 2, seed) for seed in (0, 1))


def params_of(lengths):
    """PackedSeqParams with a new book, and the book."""
    book = IndexBook()
    return with_index_book(packed(lengths) if lengths else None, book), book


def solve(layer, lengths):
    """Output, input and weight gradients, and the keys that were chosen."""
    params, book = params_of(lengths)
    answer = trained_gradients(layer, *problem(lengths), packed_seq_params=params)
    return answer, book.chosen[1]


def dense_answer(layer, lengths, chosen=None, **changes):
    plain = dense_twin(layer, chosen, **changes)
    params = packed(lengths) if lengths else None
    return trained_gradients(plain, *problem(lengths), packed_seq_params=params)


@layouts
@pytest.mark.parametrize("topk", [23, 24, 100])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0},
        {"dsa_indexer_rope_interleaved": True, "dsa_indexer_loss_coeff": 0.0},
        {"softmax_scale": 0.5},
        {"no_rope_freq": [1]},
    ],
    ids=str,
)
def test_enough_keys_are_dense_attention(changes, topk, lengths) -> None:
    layer = dsa_layer(dsa_indexer_topk=topk, **changes)
    sparse, _ = solve(layer, lengths)
    dense = dense_answer(layer, lengths, **changes)
    if topk == 23 and lengths is None:  # the last row drops one key
        assert not torch.allclose(sparse[0][-1], dense[0][-1], atol=1e-4)
        assert_close("output", sparse[0][:-1], dense[0][:-1], rel=1e-5, reason="another order")
        return
    assert_close_answers(without_indexer(sparse), dense)


@layouts
@pytest.mark.parametrize("topk", [1, 2, 5, 11])
@pytest.mark.parametrize(
    "changes", [{}, {"dsa_indexer_scoring_relu": False}, {"rotary_percent": 0.5}], ids=str
)
def test_few_keys_are_dense_attention_with_a_mask(changes, topk, lengths) -> None:
    layer = dsa_layer(dsa_indexer_topk=topk, **changes)
    sparse, chosen = solve(layer, lengths)
    assert chosen.shape == (24, 1 if lengths else 2, topk)
    counts = (chosen >= 0).sum(-1)
    assert torch.equal(counts[:10, 0].cpu(), torch.arange(1, 11).clamp(max=topk))
    assert_close_answers(without_indexer(sparse), dense_answer(layer, lengths, chosen, **changes))
    assert (sparse[2]["linear_q_up_proj.weight"].abs().max() > 1e-3) == (topk > 1)
    for rows in chosen.flatten(0, 1).tolist():  # none twice
        found = [i for i in rows if i >= 0]
        assert len(set(found)) == len(found)


@forms
@pytest.mark.parametrize("changed", [23, 12])
def test_no_row_sees_a_later_one(make, changed) -> None:
    layer, x = make(), hidden(24, 2)
    other = x.clone()
    other[changed] = hidden(1, 2, seed=9)[0]
    out, moved = layer(x, None)[0], layer(other, None)[0]
    assert torch.equal(out[:changed], moved[:changed])
    assert not torch.isclose(out[changed], moved[changed]).all(-1).any()


@forms
@pytest.mark.parametrize(
    ("changed", "may_move"), [(9, [9]), (4, range(4, 10)), (10, [10]), (21, [21]), (23, [])]
)
def test_no_row_sees_another_sequence(make, changed, may_move) -> None:
    layer, x = make(), hidden(24, 1)
    other = x.clone()
    other[changed] = hidden(1, 1, seed=9)[0]
    out, moved = (layer(t, None, packed_seq_params=packed(LENGTHS))[0] for t in (x, other))
    still = [row for row in range(24) if row not in may_move]
    assert torch.equal(out[still], moved[still])
    if may_move:
        assert not torch.isclose(out[changed], moved[changed]).all()


@pytest.mark.parametrize("topk", [3, 24])
def test_packed_sequences_equal_separate_ones(topk) -> None:
    layer = dsa_layer(dsa_indexer_topk=topk)
    x = hidden(24, 1)
    params, book = params_of(LENGTHS)
    together = layer(x, None, packed_seq_params=params)[0]
    start = 0
    for length in filter(None, LENGTHS):
        rows = slice(start, start + length)
        params, alone = params_of(None)
        out = layer(x[rows], None, packed_seq_params=params)[0]
        assert_close("output", together[rows], out, rel=1e-5, reason="products of other shapes")
        want = alone.chosen[1]
        width = want.shape[-1]
        assert torch.equal(book.chosen[1][rows, :, :width], torch.where(want < 0, -1, want + start))
        start += length


@forms
@pytest.mark.parametrize("lengths", [[9, 0, 6], [0, 0], [0], [1, 1]], ids=str)
@pytest.mark.parametrize("tail", [1, 8])
@pytest.mark.parametrize("recompute", [[], ["mla_up_proj", "core_attn"]], ids=str)
def test_padding_gives_zeros(make, lengths, tail, recompute) -> None:
    how = {"recompute_granularity": "selective", "recompute_modules": recompute}
    layer, log = make(**(how if recompute else {})), IndexerLossLog(1, "cpu")
    log.attach(layer)
    real = sum(lengths)
    x, grad = problem([1], real + tail)
    x[real:] = 1e4
    out, grad_x, grads = trained_gradients(layer, x, grad, packed_seq_params=packed(lengths))
    assert torch.equal(out[real:], torch.zeros_like(out[real:]))
    assert torch.equal(grad_x[real:], torch.zeros_like(grad_x[real:]))
    assert grads.keys() == {name for name, _ in layer.named_parameters()}
    for name, g in grads.items():
        assert torch.isfinite(g).all(), name
        assert real or not g.any(), name
    assert log.read().keys() == ({1} if real and make is dsa_layer else set())


@layouts
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coeff", [0.5, None])
def test_training_and_evaluation_have_the_same_bits(lengths, fused, dtype, coeff) -> None:
    changes = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    layer = dsa_layer(**changes, apply_rope_fusion=fused, dsa_indexer_loss_coeff=coeff)
    x = problem(lengths)[0].to(dtype)
    answers = []
    for grad, training in ((True, True), (False, True), (False, False), (True, False)):
        params, book = params_of(lengths)
        with torch.set_grad_enabled(grad):
            out = layer.train(training)(x, None, packed_seq_params=params)[0]
        answers.append((out.detach(), book.chosen[1]))
    for out, chosen in answers[1:]:
        assert torch.equal(out, answers[0][0]) and torch.equal(chosen, answers[0][1])


def count_losses(monkeypatch):
    calls, made = [], dsa.indexer_loss

    def counted(*args, **kwargs):
        calls.append(1)
        return made(*args, **kwargs)

    monkeypatch.setattr(dsa, "indexer_loss", counted)
    return calls


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_is_made_only_where_it_trains(monkeypatch, recompute) -> None:
    calls = count_losses(monkeypatch)
    how = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    how = how if recompute else {}

    def calls_of(coeff, training=True, grad=True, frozen=False):
        layer = dsa_layer(dsa_indexer_loss_coeff=coeff, **how).train(training)
        if frozen:
            layer.core_attention.indexer.requires_grad_(False)
        calls.clear()
        with torch.set_grad_enabled(grad):
            out = layer(hidden().requires_grad_(), None)[0]
            if grad:
                out.sum().backward()
        return len(calls)

    assert calls_of(0.5) == 1
    assert calls_of(0.5, training=False) == 0
    assert calls_of(0.5, grad=False) == 0
    assert calls_of(0.5, frozen=True) == 0
    assert calls_of(None) == 0
    assert calls_of(0.0) == 0


@layouts
@pytest.mark.parametrize("sparse_loss", [False, True])
@pytest.mark.parametrize("coeff", [None, 0.0])
def test_loss_reaches_the_indexer_alone(coeff, sparse_loss, lengths) -> None:
    """Without a loss the indexer is frozen; with one no other gradient moves by a bit."""
    silent = dsa_layer(dsa_indexer_loss_coeff=coeff)
    loud = dsa_layer(dsa_indexer_loss_coeff=50.0, dsa_indexer_use_sparse_loss=sparse_loss)
    frozen = {n for n, p in silent.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in loud.named_parameters() if n.startswith(INDEXER)}
    (quiet, chosen), (answer, chosen2) = solve(silent, lengths), solve(loud, lengths)
    assert torch.equal(chosen, chosen2)
    assert not frozen & quiet[2].keys()
    assert_same_bits(without_indexer(answer), quiet)
    assert all(answer[2][name].abs().max() > 0 for name in frozen)


class CountingLog(IndexerLossLog):
    def __init__(self, *args):
        super().__init__(*args)
        self.reports = []

    def add(self, layer_number, loss_sum, num_rows):
        self.reports.append((loss_sum.item(), layer_number, num_rows))


NO_LOSS = {"dsa_indexer_loss_coeff": None}


@layouts
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("modules", [["mla_up_proj"], ["core_attn"], ["mla_up_proj", "core_attn"]])
@pytest.mark.parametrize(
    "changes",
    [{}, NO_LOSS, {"dsa_indexer_use_sparse_loss": True}],
    ids=["dense_loss", "no_loss", "sparse_loss"],
)
def test_recompute_changes_no_bit(changes, modules, fused, lengths) -> None:
    again = {"recompute_granularity": "selective", "recompute_modules": modules}
    answers, reports = [], []
    for how in ({}, again):
        layer, log = dsa_layer(**changes, **how, apply_rope_fusion=fused), CountingLog(1, "cpu")
        log.attach(layer)
        calls = []
        layer.core_attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        answers.append(solve(layer, lengths))
        reports.append(log.reports)
        assert len(calls) == 1 + ("core_attn" in how.get("recompute_modules", []))
    assert_same_bits(answers[1][0], answers[0][0])
    assert torch.equal(answers[1][1], answers[0][1])
    num_rows = 22 if lengths else 48
    assert [report[1:] for report in reports[0]] == [(1, num_rows)] * (changes != NO_LOSS)
    assert reports[1] == reports[0]  # once too, and the same loss


def test_given_indices_of_one_column_need_no_batch() -> None:
    layer, x = dsa_layer(), hidden(24, 1)
    params, book = params_of(None)
    out, _ = layer(x, None, packed_seq_params=params)
    params = with_index_book(None, IndexBook(given={1: book.chosen[1][:, 0]}))
    assert torch.equal(layer(x, None, packed_seq_params=params)[0], out)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((23, 2, 5), torch.int32),
        ((25, 2, 5), torch.int32),
        ((24, 1, 5), torch.int32),
        ((24, 5), torch.int32),  # with a batch of two
        ((24,), torch.int32),
        ((24, 2, 5, 1), torch.int32),
        ((24, 2, 5), torch.float32),
        ((24, 2, 5), torch.bool),
    ],
    ids=str,
)
def test_given_indices_of_another_shape_or_dtype_are_refused(shape, dtype) -> None:
    params = with_index_book(None, IndexBook(given={1: torch.zeros(shape, dtype=dtype)}))
    with pytest.raises(ValueError, match=r"given indices of layer 1 must be integers \[24, 2, K\]"):
        dsa_layer()(hidden(24, 2), None, packed_seq_params=params)
