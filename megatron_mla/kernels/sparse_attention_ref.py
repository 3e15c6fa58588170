"""Attention over chosen keys of one latent head, in plain PyTorch.

Equation: kernels/README.md (10). Legend: T query rows, S key rows, H heads of this rank, C latent
channels (the value), D = C + positional channels, K slots of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import row_chunks, wide_dtype


def sparse_attention_ref(
    query: Tensor, key: Tensor, indices: Tensor, *, scale: float, v_dim: int
) -> Tensor:
    """Softmax attention of every row over the keys it has chosen; their latents are the values.

    Memory is bounded: rows are worked in chunks, forward and backward, and only the arguments, the
    output and [T, H] are kept. Sums are in fp32, the output and each gradient are rounded once.

    Args:
        query: [T, H, D]. key: [S, D], shared by all heads.
        indices: [T, K] integer, rows of ``key`` in any order. A slot outside [0, S), -1 for
            instance, has no weight and no gradient; a row of nothing else gives 0.
        scale: of the products.
        v_dim: C, leading channels of ``key``.
    Returns:
        [T, H, C] in the dtype of ``query``.
    """
    return _SparseAttention.apply(query, key, indices, scale, v_dim)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, indices, scale, v_dim):
        out = query.new_empty(*query.shape[:2], v_dim)
        log_sum = query.new_empty(query.shape[:2], dtype=wide_dtype(query))
        for rows in _chunks(query, key, indices):
            keys, live, _ = _chosen(key, indices[rows])
            scores = _scores(query[rows], keys, live, scale)
            largest = scores.amax(-1, keepdim=True)
            # Rows without a key: finite, and every weight 0.
            largest = largest.masked_fill(largest == -torch.inf, 0.0)
            weights = (scores - largest).exp()
            total = weights.sum(-1, keepdim=True)
            # An infinite log-sum-exp makes exp(score - it) 0 again in the backward.
            log_sum[rows] = torch.where(total > 0, largest + total.log(), torch.inf)[..., 0]
            weights = weights / total.masked_fill(total == 0, 1.0)
            out[rows] = (weights @ keys[..., :v_dim]).to(out.dtype)
        ctx.save_for_backward(query, key, indices, out, log_sum)
        ctx.scale, ctx.v_dim = scale, v_dim
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, indices, out, log_sum = ctx.saved_tensors
        wide = wide_dtype(query)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=wide, device=key.device)
        for rows in _chunks(query, key, indices):
            keys, live, place = _chosen(key, indices[rows])
            scores = _scores(query[rows], keys, live, ctx.scale)
            weights = (scores - log_sum[rows].unsqueeze(-1)).exp()  # [t, H, K]
            grad_out = grad[rows].to(wide)
            of_weights = grad_out @ keys[..., : ctx.v_dim].transpose(-1, -2)
            mean = (grad_out * out[rows].to(wide)).sum(-1, keepdim=True)
            of_scores = weights * (of_weights - mean) * ctx.scale
            grad_query[rows] = (of_scores @ keys).to(query.dtype)
            of_keys = of_scores.transpose(-1, -2) @ query[rows].to(wide)  # [t, K, D]
            of_keys[..., : ctx.v_dim] += weights.transpose(-1, -2) @ grad_out
            grad_key.index_add_(0, place.flatten(), of_keys.flatten(0, 1))
        return grad_query, grad_key.to(key.dtype), None, None, None


def _chunks(query: Tensor, key: Tensor, indices: Tensor):
    heads, width = query.shape[1:]
    return row_chunks(query.shape[0], indices.shape[1] * max(width, heads))


def _chosen(key: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [t, K, D] in fp32, whether a slot holds one [t, 1, K], and where it lies [t, K]."""
    live = (indices >= 0) & (indices < key.shape[0])
    place = indices.masked_fill(~live, 0).long()
    # What an empty slot reads counts for nothing, whatever it is: 0 times infinity would be NaN.
    keys = key[place].to(wide_dtype(key)).masked_fill(~live.unsqueeze(-1), 0.0)
    return keys, live.unsqueeze(1), place


def _scores(query: Tensor, keys: Tensor, live: Tensor, scale: float) -> Tensor:
    """[t, H, K], -inf in empty slots."""
    scores = query.to(keys.dtype) @ keys.transpose(-1, -2) * scale
    return scores.masked_fill(~live, -torch.inf)
