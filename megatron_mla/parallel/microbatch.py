"""What one micro-batch looks like on this rank: positions, order and causal blocks.

Built once per micro-batch and shared by all layers: for packed batches it is kept on the
``PackedSeqParams`` object, for unpacked ones it depends on the length alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mla.parallel import layout

_ATTRIBUTE = "_megatron_mla_rows"


class CausalBlock(NamedTuple):
    """Queries ``[q_start, q_end)`` attend causally to keys ``[k_start, k_end)``.

    The last query sees the last key and each earlier one a key less. Queries are rows of this
    rank, keys are rows of the whole batch in global order.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(eq=False)
class Rows:
    """Rows of one micro-batch on this rank.

    Attributes:
        num_local: L, rows of this rank (all its sequence-parallel parts together).
        num_global: T, rows of all context-parallel ranks.
        packed: thd (True) or sbhd (False).
        positions: [L] int32, position of every local row inside its own sequence.
        key_positions: [T] int32, the same for all rows in global order.
        cu_seqlens: [N + 1] padded cumulative lengths over all ranks; None unless packed.
    """

    num_local: int
    num_global: int
    packed: bool
    positions: Tensor
    key_positions: Tensor
    cu_seqlens: Tensor | None
    cp_rank: int
    cp_size: int
    tp_chunks: int
    _key_order: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _blocks: list[CausalBlock] | None = field(default=None, repr=False)
    _sequences: tuple[Tensor, int, int] | None = field(default=None, repr=False)

    def causal_blocks(self) -> list[CausalBlock]:
        """Every block of causal attention of this rank, in query order; empty ones are left out.

        For packed batches this reads ``cu_seqlens`` on the host, once per micro-batch.
        """
        if self._blocks is None:
            self._blocks = list(self._make_blocks())
        return self._blocks

    def key_order(self) -> tuple[Tensor, Tensor]:
        """Index [T] int64 that puts cp-gathered rows into global order, and its inverse."""
        if self._key_order is None:
            self.causal_blocks()  # checks the lengths; others would index out of bounds
            order = layout.gather_order(
                self.num_local,
                self.cp_size,
                self.cu_seqlens,
                tp_chunks=self.tp_chunks,
                device=self.positions.device,
            )
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.numel(), device=order.device)
            self._key_order = order, inverse
        return self._key_order

    def sequences(self) -> tuple[Tensor, int, int]:
        """For kernels over whole packed sequences (no context parallelism).

        Returns:
            Cumulative lengths without empty sequences [M + 1] int32 on the device, the longest
            length and the end of the last sequence, in rows.
        """
        if self._sequences is None:
            ends = [block.q_end for block in self.causal_blocks()]
            longest = max((block.q_end - block.q_start for block in self._blocks), default=0)
            cumulative = torch.tensor([0, *ends], dtype=torch.int32, device=self.positions.device)
            self._sequences = cumulative, longest, ends[-1] if ends else 0
        return self._sequences

    def _make_blocks(self):
        if self.cu_seqlens is None:
            bounds = [0, self.num_global]
        else:
            bounds = self.cu_seqlens.tolist()
            layout.check_host_cu_seqlens(bounds, self.cp_size, self.num_global)
        for start, end in pairwise(bounds):
            length = end - start
            if length == 0:
                continue
            first = start // self.cp_size  # row of this rank where the sequence begins
            if self.cp_size == 1:
                yield CausalBlock(first, first + length, start, end)
                continue
            chunk = length // (2 * self.cp_size)
            for half, index in enumerate((self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank)):
                row = first + half * chunk
                yield CausalBlock(row, row + chunk, start, start + (index + 1) * chunk)


def _build(num_local, cp_rank, cp_size, tp_chunks, device, cu_seqlens) -> Rows:
    num_global = num_local * cp_size
    if cu_seqlens is None:
        positions = layout.sbhd_positions(num_local, cp_rank, cp_size, device=device)
        key_positions = layout.sbhd_positions(num_global, device=device)
    else:
        positions = layout.thd_positions(cu_seqlens, num_local, cp_rank, cp_size)
        key_positions = layout.thd_positions(cu_seqlens, num_global)
    return Rows(
        num_local=num_local,
        num_global=num_global,
        packed=cu_seqlens is not None,
        positions=positions,
        key_positions=key_positions,
        cu_seqlens=cu_seqlens,
        cp_rank=cp_rank,
        cp_size=cp_size,
        tp_chunks=tp_chunks,
    )


@functools.lru_cache(maxsize=16)
def _unpacked(num_local, cp_rank, cp_size, tp_chunks, device) -> Rows:
    return _build(num_local, cp_rank, cp_size, tp_chunks, device, None)


def rows_of_microbatch(
    num_local: int,
    *,
    cp_rank: int,
    cp_size: int,
    tp_chunks: int,
    device: torch.device,
    packed_seq_params=None,
) -> Rows:
    """Rows of a micro-batch, built at most once for it.

    Args:
        num_local: rows of this context-parallel rank.
        tp_chunks: tp size under sequence parallelism, else 1.
        packed_seq_params: Megatron-Core's ``PackedSeqParams``; only ``qkv_format="thd"`` is packed.
            Padded cumulative lengths are used where given.
    Raises:
        ValueError: query and key lengths differ, or lengths do not fit the ranks.
    """
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        layout.check_divisible(num_local * cp_size, cp_size)
        return _unpacked(num_local, cp_rank, cp_size, tp_chunks, device)
    key = (num_local, cp_rank, cp_size, tp_chunks, device)
    cached = packed_seq_params.__dict__.get(_ATTRIBUTE)
    if cached is not None and cached[0] == key:
        return cached[1]
    if packed_seq_params.local_cp_size not in (None, cp_size):
        raise ValueError(
            "PackedSeqParams.local_cp_size must be None or context_parallel_size = "
            f"{cp_size}, got {packed_seq_params.local_cp_size}; hybrid context parallelism is not "
            "supported with MLA"
        )
    rows = _build(
        num_local,
        cp_rank,
        cp_size,
        tp_chunks,
        device,
        _padded_cu_seqlens(packed_seq_params, device),
    )
    packed_seq_params.__dict__[_ATTRIBUTE] = (key, rows)
    return rows


def _padded_cu_seqlens(params, device: torch.device) -> Tensor:
    """Cumulative lengths that say where the rows of each sequence lie."""
    query, key = (
        padded if padded is not None else plain
        for padded, plain in (
            (params.cu_seqlens_q_padded, params.cu_seqlens_q),
            (params.cu_seqlens_kv_padded, params.cu_seqlens_kv),
        )
    )
    if query is None:
        raise ValueError(
            "PackedSeqParams.cu_seqlens_q must be given with qkv_format='thd', got None; pass the "
            "cumulative lengths over all context-parallel ranks"
        )
    if key is not None and key is not query and key.shape != query.shape:
        raise ValueError(
            "PackedSeqParams.cu_seqlens_kv must equal cu_seqlens_q in self-attention, got "
            f"{key.numel() - 1} key and {query.numel() - 1} query sequences"
        )
    return query.to(device)
