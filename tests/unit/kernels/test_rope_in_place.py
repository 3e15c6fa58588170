"""What autograd and the caller see of a rotation in place."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.rope import rope, rope_
from megatron_mla.kernels.rope_ref import rope_ref
from tests.helpers.rotations import (
    DEVICE,
    Layout,
    assert_same_bits,
    laid_out,
    tables,
    values,
)

HEADS, NOPE, ROTATED = 2, 128, 64
WIDTH = NOPE + ROTATED
ROWS = 8

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["by-head", "flat"])


@pytest.fixture
def arguments():
    return *tables(ROWS, ROTATED, torch.float32), torch.arange(ROWS, device=DEVICE)


def linear_queries(weight, x, flat):
    q = torch.nn.functional.linear(x, weight)
    return q if flat else q.view(ROWS, HEADS, WIDTH)


@FLAT
def test_weight_gradient_of_the_up_projection_is_that_of_out_of_place(arguments, flat) -> None:
    x, grad = values(ROWS, 24), values(ROWS, HEADS, WIDTH, seed=1)
    weight = values(HEADS * WIDTH, 24, seed=2).requires_grad_()
    x.requires_grad_()
    q = linear_queries(weight, x, flat)
    rotated = rope_(q, *arguments, nope_dim=NOPE, num_heads=HEADS if flat else None)
    assert rotated is q
    got = torch.autograd.grad(rotated.view(grad.shape), (weight, x), grad)
    q = linear_queries(weight, x, flat=False)
    want = torch.autograd.grad(rope_ref(q, *arguments, nope_dim=NOPE), (weight, x), grad)
    assert_same_bits("dW", got[0], want[0])
    assert_same_bits("dx", got[1], want[1])


@FLAT
def test_graph_that_saved_the_tensor_raises(arguments, flat) -> None:
    leaf = values(ROWS, HEADS * WIDTH).requires_grad_()
    t = leaf.exp()  # keeps its result for the backward
    version = t._version
    view = t if flat else t.view(ROWS, HEADS, WIDTH)
    rotated = rope_(view, *arguments, nope_dim=NOPE, num_heads=HEADS if flat else None)
    assert t._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotated.sum().backward()


@pytest.mark.parametrize("how", ["tracked", "no-grad", "out"])
def test_graph_that_saved_data_without_gradients_raises_too(arguments, how) -> None:
    """The gradient of the weight would be made of rotated data."""
    weight = values(ROWS, HEADS, WIDTH).requires_grad_()
    t = values(ROWS, HEADS, WIDTH, seed=1)
    product = weight * t  # keeps t for the backward
    if how == "out":
        with torch.no_grad():
            rope(t, *arguments, nope_dim=NOPE, out=t)
    else:
        with torch.set_grad_enabled(how == "tracked"):
            rope_(t, *arguments, nope_dim=NOPE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@FLAT
def test_leaf_is_left_alone_and_a_new_tensor_comes_back(arguments, flat) -> None:
    data, grad = values(ROWS, HEADS, WIDTH), values(ROWS, HEADS, WIDTH, seed=1)
    shape = (ROWS, HEADS * WIDTH) if flat else data.shape
    leaf = data.clone().view(shape).requires_grad_()
    out = rope_(leaf, *arguments, nope_dim=NOPE, num_heads=HEADS if flat else None)
    assert out is not leaf
    assert out.shape == shape
    assert_same_bits("leaf", leaf.view(data.shape), data)
    out.backward(grad.view(shape))
    twin = data.clone().requires_grad_()
    want = rope_ref(twin, *arguments, nope_dim=NOPE)
    want.backward(grad)
    assert_same_bits("rope_", out.view(data.shape), want)
    assert_same_bits("gradient", leaf.grad.view(data.shape), twin.grad)


@pytest.mark.parametrize("of", ["unbind", "no-grad-view"])
def test_view_that_may_not_change_is_left_alone(arguments, of) -> None:
    leaf = values(2, ROWS, HEADS, WIDTH).requires_grad_()
    base = leaf.clone()
    if of == "unbind":
        t = base.unbind()[0]
    else:
        with torch.no_grad():
            t = base[0]
    before = base.detach().clone()
    out = rope_(t, *arguments, nope_dim=NOPE)
    assert_same_bits("base", base, before)
    assert_same_bits("rope_", out, rope_ref(before[0], *arguments, nope_dim=NOPE))


def test_leaf_without_gradients_is_changed_and_returned(arguments) -> None:
    t = values(ROWS, HEADS, WIDTH).requires_grad_()
    want = rope_ref(t.detach(), *arguments, nope_dim=NOPE)
    address = t.data_ptr()
    with torch.no_grad():
        assert rope_(t, *arguments, nope_dim=NOPE) is t
    assert t.data_ptr() == address
    assert_same_bits("t", t, want)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "every-second"])
def test_flat_takes_a_gradient_of_any_strides(arguments, layout) -> None:
    at = {
        "transposed": Layout((1, 0), (0, 0)),
        "expanded": Layout((0, 1), (0, 0), expanded=(0, 1)),
        "every-second": Layout((0, 1), (1, 1), step=2),
    }[layout]
    leaf = values(ROWS, HEADS * WIDTH).requires_grad_()
    grad = laid_out(values(ROWS, HEADS * WIDTH, seed=1), at)
    before = grad.clone()
    out = rope_(leaf.clone(), *arguments, nope_dim=NOPE, num_heads=HEADS)
    (got,) = torch.autograd.grad(out, leaf, grad)
    assert_same_bits("incoming gradient", grad, before)
    twin = leaf.detach().view(ROWS, HEADS, WIDTH).requires_grad_()
    out = rope_ref(twin, *arguments, nope_dim=NOPE)
    (want,) = torch.autograd.grad(out, twin, grad.reshape(twin.shape))
    assert_same_bits("gradient", got.view(want.shape), want)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["rows", "heads", "both"])
def test_tensor_that_overlaps_itself_is_refused_unchanged(arguments, dims) -> None:
    at = Layout((0, 1, 2), (0, 0, 0), expanded=dims)
    t = laid_out(values(ROWS, HEADS, WIDTH), at)
    before = t.clone()
    with pytest.raises(ValueError, match="t must not overlap itself"):
        rope_(t, *arguments, nope_dim=NOPE)
    assert_same_bits("t", t, before)


def test_two_rotations_in_place_are_two_rotations(arguments) -> None:
    leaf, grad = values(ROWS, HEADS, WIDTH).requires_grad_(), values(ROWS, HEADS, WIDTH, seed=1)
    turned = rope_(rope_(leaf * 1, *arguments, nope_dim=NOPE), *arguments, nope_dim=NOPE)
    (got,) = torch.autograd.grad(turned, leaf, grad)
    once = rope(leaf, *arguments, nope_dim=NOPE)
    twice = rope(once, *arguments, nope_dim=NOPE)
    (want,) = torch.autograd.grad(twice, leaf, grad)
    assert_same_bits("rope_", turned, twice)
    assert_same_bits("gradient", got, want)


def test_heads_first_storage_is_rotated_where_it_lies(arguments) -> None:
    t = values(HEADS, ROWS, WIDTH)
    want = rope_ref(t.transpose(0, 1), *arguments, nope_dim=NOPE).transpose(0, 1)
    rope_(t.transpose(0, 1), *arguments, nope_dim=NOPE)
    assert_same_bits("t", t, want)
