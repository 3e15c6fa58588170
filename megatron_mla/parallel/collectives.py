"""Autograd-aware movement of rows, between ranks and within one, that Megatron-Core has not."""

from __future__ import annotations

from dataclasses import dataclass

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


def gather_rows_over_tp(t: Tensor, groups: ParallelGroups) -> Tensor:
    """Sequence-parallel rows of every tp rank -> all rows, for work that all tp ranks do alike.

    Gradients: every rank has the whole gradient already and keeps its own rows; nothing is summed.
    """
    return gather_from_sequence_parallel_region(
        t, tensor_parallel_output_grad=False, group=groups.tp
    )


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


@dataclass(frozen=True, eq=False)
class RowMove:
    """Rows of one tensor that become rows of another, as what each row of either side reads.

    Attributes:
        read: [target rows] int64, source row of each target row; any where there is none.
        blank: [...] int64, target rows without a source.
        back, unread: the same from the source's side, for gradients.
    """

    read: Tensor
    blank: Tensor
    back: Tensor
    unread: Tensor

    @classmethod
    def of(cls, source: Tensor, target: Tensor, num_source: int, num_target: int) -> RowMove:
        """Row ``source[i]`` becomes row ``target[i]``; both [n] int64, neither with repeats."""
        read, blank = _inverse(target, source, num_target)
        back, unread = _inverse(source, target, num_source)
        return cls(read, blank, back, unread)


def _inverse(place: Tensor, value: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """[num_places] with ``value`` at ``place`` and 0 elsewhere, and where elsewhere is."""
    found = torch.full((num_places,), -1, dtype=torch.int64)
    found[place] = value
    return found.clamp(min=0), (found < 0).nonzero()[:, 0]


class _MoveRows(torch.autograd.Function):
    """Backward moves the gradient back; as no row is read twice, nothing is added up."""

    @staticmethod
    def forward(ctx, t, read, blank, back, unread):
        ctx.save_for_backward(back, unread)
        return _gather(t, read, blank)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, *ctx.saved_tensors), *(None,) * 4


def _gather(t: Tensor, read: Tensor, blank: Tensor) -> Tensor:
    """A gather and a few rows of zeros: a scatter into zeros takes several times as long."""
    if t.shape[0] == 0:
        return t.new_zeros(read.shape[0], *t.shape[1:])
    out = t.index_select(0, read)
    return out.index_fill_(0, blank, 0) if blank.numel() else out


def move_rows(t: Tensor, move: RowMove) -> Tensor:
    """[source rows, ...] -> [target rows, ...]; target rows without a source are zero."""
    return _MoveRows.apply(t, move.read, move.blank, move.back, move.unread)


def permute_rows(t: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``t[order]`` for a permutation ``order`` of the first dimension and its inverse."""
    return _PermuteRows.apply(t, order, inverse)
