"""Absorbed attention over the rows of a cache, with the log-sum-exp that partial results need.

Legend: B sequences, s query rows, H heads, T cached rows, E = C + d channels of a row, of which
the leading C are the value.
"""

from __future__ import annotations

from torch import Tensor

from megatron_mla.kernels.decode_attention_ref import decode_attention_ref
from megatron_mla.selection import should_use_decode_kernel


def attend_to_rows(
    query: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over cached rows, told apart by position.

    On a GPU by the kernel of :mod:`megatron_mla.kernels.decode_attention` unless a gradient is
    recorded; else, and wherever the kernel cannot run, by its twin.

    Arguments and results are those of
    :func:`~megatron_mla.kernels.decode_attention_ref.decode_attention_ref`.
    """
    attend = decode_attention_ref
    if should_use_decode_kernel(query, keys, v_dim):
        from megatron_mla.kernels.decode_attention import decode_attention as attend
    return attend(query, keys, query_positions, key_positions, scale=scale, v_dim=v_dim)
