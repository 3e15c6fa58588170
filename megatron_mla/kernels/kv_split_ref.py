"""Keys and values from packed heads in plain PyTorch: the specification of kv_split.py.

Equations: kernels/README.md (5) and (6). Legend: S rows, B batch (absent when packed), H heads,
N unrotated and d rotated key channels, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_positions, check_table
from megatron_mla.kernels.rope_ref import rows_of_tables, turn_ref

SUM_LANES = 32
"""Running sums of a sum over heads; part of the result, not of its tiling."""


def sum_heads_ref(t: Tensor) -> Tensor:
    """Sum over heads in a fixed order: head j goes to running sum j mod 32, those are halved.

    Args:
        t: [..., H, d].
    Returns:
        [..., 1, d], summed in fp32 (fp64 for fp64) and rounded once.
    """
    wide = torch.promote_types(t.dtype, torch.float32)
    # Running sums without a head would add zeros to others.
    lanes = min(SUM_LANES, 1 << max(t.shape[-2] - 1, 0).bit_length())
    sums = torch.zeros(*t.shape[:-2], lanes, t.shape[-1], dtype=wide, device=t.device)
    for heads in t.split(lanes, dim=-2):
        sums[..., : heads.shape[-2], :] += heads
    while lanes > 1:
        lanes //= 2
        sums = sums[..., :lanes, :] + sums[..., lanes:, :]
    return sums.to(t.dtype)


class _KVSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, k_pe, cos, sin, k_dim, pairs_out):
        ctx.save_for_backward(cos, sin)
        ctx.arguments = k_dim, pairs_out
        k_nope, value = kv[..., :k_dim], kv[..., k_dim:]
        shared = _turn_leading(k_pe, cos, sin, pairs_out=pairs_out)
        shared = shared.expand(*k_nope.shape[:-1], shared.shape[-1])
        return torch.cat((k_nope, shared), dim=-1), value

    @staticmethod
    def backward(ctx, grad_key, grad_value):
        k_dim, pairs_out = ctx.arguments
        grad_kv = torch.cat((grad_key[..., :k_dim], grad_value), dim=-1)
        shared = sum_heads_ref(grad_key[..., k_dim:])
        grad_pe = _turn_leading(
            shared,
            *ctx.saved_tensors,
            pairs_in=pairs_out,
            pairs_out=True,
            inverse=True,
            backward=True,
        )
        return grad_kv, grad_pe, None, None, None, None


def _turn_leading(t: Tensor, cos: Tensor, sin: Tensor, **how) -> Tensor:
    """Rotate as many channels as the tables have and keep the others."""
    end = 2 * cos.shape[-1]
    rotated = turn_ref(t[..., :end], cos, sin, **how)
    return torch.cat((rotated, t[..., end:]), dim=-1) if end < t.shape[-1] else rotated


def rope_kv_split_ref(
    kv: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    k_dim: int,
    remove_interleaving: bool = False,
    pack_value: bool = False,
    partial: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys with the shared rotated part on every head, and values.

    Args:
        kv: [S, (B,) H, N + V], heads ``[k nope | v]``.
        k_pe: [S, (B,) 1, d], one for all heads, in pairs.
        cos, sin: [P, d / 2]. positions: [S].
        k_dim: N.
        remove_interleaving: write pairs again instead of halves.
        pack_value: copy the values into a contiguous tensor.
        partial: the tables may be narrower than ``k_pe``, which then keeps its last channels.
    Returns:
        Key [S, (B,) H, N + d], and value [S, (B,) H, V], a view of ``kv`` unless packed.
    Gradients: kv, and k_pe by :func:`sum_heads_ref`.
    """
    check_table(cos, sin, k_pe, 2 * cos.shape[-1] if partial else k_pe.shape[-1], "k_pe")
    check_positions(positions, k_pe, cos, "k_pe")
    tables = rows_of_tables(k_pe, cos, sin, positions)
    key, value = _KVSplit.apply(kv, k_pe, *tables, k_dim, remove_interleaving)
    return key, value.contiguous() if pack_value else value
