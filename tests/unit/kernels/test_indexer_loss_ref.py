"""Divergence of the indexer from the attention: the formula, its gradients, and its memory.

Legend: t query rows, s keys, h heads and e channels of the attention, n heads and d channels of
the indexer, k slots of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mla.kernels.indexer_loss_ref import indexer_loss_ref
from tests.helpers.close import assert_close
from tests.helpers.rotations import assert_each_same_bits, assert_same_bits, examples

NAMES = "loss q.grad k.grad w.grad"
CHUNK = "megatron_mla.kernels.chunks.CHUNK_ELEMENTS"
SPARSE = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


class Bounds(NamedTuple):
    starts: Tensor
    ends: Tensor
    host: Tensor


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes; views make none."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, Tensor)]
            self.elements = max([self.elements, *sizes])
        return made


def bounds_of(spans) -> Bounds:
    host = torch.tensor(list(spans), dtype=torch.int32).reshape(-1, 2).t().contiguous()
    return Bounds(host[0], host[1], host)


def causal(length: int) -> Bounds:
    return bounds_of((0, i + 1) for i in range(length))


def tensors(t, s, n, d, h, e, *, dtype=torch.float32, seed=0) -> list[Tensor]:
    """q, k, w, query, key."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (t, n, d), (s, d), (t, n), (t, h, e), (s, e)
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype) for x in normal]


def slots(t: int, s: int, k: int, *, seed: int = 0) -> Tensor:
    """Keys with repetitions, -1 and other places that are none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, s + 2, (t, k), generator=generator, dtype=torch.int32)


def plain(q, k, w, query, key, bounds, *, scale, relu=True, indices=None):
    """Row by row over the list of its keys."""
    total = q.new_zeros(())
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
    grads = [torch.zeros_like(t) for t in leaves]
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), *grads


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
def test_attention_is_a_constant(sparse) -> None:
    leaves = [t.requires_grad_() for t in tensors(6, 6, 3, 4, 2, 5)]
    how = {"scale": 0.3, "indices": slots(6, 6, 4) if sparse else None}
    indexer_loss_ref(*leaves, causal(6), **how).backward()
    assert [t.grad is not None for t in leaves] == [True, True, True, False, False]
    assert not indexer_loss_ref(
        *(t.detach() for t in leaves[:3]), *leaves[3:], causal(6), **how
    ).requires_grad


@SPARSE
def test_rows_without_keys_count_nothing(sparse) -> None:
    *inputs, _ = *tensors(5, 6, 3, 4, 2, 5), None
    spans, indices = torch.tensor([(0, 6), (0, 0), (1, 4), (6, 6), (2, 3)]), slots(5, 6, 4)
    indices[1], indices[3] = -1, 6
    live = [0, 2, 4]
    few = [t[live] if len(t) == 5 else t for t in inputs]
    got = run(*inputs, bounds_of(spans.tolist()), indices=indices if sparse else None)
    want = run(*few, bounds_of(spans[live].tolist()), indices=indices[live] if sparse else None)
    assert_each_close([got[0], got[2]], [want[0].double(), want[2].double()][:2]) if False else None
    for one, other in ((got[0], want[0]), (got[2], want[2])):
        assert_close("loss k.grad", one, other.double())
    for one, other in ((got[1], want[1]), (got[3], want[3])):
        assert_close("q.grad w.grad", one[live], other.double())
        assert (one[[1, 3]] == 0).all()
    none = bounds_of([(0, 0)] * 5)
    for t in run(*inputs, none, indices=torch.full_like(indices, -1) if sparse else None):
        assert_same_bits("no keys at all", t, torch.zeros_like(t))
