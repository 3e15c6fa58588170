"""Attention over chosen keys of one latent head, in plain PyTorch.

Equation: kernels/README.md (10). Legend: T query rows, S key rows, H heads of this rank, C latent
channels (the value), D = C + positional channels, K slots of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.chunks import add_rows_, places, row_chunks, wide_dtype


def sparse_attention_ref(
    query: Tensor, key: Tensor, indices: Tensor, *, scale: float, v_dim: int
) -> Tensor:
    """Softmax attention of every row over the keys it has chosen; their latents are the values.

    Memory is bounded: rows are worked in chunks, forward and backward, and only the arguments are
    kept. Sums are in fp32, the output and each gradient are rounded once.

    Args:
        query: [T, H, D]. key: [S, D], shared by all heads.
        indices: [T, K] integer, rows of ``key`` in any order. A slot outside [0, S), -1 for
            instance, has no weight and no gradient; a row of nothing else gives 0.
        scale: of the products.
        v_dim: C, leading channels of ``key``.
    Returns:
        [T, H, C] in the dtype of ``query``.
    """
    if indices.shape[1] == 0 or key.shape[0] == 0:
        indices, key = indices.new_full((len(indices), 1), -1), key.new_zeros(1, key.shape[1])
    return _SparseAttention.apply(query, key, indices, scale, v_dim)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, indices, scale, v_dim):
        out = query.new_empty(*query.shape[:2], v_dim)
        for rows in _chunks(query, key, indices):
            keys, live, _ = _chosen(key, indices[rows])
            weights = _weights(_wide(query[rows], live), keys, live, scale)
            out[rows] = (weights @ keys[..., :v_dim]).to(out.dtype)
        ctx.save_for_backward(query, key, indices)
        ctx.scale, ctx.v_dim = scale, v_dim
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, indices = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=wide_dtype(query), device=key.device)
        for rows in _chunks(query, key, indices):
            keys, live, place = _chosen(key, indices[rows])
            queries, grad_out = _wide(query[rows], live), _wide(grad[rows], live)
            # The softmax anew, and not from a kept log-sum-exp: its fp32 is 1e-3 off beside logits
            # of 1e4. Nor is the mean taken from the output, which is rounded to the dtype.
            weights = _weights(queries, keys, live, ctx.scale)
            of_weights = grad_out @ keys[..., : ctx.v_dim].transpose(-1, -2)  # [t, H, K]
            mean = (weights * of_weights).sum(-1, keepdim=True)
            of_scores = weights * (of_weights - mean) * ctx.scale
            grad_query[rows] = (of_scores @ keys).to(query.dtype)
            of_keys = of_scores.transpose(-1, -2) @ queries  # [t, K, D]
            of_keys[..., : ctx.v_dim] += weights.transpose(-1, -2) @ grad_out
            add_rows_(grad_key, place, of_keys)
        return grad_query, grad_key.to(key.dtype), None, None, None


def _chunks(query: Tensor, key: Tensor, indices: Tensor):
    heads, width = query.shape[1:]
    return row_chunks(query.shape[0], indices.shape[1] * max(width, heads))


def _chosen(key: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [t, K, D] in fp32, whether a slot holds one [t, 1, K], and where it lies [t, K]."""
    live, place = places(indices, key.shape[0])
    # What an empty slot reads counts for nothing, whatever it is: 0 times infinity would be NaN.
    keys = key[place].to(wide_dtype(key)).masked_fill(~live.unsqueeze(-1), 0.0)
    return keys, live.unsqueeze(1), place


def _wide(t: Tensor, live: Tensor) -> Tensor:
    """Rows [t, H, width] in fp32; those without a key count for nothing, whatever they hold."""
    return t.to(wide_dtype(t)).masked_fill(~live.any(-1, keepdim=True), 0.0)


def _weights(query: Tensor, keys: Tensor, live: Tensor, scale: float) -> Tensor:
    """Softmax over the slots that hold a key [t, H, K]; 0 in all of a row without one."""
    scores = query @ keys.transpose(-1, -2) * scale
    # A row of nothing but -inf has a softmax of NaN.
    return scores.masked_fill(~live, -torch.inf).softmax(-1).masked_fill(~live, 0.0)
