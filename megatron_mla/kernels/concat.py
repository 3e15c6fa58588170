"""Packing of ``[nope | rotated pe]`` in one launch, in Triton. Twin: concat_ref.py.

Equations: kernels/README.md (4). Legend: S rows, B batch (absent when packed), H heads, N unrotated
and d rotated channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_positions, check_same, check_table, check_tensor
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rope import launch_rope


def _empty(nope, pe, *tables) -> Tensor:
    shape = (*nope.shape[:-1], nope.shape[-1] + pe.shape[-1])
    return torch.empty(shape, dtype=nope.dtype, device=nope.device)


def _rope_concat(nope, pe, cos, sin, positions) -> Tensor:
    out = _empty(nope, pe)
    width = nope.shape[-1]
    launch_rope(pe, out[..., width:], cos, sin, positions, nope=nope, nope_out=out[..., :width])
    return out


def _setup_context(ctx, inputs, output) -> None:
    nope, _, *tables = inputs
    ctx.save_for_backward(*tables)
    ctx.width = nope.shape[-1]


def _backward(ctx, grad):
    # The unrotated channels of the gradient are a view, as in the backward of torch.cat.
    grad_pe = torch.ops.megatron_mla.rope(
        grad[..., ctx.width :], *ctx.saved_tensors, 0, False, False, True, True, True
    )
    return grad[..., : ctx.width], grad_pe, None, None, None


register(
    "rope_concat",
    "(Tensor nope, Tensor pe, Tensor cos, Tensor sin, Tensor positions) -> Tensor",
    _rope_concat,
    _empty,
    setup_context=_setup_context,
    backward=_backward,
)


def rope_concat(nope: Tensor, pe: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """``[nope | rotated pe]`` in one contiguous tensor; pe comes in as pairs and leaves as halves.

    Args:
        nope: [S, (B,) H, N] bf16 | fp16 | fp32 | fp64, any strides.
        pe: [S, (B,) H, d], any strides.
        cos, sin: [P, d / 2]; their dtype chooses the numerics as in
            :func:`megatron_mla.kernels.rope.rope`.
        positions: [S] int32 | int64.
    Returns:
        [S, (B,) H, N + d], contiguous.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: nope (a view of the incoming gradient) and pe.
    """
    check_tensor("nope", nope)
    check_tensor("pe", pe)
    check_same("pe", pe, "nope", nope)
    if nope.shape[:-1] != pe.shape[:-1]:
        raise ValueError(
            f"pe must be [{', '.join(map(str, nope.shape[:-1]))}, d] like nope, got "
            f"{list(pe.shape)}; expand a shared head first"
        )
    check_table(cos, sin, pe, pe.shape[-1], "pe")
    check_positions(positions, pe, cos, "pe")
    return torch.ops.megatron_mla.rope_concat(nope, pe, cos, sin, positions)
