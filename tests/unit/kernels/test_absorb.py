"""Absorbed queries: the twin's bits where channels rotate, its numbers where products add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mla.kernels.absorb import absorb_query
from megatron_mla.kernels.absorb_ref import absorb_query_ref
from tests.helpers.close import assert_close
from tests.helpers.rotations import (
    DEVICE,
    assert_same_bits,
    cases,
    complex_rotation,
    examples,
    five_rows,
    forward_backward,
    laid_out,
    layouts,
    values,
)

BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_product(name: str, got, truth) -> None:
    reason = "sums of up to 528 products in fp32 in any order, rounded once"
    assert_close(name, got, truth, rel=BOUNDS[got.dtype], reason=reason)


@pytest.mark.timeout(900)
@examples(50)
@given(
    case=cases(most_heads=20),
    latent=st.sampled_from([1, 20, 64]),
    layout=layouts(3, unit=False, expand=False),
)
def test_absorbed_queries_and_their_gradients_are_those_of_the_twin(case, latent, layout) -> None:
    dtype = case.numerics[0]
    q = case.input(0, case.nope + case.rotated)
    wk = laid_out(values(case.heads, case.nope, latent, dtype=dtype, seed=1), layout)
    grad = case.grad(0, latent + case.rotated)
    cos, sin, positions = case.tables()
    how = {"nope_dim": case.nope}
    (got,), got_grads = forward_backward(
        absorb_query, [q, wk], (cos, sin, positions), [grad], **how
    )
    (want,), want_grads = forward_backward(
        absorb_query_ref, [q, wk], (cos, sin, positions), [grad], **how
    )
    assert got.is_contiguous()
    assert_same_bits("rotated", got[..., latent:], want[..., latent:])
    assert_same_bits(
        "gradient of what was rotated",
        got_grads[0][..., case.nope :],
        want_grads[0][..., case.nope :],
    )
    wide = (t.double() for t in (q, wk))
    (truth,), truth_grads = forward_backward(
        absorb_query_ref, [*wide], (cos.double(), sin.double(), positions), [grad.double()], **how
    )
    assert_product("latent", got[..., :latent], truth[..., :latent])
    assert_product(
        "gradient of nope", got_grads[0][..., : case.nope], truth_grads[0][..., : case.nope]
    )
    assert_product("gradient of wk", got_grads[1], truth_grads[1])


@pytest.mark.parametrize("needed", ["q", "wk"])
def test_one_input_alone_may_need_a_gradient(needed) -> None:
    inputs = {"q": values(5, 2, 3, 18), "wk": values(3, 12, 20, seed=1)}
    leaf = inputs[needed].requires_grad_()
    grad = values(5, 2, 3, 26, seed=2)
    (got,), (want,) = (
        torch.autograd.grad(op(*inputs.values(), *five_rows(), nope_dim=12), leaf, grad)
        for op in (absorb_query, absorb_query_ref)
    )
    assert_product(f"gradient of {needed}", got, want)


def test_weight_may_be_a_view_of_the_up_projection() -> None:
    weight = values(3 * 20, 16).requires_grad_()  # rows: a head's keys, then its values
    q = values(5, 3, 18, seed=1)
    grad = values(5, 3, 22, seed=2)
    wk = weight.view(3, 20, 16)[:, :12]
    got = absorb_query(q, wk, *five_rows(), nope_dim=12)
    want = absorb_query_ref(q, wk, *five_rows(), nope_dim=12)
    assert_product("query", got, want)
    (got,), (want,) = (torch.autograd.grad(t, weight, grad) for t in (got, want))
    assert_product("gradient of the weight", got, want)


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (5, 0, 3), (0, 2, 3)], ids=str)
def test_no_rows_or_heads_are_no_work(shape) -> None:
    q = values(*shape, 18).requires_grad_()
    wk = values(shape[-1], 12, 20, seed=1).requires_grad_()
    positions = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    out = absorb_query(q, wk, *five_rows()[:2], positions, nope_dim=12)
    out.sum().backward()
    assert out.shape == (*shape, 26)
    assert q.grad.shape == q.shape
    assert_same_bits("gradient of wk", wk.grad, torch.zeros_like(wk))


@pytest.mark.parametrize("op", [absorb_query, absorb_query_ref], ids=["kernel", "twin"])
def test_gradients_are_the_derivatives(op) -> None:
    q = values(2, 2, 5, dtype=torch.float64).requires_grad_()
    wk = values(2, 3, 2, dtype=torch.float64, seed=1).requires_grad_()
    cos, sin, positions = five_rows(torch.float64, 2)
    assert torch.autograd.gradcheck(lambda *x: op(*x, cos, sin, positions[:2], nope_dim=3), (q, wk))


class TestTwin:
    @pytest.mark.parametrize("shape", [(5,), (5, 2)], ids=["packed", "batch"])
    def test_is_one_product_per_head_and_a_rotation(self, shape) -> None:
        q, grad = (values(*shape, 3, n, dtype=torch.float64, seed=n) for n in (13, 10))
        wk = values(3, 7, 4, dtype=torch.float64)

        def by_hand(q, wk, *arguments):
            latent = torch.einsum("...hn,hnc->...hc", q[..., :7], wk)
            return torch.cat((latent, complex_rotation(q[..., 7:], *arguments)), dim=-1)

        run = ([q, wk], five_rows(torch.float64), [grad])
        (got,), got_grads = forward_backward(absorb_query_ref, *run, nope_dim=7)
        (want,), want_grads = forward_backward(by_hand, *run)
        assert_close("absorb_query_ref", got, want)
        assert_close("gradient of q", got_grads[0], want_grads[0])
        assert_close("gradient of wk", got_grads[1], want_grads[1])
