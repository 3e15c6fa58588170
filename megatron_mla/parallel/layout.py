"""Packing and context-parallel order as index arithmetic.

Everything here maps rows of a rank to tokens and positions; nothing sees an activation or a
process group. A sequence that is split over ``cp_size`` ranks is cut into ``2 * cp_size`` equal
chunks and rank ``r`` holds chunks ``r`` and ``2 * cp_size - 1 - r`` ("zigzag"), so that causal
work is even. Packed batches ("thd") do this for every sequence on its own.

Legend: S sequence length, T tokens of all ranks, L tokens of this rank, N packed sequences.
"""

from __future__ import annotations

from itertools import pairwise
from math import lcm

import torch
from torch import Tensor


def check_divisible(length: int, cp_size: int, name: str = "seq_len") -> None:
    """Refuse a sequence length that cannot be cut into ``2 * cp_size`` equal chunks."""
    if cp_size > 1 and length % (2 * cp_size):
        raise ValueError(
            f"{name} must be a multiple of 2 * context_parallel_size = {2 * cp_size}, got "
            f"{length}; pad the sequence or lower context_parallel_size"
        )


def sbhd_positions(
    local_len: int, cp_rank: int = 0, cp_size: int = 1, *, offset: int = 0, device=None
) -> Tensor:
    """Position of every local row of an unpacked batch.

    Args:
        local_len: rows on this rank, S / cp_size.
        offset: tokens already in the inference context (0 in training).
    Returns:
        [local_len] int32. Without packing, a token's position is its index in the sequence, so
        this is also the global row of every local row.
    Raises:
        ValueError: ``local_len`` is odd under context parallelism.
    """
    row = torch.arange(local_len, dtype=torch.int32, device=device)
    if cp_size == 1:
        return row + offset
    if local_len % 2:
        raise ValueError(
            f"rows per context-parallel rank must be even (two zigzag chunks), got {local_len}; "
            f"pad the sequence to a multiple of {2 * cp_size}"
        )
    chunk = local_len // 2
    second = row >= chunk
    start = torch.where(second, (2 * cp_size - 1 - cp_rank) * chunk - chunk, cp_rank * chunk)
    return row + start.to(torch.int32) + offset


def _sequence_of_row(cu_seqlens: Tensor, row: Tensor, cp_size: int) -> tuple[Tensor, Tensor]:
    """Sequence that holds each local row, and whether the row lies past the last sequence."""
    num_sequences = cu_seqlens.numel() - 1
    # right=True skips zero-length sequences: it returns the last start that is <= row.
    starts = cu_seqlens if cp_size == 1 else cu_seqlens // cp_size
    sequence = torch.searchsorted(starts, row, right=True) - 1
    tail = sequence >= num_sequences
    return sequence.clamp(max=max(num_sequences - 1, 0)), tail


def thd_rows(
    cu_seqlens: Tensor, local_len: int, cp_rank: int = 0, cp_size: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Where every local row of a packed batch comes from.

    Args:
        cu_seqlens: [N + 1] int32 | int64, **padded** cumulative lengths over all ranks.
        local_len: rows on this rank. Rows past ``cu_seqlens[-1] / cp_size`` are tail padding.
    Returns:
        Three [local_len] tensors. ``sequence`` int64: index of the row's sequence (N for tail
        rows). ``position`` int32: index inside that sequence (0 for tail rows). ``token`` int64:
        row in the global packed order, ``cu_seqlens[sequence] + position``; tail rows keep their
        order behind ``cu_seqlens[-1]``.

    No host sync: lengths are checked by :func:`check_cu_seqlens` where they are made.
    """
    cu = cu_seqlens.to(torch.int64)
    row = torch.arange(local_len, dtype=torch.int64, device=cu.device)
    if cu.numel() < 2:
        zeros = torch.zeros_like(row)
        return zeros, zeros.to(torch.int32), cp_rank * local_len + row
    sequence, tail, start, position = _places(cu, row, cp_rank, cp_size)
    tail_rows = local_len - torch.div(cu[-1], cp_size, rounding_mode="floor")
    behind = cu[-1] + cp_rank * tail_rows + (row - cu[-1] // cp_size)
    token = torch.where(tail, behind, start + position)
    sequence = sequence.masked_fill(tail, cu.numel() - 1)
    return sequence, position.to(torch.int32), token


def _places(
    cu: Tensor, row: Tensor, cp_rank: int, cp_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence of every local row, whether the row lies past it, the sequence's start, position."""
    sequence, tail = _sequence_of_row(cu, row, cp_size)
    start = cu[sequence]
    if cp_size == 1:
        position = row - start
    else:
        local = row - start // cp_size
        local_length = (cu[sequence + 1] - start) // cp_size
        chunk = local_length // 2
        position = torch.where(
            local < chunk,
            cp_rank * chunk + local,
            (2 * cp_size - 1 - cp_rank) * chunk + local - chunk,
        )
    return sequence, tail, start, position.masked_fill(tail, 0)


def thd_positions(cu_seqlens: Tensor, local_len: int, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    """Position of every local row of a packed batch, [local_len] int32: see :func:`thd_rows`."""
    cu = cu_seqlens.to(torch.int64)
    row = torch.arange(local_len, dtype=torch.int64, device=cu.device)
    if cu.numel() < 2:
        return torch.zeros_like(row, dtype=torch.int32)
    return _places(cu, row, cp_rank, cp_size)[-1].to(torch.int32)


def rows_of_rank(
    seq_len: int, cp_rank: int, cp_size: int, cu_seqlens: Tensor | None = None, device=None
) -> Tensor:
    """Global rows that context-parallel rank ``cp_rank`` holds, in its own order.

    Use it to cut a batch: ``tokens[:, rows_of_rank(S, r, n)]``.

    Args:
        seq_len: S, or T for a packed batch (with ``cu_seqlens``, padded).
    Returns:
        [seq_len / cp_size] int64.
    Raises:
        ValueError: a length is no multiple of ``2 * cp_size``.
    """
    if cu_seqlens is None:
        check_divisible(seq_len, cp_size)
        return sbhd_positions(seq_len // cp_size, cp_rank, cp_size, device=device).long()
    check_cu_seqlens(cu_seqlens, cp_size, total=seq_len)
    return thd_rows(cu_seqlens, seq_len // cp_size, cp_rank, cp_size)[2]


def check_cu_seqlens(cu_seqlens: Tensor, cp_size: int, total: int | None = None) -> None:
    """Validate padded cumulative lengths on the host; call it where a batch is made.

    Raises:
        ValueError: not a 1-D integer tensor that starts at 0 and never falls, a sequence is no
            multiple of ``2 * cp_size``, or it ends past ``total``.
    """
    is_index = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or not is_index:
        raise ValueError(
            "cu_seqlens must be a 1-D int32 or int64 tensor [N + 1], got "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    check_host_cu_seqlens(cu_seqlens.tolist(), cp_size, total)


def check_host_cu_seqlens(host: list[int], cp_size: int, total: int | None = None) -> None:
    """:func:`check_cu_seqlens` of lengths that are already on the host."""
    if host[0] != 0 or any(b < a for a, b in pairwise(host)):
        raise ValueError(f"cu_seqlens must start at 0 and never fall, got {host[:8]}")
    for index, (start, end) in enumerate(pairwise(host)):
        check_divisible(end - start, cp_size, name=f"padded length of packed sequence {index}")
    if total is not None and (host[-1] > total or total % cp_size):
        raise ValueError(
            f"a packed batch of {total} tokens must hold cu_seqlens[-1] = {host[-1]} tokens and "
            f"be a multiple of context_parallel_size = {cp_size}"
        )


def padding_multiple(tp_size: int, cp_size: int, sequence_parallel: bool, *, tile: int = 1) -> int:
    """Multiple to which every packed sequence is padded; the only place that knows it.

    ``2 * cp_size`` for the zigzag cut; with sequence parallelism every rank's rows are cut over
    tp as well; ``tile`` is an alignment of the kernels (FP8: 16).
    """
    parts = [2 * cp_size if cp_size > 1 else 1, tile]
    if sequence_parallel:
        parts.append(tp_size * cp_size)
    return lcm(*parts)


def gather_order(
    local_len: int,
    cp_size: int,
    cu_seqlens: Tensor | None = None,
    *,
    tp_chunks: int = 1,
    device=None,
) -> Tensor:
    """Index that puts rows gathered from all ranks back into global order.

    The rows of all ranks are concatenated tp-major: for each of ``tp_chunks`` sequence-parallel
    ranks, its part of cp rank 0, 1, ... ``gathered[gather_order(...)]`` is then in global order.

    Args:
        local_len: rows of one context-parallel rank (all its tp parts together).
    Returns:
        [local_len * cp_size] int64, a permutation.
    Raises:
        ValueError: the rows of a rank cannot be shared evenly by ``tp_chunks``.
    """
    if local_len % tp_chunks:
        raise ValueError(
            f"local_len must be a multiple of tp_chunks = {tp_chunks}, got {local_len}; pad "
            "sequences to padding_multiple or switch sequence_parallel off"
        )
    part = local_len // tp_chunks
    token = torch.stack(
        [
            sbhd_positions(local_len, rank, cp_size, device=device).long()
            if cu_seqlens is None
            else thd_rows(cu_seqlens, local_len, rank, cp_size)[2]
            for rank in range(cp_size)
        ]
    )  # [cp, local_len]
    token = token.view(cp_size, tp_chunks, part).transpose(0, 1).reshape(-1)
    # Inverse of a permutation. A sort and not a scatter: lengths that cannot be cut are refused
    # later, on the host, and until then the result has to be safe to index with.
    return token.argsort()
