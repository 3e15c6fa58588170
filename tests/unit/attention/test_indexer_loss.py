"""The indexer's loss: what it is, how it is scaled, whom it reaches, and the log."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

from megatron_mla.attention.index_sharing import IndexBook, with_index_book
from megatron_mla.attention.indexer_loss import IndexerLossLog, join_loss
from tests.helpers.close import assert_close
from tests.helpers.layers import INDEXER, dsa_layer, hidden, packed, trained_gradients

pytestmark = pytest.mark.usefixtures("single_rank")

layouts = pytest.mark.parametrize("lengths", [None, [10, 0, 1, 11]], ids=["sbhd", "thd"])
PER_TOKEN = {"calculate_per_token_loss": True}
CLOSE = {"rel": 1e-5, "reason": "the same sums in another order"}


@pytest.fixture(autouse=True)
def no_scale():
    """Megatron-Core keeps the scale on the class."""
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    yield
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None


def train(layer, x, params=None):
    """Indexer gradients and the logged loss of one forward and backward."""
    log = IndexerLossLog(layer.config.num_layers, "cpu")
    log.attach(layer)
    *_, grads = trained_gradients(layer, x, torch.ones_like(x), packed_seq_params=params)
    return {n: g for n, g in grads.items() if n.startswith(INDEXER)}, log.read()


def assert_close_gradients(got, want, factor=1.0) -> None:
    assert got.keys() == want.keys() and len(want) == 5
    for name, grad in want.items():
        assert grad.abs().max() > 0, name
        assert_close(name, got[name], factor * grad, **CLOSE)


def by_hand(layer, x, lengths):
    """Sum of the divergences of all rows and its gradients, row by row from the definition."""
    core, seen = layer.core_attention, []
    handle = core.register_forward_pre_hook(lambda _, args: seen.append(args))
    book = IndexBook()
    params = with_index_book(packed(lengths) if lengths else None, book)
    layer(x, None, packed_seq_params=params)
    handle.remove()
    query, key, hidden_states, qr, rows, _ = seen[0]
    assert not hidden_states.requires_grad and not qr.requires_grad
    chosen, config = book.chosen[1], layer.config
    layer.zero_grad(set_to_none=True)
    q, k, w = core.indexer(hidden_states, qr, rows)
    start, total = 0, 0.0
    for length in lengths or [len(x)]:
        for t in range(start, start + length):
            for b in range(x.shape[1]):
                keys = list(range(start, t + 1))
                if config.dsa_indexer_use_sparse_loss:
                    keys = [i for i in chosen[t, b].tolist() if i >= 0]
                scores = (w[t, b] * (q[t, b] @ k[keys, b].T).relu().T).sum(-1)
                attention = (query[t, b] @ key[keys, b].T * core.softmax_scale).softmax(-1)
                target = attention.detach().double().mean(0)  # over heads
                log_p = scores.double().log_softmax(-1)
                total = total + (target * (target.log() - log_p)).sum()
        start += length
    total = total * config.dsa_indexer_loss_coeff
    total.backward()
    return total.item(), {
        n: p.grad.clone() for n, p in layer.named_parameters() if n.startswith(INDEXER)
    }


@layouts
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("coeff", [0.5, 2.0])
def test_loss_is_that_of_the_definition(coeff, per_token, sparse, lengths) -> None:
    layer = dsa_layer(
        dsa_indexer_loss_coeff=coeff,
        dsa_indexer_use_sparse_loss=sparse,
        calculate_per_token_loss=per_token,
    )
    x = hidden(24, 1 if lengths else 2)
    num_rows = sum(lengths) if lengths else 48
    total, want = by_hand(layer, x, lengths)
    got, losses = train(layer, x, packed(lengths) if lengths else None)
    assert losses == {1: pytest.approx(total / num_rows, rel=1e-5)}
    assert_close_gradients(got, want, 1.0 if per_token else 1 / num_rows)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_does_not_depend_on_how_rows_are_cut(sparse) -> None:
    """Per token sums add up; means weighted by their rows do."""
    cuts = [[10, 3, 11]], [[10], [3, 11]], [[10, 3], [11]], [[10], [3], [11]]
    x = hidden(24, 1)
    for mode in ({}, PER_TOKEN):
        layer = dsa_layer(**mode, dsa_indexer_use_sparse_loss=sparse)
        answers = []
        for cut in cuts:
            sums: dict[str, torch.Tensor] = {}
            for part, lengths in zip(x.split([sum(c) for c in cut]), cut, strict=True):
                grads, _ = train(layer, part, packed(lengths))
                for name, grad in grads.items():
                    sums[name] = sums.get(name, 0) + grad * (1 if mode else len(part))
            answers.append(sums)
        for other in answers[1:]:
            assert_close_gradients(other, answers[0])


@pytest.mark.parametrize("per_token", [False, True])
def test_rows_without_a_sequence_do_not_count(per_token) -> None:
    layer = dsa_layer(calculate_per_token_loss=per_token)
    x = hidden(32, 1)
    want, loss = train(layer, x[:24], packed([10, 14]))
    got, loss_with_tail = train(layer, x, packed([10, 0, 14]))
    assert_close_gradients(got, want)
    assert loss_with_tail == {1: pytest.approx(loss[1], rel=1e-6)}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("recompute", [[], ["core_attn"]], ids=str)
@pytest.mark.parametrize("scale", [0.25, 8.0])
def test_scale_of_the_schedule_is_honoured(scale, recompute, per_token) -> None:
    """One over the number of micro-batches, times the loss scale: powers of two leave the bits."""
    how = {"recompute_granularity": "selective", "recompute_modules": recompute}
    layer = dsa_layer(**(how if recompute else {}), calculate_per_token_loss=per_token)
    x = hidden(24, 2)
    want, loss = train(layer, x)
    DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(scale))
    got, same_loss = train(layer, x)
    assert same_loss == loss  # the log is that of the loss itself
    for name, grad in want.items():
        assert grad.abs().max() > 0 and torch.equal(got[name], scale * grad), name


def test_joined_loss_leaves_the_output_alone() -> None:
    out, loss = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    joined = join_loss(out * 1, loss * 1)
    assert torch.equal(joined, out)
    joined.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert out.grad.tolist() == [1, 2, 3] and loss.grad == 1


@layouts
@pytest.mark.parametrize(("topk", "same"), [(5, False), (10, False), (24, True), (100, True)])
def test_dense_and_sparse_loss_agree_where_all_keys_are_chosen(topk, same, lengths) -> None:
    x, params = hidden(24, 1 if lengths else 2), packed(lengths) if lengths else None
    (dense, loss), (sparse, loss2) = (
        train(dsa_layer(dsa_indexer_topk=topk, dsa_indexer_use_sparse_loss=s), x, params)
        for s in (False, True)
    )
    assert (loss2 == {1: pytest.approx(loss[1], rel=1e-5)}) == same
    if same:
        assert_close_gradients(sparse, dense)
    else:
        assert not any(torch.allclose(sparse[n], g, rtol=1e-3, atol=0) for n, g in dense.items())


# --- the log ---


def test_log_weighs_micro_batches_by_rows_and_starts_anew() -> None:
    log = IndexerLossLog(4, "cpu")
    assert log.read() == {}
    log.add(2, torch.tensor(6.0), 2)
    log.add(2, torch.tensor(3.0), 10)
    log.add(4, torch.tensor(0.0, requires_grad=True), 5)
    log.add(1, torch.tensor(0.0), 0)  # nothing but padding
    assert log.read() == {2: 0.75, 4: 0.0}
    assert log.read() == {}
    log.add(2, torch.tensor(1.0), 4)
    assert log.read() == {2: 0.25}


def test_log_adds_up_over_micro_batches_of_a_layer() -> None:
    layer, log = dsa_layer(), IndexerLossLog(1, "cpu")
    parts = hidden(6, 2), hidden(24, 2, seed=2)
    alone = [train(layer, part)[1][1] for part in parts]
    assert abs(alone[0] - alone[1]) > 0.01 * alone[1]
    log.attach(layer)
    for part in parts:
        layer(part, None)
    weighted = (alone[0] * 12 + alone[1] * 48) / 60
    assert log.read() == {1: pytest.approx(weighted, rel=1e-6)}


def test_attach_finds_the_layers_and_those_that_share_do_not_report() -> None:
    changes = {"num_layers": 4, "dsa_indexer_topk_freq": 2}
    layers = torch.nn.ModuleList([dsa_layer(n, **changes) for n in range(1, 5)])
    x = hidden()

    def forward():
        params = with_index_book(None)
        for layer in layers:
            layer(x, None, packed_seq_params=params)

    forward()  # without a log
    log = IndexerLossLog(4, "cpu")
    log.attach(torch.nn.ModuleDict({"decoder": layers}))
    forward()
    losses = log.read()
    assert losses.keys() == {1, 3} and all(loss > 0 for loss in losses.values())
    layers.eval()
    forward()
    assert log.read() == {}


def test_log_holds_no_graph() -> None:
    layer, log = dsa_layer(), IndexerLossLog(1, "cpu")
    log.attach(layer)
    layer(hidden(), None)
    assert log.read()[1] > 0
    assert not any(t.requires_grad for t in vars(log).values() if isinstance(t, torch.Tensor))
    assert not any("indexer_loss" in key for key in layer.state_dict())
