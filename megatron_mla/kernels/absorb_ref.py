"""Absorbed queries in plain PyTorch: the specification of absorb.py."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.concat_ref import rope_concat_ref


def absorb_query_ref(
    q: Tensor,
    wk: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    nope_dim: int,
    partial: bool = False,
) -> Tensor:
    """``[q_nope . wk | rotated q_pe]``: queries that meet the latent itself.

    Args:
        q: [S, (B,) H, N + d], heads ``[nope | pe]`` with pe in pairs.
        wk: [H, N, C], the key half of the up projection.
        cos, sin: [P, d / 2]. positions: [S].
        nope_dim: N.
        partial: tables are narrower than d; the channels behind them are not rotated.
    Returns:
        [S, (B,) H, C + d].
    """
    latent = absorb_nope_ref(q[..., :nope_dim], wk)
    return rope_concat_ref(latent, q[..., nope_dim:], cos, sin, positions, partial=partial)


def absorb_nope_ref(nope: Tensor, wk: Tensor) -> Tensor:
    """[S, (B,) H, N] times [H, N, C], head by head."""
    heads_first = nope.flatten(0, -3).transpose(0, 1)  # [H, T, N]
    latent = torch.bmm(heads_first, wk).transpose(0, 1)  # [T, H, C]
    return latent.reshape(*nope.shape[:-1], wk.shape[-1])
