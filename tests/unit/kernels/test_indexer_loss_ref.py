"""Divergence of the indexer from the attention: the formula, its gradients, and its memory.

Legend: t query rows, s keys, h heads, e channels, k slots; the indexer has n heads, d channels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.kernels.indexer_loss_ref import indexer_loss_ref
from tests.helpers.chunked import Largest, bounds_of, causal
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_each_same_bits, assert_same_bits, examples

NAMES = "loss q.grad k.grad w.grad"
CHUNK = "megatron_mla.kernels.chunks.CHUNK_ELEMENTS"
SPARSE = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def tensors(t, s, n, d, h, e, *, dtype=torch.float32, seed=0) -> list[Tensor]:
    """q, k, w, query, key."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (t, n, d), (s, d), (t, n), (t, h, e), (s, e)
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(DEVICE, dtype) for x in normal]


def slots(t: int, s: int, k: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, s + 2, (t, k), generator=generator, dtype=torch.int32).to(DEVICE)


def plain(q, k, w, query, key, bounds, *, scale, relu=True, indices=None):
    """Row by row over the list of its keys."""
    total = 0 * (q.sum() + k.sum() + w.sum())
    for row, (start, end) in enumerate(bounds.host.t().tolist()):
        live = list(range(start, end))
        if indices is not None:
            live = [s for s in indices[row].tolist() if 0 <= s < len(k)]
        if live:
            target = (query[row] @ key[live].t() * scale).softmax(-1).mean(0).detach()
            products = q[row] @ k[live].t()
            log_p = (w[row] @ (products.relu() if relu else products)).log_softmax(-1)
            total = total + (target * (target.log() - log_p)).sum()
    return total


def run(q, k, w, query, key, bounds, *, op=indexer_loss_ref, scale=0.3, **how):
    """Loss and the gradients of q, k and w."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, w)]
    loss = op(*leaves, query, key, bounds, scale=scale, **how)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def truth(*inputs, **how):
    *given, bounds = inputs
    return run(*(t.double() for t in given), bounds, op=plain, **how)


def assert_each_close(got, want, **how) -> None:
    for name, one, other in zip(NAMES.split(), got, want, strict=True):
        assert_close(name, one, other, **how)


@examples(120)
@given(
    spans=st.lists(st.tuples(*[st.integers(0, 9)] * 2).map(sorted), min_size=1, max_size=6),
    n=st.integers(1, 5), d=st.integers(1, 9), h=st.sampled_from([1, 3, 8]), e=st.integers(1, 9),
    k=st.sampled_from([None, 1, 4, 12]), relu=st.booleans(), scale=st.sampled_from([1.0, 0.2]),
    chunk=st.sampled_from([1, 150, 1 << 25]), seed=st.integers(0, 999),
)  # fmt: skip
def test_is_the_divergence_over_the_keys_of_each_row(
    spans, n, d, h, e, k, relu, scale, chunk, seed
) -> None:
    inputs = *tensors(len(spans), 9, n, d, h, e, dtype=torch.float64, seed=seed), bounds_of(spans)
    how = {"relu": relu, "scale": scale, "indices": k and slots(len(spans), 9, k, seed=seed)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHUNK, chunk)
        got = run(*inputs, **how)
    assert_each_close(got, truth(*inputs, **how), rel=1e-10, reason="sums of both signs in fp64")


@SPARSE
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
def test_gradients_are_the_derivatives(relu, sparse) -> None:
    q, k, w, *attention = tensors(4, 5, 3, 4, 2, 6, dtype=torch.float64)
    bounds = bounds_of([(0, 3), (2, 2), (1, 5), (4, 5)])
    how = {"scale": 0.3, "relu": relu, "indices": slots(4, 5, 6) if sparse else None}
    leaves = [t.requires_grad_() for t in (q, k, w)]
    assert torch.autograd.gradcheck(
        lambda *x: indexer_loss_ref(*x, *attention, bounds, **how), leaves
    )


@SPARSE
def test_attention_is_a_constant_and_the_incoming_gradient_a_factor(sparse) -> None:
    leaves = [t.requires_grad_() for t in tensors(6, 6, 3, 4, 2, 5)]
    how = {"scale": 0.3, "indices": slots(6, 6, 4) if sparse else None}
    _, *want = run(*leaves, causal(6), **how)
    loss = indexer_loss_ref(*leaves, causal(6), **how)
    (loss * 3).backward()
    for leaf, grad in zip(leaves, want, strict=False):
        assert_same_bits("gradient", leaf.grad, grad * 3)
    assert leaves[3].grad is None and leaves[4].grad is None


@SPARSE
def test_rows_without_keys_count_nothing(sparse) -> None:
    q, k, w, query, key = tensors(5, 6, 3, 4, 2, 5)
    spans, indices = [(0, 6), (1, 4), (2, 3), (0, 0), (6, 6)], slots(5, 6, 4)
    indices[3], indices[4] = -1, 6
    few = q[:3], k, w[:3], query[:3], key, bounds_of(spans[:3])
    want = run(*few, indices=indices[:3] if sparse else None)
    order = torch.tensor([3, 0, 1, 4, 2])
    many = q[order], k, w[order], query[order], key, bounds_of(spans[i] for i in order)
    loss, *got = run(*many, indices=indices[order] if sparse else None)
    for t in (got[0], got[2]):
        assert_same_bits("rows without keys", t[[0, 3]], torch.zeros_like(t[:2]))
    got = loss, got[0][[1, 2, 4]], got[1], got[2][[1, 2, 4]]
    assert_each_close(got, [t.double() for t in want])
    none = torch.full_like(indices, -1) if sparse else None
    for t in run(q, k, w, query, key, bounds_of([(0, 0)] * 5), indices=none):
        assert_same_bits("no keys at all", t, torch.zeros_like(t))


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("unused", "spans", "chosen"),
    [
        (4, [(0, 2), (1, 4)], None),
        (2, [(0, 2), (3, 5)], None),
        (0, [(1, 5)] * 2, [[1, 2, -1], [3, 4, 5]]),
    ],
)
def test_keys_that_no_row_uses_do_not_matter(unused, spans, chosen, strange) -> None:
    q, k, w, query, key = tensors(2, 5, 3, 4, 2, 5)
    how = {"indices": chosen and torch.tensor(chosen, device=DEVICE)}
    want = run(q, k, w, query, key, bounds_of(spans), **how)
    k[unused], key[unused] = strange, strange
    assert_each_same_bits(NAMES, run(q, k, w, query, key, bounds_of(spans), **how), want)


@SPARSE
@pytest.mark.parametrize("chunk", [1, 200, 1 << 25])
def test_heads_of_two_ranks_add_up(monkeypatch, chunk, sparse) -> None:
    monkeypatch.setattr(CHUNK, chunk)
    q, k, w, query, key = tensors(9, 9, 8, 4, 8, 5)
    rest, how = (key, causal(9)), {"indices": slots(9, 9, 4) if sparse else None}
    ranks = query[:, :1], query[:, 1:]  # unequal shares: neither may be normalised alone
    shares = [], []
    for heads, mine in zip(ranks, shares, strict=True):
        run(q, k, w, heads, *rest, sum_heads=lambda t, mine=mine: mine.append(t.clone()), **how)
    want = truth(q, k, w, query, *rest, **how)
    for heads, other in zip(ranks, map(iter, reversed(shares)), strict=True):
        got = run(q, k, w, heads, *rest, sum_heads=lambda t, of=other: t.add_(next(of)), **how)
        assert next(other, None) is None
        assert_each_close(got, want, rel=2e-6, reason="sums over 9 rows in fp32")


def test_ranks_add_up_probabilities_of_their_heads() -> None:
    q, k, w, query, key = tensors(5, 5, 2, 4, 3, 6)
    shares = []
    bounds = bounds_of([(0, 5)] * 5)
    run(q, k, w, query, key, bounds, sum_heads=lambda t: shares.append(t.clone()))
    scores = torch.einsum("the,se->hts", query.double(), key.double()) * 0.3
    assert_close("shares", torch.stack(shares), scores.softmax(-1).sum(0)[None])


@pytest.mark.parametrize("student", ["same", "none", "relu", "linear"])
def test_uniform_target_over_many_keys(student) -> None:
    q, k, w, query, key = tensors(2, 65_536, 2, 4, 3, 4)
    query.zero_()
    if student == "same":
        q.zero_()
    elif student == "none":  # exp(-30) for half of the keys
        q.fill_(1.0), w.fill_(1.0), k.zero_()
        k[::2] = -3.75
    inputs = q, k, w, query, key, bounds_of([(0, 65_536)] * 2)
    got, want = (f(*inputs, relu=student == "relu")[0].double() for f in (run, truth))
    assert abs(got - want) <= 1e-6 * max(1.0, want)


@SPARSE
@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_bf16_is_summed_in_fp32_and_rounded_once(monkeypatch, part, sparse) -> None:
    monkeypatch.setattr(CHUNK, 1)
    inputs = tensors(32, 32, 8, 16, 4, 24, dtype=torch.bfloat16)
    how = {"indices": slots(32, 32, 12) if sparse else None}
    got = run(*inputs, causal(32), **how)[part]
    wide = run(*(t.float() for t in inputs), causal(32), **how)[part]
    assert_same_bits(NAMES.split()[part], got, wide.to(torch.bfloat16) if part else wide)
    want = truth(*inputs, causal(32), **how)[part]
    assert_close("fp64", got, want, rel=None if part else 1e-6, reason="sum of 32 rows in fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("d", "k"), [(4, None), (16, None), (4, 64), (16, 64)])
def test_no_tensor_is_larger_than_a_chunk(monkeypatch, d, k, dtype) -> None:
    *leaves, query, key = tensors(256, 256, 1, d, 2, 4, dtype=dtype)
    leaves = [t.requires_grad_() for t in leaves]
    how = {"scale": 0.3, "indices": k and slots(256, 256, k)}
    monkeypatch.setattr(CHUNK, 1 << 12)
    with Largest() as made:
        loss = indexer_loss_ref(*leaves, query, key, causal(256), **how)
        kept = loss.grad_fn.saved_tensors
        loss.backward()
    assert 256 < made.elements <= 1 << 12
    assert 0 < sum(t.numel() for t in kept) <= sum(t.numel() for t in leaves)
