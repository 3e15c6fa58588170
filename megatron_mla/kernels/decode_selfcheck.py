"""A check before its first use that the kernel of attention over a cache is right on this machine.

A new GPU, driver or Triton can turn right source into wrong code, and older GPUs have no FP8. The
problem has the dtypes, the widths and the block of rows that will run, so that what is compiled
here is not compiled again, and few keys; the truth is that of the twin in fp64.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_mla.kernels.decode_attention import decode_attention
from megatron_mla.kernels.decode_attention_ref import decode_attention_ref
from megatron_mla.kernels.sparse_forward import HEADS, head_block

# Keys of one split, and of several.
_KEYS = (70, 1000)
# Of the largest value; wrong code is off by far more.
_ALLOWED = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 5e-2}


def decode_fault(
    device: str, dtypes: tuple[torch.dtype, torch.dtype], num_rows: int, widths: tuple[int, int]
) -> str | None:
    """What is wrong with the kernel on ``device``, a sentence, or None.

    Args:
        device: "cuda:0", or "cpu" with Triton's interpreter.
        dtypes: of queries and of keys.
        num_rows: new tokens of a sequence times heads.
        widths: latent and positional channels.
    """
    return _fault(device, dtypes, head_block(max(1, num_rows), HEADS), widths)


@functools.cache
def _fault(device: str, dtypes, num_rows: int, widths: tuple[int, int]) -> str | None:
    try:
        with torch.inference_mode(False), torch.no_grad():
            off = _compare(torch.device(device), *dtypes, num_rows, widths)
    except Exception as error:  # noqa: BLE001  whatever a compiler or driver raises
        return f"the kernel does not run on {device} ({type(error).__name__}: {error})"
    wrong = [name for name, error in off.items() if not error <= _ALLOWED[dtypes[0]]]
    if wrong:
        kinds = " over ".join(str(dtype) for dtype in dtypes)
        return f"the kernel gives a wrong {', '.join(wrong)} on {device} for {kinds}"
    return None


def _compare(device, dtype, key_dtype, num_rows: int, widths) -> dict[str, float]:
    """Largest errors, over the largest true value."""
    # The CPU by name: a layer may be built on the meta device.
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device)

    off: dict[str, float] = {}
    how = {"scale": sum(widths) ** -0.5, "v_dim": widths[0]}
    for length in _KEYS:
        query = normal(2, 1, num_rows, sum(widths)).to(dtype)
        keys = normal(2, length, sum(widths))
        # One sequence is shorter, and holds rows that nobody wrote; the other misses some.
        positions = torch.arange(length, device=device).repeat(2, 1)
        positions[1, length // 2 :] = -1
        positions[0, 3] = -1
        keys[1, length // 2 :] = torch.nan
        keys = keys.to(key_dtype)
        last = torch.tensor([[length - 1], [length // 3]], device=device)
        got = decode_attention(query, keys, last, positions, **how)
        want = decode_attention_ref(query.double(), keys, last, positions, **how)
        for name, one, other in zip(("output", "log-sum-exp"), got, want, strict=True):
            error = (one.double() - other).abs().max() / other.abs().max()
            off[name] = max(off.get(name, 0.0), error.item())
    return off
