"""The Hadamard transform is the product with Sylvester's matrix, in fp32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.hadamard import hadamard
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_same_bits

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
WIDTHS = pytest.mark.parametrize("width", [1, 2, 4, 16, 128])


def sylvester(width: int) -> torch.Tensor:
    """Kronecker power of [[1, 1], [1, -1]], orthonormal, in fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return (matrix * width**-0.5).to(DEVICE)


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """As large as the dtype holds exactly, so that it cannot hold their sums; fp32 can."""
    most = {torch.bfloat16: 255, torch.float16: 2047}[dtype]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


@DTYPES
@WIDTHS
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
def test_is_the_product_with_sylvesters_matrix(leading, width, dtype) -> None:
    t = numbers(*leading, width, dtype=dtype)
    before = t.clone()
    got = hadamard(t)
    assert got.dtype == dtype
    assert_close("transform", got, t.double() @ sylvester(width))
    assert_same_bits("what was given", t, before)


def test_strides_do_not_matter() -> None:
    t = numbers(16, 3, 2).permute(2, 1, 0)
    assert not t.is_contiguous()
    assert_same_bits("transform", hadamard(t), hadamard(t.contiguous()))
    one = numbers(1, 8)
    assert_same_bits("expanded", hadamard(one.expand(3, 8)), hadamard(one).expand(3, 8))


@WIDTHS
def test_is_orthonormal_and_its_own_inverse(width) -> None:
    matrix = hadamard(torch.eye(width, dtype=torch.float64, device=DEVICE))
    assert_close("matrix", matrix, sylvester(width))
    assert_close(
        "square", matrix @ matrix.t(), torch.eye(width, dtype=torch.float64, device=DEVICE)
    )
    t = numbers(7, width, dtype=torch.float32)
    assert_close("twice", hadamard(hadamard(t)), t)
    assert_close("length", hadamard(t).norm(dim=-1), t.double().norm(dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [4, 16, 64, 256])
def test_narrow_input_is_summed_in_fp32_and_rounded_once(width, dtype) -> None:
    # D ** -0.5 is a power of two here, so the only rounding is the last one.
    t = whole_numbers(20, width, dtype=dtype).requires_grad_()
    grad = whole_numbers(20, width, dtype=dtype, seed=1)
    got = hadamard(t)
    (got_grad,) = torch.autograd.grad(got, t, grad)
    for name, one, given in (("transform", got, t), ("gradient", got_grad, grad)):
        truth = given.double() @ sylvester(width)
        assert_same_bits(name, one, truth.to(dtype))
        assert not torch.equal(one.double(), truth), "not rounded: the inputs prove nothing"


@DTYPES
@WIDTHS
def test_gradient_is_the_transform_of_the_gradient(width, dtype) -> None:
    t = numbers(5, width, dtype=dtype).requires_grad_()
    grad = numbers(5, width, dtype=dtype, seed=1)
    (got,) = torch.autograd.grad(hadamard(t), t, grad)
    assert got.dtype == dtype
    assert_close("gradient", got, grad.double() @ sylvester(width))


@pytest.mark.parametrize("width", [0, 3, 6, 12, 96, 127, 129])
def test_refuses_a_width_that_is_no_power_of_two(width) -> None:
    with pytest.raises(ValueError, match=rf"power of two, got {width};"):
        hadamard(torch.ones(2, width))
