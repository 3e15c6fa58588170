"""Keys and values of every head: bits of the twin, whatever is packed, used or absent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.kv_split_backward import kv_split_grads
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref, sum_heads_ref
from tests.helpers.close import assert_close
from tests.helpers.rotations import (
    DEVICE,
    DTYPES,
    assert_each_same_bits,
    assert_same_bits,
    cases,
    complex_rotation,
    examples,
    five_rows,
    forward_backward,
    values,
)

PACK = pytest.mark.parametrize("pack_value", [False, True], ids=["view", "packed"])
ORDER = pytest.mark.parametrize("remove_interleaving", [False, True], ids=["halves", "pairs"])


@pytest.mark.timeout(900)
@examples(110)
@given(case=cases(inputs=2, grads=2), remove_interleaving=st.booleans(), pack_value=st.booleans())
def test_kv_split_and_its_gradients_have_the_bits_of_the_twin(
    case, remove_interleaving, pack_value
) -> None:
    inputs = [case.input(0, case.nope + case.value), case.input(1, case.rotated, heads=1)]
    grads = [case.grad(0, case.nope + case.rotated), case.grad(1, case.value)]
    how = {"k_dim": case.nope, "remove_interleaving": remove_interleaving}
    how["pack_value"] = pack_value
    got, got_grads = forward_backward(rope_kv_split, inputs, case.tables(), grads, **how)
    want, want_grads = forward_backward(rope_kv_split_ref, inputs, case.tables(), grads, **how)
    assert got[0].is_contiguous()
    assert_each_same_bits("key value", got, want)
    assert_each_same_bits("kv.grad k_pe.grad", got_grads, want_grads)


@pytest.mark.parametrize("tracked", [False, True], ids=["no-grad", "tracked"])
def test_value_is_a_view_unless_packed(tracked) -> None:
    kv = values(5, 2, 3, 20).requires_grad_(tracked)
    k_pe = values(5, 2, 1, 6, seed=1)
    _, value = rope_kv_split(kv, k_pe, *five_rows(), k_dim=12)
    assert value.data_ptr() == kv[..., 12:].data_ptr()
    assert value.stride() == kv[..., 12:].stride()
    _, packed = rope_kv_split(kv, k_pe, *five_rows(), k_dim=12, pack_value=True)
    assert packed.is_contiguous()
    assert packed.untyped_storage().data_ptr() != kv.untyped_storage().data_ptr()
    assert_same_bits("packed value", packed, value)


@PACK
@pytest.mark.parametrize(
    ("used", "needed"),
    [("key", "kv"), ("key", "k_pe"), ("key", "kv k_pe"), ("value", "kv"), ("value", "kv k_pe")],
)
def test_an_output_may_be_unused_and_an_input_constant(used, needed, pack_value) -> None:
    inputs = {"kv": values(5, 3, 20), "k_pe": values(5, 1, 6, seed=1)}
    leaves = [inputs[name].requires_grad_() for name in needed.split()]
    results = []
    for op in (rope_kv_split, rope_kv_split_ref):
        outputs = op(*inputs.values(), *five_rows(), k_dim=12, pack_value=pack_value)
        output = outputs[["key", "value"].index(used)]
        grad = values(*output.shape, seed=2)
        results.append(torch.autograd.grad(output, leaves, grad, materialize_grads=True))
    assert_each_same_bits(needed, *results)


def test_operator_of_the_key_alone_has_its_gradients() -> None:
    inputs = [values(5, 3, 20), values(5, 1, 6, seed=1)]
    grads = [values(5, 3, 18, seed=2)]

    def key_of_twin(*arguments):
        return rope_kv_split_ref(*arguments, k_dim=12)[0]

    def key_of_operator(*arguments):
        return torch.ops.megatron_mla.rope_key(*arguments, 12, False)

    got, got_grads = forward_backward(key_of_operator, inputs, five_rows(), grads)
    want, want_grads = forward_backward(key_of_twin, inputs, five_rows(), grads)
    assert_each_same_bits("key", got, want)
    assert_each_same_bits("kv.grad k_pe.grad", got_grads, want_grads)


def test_gradient_of_a_value_without_one_is_zero() -> None:
    grad_key, grad_value = values(5, 3, 18), torch.zeros(5, 3, 8, device=DEVICE)
    got = kv_split_grads(grad_key, None, *five_rows(), 12, 8, False)
    want = kv_split_grads(grad_key, grad_value, *five_rows(), 12, 8, False)
    assert_each_same_bits("kv.grad k_pe.grad", got, want)


@PACK
@pytest.mark.parametrize(
    ("k_dim", "v_dim"),
    [(12, 0), (0, 8), (0, 0), (1, 1)],
    ids=["no-value", "no-nope", "only-rotated", "narrow"],
)
def test_parts_may_be_absent(k_dim, v_dim, pack_value) -> None:
    inputs = [values(5, 3, k_dim + v_dim), values(5, 1, 6, seed=1)]
    grads = [values(5, 3, k_dim + 6, seed=2), values(5, 3, v_dim, seed=3)]
    how = {"k_dim": k_dim, "pack_value": pack_value}
    got, got_grads = forward_backward(rope_kv_split, inputs, five_rows(), grads, **how)
    want, want_grads = forward_backward(rope_kv_split_ref, inputs, five_rows(), grads, **how)
    assert got[1].shape == (5, 3, v_dim)
    assert_each_same_bits("key value", got, want)
    assert_each_same_bits("kv.grad k_pe.grad", got_grads, want_grads)


@PACK
@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 2, 3), (5, 2, 0), (5, 0, 3)], ids=str)
def test_no_rows_or_heads_are_no_work(shape, pack_value) -> None:
    kv = values(*shape, 20).requires_grad_()
    k_pe = values(*shape[:-1], 1, 6, seed=1).requires_grad_()
    positions = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    key, value = rope_kv_split(
        kv, k_pe, *five_rows()[:2], positions, k_dim=12, pack_value=pack_value
    )
    assert key.shape == (*shape, 18)
    assert value.shape == (*shape, 8)
    (key.sum() + value.sum()).backward()
    assert kv.grad.shape == kv.shape
    # Nothing was added up where there are no heads.
    assert_same_bits("gradient of k_pe", k_pe.grad, torch.zeros_like(k_pe))


@ORDER
@PACK
@pytest.mark.parametrize("op", [rope_kv_split, rope_kv_split_ref], ids=["kernel", "twin"])
def test_gradients_are_the_derivatives(op, remove_interleaving, pack_value) -> None:
    how = {"k_dim": 2, "remove_interleaving": remove_interleaving, "pack_value": pack_value}
    kv = values(2, 3, 3, dtype=torch.float64).requires_grad_()
    k_pe = values(2, 1, 2, dtype=torch.float64, seed=1).requires_grad_()
    cos, sin, positions = five_rows(torch.float64, 2)
    assert torch.autograd.gradcheck(lambda *x: op(*x, cos, sin, positions[:2], **how), (kv, k_pe))


class TestTwin:
    @ORDER
    @PACK
    @pytest.mark.parametrize("shape", [(5,), (5, 2)], ids=["packed", "batch"])
    def test_is_a_product_of_complex_numbers_on_every_head(
        self, remove_interleaving, pack_value, shape
    ) -> None:
        kv, k_pe, grad_key, grad_value = (
            values(*shape, heads, width, dtype=torch.float64, seed=width)
            for heads, width in ((45, 11), (1, 6), (45, 13), (45, 4))
        )

        def by_hand(kv, k_pe, *arguments):
            shared = complex_rotation(k_pe, *arguments, remove_interleaving=remove_interleaving)
            key = torch.cat((kv[..., :7], shared.expand(*shape, 45, 6)), dim=-1)
            return key, kv[..., 7:]

        run = ([kv, k_pe], five_rows(torch.float64), [grad_key, grad_value])
        how = {"k_dim": 7, "remove_interleaving": remove_interleaving, "pack_value": pack_value}
        got, got_grads = forward_backward(rope_kv_split_ref, *run, **how)
        want, want_grads = forward_backward(by_hand, *run)
        assert_close("key", got[0], want[0])
        assert_close("value", got[1], want[1])
        assert_close("gradient of kv", got_grads[0], want_grads[0])
        assert_close("gradient of k_pe", got_grads[1], want_grads[1])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("heads", [1, 2, 6, 32, 33, 100, 130])
    def test_sum_over_heads_is_rounded_once(self, heads, dtype) -> None:
        t = values(5, 2, heads, 6, dtype=dtype)
        got = sum_heads_ref(t)
        assert got.dtype == dtype
        assert got.shape == (5, 2, 1, 6)
        truth = t.double().sum(-2, keepdim=True)
        if got.element_size() == 2:
            assert_close("sum", got, truth)
        else:
            bound = {torch.float64: 1e-15, torch.float32: 1e-6}[dtype]
            assert_close("sum", got, truth, rel=bound, reason="130 roundings of the dtype itself")

    def test_sum_over_no_heads_is_zero(self) -> None:
        assert_same_bits("sum", sum_heads_ref(values(5, 0, 6)), torch.zeros(5, 1, 6, device=DEVICE))
