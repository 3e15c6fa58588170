"""Autograd-aware movement of rows, between ranks and within one, that Megatron-Core has not."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_mla.parallel.groups import ParallelGroups


def shared_over_tp(t: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """Give every tp rank all rows of a tensor that its heads share, and sum its gradient over tp.

    Args:
        t: [rows, ...]; this rank's 1 / tp of the rows with sequence parallelism, else all rows.
    Returns:
        [all rows, ...], the same on every tp rank.
    Gradients: each rank's gradient covers its own heads only, so the sum over tp is taken here,
        exactly once: a reduce-scatter with sequence parallelism, an all-reduce without.
    """
    if groups.tp_size == 1:
        return t
    if sequence_parallel:
        return gather_from_sequence_parallel_region(t, group=groups.tp)
    return copy_to_tensor_model_parallel_region(t, group=groups.tp)


def rejoin_columns(t: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """Output of a column-parallel down projection -> what a duplicated one gives.

    Args:
        t: [all rows, B, width / tp].
    Returns:
        [rows, B, width], with sequence parallelism this rank's 1 / tp of the rows.
    """
    t = gather_from_tensor_model_parallel_region(t, group=groups.tp)
    if sequence_parallel:
        t = scatter_to_sequence_parallel_region(t, group=groups.tp)
    return t


def gather_over_cp(t: Tensor, groups: ParallelGroups) -> Tensor:
    """[rows, ...] of each cp rank -> [cp * rows, ...], ranks one after the other.

    Gradients: summed over cp (reduce-scatter), since every rank's queries use every row.
    """
    return gather_from_sequence_parallel_region(t, group=groups.cp)


class _PermuteRows(torch.autograd.Function):
    """Backward is a gather by the inverse permutation; index_select's own would scatter-add."""

    @staticmethod
    def forward(ctx, t, order, inverse):
        ctx.save_for_backward(inverse)
        return t.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _MoveRows(torch.autograd.Function):
    """Backward moves the gradient back; as no row is read twice, nothing is added up."""

    @staticmethod
    def forward(ctx, t, source, target, num_rows):
        ctx.save_for_backward(source, target)
        ctx.num_source = t.shape[0]
        out = t.new_zeros(num_rows, *t.shape[1:])
        return out.index_copy_(0, target, t.index_select(0, source))

    @staticmethod
    def backward(ctx, grad):
        source, target = ctx.saved_tensors
        out = grad.new_zeros(ctx.num_source, *grad.shape[1:])
        return out.index_copy_(0, source, grad.index_select(0, target)), None, None, None


def move_rows(t: Tensor, source: Tensor, target: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...] of zeros with rows ``target`` set to ``t[source]``; indices are distinct."""
    return _MoveRows.apply(t, source, target, num_rows)


def permute_rows(t: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``t[order]`` for a permutation ``order`` of the first dimension and its inverse."""
    return _PermuteRows.apply(t, order, inverse)
