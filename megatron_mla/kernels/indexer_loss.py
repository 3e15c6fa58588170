"""Divergence of the indexer's distribution from the attention's, in Triton.

Twin: indexer_loss_ref.py; equation: kernels/README.md (11). Rows are worked in chunks: first the
target of a chunk, which other ranks add to, then losses and gradients. Chosen keys are gathered row
by row (indexer_target.py, indexer_grads.py), all visible keys are worked in tiles
(indexer_dense.py, indexer_dense_grads.py).

Legend: T query rows, S key rows, H heads of this rank, E channels of the attention's keys, n heads
of the indexer, D channels of one, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_same, check_unit_stride
from megatron_mla.kernels.chunks import KeyBounds, row_chunks, seen_keys
from megatron_mla.kernels.indexer_dense import (
    launch_dense_log_sum_exp,
    launch_slopes,
    launch_tiles,
)
from megatron_mla.kernels.indexer_dense_grads import launch_key_grad, launch_query_grad
from megatron_mla.kernels.indexer_grads import (
    ATOMICS,
    DENSE,
    FIXED,
    NONE,
    fixed_unit,
    launch_grads,
)
from megatron_mla.kernels.indexer_target import launch_log_sum_exp, launch_target
from megatron_mla.kernels.registry import register

# Up to so many keys per slot, tiles of all rows and keys make the gradient of the keys faster than
# atomics do for the chosen ones.
TILED_KEYS_PER_SLOT = 8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def indexer_loss(
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
    lse: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """``sum_t KL(attention of row t, summed over heads || softmax of the scores of row t)``.

    Over the keys that a row sees or, with ``indices``, over those it has chosen. Gradients are made
    in the forward, and kept in fp32. Beside them and the arguments no tensor has more than 2^25
    elements, unless a row of all keys has or the gradient of the keys; none of queries x keys is
    kept.

    Args:
        q: [T, n, D]. k: [S, D]. w: [T, n], of the indexer.
        query: [T, H, E]. key: [S, E], of the attention; bf16 | fp16 | fp32 all, last strides 1.
        bounds: keys that each row may see.
        scale: of the attention's products.
        relu: of the indexer's scores.
        indices: [T, K] int32 | int64, in any order; slots outside [0, S) are empty.
        sum_heads: adds the attention of other ranks' heads to a [rows, keys] fp32 tensor, in place.
        lse: [T, H] fp32, log-sum-exp of ``scale * query . key`` over the same keys, as the forward
            of the attention has it; computed when None.
        deterministic: the gradient of ``k`` has the same bits in every run, whatever the order of
            its sums; ``torch.are_deterministic_algorithms_enabled()`` when None.
    Returns:
        Scalar in fp32.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: q, k and w; the attention is a constant.
    """
    _check(q, k, w, query, key, bounds, indices, lse)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, w))
    how = scale, relu, indices, sum_heads, lse, deterministic, trains
    return _IndexerLoss.apply(q, k, w, query, key, bounds, *how)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, w, query, key, bounds,
        scale, relu, indices, sum_heads, lse, deterministic, trains,
    ):  # fmt: skip
        loss = torch.zeros(q.shape[0], dtype=torch.float32, device=q.device)
        dq, dk, dw = (
            torch.zeros(t.shape if trains else 0, dtype=torch.float32, device=t.device)
            for t in (q, k, w)
        )
        num_keys = k.shape[0]
        way = DENSE if indices is None else way_of(num_keys, indices.shape[1], deterministic)
        # The largest tensors of a chunk are as wide as this.
        width = num_keys if way == DENSE else 0
        width = width if indices is None else max(width, indices.shape[1])
        for rows in row_chunks(q.shape[0] if width else 0, width):
            keys = slice(0, num_keys) if indices is not None else seen_keys(bounds, rows)
            if keys.stop == keys.start:
                continue
            if indices is None:
                over = bounds.starts[rows] - keys.start, bounds.ends[rows] - keys.start
            else:
                over = indices[rows], None
            level = None if lse is None else lse[rows]
            target = torch.ops.megatron_mla.indexer_target(
                query[rows], key[keys], *over, level, scale
            )
            if sum_heads is not None:
                sum_heads(target)
            torch.ops.megatron_mla.indexer_grads_(
                q[rows], k[keys], w[rows], *over, target, loss[rows],
                dq[rows], dk[keys], dw[rows], relu, way.value if trains else NONE.value,
            )  # fmt: skip
        ctx.save_for_backward(dq, dk, dw)
        ctx.dtypes = q.dtype, k.dtype, w.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, grad):
        grads = (
            (saved * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *grads, *(None,) * 10


def way_of(num_keys: int, num_slots: int, deterministic: bool):
    """How the gradient of the keys is summed: see indexer_grads.py."""
    if num_keys <= TILED_KEYS_PER_SLOT * num_slots:
        return DENSE
    return FIXED if deterministic else ATOMICS


# Both operators take indices [T, K] and None, or the starts and ends [T] of what rows see.


def _target(query, key, over, ends, lse, scale) -> Tensor:
    if ends is None:
        if lse is None:
            lse = launch_log_sum_exp(query, key, over, scale)
        return launch_target(query, key, over, lse, scale)
    if lse is None:
        lse = launch_dense_log_sum_exp(query, key, over, ends, scale)
    return launch_tiles(query, key, lse, over, ends, scale=scale)


def _empty_target(query, key, over, ends, lse, scale) -> Tensor:
    width = over.shape[1] if ends is None else key.shape[0]
    return torch.empty(query.shape[0], width, dtype=torch.float32, device=query.device)


def _grads_(q, k, w, over, ends, target, loss, dq, dk, dw, relu, way) -> None:
    if ends is not None:
        slopes = launch_tiles(q, k, w, over, ends, relu=relu)
        launch_slopes(slopes, target, over, ends, loss)
        if way != NONE:
            k = torch.where(_seen(over, ends, len(k))[:, None], k, 0)
            launch_query_grad(q, k, w, slopes, over, ends, dq, dw, relu=relu)
            launch_key_grad(q, k, w, slopes, dk, relu=relu)
        return
    into, unit = dk, None
    if way == DENSE:
        into = torch.zeros(len(q), len(k), dtype=torch.float32, device=q.device)
    elif way == FIXED:
        # Sums of whole numbers are the same in any order.
        into = torch.zeros(dk.shape, dtype=torch.int64, device=dk.device)
        unit = fixed_unit(q, w, over, len(k))
    launch_grads(q, k, w, over, target, loss, dq, dw, into, relu=relu, way=way, unit=unit)
    if way == DENSE:
        launch_key_grad(q, k, w, into, dk, relu=relu)
    elif way == FIXED:
        # Whole numbers cannot say that they are none: if a loss is not finite, all of dk is NaN.
        dk.addcmul_(into.to(torch.float32), unit.reciprocal() + loss.sum() * 0.0)


def _seen(starts: Tensor, ends: Tensor, num_keys: int) -> Tensor:
    """[keys] bool: whether any row sees the key."""
    seeing = (ends > starts).to(torch.int32)
    steps = torch.zeros(num_keys + 1, dtype=torch.int32, device=starts.device)
    # What a row that sees nothing begins with may lie anywhere.
    steps.index_add_(0, torch.where(seeing > 0, starts, 0), seeing)
    steps.index_add_(0, torch.where(seeing > 0, ends, 0), -seeing)
    return steps.cumsum(0)[:-1] > 0


register(
    "indexer_target",
    "(Tensor query, Tensor key, Tensor over, Tensor? ends, Tensor? lse, float scale) -> Tensor",
    _target,
    _empty_target,
)
register(
    "indexer_grads_",
    "(Tensor q, Tensor k, Tensor w, Tensor over, Tensor? ends, Tensor target, Tensor(a!) loss, "
    "Tensor(b!) dq, Tensor(c!) dk, Tensor(d!) dw, bool relu, int way) -> ()",
    _grads_,
    lambda *arguments: None,
)


def _check(q, k, w, query, key, bounds, indices, lse) -> None:
    shapes = {
        "q": (q, "[rows, heads, channels]", 3),
        "k": (k, "[keys, channels]", 2),
        "w": (w, "[rows, heads]", 2),
        "query": (query, "[rows, heads, channels]", 3),
        "key": (key, "[keys, channels]", 2),
    }
    for name, (t, shape, dims) in shapes.items():
        if t.dim() != dims:
            raise ValueError(f"{name} must be {shape}, got {list(t.shape)}; take one batch entry")
        if t.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be bfloat16, float16 or float32, got {t.dtype}; cast it, or call "
                "megatron_mla.kernels.indexer_loss_ref.indexer_loss_ref"
            )
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")
        if name != "w":
            check_unit_stride(name, t)
    check_same("k", k, "q", q)
    check_same("key", key, "query", query)
    _check_shape("k", k, (key.shape[0], q.shape[2]), "keys of key, channels of q")
    _check_shape("w", w, q.shape[:2], "rows and heads of q")
    _check_shape(
        "query", query, (q.shape[0], query.shape[1], key.shape[1]), "rows of q, channels of key"
    )
    _check_shape("bounds.starts", bounds.starts, q.shape[:1], "rows of q")
    _check_shape("bounds.ends", bounds.ends, q.shape[:1], "rows of q")
    if indices is not None:
        if indices.dtype not in (torch.int32, torch.int64) or indices.device != q.device:
            raise ValueError(
                f"indices must be int32 or int64 on {q.device}, the device of q, got "
                f"{indices.dtype} on {indices.device}; cast or move them"
            )
        if indices.dim() != 2:
            raise ValueError(f"indices must be [rows, slots], got {list(indices.shape)}")
        _check_shape("indices", indices, (q.shape[0], indices.shape[1]), "rows of q")
        check_unit_stride("indices", indices)
    if lse is not None:
        if lse.dtype != torch.float32 or lse.device != q.device:
            raise ValueError(
                f"lse must be float32 on {q.device}, the device of q, got {lse.dtype} on "
                f"{lse.device}; leave it out to have it computed"
            )
        _check_shape("lse", lse, query.shape[:2], "rows and heads of query")


def _check_shape(name: str, t: Tensor, shape: tuple[int, ...], condition: str) -> None:
    if tuple(t.shape) != tuple(shape):
        raise ValueError(
            f"{name} must be {list(shape)} ({condition}), got {list(t.shape)}; check what is passed"
        )
