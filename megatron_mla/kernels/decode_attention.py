"""Attention of new tokens over the rows of a cache, by kernels. Twin: decode_attention_ref.py.

Equation: kernels/README.md (15). Kernels: decode_attention_kernel.py. Scores, sums and partial
results are in fp32; keys that are narrower than the query are converted to its dtype, and
probabilities are rounded to it before tensor cores multiply them. Legend: B sequences, s new
tokens, H heads, T cached rows, E = C + d channels of a row, of which the leading C are the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_unit_stride
from megatron_mla.kernels.decode_attention_kernel import launch_decode
from megatron_mla.kernels.registry import register

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEY_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)


def _empty(query, keys, query_positions, key_positions, scale, v_dim):
    how = {"device": query.device}
    out = torch.empty(*query.shape[:3], v_dim, dtype=query.dtype, **how)
    return out, torch.empty(query.shape[:3], dtype=torch.float32, **how)


def _decode_attention(query, keys, query_positions, key_positions, scale, v_dim):
    out, lse = _empty(query, keys, query_positions, key_positions, scale, v_dim)
    if 0 in (*query.shape, *keys.shape):
        return out.zero_(), lse.fill_(-torch.inf)
    launch_decode(query, keys, query_positions, key_positions, out, lse, scale)
    return out, lse


register(
    "decode_attention",
    "(Tensor query, Tensor keys, Tensor query_positions, Tensor key_positions, float scale, "
    "int v_dim) -> (Tensor, Tensor)",
    _decode_attention,
    _empty,
)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    scale: float,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over cached rows, told apart by position.

    The number of launches and their sizes follow from shapes alone, so a CUDA graph may hold them.

    Args:
        query: [B, s, H, E] bf16 | fp16 | fp32, last stride 1, others any.
        keys: [B, T, E] bf16 | fp16 | fp32 | fp8 (e4m3fn, e5m2), one for all heads, last stride 1;
            what a row that is not there holds does not matter.
        query_positions: [B, s] int32 | int64, any strides; negative for rows that are padding.
        key_positions: [B, T] int32 | int64, any strides and order; negative for rows that are not
            there. A query sees the keys up to its own position.
        scale: factor on the products.
        v_dim: C.
    Returns:
        [B, s, H, C] in the dtype of ``query``, contiguous, and the natural log-sum-exp [B, s, H] in
        fp32. Rows that see no key are 0 and -inf.
    Raises:
        ValueError: an argument does not fit, or requires grad while gradients are recorded; its
            name, value, the condition and a way out.
    Gradients: none. Bits are the same in every run.
    """
    _check(query, keys, query_positions, key_positions, v_dim)
    return torch.ops.megatron_mla.decode_attention(
        query, keys, query_positions, key_positions, scale, v_dim
    )


def _check(query: Tensor, keys: Tensor, query_positions, key_positions, v_dim: int) -> None:
    for name, t, shape, dtypes in (
        ("query", query, "[batch, tokens, heads, width]", QUERY_DTYPES),
        ("keys", keys, "[batch, rows, width]", KEY_DTYPES),
    ):
        if t.dim() != shape.count(",") + 1:
            raise ValueError(
                f"{name} must be {shape}, got {list(t.shape)}; keys are one head for all of query"
            )
        if t.dtype not in dtypes:
            raise ValueError(
                f"{name} must be one of {', '.join(str(d)[6:] for d in dtypes)} for the kernel, "
                f"got {t.dtype}; cast it, or call decode_attention_ref"
            )
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(
                f"{name} must not require grad, for the kernel has no gradients; call this under "
                "torch.no_grad(), or call decode_attention_ref"
            )
        check_unit_stride(name, t)
    if keys.shape[0] != query.shape[0] or keys.shape[2] != query.shape[3]:
        raise ValueError(
            f"keys must have the sequences and the width of query, {query.shape[0]} and "
            f"{query.shape[3]}, got {list(keys.shape)}; pass memory[:batch], and absorb the query"
        )
    if not 0 < v_dim <= keys.shape[2]:
        raise ValueError(
            f"v_dim must be 1 to {keys.shape[2]}, leading channels of keys, got {v_dim}; it is the "
            "width of the latent"
        )
    for name, t, of, shape in (
        ("query_positions", query_positions, "query", query.shape[:2]),
        ("key_positions", key_positions, "keys", keys.shape[:2]),
    ):
        if t.dtype not in (torch.int32, torch.int64) or t.shape != shape:
            raise ValueError(
                f"{name} must be int32 or int64 {list(shape)}, one for each row of {of}, got "
                f"{t.dtype} {list(t.shape)}; -1 says that a row is not there"
            )
    for name, t in (
        ("keys", keys),
        ("query_positions", query_positions),
        ("key_positions", key_positions),
    ):
        if t.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {t.device}; move it"
            )
