"""A start-up check that the kernels are right on this machine: bits of their twins, once.

A new GPU, driver or Triton can turn right source into wrong code. The shapes are tiny but ragged:
heads past one block, widths that are no powers of two, packed positions.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope import rope, rope_
from megatron_mla.kernels.rope_ref import rope_ref

_TOKENS, _HEADS, _NOPE, _ROTATED, _VALUE = 5, 37, 24, 12, 20


@functools.cache
def rope_fault(device: str, dtype: torch.dtype) -> str | None:
    """What is wrong with the rotary kernels on ``device``, a sentence, or None.

    Args:
        device: "cuda:0", or "cpu" with Triton's interpreter.
        dtype: activation dtype.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _compare(torch.device(device), dtype)
    except Exception as error:  # noqa: BLE001  whatever a compiler or driver raises
        return f"the kernels do not run on {device} ({type(error).__name__}: {error})"


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    # The CPU by name: a layer may be built on the meta device.
    source = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, **source).to(device, dtype)

    angle = torch.rand(4, _ROTATED // 2, **source) * 6
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    positions = torch.tensor([0, 1, 0, 3, 2], dtype=torch.int32, device=device)
    tables = cos, sin, positions
    q = normal(_TOKENS, _HEADS, _NOPE + _ROTATED)
    kv, k_pe = normal(_TOKENS, _HEADS, _NOPE + _VALUE), normal(_TOKENS, 1, _ROTATED)
    grads = [normal(_TOKENS, _HEADS, _NOPE + _ROTATED), normal(_TOKENS, _HEADS, _VALUE)]

    def run(query, key_value) -> dict[str, Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, kv, k_pe)]
        outputs = query(leaves[0]), *key_value(leaves[1], leaves[2], *tables, k_dim=_NOPE)
        backward = torch.autograd.grad(outputs, leaves, [grads[0], *grads])
        names = ("query", "key", "value", "gradient of q", "gradient of kv", "gradient of k_pe")
        return dict(zip(names, (*outputs, *backward), strict=True))

    def in_place(t: Tensor) -> Tensor:
        return rope_(t * 1, *tables, nope_dim=_NOPE)

    want = run(lambda t: rope_ref(t, *tables, nope_dim=_NOPE), rope_kv_split_ref)
    for query in (in_place, lambda t: rope(t, *tables, nope_dim=_NOPE)):
        got = run(query, rope_kv_split)
        wrong = [name for name in want if not torch.equal(got[name], want[name])]
        if wrong:
            return f"the kernels give a wrong {', '.join(wrong)} on {device} in {dtype}"
    return None
