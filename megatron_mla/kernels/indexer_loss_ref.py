"""Divergence of the indexer's distribution from the attention's, in plain PyTorch.

Equation: kernels/README.md (11). Legend: T query rows, S key rows, H heads of this rank, C latent
channels, E = C + positional channels, n indexer heads, D channels of an indexer head, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import (
    KeyBounds,
    add_rows_,
    places,
    row_chunks,
    seen_keys,
    visible,
    wide_dtype,
)
from megatron_mla.kernels.index_ref import index_scores_ref


def indexer_loss_ref(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    query: Tensor,
    key: Tensor,
    bounds: KeyBounds,
    *,
    scale: float,
    relu: bool = True,
    indices: Tensor | None = None,
    sum_heads: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """``sum_t KL(attention of row t, summed over heads || softmax of the scores of row t)``.

    Over the keys that a row sees or, with ``indices``, over those it has chosen: both are
    restricted before their softmax. Rows without a key count 0. Gradients go to ``q``, ``k`` and
    ``w``, the attention is a constant. Memory is bounded: rows are worked in chunks, gradients are
    made in the forward, and nothing of T x S or larger is kept.

    Args:
        q: [T, n, D]. k: [S, D]. w: [T, n], of the indexer.
        query: [T, H, E]. key: [S, E], of the attention.
        bounds: keys that each row may see.
        scale: of the attention's products.
        relu: of the indexer's scores.
        indices: [T, K] integer, slots outside [0, S) are empty.
        sum_heads: adds the attention of other ranks' heads to a [rows, keys] fp32 tensor, in place.
    Returns:
        Scalar in fp32.
    """
    return _IndexerLoss.apply(q, k, w, query, key, bounds, scale, relu, indices, sum_heads)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, w, query, key, bounds, scale, relu, indices, sum_heads):
        total = q.new_zeros((), dtype=wide_dtype(q))
        grads = [torch.zeros(t.shape, dtype=wide_dtype(t), device=t.device) for t in (q, k, w)]
        heads = max(q.shape[1], query.shape[1])
        if indices is None:
            per_row = heads * k.shape[0]
        else:
            per_row = indices.shape[1] * max(heads, k.shape[1], key.shape[1])
        for rows in row_chunks(q.shape[0] if len(k) else 0, per_row):
            if indices is None:
                keys = seen_keys(bounds, rows)
                live = visible(bounds, rows, keys)
                of_index, of_attention = k[keys], key[keys]
            else:
                live, place = places(indices[rows], k.shape[0])
                of_index, of_attention = k[place], key[place]
            # What no row sees, and rows that see nothing, count for nothing, whatever they hold.
            used = live.any(0) if indices is None else live
            of_index, of_attention = (
                t.to(wide_dtype(t)).masked_fill(~used.unsqueeze(-1), 0.0)
                for t in (of_index, of_attention)
            )
            seeing = live.any(-1)
            target = summed_attention(_rows(query[rows], seeing), of_attention, live, scale)
            if sum_heads is not None:
                sum_heads(target)
            if target.shape[1] == 0:
                continue
            target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
            # In fp32 already: a gradient of a leaf has the dtype of the leaf.
            leaves = [
                t.detach().requires_grad_()
                for t in (_rows(q[rows], seeing), of_index, _rows(w[rows], seeing))
            ]
            with torch.enable_grad():
                scores = _scores(*leaves, relu)
            log_p, slope = _divergence(scores.detach(), target, live)
            total += log_p
            for_q, for_k, for_w = torch.autograd.grad(scores, leaves, slope)
            grads[0][rows] = for_q
            grads[2][rows] = for_w
            if indices is None:
                grads[1][keys] += for_k
            else:
                add_rows_(grads[1], place, for_k.to(grads[1].dtype))
        ctx.save_for_backward(*grads)
        ctx.dtypes = q.dtype, k.dtype, w.dtype
        return total

    @staticmethod
    def backward(ctx, grad):
        grads = (
            (saved * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *grads, *(None,) * 7


def _rows(t: Tensor, seeing: Tensor) -> Tensor:
    """Rows in fp32, zeros where they see no key."""
    return t.to(wide_dtype(t)).masked_fill(~seeing.view(-1, *(1,) * (t.dim() - 1)), 0.0)


def summed_attention(query: Tensor, keys: Tensor, live: Tensor, scale: float) -> Tensor:
    """Softmax over the live keys of every head, summed over heads: [t, keys]; 0 without any.

    Args:
        query: [t, H, E]. keys: [keys, E], or [t, keys, E]. live: [t, keys].
    """
    wide = wide_dtype(query)
    keys = keys.to(wide)
    scores = query.to(wide) @ keys.transpose(-1, -2) * scale  # [t, H, keys]
    scores = scores.masked_fill(~live.unsqueeze(1), -torch.inf)
    # A row without a key: softmax of nothing but -inf is NaN.
    return scores.softmax(-1).masked_fill(~live.unsqueeze(1), 0.0).sum(1)


def _scores(q: Tensor, k: Tensor, w: Tensor, relu: bool) -> Tensor:
    """Index scores [t, keys] for keys of all rows [keys, D] or of each [t, keys, D]."""
    if k.dim() == 2:
        return index_scores_ref(q, k, w, relu=relu)
    wide = wide_dtype(q)
    products = q.to(wide) @ k.to(wide).transpose(-1, -2)  # [t, n, keys]
    if relu:
        products = products.relu()
    return (products * w.to(wide).unsqueeze(-1)).sum(1)


def _divergence(scores: Tensor, target: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of KL(target || softmax of the live scores), and its slope over the scores."""
    any_live = live.any(-1, keepdim=True)
    scores = scores.masked_fill(~live, -torch.inf)
    # Not log_softmax, whose sum on a CPU is 1e-5 off with 64K keys.
    log_p = scores - scores.logsumexp(-1, keepdim=True)
    log_p = log_p.masked_fill(~(live & any_live), 0.0)
    # xlogy: 0 log 0 is 0. No constant is added inside the logarithms: with 64K keys the target is
    # 1.5e-5 everywhere, and 1e-10 would not be small beside a student's.
    divergence = (torch.xlogy(target, target) - target * log_p).sum()
    slope = (log_p.exp() - target).masked_fill(~(live & any_live), 0.0)
    return divergence, slope
