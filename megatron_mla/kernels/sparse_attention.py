"""Attention over chosen keys of one latent head, by kernels. Twin: sparse_attention_ref.py.

Equation: kernels/README.md (10). Scores, sums and gradients are in fp32; probabilities and the
slopes of scores are rounded to the dtype of the arguments before tensor cores multiply them, and
the incoming gradient's mean is taken from the rounded output, as in every flash attention. Legend:
T query rows, S key rows, H heads of this rank, C latent channels (the value), D = C + positional
channels, K slots of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_same, check_tensor, check_unit_stride
from megatron_mla.kernels.registry import register
from megatron_mla.kernels.sparse_backward import sparse_backward
from megatron_mla.kernels.sparse_forward import launch_forward

try:
    from megatron_mla.kernels.sparse_forward_hopper import fits, launch_forward_hopper
except Exception as error:  # noqa: BLE001  Gluon is experimental: another Triton may lack anything
    _hopper_fault: str | None = f"{type(error).__name__}: {error}"
else:
    _hopper_fault = None


def runs_on_hopper(query: Tensor, v_dim: int) -> bool:
    """Whether the forward of ``query`` [T, H, D] is the kernel for Hopper."""
    return _hopper_fault is None and fits(query, v_dim)


def leave_hopper(fault: str) -> None:
    """Let the portable kernel run from now on, where the one for Hopper has a fault."""
    global _hopper_fault
    _hopper_fault = fault


def _is_empty(query: Tensor, key: Tensor, indices: Tensor) -> bool:
    return 0 in (*query.shape, *key.shape, *indices.shape)


def _empty(query, key, indices, scale, v_dim):
    how = {"device": query.device}
    out = torch.empty(*query.shape[:2], v_dim, dtype=query.dtype, **how)
    return out, torch.empty(query.shape[:2], dtype=torch.float32, **how)


def _sparse_attention(query, key, indices, scale, v_dim):
    out, lse = _empty(query, key, indices, scale, v_dim)
    if _is_empty(query, key, indices):
        return out.zero_(), lse.fill_(-torch.inf)
    if runs_on_hopper(query, v_dim):
        launch_forward_hopper(query, key, indices, out, lse, scale)
    else:
        launch_forward(query, key, indices, out, lse, scale)
    return out, lse


def _sparse_attention_backward(grad, query, key, indices, out, lse, scale, deterministic):
    if _is_empty(query, key, indices):
        return torch.zeros_like(query), torch.zeros_like(key)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    return sparse_backward(grad, query, key, indices, out, lse, scale, deterministic)


def _empty_grads(grad, query, key, indices, out, lse, scale, deterministic):
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.empty_like(key)


def _setup_context(ctx, inputs, output) -> None:
    query, key, indices, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, indices, *output)


def _backward(ctx, grad, grad_lse):
    query, key, indices, out, lse = ctx.saved_tensors
    strict = torch.are_deterministic_algorithms_enabled()
    grads = torch.ops.megatron_mla.sparse_attention_backward(
        grad, query, key, indices, out, lse, ctx.scale, strict
    )
    return *grads, None, None, None


register(
    "sparse_attention",
    "(Tensor query, Tensor key, Tensor indices, float scale, int v_dim) -> (Tensor, Tensor)",
    _sparse_attention,
    _empty,
    setup_context=_setup_context,
    backward=_backward,
)
register(
    "sparse_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor indices, Tensor out, Tensor lse, float scale, "
    "bool deterministic) -> (Tensor, Tensor)",
    _sparse_attention_backward,
    _empty_grads,
)


def sparse_attention(
    query: Tensor, key: Tensor, indices: Tensor, *, scale: float, v_dim: int
) -> Tensor:
    """Softmax attention of every row over the keys it has chosen; their latents are the values.

    Args:
        query: [T, H, D] bf16 | fp16 | fp32, last stride 1.
        key: [S, D] in the dtype of ``query``, last stride 1; shared by all heads.
        indices: [T, K] int32 | int64, last stride 1: rows of ``key`` in any order. A slot outside
            [0, S), -1 for instance, has no weight and no gradient; a row of nothing else gives 0.
        scale: of the products.
        v_dim: C, leading channels of ``key``.
    Returns:
        [T, H, C] in the dtype of ``query``, contiguous.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: query and key. A key's gradient is summed by atomics in fp32, in any order, or in a
    fixed order under ``torch.use_deterministic_algorithms(True)``, which takes longer. Kept for the
    backward: the arguments, the output and fp32 [T, H].
    """
    return sparse_attention_with_lse(query, key, indices, scale=scale, v_dim=v_dim)[0]


def sparse_attention_with_lse(
    query: Tensor, key: Tensor, indices: Tensor, *, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    """:func:`sparse_attention` and the log-sum-exp of its scores.

    Returns:
        [T, H, C], and fp32 [T, H] in natural logarithms, -inf for a row without a key; no gradient
        comes from there.
    """
    _check(query, key, indices, v_dim)
    out, lse = torch.ops.megatron_mla.sparse_attention(query, key, indices, scale, v_dim)
    return out, lse.detach()


def _check(query: Tensor, key: Tensor, indices: Tensor, v_dim: int) -> None:
    check_tensor("query", query, (3,))
    check_tensor("key", key, (2,))
    check_same("key", key, "query", query)
    if query.dtype == torch.float64:
        raise ValueError(
            "query must be bfloat16, float16 or float32 for the kernels, got torch.float64; cast "
            "it, or call sparse_attention_ref"
        )
    for name, t in (("query", query), ("key", key), ("indices", indices)):
        check_unit_stride(name, t)
    if query.shape[-1] != key.shape[-1] or not 0 < v_dim <= key.shape[-1]:
        raise ValueError(
            f"query and key must have the same width, of which v_dim is a part, got "
            f"{list(query.shape)}, {list(key.shape)} and v_dim = {v_dim}; absorb the query first"
        )
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 2:
        raise ValueError(
            f"indices must be int32 or int64 [{query.shape[0]}, K], got {indices.dtype} "
            f"{list(indices.shape)}; one list of keys for each row of query"
        )
    if indices.shape[0] != query.shape[0] or indices.device != query.device:
        raise ValueError(
            f"indices must have the rows and the device of query, {query.shape[0]} on "
            f"{query.device}, got {indices.shape[0]} on {indices.device}; move or cut them"
        )
