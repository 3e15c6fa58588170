"""Rotation of one end of every head: bits of the twin, and the twin against complex numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mla.kernels.rope import rope, rope_
from megatron_mla.kernels.rope_ref import rope_ref
from tests.helpers.close import assert_close
from tests.helpers.rotations import (
    DEVICE,
    Layout,
    assert_same_bits,
    cases,
    complex_rotation,
    examples,
    forward_backward,
    laid_out,
    storage_of,
    tables,
    values,
)

HOW = st.fixed_dictionaries(
    {
        name: st.booleans()
        for name in ("rope_first", "interleaved", "inverse", "remove_interleaving")
    }
)
ORDERS = pytest.mark.parametrize(
    "order",
    [
        {},
        {"remove_interleaving": True},
        {"interleaved": False},
        {"interleaved": False, "remove_interleaving": True},
    ],
    ids=["pairs-to-halves", "pairs-to-pairs", "halves", "halves-stay-halves"],
)
INVERSE = pytest.mark.parametrize("inverse", [False, True], ids=["forth", "back"])


@pytest.mark.timeout(900)
@examples(140)
@given(case=cases(), how=HOW)
def test_rope_and_its_gradient_have_the_bits_of_the_twin(case, how) -> None:
    width = case.nope + case.rotated
    t, grad, arguments = case.input(0, width), case.grad(0, width), case.tables()
    how["nope_dim"] = case.nope
    (got,), (got_grad,) = forward_backward(rope, [t], arguments, [grad], **how)
    (want,), (want_grad,) = forward_backward(rope_ref, [t], arguments, [grad], **how)
    assert got.is_contiguous()
    assert_same_bits("rope", got, want)
    assert_same_bits("gradient of t", got_grad, want_grad)


@pytest.mark.timeout(900)
@examples(90)
@given(case=cases(expand=False), how=HOW)
def test_in_place_has_the_bits_of_the_twin_and_leaves_its_surroundings(case, how) -> None:
    width = case.nope + case.rotated
    t, arguments = case.input(0, width), case.tables()
    how["nope_dim"] = case.nope
    want = storage_of(t).clone()
    want.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(rope_ref(t, *arguments, **how))
    with torch.no_grad():
        assert rope_(t, *arguments, **how) is t
    assert_same_bits("storage of t", storage_of(t), want, finite=False)


@pytest.mark.timeout(900)
@examples(60)
@given(case=cases(expand=False), how=HOW, flat=st.booleans())
def test_gradient_in_place_has_the_bits_of_the_twin(case, how, flat) -> None:
    width = case.nope + case.rotated
    t, grad, arguments = case.input(0, width), case.grad(0, width), case.tables()
    how["nope_dim"] = case.nope

    def in_place(leaf, *arguments, **how):
        # Not a leaf, which rope_ would not change.
        changed = leaf.clone(memory_format=torch.contiguous_format)
        if flat:
            changed = changed.flatten(-2)
            how["num_heads"] = case.heads
        return rope_(changed, *arguments, **how).view(leaf.shape)

    (got,), (got_grad,) = forward_backward(in_place, [t], arguments, [grad], **how)
    (want,), (want_grad,) = forward_backward(rope_ref, [t], arguments, [grad], **how)
    assert_same_bits("rope_", got, want)
    assert_same_bits("gradient of t", got_grad, want_grad)


@examples(40)
@given(case=cases(expand=False, inputs=2), how=HOW)
def test_out_is_written_and_nothing_beside_it(case, how) -> None:
    width = case.nope + case.rotated
    t, out, arguments = case.input(0, width), case.input(1, width), case.tables()
    how["nope_dim"] = case.nope
    want = storage_of(out).clone()
    rotated = rope_ref(t, *arguments, **how)
    want.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(rotated)
    assert rope(t, *arguments, out=out, **how) is out
    assert_same_bits("storage of out", storage_of(out), want, finite=False)


def test_rope_into_its_own_input_is_in_place() -> None:
    t = values(5, 6, 18)
    arguments = (*tables(8, 6, torch.float32), torch.arange(5, device=DEVICE))
    want = rope_ref(t, *arguments, nope_dim=12)
    rope(t, *arguments, nope_dim=12, out=t)
    assert_same_bits("t", t, want)


@pytest.mark.parametrize(
    "needs_grad", [("t",), ("out",), ("t", "out")], ids=["of-t", "of-out", "of-both"]
)
def test_out_with_gradients_is_refused(needs_grad) -> None:
    tensors = {name: values(2, 3, 6).requires_grad_(name in needs_grad) for name in ("t", "out")}
    arguments = (*tables(8, 6, torch.float32), torch.arange(2, device=DEVICE))
    with pytest.raises(ValueError, match="out cannot be given where gradients are needed"):
        rope(tensors["t"], *arguments, nope_dim=0, out=tensors["out"])
    with torch.no_grad():
        rope(tensors["t"], *arguments, nope_dim=0, out=tensors["out"])
    assert_same_bits("out", tensors["out"], rope_ref(tensors["t"], *arguments, nope_dim=0))


@pytest.mark.parametrize("shape", [(0, 3, 18), (4, 0, 18), (4, 0, 3, 18), (0, 2, 3, 18)], ids=str)
def test_no_rows_or_heads_are_no_work(shape) -> None:
    t = values(*shape).requires_grad_()
    arguments = (*tables(8, 6, torch.float32), torch.zeros(shape[0], dtype=torch.int32).to(DEVICE))
    out = rope(t, *arguments, nope_dim=12)
    out.sum().backward()
    assert out.shape == t.grad.shape == shape
    assert rope_(t.detach(), *arguments, nope_dim=12).shape == shape


def test_empty_table_serves_no_rows() -> None:
    table = torch.zeros(0, 3, device=DEVICE)
    positions = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert rope(values(0, 3, 6), table, table, positions, nope_dim=0).shape == (0, 3, 6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_position_outside_the_table_reads_its_nearest_row(dtype) -> None:
    # The rows beside the table are NaN.
    cos, sin = (laid_out(x, Layout((0, 1), (6, 2))) for x in tables(4, 6, torch.float32))
    last = torch.iinfo(dtype).max
    positions = torch.tensor([-last - 1, -1, 0, 3, 4, 5, last], dtype=dtype, device=DEVICE)
    t = values(7, 3, 8)
    got = rope(t, cos, sin, positions, nope_dim=2)
    assert_same_bits("rope", got, rope_ref(t, cos, sin, positions.clamp(0, 3), nope_dim=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@INVERSE
def test_zeros_keep_their_signs(dtype, inverse) -> None:
    # sin(0) is a zero as well: every product and sum here may be one of either sign.
    signed = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype, device=DEVICE)
    t = torch.cartesian_prod(signed, signed).view(1, 16, 2)
    cos = torch.ones(2, 1, dtype=dtype, device=DEVICE)
    sin = torch.tensor([[0.0], [-0.0]], dtype=dtype, device=DEVICE)
    for position in (0, 1):
        arguments = (cos, sin, torch.tensor([position], device=DEVICE))
        got = rope(t, *arguments, nope_dim=0, inverse=inverse)
        want = rope_ref(t, *arguments, nope_dim=0, inverse=inverse)
        assert_same_bits(f"position {position}", got, want)


def test_rotation_forth_and_back_is_the_input() -> None:
    t = values(9, 2, 5, 18, dtype=torch.float64)
    arguments = (*tables(9, 6, torch.float64), torch.arange(9, device=DEVICE))
    there = rope(t, *arguments, nope_dim=12)
    back = rope(there, *arguments, nope_dim=12, interleaved=False, inverse=True)
    order = [0, 2, 4, 1, 3, 5]
    assert_same_bits("unrotated", back[..., :12], t[..., :12])
    assert_close("rotated", back[..., 12:], t[..., 12:][..., order])


@ORDERS
@INVERSE
@pytest.mark.parametrize("op", [rope, rope_ref], ids=["kernel", "twin"])
def test_gradient_is_the_derivative(op, order, inverse) -> None:
    t = values(2, 1, 2, 5, dtype=torch.float64).requires_grad_()
    arguments = (*tables(4, 4, torch.float64), torch.tensor([3, 1], device=DEVICE))
    assert torch.autograd.gradcheck(
        lambda x: op(x, *arguments, nope_dim=1, inverse=inverse, **order), t
    )


class TestTwin:
    @ORDERS
    @INVERSE
    @pytest.mark.parametrize("rope_first", [False, True], ids=["nope-pe", "pe-nope"])
    @pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)], ids=["packed", "batch"])
    def test_is_a_product_of_complex_numbers(self, order, inverse, rope_first, shape) -> None:
        t, grad = (values(*shape, 13, dtype=torch.float64, seed=seed) for seed in (0, 1))
        positions = torch.tensor([4, 0, 7, 7, 1], device=DEVICE)
        arguments = (*tables(8, 6, torch.float64, concentration=0.7), positions)

        def by_hand(t, *arguments):
            nope, pe = (t[..., 6:], t[..., :6]) if rope_first else (t[..., :7], t[..., 7:])
            pe = complex_rotation(pe, *arguments, inverse=inverse, **order)
            return torch.cat((pe, nope) if rope_first else (nope, pe), dim=-1)

        how = {"nope_dim": 7, "rope_first": rope_first, "inverse": inverse, **order}
        (got,), (got_grad,) = forward_backward(rope_ref, [t], arguments, [grad], **how)
        (want,), (want_grad,) = forward_backward(by_hand, [t], arguments, [grad])
        assert_close("rope_ref", got, want)
        assert_close("gradient", got_grad, want_grad)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_wide_tables_round_once(self, dtype) -> None:
        t = values(9, 3, 6, dtype=dtype)
        wide = tables(9, 6, torch.float32, concentration=0.7)
        positions = torch.arange(9, device=DEVICE)
        got = rope_ref(t, *wide, positions, nope_dim=0)
        want = rope_ref(t.float(), *wide, positions, nope_dim=0).to(dtype)
        assert_same_bits("rope_ref", got, want)
        narrow = (table.to(dtype) for table in wide)
        assert not torch.equal(got, rope_ref(t, *narrow, positions, nope_dim=0))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_narrow_tables_round_every_product(self, dtype) -> None:
        t = values(9, 3, 6, dtype=dtype)
        cos, sin = tables(9, 6, dtype, concentration=0.7)

        def rounded(x):
            return x.to(dtype).float()

        x1, x2 = t[..., 0::2].float(), t[..., 1::2].float()
        c, s = cos[:, None].float(), sin[:, None].float()
        left = rounded(x1 * c) - rounded(x2 * s)
        right = rounded(x2 * c) + rounded(x1 * s)
        want = torch.cat((left, right), dim=-1).to(dtype)
        got = rope_ref(t, cos, sin, torch.arange(9, device=DEVICE), nope_dim=0)
        assert_same_bits("rope_ref", got, want)
