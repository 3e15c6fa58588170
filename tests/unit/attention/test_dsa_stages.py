"""Stages of an indexer's training, and what an evaluation measures of it."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention.indexer_loss import IndexerLossLog, freeze_for_stage
from tests.helpers.layers import (
    INDEXER,
    assert_same_bits,
    dense_twin,
    dsa_layer,
    gradients,
    hidden,
    packed,
    small_config,
    trained_gradients,
)

pytestmark = pytest.mark.usefixtures("single_rank")

BATCHES = pytest.mark.parametrize("is_packed", [False, True], ids=["sbhd", "thd"])


def batch(is_packed: bool) -> tuple[torch.Tensor, dict]:
    x = hidden(24, 1 if is_packed else 2)
    return x, ({"packed_seq_params": packed([10, 0, 14])} if is_packed else {})


@BATCHES
def test_warm_up_attends_to_all_keys(is_packed) -> None:
    layer = dsa_layer(dsa_indexer_stage="warmup")
    x, kwargs = batch(is_packed)
    grad = torch.randn_like(x)
    got = trained_gradients(layer, x, grad, **kwargs)
    want = gradients(dense_twin(layer), x, grad, **kwargs)
    assert any(name.startswith(INDEXER) for name in got[2])
    shared = {name: got[2][name] for name in want[2]}
    assert_same_bits((*got[:2], shared), want)


@BATCHES
def test_warm_up_has_the_dense_loss_whatever_the_flag_says(is_packed) -> None:
    x, kwargs = batch(is_packed)
    losses, grads = [], []
    for stage, sparse in (("warmup", True), ("warmup", False), ("joint", False)):
        layer = dsa_layer(dsa_indexer_stage=stage, dsa_indexer_use_sparse_loss=sparse)
        log = IndexerLossLog(1, x.device)
        log.attach(layer)
        answer = trained_gradients(layer, x, torch.zeros_like(x), **kwargs)
        losses.append(log.read()[1])
        grads.append({n: g for n, g in answer[2].items() if n.startswith(INDEXER)})
    assert losses[0] == losses[1] == losses[2] > 0
    for other in grads[1:]:
        assert other.keys() == grads[0].keys()
        assert all(torch.equal(other[name], grads[0][name]) for name in other)


@pytest.mark.parametrize("stage", ["joint", "warmup", "frozen"])
def test_stage_says_what_trains(stage) -> None:
    layer = dsa_layer(dsa_indexer_stage=stage)
    freeze_for_stage(layer, layer.config)
    for name, parameter in layer.named_parameters():
        is_indexer = name.startswith(INDEXER)
        assert parameter.requires_grad is {
            "joint": True, "warmup": is_indexer, "frozen": not is_indexer
        }[stage], name  # fmt: skip
    dense = small_config()
    freeze_for_stage(torch.nn.Linear(2, 2), dense)  # nothing to do with other models


@pytest.mark.parametrize("modules", [["core_attn"], ["mla_up_proj"], ["mla_up_proj", "core_attn"]])
def test_recompute_reaches_the_indexer_when_all_else_is_frozen(modules) -> None:
    how = {"recompute_granularity": "selective", "recompute_modules": modules}
    plain = dsa_layer(dsa_indexer_stage="warmup")
    again = dsa_layer(dsa_indexer_stage="warmup", **how)
    x = hidden(24, 2)
    answers = []
    for layer in (plain, again):
        freeze_for_stage(layer, layer.config)
        answers.append(trained_gradients(layer, x, torch.ones_like(x)))
    assert answers[0][2] and all(name.startswith(INDEXER) for name in answers[0][2])
    assert_same_bits(answers[1], answers[0])


def test_frozen_embedding_still_starts_a_backward() -> None:
    """A recomputed layer is part of the backward only if its input requires a gradient."""

    class Model(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.embedding = torch.nn.Embedding(8, 4)

    config = dsa_layer(dsa_indexer_stage="warmup").config
    model = Model(config)
    freeze_for_stage(model, config)
    assert not model.embedding.weight.requires_grad
    tokens = torch.tensor([1, 2])
    assert model.embedding(tokens).requires_grad
    with torch.no_grad():
        assert not model.embedding(tokens).requires_grad


@BATCHES
@pytest.mark.parametrize("stage", ["joint", "warmup", "frozen"])
def test_overlap_is_measured_only_where_it_is_asked_for(stage, is_packed) -> None:
    layer = dsa_layer(dsa_indexer_stage=stage).eval()
    x, kwargs = batch(is_packed)
    log = IndexerLossLog(1, x.device)
    log.attach(layer)
    with torch.no_grad():
        quiet, _ = layer(x, None, **kwargs)
        assert log.read_overlap() == {} and log.read() == {}
        log.measures_overlap = True
        measured, _ = layer(x, None, **kwargs)
    assert torch.equal(quiet, measured)
    (overlap,) = log.read_overlap().values()
    assert 0 < overlap < 1 and log.read_overlap() == {}


def test_keys_that_attention_weighs_most_overlap_whole() -> None:
    from megatron_mla.attention.indexer_loss import overlap_with_dense

    layer = dsa_layer()
    x = hidden(24, 2)
    seen = []
    core = layer.core_attention
    sparse = core._sparse
    core._sparse = lambda query, key, indices: (
        seen.append((query, key)) or sparse(query, key, indices)
    )
    with torch.no_grad():
        layer(x, None)
    (query, key), bounds = seen[0], layer._rows(x, None).key_bounds()
    attention = torch.einsum("lbhe,kbe->lbhk", query, key) * core.softmax_scale
    causal = torch.ones(24, 24, dtype=torch.bool, device=x.device).tril()[:, None, None]
    weight = attention.masked_fill(~causal, -torch.inf).softmax(-1).sum(2)
    best = weight.topk(5, dim=-1).indices.int()
    common, keys = overlap_with_dense(core.groups, query, key, bounds, best, core.softmax_scale)
    assert int(common) == int(keys) == (24 - 5) * 2 * 5
    worst = weight.masked_fill(~causal[:, :, 0], torch.inf).topk(5, largest=False).indices.int()
    common, keys = overlap_with_dense(core.groups, query, key, bounds, worst, core.softmax_scale)
    assert int(common) < int(keys)
