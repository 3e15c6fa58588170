"""Products on tensor cores, and what kernels that have some share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels.rotation import round_to

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Of a program on Hopper.
HOPPER_SHARED_BYTES = 227 * 1024

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


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; that of Hopper where there is no device to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
