"""Indexer scores and the choice of keys in plain PyTorch.

Equations: kernels/README.md (8) and (9). Legend: T query rows, S key rows, n indexer heads,
D channels of an indexer head, K chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import KeyBounds, row_chunks, seen_keys, visible, wide_dtype


def index_scores_ref(q: Tensor, k: Tensor, w: Tensor, *, relu: bool = True) -> Tensor:
    """``sum_h w[t, h] * relu(q[t, h] . k[s])`` in fp32; differentiable.

    Not bounded in memory: makes [n, T, S]. Callers hand chunks of rows.

    Args:
        q: [T, n, D]. k: [S, D]. w: [T, n].
        relu: without, plain products are summed.
    Returns:
        [T, S] fp32 (fp64 for fp64 inputs).
    """
    wide = wide_dtype(q)
    products = q.to(wide).transpose(0, 1) @ k.to(wide).t()  # [n, T, S]
    if relu:
        products = products.relu()
    return (products * w.to(wide).t().unsqueeze(-1)).sum(0)


@torch.no_grad()
def index_topk_ref(
    q: Tensor, k: Tensor, w: Tensor, bounds: KeyBounds, *, topk: int, relu: bool = True
) -> Tensor:
    """Keys with the greatest scores of every row: greater first, ties by the lowest index.

    Memory is bounded: rows are scored in chunks, and nothing of T x S or larger is kept.

    Args:
        q: [T, n, D]. k: [S, D]. w: [T, n].
        bounds: keys that each row may see.
        topk: keys per row.
    Returns:
        [T, min(topk, S)] int32, in the order of choice; -1 where a row sees fewer.
    """
    num_rows, num_keys = q.shape[0], k.shape[0]
    width = min(topk, num_keys)
    chosen = torch.full((num_rows, width), -1, dtype=torch.int32, device=q.device)
    for rows in row_chunks(num_rows, q.shape[1] * num_keys):
        keys = seen_keys(bounds, rows)
        found = min(width, keys.stop - keys.start)
        if found == 0:
            continue
        scores = index_scores_ref(q[rows], k[keys], w[rows], relu=relu)
        chosen[rows, :found] = best_keys(scores, visible(bounds, rows, keys), found, keys.start)
    return chosen


def best_keys(scores: Tensor, seen: Tensor, width: int, first: int = 0) -> Tensor:
    """[rows, width] int32: visible columns by falling score, then by rising index; else -1.

    Args:
        scores, seen: [rows, keys].
        first: index of the first column.
    """
    # A score that is -inf itself must not tie with keys that are not visible.
    scores = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(~seen, -torch.inf)
    # Stable: equal scores, of which ReLU makes many, stay in the order of their keys.
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    order = (order + first).to(torch.int32)
    slot = torch.arange(width, device=scores.device)
    return order.masked_fill(slot >= seen.sum(-1, keepdim=True), -1)
