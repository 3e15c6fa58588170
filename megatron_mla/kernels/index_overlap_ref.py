"""How well chosen keys cover what dense attention weighs most, in plain PyTorch.

Legend: T query rows, S key rows, H heads of this rank, E channels of an absorbed head, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import KeyBounds, row_chunks, seen_keys, visible
from megatron_mla.kernels.index_ref import best_keys
from megatron_mla.kernels.indexer_loss_ref import summed_attention


def index_overlap_ref(
    query: Tensor,
    key: Tensor,
    bounds: KeyBounds,
    indices: Tensor,
    *,
    scale: float,
    sum_heads: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Chosen keys among the K with the most attention, over rows that see more than K.

    Memory is bounded as in :func:`~megatron_mla.kernels.indexer_loss_ref.indexer_loss_ref`.

    Args:
        query: [T, H, E]. key: [S, E]. indices: [T, K], -1 for none.
        bounds: keys that each row may see.
        scale, sum_heads: as for the loss.
    Returns:
        Keys in common and keys (rows times K), scalars in int64.
    """
    width = indices.shape[1]
    common = torch.zeros((), dtype=torch.int64, device=query.device)
    keys_in_all = torch.zeros_like(common)
    for rows in row_chunks(query.shape[0], query.shape[1] * key.shape[0]):
        keys = seen_keys(bounds, rows)
        if keys.stop - keys.start <= width:
            continue
        seen = visible(bounds, rows, keys)
        attention = summed_attention(query[rows], key[keys], seen, scale)
        if sum_heads is not None:
            sum_heads(attention)
        many = seen.sum(-1) > width
        best = best_keys(attention, seen, width)[many].long()
        chosen = indices[rows][many].long() - keys.start
        inside = (chosen >= 0) & (chosen < seen.shape[1])
        # One column more, for slots without a key.
        marked = torch.zeros(len(best), seen.shape[1] + 1, dtype=torch.bool, device=query.device)
        marked.scatter_(1, torch.where(inside, chosen, seen.shape[1]), True)
        common += marked.gather(1, best).sum()
        keys_in_all += best.numel()
    return common, keys_in_all
