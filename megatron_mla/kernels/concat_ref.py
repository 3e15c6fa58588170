"""Packing of ``[nope | rotated pe]`` in plain PyTorch: the specification of concat.py."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.rope_ref import rope_ref


def rope_concat_ref(
    nope: Tensor,
    pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    partial: bool = False,
) -> Tensor:
    """``[nope | rotated pe]`` in one tensor; pe comes in as pairs and leaves as halves.

    Args:
        nope: [S, (B,) H, N]. pe: [S, (B,) H, d].
        cos, sin: [P, d / 2]. positions: [S].
    Returns:
        [S, (B,) H, N + d].
    """
    pe = rope_ref(pe, cos, sin, positions, nope_dim=0, partial=partial)
    return torch.cat((nope, pe), dim=-1)
