"""Walsh-Hadamard transform in plain PyTorch, orthonormal."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import wide_dtype


def hadamard(t: Tensor) -> Tensor:
    """Multiply the last dimension by the Hadamard matrix times ``D**-0.5``.

    Sylvester's order, sums in fp32 and one rounding, as in ``fast_hadamard_transform``. The matrix
    is symmetric and its own inverse, so the gradient is the transform of the gradient.

    Args:
        t: [..., D], D a power of two.
    Raises:
        ValueError: D is no power of two.
    """
    width = t.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"the last dimension must be a power of two, got {width}; leave the rotation off"
        )
    x = t.to(wide_dtype(t))
    half = 1
    while half < width:
        # [..., blocks, 2, half]: sums and differences of neighbouring blocks
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (x * width**-0.5).to(t.dtype)
