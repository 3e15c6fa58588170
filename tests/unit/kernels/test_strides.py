"""Offsets past 2**31 elements, in views that touch little of the memory they span."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.concat_ref import rope_concat_ref
from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope import rope, rope_
from megatron_mla.kernels.rope_ref import rope_ref
from tests.helpers.rotations import (
    DEVICE,
    assert_each_same_bits,
    assert_same_bits,
    tables,
    values,
)

HALF = torch.float16
APART = 2**30
ROWS = 4


@pytest.fixture
def far(tmp_path):
    """A copy of a tensor whose neighbours along a dim are 2**30 elements apart.

    It begins 2**31 elements into its memory, so that offsets that wrap read zeros and no foreign
    memory.
    """
    count = 2**31 + 4 * APART
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 3 * 2 * count:
        pytest.skip("needs 39 GB of GPU memory")

    def spread(t, dim):
        if DEVICE == "cuda":
            return _spread(torch.zeros(count, dtype=HALF, device=DEVICE), t, dim)
        # A file with holes: pages that nothing touches take no memory.
        path = tmp_path / "holes"
        try:
            memory = torch.from_file(str(path), shared=True, size=count, dtype=HALF)
        except RuntimeError as error:
            pytest.skip(f"needs a file system that lets files have holes: {error}")
        path.unlink()
        return _spread(memory, t, dim)

    return spread


def _spread(memory, t, dim):
    strides = list(t.contiguous().stride())
    strides[dim] = APART
    # Others stay inside of a gap.
    return memory.as_strided(t.shape, strides, 2**31).copy_(t)


def arguments(rotated=4):
    return *tables(8, rotated, HALF), torch.tensor([4, 0, 7, 1], device=DEVICE)


def data(*shape, seed=0):
    return values(*shape, dtype=HALF, seed=seed)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "heads"])
def test_rope_and_rope_in_place(far, dim) -> None:
    t = data(ROWS, 4, 6)
    want = rope_ref(t, *arguments(), nope_dim=2)
    view = far(t, dim)
    assert_same_bits("rope", rope(view, *arguments(), nope_dim=2), want)
    rope_(view, *arguments(), nope_dim=2)
    assert_same_bits("rope_", view, want)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["rows", "heads", "channels"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
def test_gradient_of_rope(far, dim, interleaved) -> None:
    t, grad = data(ROWS, 4, 4).requires_grad_(), data(ROWS, 4, 4, seed=1)
    how = {"nope_dim": 0, "interleaved": interleaved, "remove_interleaving": interleaved}
    (want,) = torch.autograd.grad(rope_ref(t, *arguments(), **how), t, grad)
    (got,) = torch.autograd.grad(rope(t, *arguments(), **how), t, far(grad, dim))
    assert_same_bits("gradient", got, want)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["rows", "heads", "channels"])
@pytest.mark.parametrize("which", [0, 1], ids=["nope", "pe"])
def test_concat(far, dim, which) -> None:
    inputs = [data(ROWS, 4, 4), data(ROWS, 4, 4, seed=1)]
    want = rope_concat_ref(*inputs, *arguments())
    inputs[which] = far(inputs[which], dim)
    assert_same_bits("rope_concat", rope_concat(*inputs, *arguments()), want)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "heads"])
@pytest.mark.parametrize("which", [0, 1], ids=["kv", "k_pe"])
def test_kv_split(far, dim, which) -> None:
    inputs = [data(ROWS, 4, 7), data(ROWS, 1, 4, seed=1)]
    how = {"k_dim": 4, "pack_value": True}
    want = rope_kv_split_ref(*inputs, *arguments(), **how)
    inputs[which] = far(inputs[which], dim)
    assert_each_same_bits("key value", rope_kv_split(*inputs, *arguments(), **how), want)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["rows", "heads", "channels"])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_gradients_of_kv_split(far, dim, which) -> None:
    inputs = [data(ROWS, 4, 4).requires_grad_(), data(ROWS, 1, 2, seed=1).requires_grad_()]
    grads = [data(ROWS, 4, 4, seed=2), data(ROWS, 4, 2, seed=3)]
    want = torch.autograd.grad(rope_kv_split_ref(*inputs, *arguments(2), k_dim=2), inputs, grads)
    grads[which] = far(grads[which], dim)
    got = torch.autograd.grad(rope_kv_split(*inputs, *arguments(2), k_dim=2), inputs, grads)
    assert_each_same_bits("kv.grad k_pe.grad", got, want)


def test_rows_of_the_table(far) -> None:
    cos, sin, _ = arguments()
    cos, sin = cos[:4], sin[:4]
    t, positions = data(ROWS, 4, 4), torch.arange(ROWS, device=DEVICE).flip(0)
    want = rope_ref(t, cos, sin, positions, nope_dim=0)
    got = rope(t, far(cos, 0), far(sin, 0), positions, nope_dim=0)
    assert_same_bits("rope", got, want)
