"""Products on tensor cores, and what Triton's interpreter does otherwise than a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.rotation import round_to

# The interpreter multiplies the bits of bf16 as integers (seen in Triton 3.6 to 3.8).
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(a, b, sums, PRECISION: tl.constexpr):
    """``sums + a . b`` in fp32."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 rounded to nearest, as ``dtype``."""
    return round_to(x, dtype).to(dtype)


def precision_of(t: Tensor) -> str:
    """Products of fp32 must not be cut to tf32; others do not ask."""
    return "ieee" if t.dtype == torch.float32 else "tf32"
