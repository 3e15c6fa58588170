"""Packing of ``[nope | rotated pe]``: bits of the twin for inputs of any strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.concat_ref import rope_concat_ref
from tests.helpers.close import assert_close
from tests.helpers.rotations import (
    DEVICE,
    assert_each_same_bits,
    assert_same_bits,
    cases,
    complex_rotation,
    examples,
    five_rows,
    forward_backward,
    storage_of,
    values,
)


@pytest.mark.timeout(900)
@examples(90)
@given(case=cases(inputs=2, unit=False))
def test_concat_and_its_gradients_have_the_bits_of_the_twin(case) -> None:
    inputs = [case.input(0, case.nope), case.input(1, case.rotated)]
    grads = [case.grad(0, case.nope + case.rotated)]
    (got,), got_grads = forward_backward(rope_concat, inputs, case.tables(), grads)
    (want,), want_grads = forward_backward(rope_concat_ref, inputs, case.tables(), grads)
    assert got.is_contiguous()
    assert_same_bits("rope_concat", got, want)
    assert_each_same_bits("nope.grad pe.grad", got_grads, want_grads)


def test_one_shared_head_is_rotated_for_all() -> None:
    nope, shared = values(5, 2, 7, 12), values(5, 2, 1, 6, seed=1).requires_grad_()
    pe = shared.expand(5, 2, 7, 6)
    got = rope_concat(nope, pe, *five_rows())
    assert_same_bits("rope_concat", got, rope_concat_ref(nope, pe.contiguous(), *five_rows()))
    grad = values(*got.shape, seed=2)
    (got_grad,) = torch.autograd.grad(got, shared, grad)
    (want_grad,) = torch.autograd.grad(rope_concat_ref(nope, pe, *five_rows()), shared, grad)
    assert_same_bits("gradient of the shared head", got_grad, want_grad)


def test_gradient_of_nope_is_a_view_and_neither_is_shared_with_pe() -> None:
    nope, pe = values(5, 3, 12).requires_grad_(), values(5, 3, 6, seed=1).requires_grad_()
    grad = values(5, 3, 18, seed=2)
    out = rope_concat(nope, pe, *five_rows())
    grad_nope, grad_pe = torch.autograd.grad(out, (nope, pe), grad)
    assert grad_nope.data_ptr() == grad.data_ptr()
    assert storage_of(grad_pe).data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("needed", ["nope", "pe"])
def test_one_input_alone_may_need_a_gradient(needed) -> None:
    inputs = {"nope": values(5, 3, 12), "pe": values(5, 3, 6, seed=1)}
    leaf = inputs[needed].requires_grad_()
    grad = values(5, 3, 18, seed=2)
    (got,), (want,) = (
        torch.autograd.grad(op(*inputs.values(), *five_rows()), leaf, grad)
        for op in (rope_concat, rope_concat_ref)
    )
    assert_same_bits(f"{needed}.grad", got, want)


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (5, 0, 3), (0, 2, 3)], ids=str)
def test_no_rows_or_heads_are_no_work(shape) -> None:
    nope, pe = values(*shape, 12).requires_grad_(), values(*shape, 6).requires_grad_()
    positions = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    out = rope_concat(nope, pe, *five_rows()[:2], positions)
    out.sum().backward()
    assert out.shape == (*shape, 18)
    assert nope.grad.shape == nope.shape
    assert pe.grad.shape == pe.shape


@pytest.mark.parametrize("op", [rope_concat, rope_concat_ref], ids=["kernel", "twin"])
def test_gradients_are_the_derivatives(op) -> None:
    nope, pe = (
        values(5, 2, width, dtype=torch.float64, seed=width).requires_grad_() for width in (3, 2)
    )
    assert torch.autograd.gradcheck(lambda *x: op(*x, *five_rows(torch.float64, 2)), (nope, pe))


class TestTwin:
    @pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)], ids=["packed", "batch"])
    def test_is_a_product_of_complex_numbers_behind_nope(self, shape) -> None:
        nope, pe, grad = (
            values(*shape, width, dtype=torch.float64, seed=width) for width in (7, 6, 13)
        )

        def by_hand(nope, pe, *arguments):
            return torch.cat((nope, complex_rotation(pe, *arguments)), dim=-1)

        run = ([nope, pe], five_rows(torch.float64), [grad])
        (got,), got_grads = forward_backward(rope_concat_ref, *run)
        (want,), want_grads = forward_backward(by_hand, *run)
        assert_close("rope_concat_ref", got, want)
        assert_close("gradient of nope", got_grads[0], want_grads[0])
        assert_close("gradient of pe", got_grads[1], want_grads[1])
