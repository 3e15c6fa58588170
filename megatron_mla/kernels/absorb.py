"""Absorbed queries without a copy: the product writes into the packed buffer. Twin: absorb_ref.py.

Only the d positional channels of a head are left to a kernel; neither direction concatenates or
splits. Equations: kernels/README.md (7). Legend: S rows, B batch (absent when packed), T = S * B,
H heads, N unrotated and d rotated query channels, C latent channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_rope, check_same
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.rope import launch_rope


def _by_head(t: Tensor) -> Tensor:
    """[S, (B,) H, width] -> [H, T, width], a view where S and B can be one."""
    return t.flatten(0, -3).transpose(0, 1)


def _empty(q, wk, cos, sin, positions, nope_dim) -> Tensor:
    shape = (*q.shape[:-1], wk.shape[-1] + q.shape[-1] - nope_dim)
    return torch.empty(shape, dtype=q.dtype, device=q.device)


def _absorb_query(q, wk, cos, sin, positions, nope_dim) -> Tensor:
    out = _empty(q, wk, cos, sin, positions, nope_dim)
    latent = wk.shape[-1]
    torch.bmm(_by_head(q[..., :nope_dim]), wk, out=_by_head(out[..., :latent]))
    launch_rope(q[..., nope_dim:], out[..., latent:], cos, sin, positions)
    return out


def _absorb_query_backward(grad, q, wk, cos, sin, positions, nope_dim, need_q, need_wk):
    latent = wk.shape[-1]
    grad_q, grad_wk = _empty_grads(grad, q, wk, cos, sin, positions, nope_dim, need_q, need_wk)
    grad_latent = _by_head(grad[..., :latent])  # [H, T, C]
    if need_q:
        torch.bmm(grad_latent, wk.transpose(1, 2), out=_by_head(grad_q[..., :nope_dim]))
        launch_rope(
            grad[..., latent:],
            grad_q[..., nope_dim:],
            cos,
            sin,
            positions,
            pairs_in=False,
            pairs_out=True,
            inverse=True,
            backward=True,
        )
    if need_wk:
        torch.bmm(_by_head(q[..., :nope_dim]).transpose(1, 2), grad_latent, out=grad_wk)
    return grad_q, grad_wk


def _empty_grads(grad, q, wk, cos, sin, positions, nope_dim, need_q, need_wk):
    return (
        torch.empty(q.shape if need_q else (0,), dtype=q.dtype, device=q.device),
        torch.empty(wk.shape if need_wk else (0,), dtype=wk.dtype, device=wk.device),
    )


def _setup_context(ctx, inputs, output) -> None:
    q, wk, cos, sin, positions, nope_dim = inputs
    ctx.save_for_backward(q, wk, cos, sin, positions)
    ctx.nope_dim = nope_dim


def _backward(ctx, grad):
    needs = ctx.needs_input_grad[:2]
    grads = torch.ops.megatron_mla.absorb_query_backward(
        grad, *ctx.saved_tensors, ctx.nope_dim, *needs
    )
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 4


_ARGUMENTS = "Tensor q, Tensor wk, Tensor cos, Tensor sin, Tensor positions, int nope_dim"
register(
    "absorb_query",
    f"({_ARGUMENTS}) -> Tensor",
    _absorb_query,
    _empty,
    setup_context=_setup_context,
    backward=_backward,
)
register(
    "absorb_query_backward",
    f"(Tensor grad, {_ARGUMENTS}, bool need_q, bool need_wk) -> (Tensor, Tensor)",
    _absorb_query_backward,
    _empty_grads,
)


def absorb_query(
    q: Tensor, wk: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, nope_dim: int
) -> Tensor:
    """``[q_nope . wk | rotated q_pe]``: queries that meet the latent itself.

    Args:
        q: [S, (B,) H, N + d] bf16 | fp16 | fp32 | fp64, last stride 1; heads ``[nope | pe]`` with
            pe in pairs.
        wk: [H, N, C] in the dtype of ``q``, the key half of the up projection; may be a view.
        cos, sin: [P, d / 2]; their dtype chooses the numerics as in
            :func:`megatron_mla.kernels.rope.rope`.
        positions: [S] int32 | int64.
        nope_dim: N.
    Returns:
        [S, (B,) H, C + d], contiguous.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: q and wk. Nothing but the arguments is kept for the backward.
    """
    check_rope(q, cos, sin, positions, nope_dim=nope_dim, name="q")
    check_same("wk", wk, "q", q)
    if wk.dim() != 3 or wk.shape[:2] != (q.shape[-2], nope_dim):
        raise ValueError(
            f"wk must be [{q.shape[-2]}, {nope_dim}, C], heads and nope_dim of q, got "
            f"{list(wk.shape)}; view the up projection's weight by head and take its key rows"
        )
    return torch.ops.megatron_mla.absorb_query(q, wk, cos, sin, positions, nope_dim)
