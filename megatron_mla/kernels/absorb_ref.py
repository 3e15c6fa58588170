"""Absorbed queries in plain PyTorch: the specification of absorb.py."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.concat_ref import rope_concat_ref


def absorb_query_ref(
    q: Tensor, wk: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, nope_dim: int
) -> Tensor:
    """``[q_nope . wk | rotated q_pe]``: queries that meet the latent itself.

    Args:
        q: [S, (B,) H, N + d], heads ``[nope | pe]`` with pe in pairs.
        wk: [H, N, C], the key half of the up projection.
        cos, sin: [P, d / 2]. positions: [S].
        nope_dim: N.
    Returns:
        [S, (B,) H, C + d].
    """
    nope, pe = q[..., :nope_dim], q[..., nope_dim:]
    heads_first = nope.flatten(0, -3).transpose(0, 1)  # [H, T, N]
    latent = torch.bmm(heads_first, wk).transpose(0, 1)  # [T, H, C]
    latent = latent.reshape(*nope.shape[:-1], wk.shape[-1])
    return rope_concat_ref(latent, pe, cos, sin, positions)
