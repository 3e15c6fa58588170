"""Attention of new tokens over the rows of a cache, in plain PyTorch.

Equation: kernels/README.md (15). Legend: B sequences, s query rows, H heads, T cached rows, E = C +
d channels of a row, of which the leading C are the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import row_chunks, wide_dtype


def decode_attention_ref(
    query: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over cached rows, told apart by position.

    Args:
        query: [B, s, H, E].
        keys: [B, T, E], one for all heads, in any dtype; what a row that is not there holds does
            not matter.
        query_positions: [B, s] integer, negative for rows that are padding.
        key_positions: [B, T] integer, negative for rows that are not there. A query sees the keys
            up to its own position.
        scale: factor on the products.
        v_dim: C.
    Returns:
        [B, s, H, C] in the dtype of ``query`` and the natural log-sum-exp [B, s, H] in fp32 (fp64
        for fp64). Rows that see no key are 0 and -inf.
    """
    batch, rows, heads, _ = query.shape
    wide = wide_dtype(query)
    there = key_positions >= 0
    # What nobody wrote may be NaN, which no weight of 0 would take away.
    keys = keys.to(wide).masked_fill(~there.unsqueeze(-1), 0.0)
    outs, levels = [], []
    for part in row_chunks(rows, batch * heads * keys.shape[1]):
        where = query_positions[:, part, None]
        seen = there.unsqueeze(1) & (key_positions.unsqueeze(1) <= where)  # [B, s, T]
        scores = torch.einsum("bshe,bte->bsht", query[:, part].to(wide), keys) * scale
        scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
        level = scores.logsumexp(dim=-1)
        weights = (scores - level.masked_fill(level.isinf(), 0.0).unsqueeze(-1)).exp()
        outs.append(torch.einsum("bsht,btc->bshc", weights, keys[..., :v_dim]).to(query.dtype))
        levels.append(level)
    if not outs:
        none = query.new_zeros(batch, rows, heads, v_dim)
        return none, query.new_zeros(batch, rows, heads, dtype=wide)
    return torch.cat(outs, dim=1), torch.cat(levels, dim=1)
