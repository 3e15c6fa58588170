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

    Args:
        query: [B, s, H, E].
        keys: [B, T, E], one for all heads; what a row that is not there holds does not matter.
        query_positions: [B, s] integer, negative for rows that are padding.
        key_positions: [B, T] integer, negative for rows that are not there. A query sees the keys
            up to its own position.
        scale: factor on the products.
        v_dim: C.
    Returns:
        [B, s, H, C] in the dtype of ``query`` and the natural log-sum-exp [B, s, H] in fp32 (fp64
        for fp64). Rows that see no key are 0 and -inf.
    """
    attend = decode_attention_ref
    if should_use_decode_kernel(query, keys, v_dim):
        from megatron_mla.kernels.decode_attention import decode_attention as attend
    return attend(query, keys, query_positions, key_positions, scale=scale, v_dim=v_dim)
