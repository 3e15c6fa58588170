"""Rows that a layer keeps in a cache: cast, written and read.

Legend: B sequences of a pass, s rows of it, T rows of a sequence's memory, E channels of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.inference.context import LatentInferenceContext, Step
from megatron_mla.kernels.fp8_pack_ref import LIMITS, rounded_ref


def latent_memory(
    context: LatentInferenceContext, layer_number: int, width: int, like: Tensor
) -> Tensor:
    """[max_batch_size, T, ``width``] for latents; with ``context.dcp`` of this rank's rows."""
    rows = context.max_sequence_length
    if context.dcp is not None:
        rows = context.dcp.rows_needed(rows)
    shape = context.max_batch_size, rows, width
    return context.memory(layer_number, "latents", shape, like, context.cache_dtype)


def indexer_memory(
    context: LatentInferenceContext, layer_number: int, width: int, like: Tensor
) -> Tensor:
    """[max_batch_size, T, ``width``] for indexer keys, which every rank has all of."""
    shape = context.max_batch_size, context.max_sequence_length, width
    return context.memory(layer_number, "indexer_keys", shape, like, context.cache_dtype)


def to_cache(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` as a cache of ``dtype`` holds it; FP8 without scales, saturating."""
    return rounded_ref(t, dtype, 1.0) if dtype in LIMITS else t.to(dtype)


def write_rows(memory: Tensor, rows: Tensor, step: Step, dcp=None) -> None:
    """Cast the new rows [s * B, E] of a pass and put them into ``memory``, padding not.

    Args:
        dcp: whose ranks share the rows; None: every rank has all of them.
    """
    rows = to_cache(rows.detach(), memory.dtype)
    if dcp is not None:
        rows = rows.unflatten(0, tuple(step.positions.shape))
        dcp.write_owned(memory[: len(step.ends)], rows, step.positions)
        return
    row, sequence, position = step.tokens
    if memory.dtype.itemsize == 1:  # not every device can index FP8
        memory, rows = memory.view(torch.uint8), rows.view(torch.uint8)
    memory[sequence, position] = rows[row]


def read_flat(memory: Tensor, step: Step, used: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Rows of all sequences of a pass, one sequence below the other.

    Args:
        used: rows of a sequence that have to be among them.
    Returns:
        [B * stride, E] in ``dtype``, and stride. A view where nothing has to be converted.
    """
    memory = memory[: len(step.ends)]
    if memory.dtype != dtype:
        memory = memory[:, :used].to(dtype)
    return memory.flatten(0, 1), memory.shape[1]
