"""What one micro-batch looks like on this rank: positions, order and causal attention.

Built once per micro-batch and shared by all layers: for packed batches it is kept on the
``PackedSeqParams`` object, for unpacked ones it depends on the length alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mla.parallel import layout
from megatron_mla.parallel.collectives import RowMove

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


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Causal attention of a rank in few calls.

    Short sequences of about the same length are padded to the longest of them and attend as one
    batch. Causal masks keep padding, which is last, from every real row. The results of all
    calls, one after the other, are the "worked" rows.

    Attributes:
        batches: (number of sequences, padded length) of every batched call.
        queries, keys: rows of this rank, and under context parallelism of all ranks, to the padded
            rows of all batches; None without batches.
        blocks: what is left, one call each, in query order.
        results: worked rows to the rows of this rank; None where they are these in order (up to a
            tail that belongs to no sequence).
    """

    batches: list[tuple[int, int]]
    queries: RowMove | None
    keys: RowMove | None
    blocks: list[CausalBlock]
    results: RowMove | None


# Longer sequences fill a GPU alone, and copying them costs more than a call.
_BATCHED_LENGTH = 1024


def _make_plan(blocks: list[CausalBlock], num_local: int, num_global: int, device) -> AttentionPlan:
    classes: dict[int, list[CausalBlock]] = {}
    for block in blocks:
        length = block.q_end - block.q_start
        if block.k_end - block.k_start == length <= _BATCHED_LENGTH:
            # Lengths up to a power of two and above its half: less than half is padding.
            classes.setdefault((length - 1).bit_length(), []).append(block)
    groups = [group for group in classes.values() if len(group) > 1]
    batched = {block for group in groups for block in group}
    alone = [block for block in blocks if block not in batched]
    if not groups:
        return AttentionPlan([], None, None, alone, None)
    batches, rows, keys, slots, end = [], [], [], [], 0  # (start, length) of every run of rows
    for group in groups:
        longest = max(block.q_end - block.q_start for block in group)
        for block in group:
            length = block.q_end - block.q_start
            rows.append((block.q_start, length))
            keys.append((block.k_start, length))
            slots.append((end, length))
            end += longest
        batches.append((len(group), longest))
    places = _runs(slots)
    queries = RowMove.of(_runs(rows), places, num_local, end)
    # One move for both where queries and keys are the same rows.
    keys = queries if rows == keys else RowMove.of(_runs(keys), places, num_global, end)
    for block in alone:
        length = block.q_end - block.q_start
        rows.append((block.q_start, length))
        slots.append((end, length))
        end += length
    results = RowMove.of(_runs(slots), _runs(rows), end, num_local)
    queries, keys, results = _at(device, queries, keys, results)
    return AttentionPlan(batches, queries, keys, alone, results)


def _at(device, *moves: RowMove) -> list[RowMove]:
    """``moves`` on ``device``, in one transfer."""
    names = [field.name for field in fields(RowMove)]
    tensors = [getattr(move, name) for move in moves for name in names]
    there = iter(torch.cat(tensors).to(device).split([t.numel() for t in tensors]))
    return [RowMove(**{name: next(there) for name in names}) for _ in moves]


def _runs(runs: list[tuple[int, int]] | Tensor) -> Tensor:
    """Indices of all (start, length), one run after the other, [sum of lengths] int64.

    Not one ``arange`` per sequence: thousands of those take longer than the attention.
    """
    start, length = torch.as_tensor(runs).unbind(1)
    offset = start - (length.cumsum(0) - length)  # of a run's indices above their places
    return offset.repeat_interleave(length) + torch.arange(int(length.sum()))


class KeyBounds(NamedTuple):
    """Which keys each row of this rank may see: those from its start to before its end.

    Attributes:
        starts, ends: [L] int32 on the device, rows of the whole batch in global order; equal for
            rows that belong to no sequence.
        host: [2, L] int32, the same on the host.
        num_rows: rows that see a key, on all context-parallel ranks together.
    """

    starts: Tensor
    ends: Tensor
    host: Tensor
    num_rows: int


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
        cu_seqlens_kv: those of the keys where they are another tensor; must hold the same.
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
    cu_seqlens_kv: Tensor | None = None
    _key_orders: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _blocks: list[CausalBlock] | None = field(default=None, repr=False)
    _plan: AttentionPlan | None = field(default=None, repr=False)
    _bounds: KeyBounds | None = field(default=None, repr=False)

    def causal_blocks(self) -> list[CausalBlock]:
        """Every block of causal attention of this rank, in query order; empty ones are left out.

        For packed batches this reads ``cu_seqlens`` on the host, once per micro-batch.
        """
        if self._blocks is None:
            self._blocks = list(self._make_blocks())
        return self._blocks

    @torch.inference_mode(False)
    def key_order(self, tp_chunks: int | None = None) -> tuple[Tensor, Tensor]:
        """Index [T] int64 that puts cp-gathered rows into global order, and its inverse.

        Args:
            tp_chunks: tp ranks whose parts were gathered over cp first, and over tp then; None for
                those of sequence parallelism, 1 for rows that were whole on every tp rank.
        """
        tp_chunks = self.tp_chunks if tp_chunks is None else tp_chunks
        if tp_chunks not in self._key_orders:
            self.causal_blocks()  # checks the lengths; others would index out of bounds
            order = layout.gather_order(
                self.num_local,
                self.cp_size,
                self.cu_seqlens,
                tp_chunks=tp_chunks,
                device=self.positions.device,
            )
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.numel(), device=order.device)
            self._key_orders[tp_chunks] = order, inverse
        return self._key_orders[tp_chunks]

    @torch.inference_mode(False)
    def plan(self) -> AttentionPlan:
        """The causal blocks, the short square ones batched: many short sequences, few calls."""
        if self._plan is None:
            self._plan = _make_plan(
                self.causal_blocks(), self.num_local, self.num_global, self.positions.device
            )
        return self._plan

    @torch.inference_mode(False)
    def key_bounds(self) -> KeyBounds:
        """The causal blocks row by row."""
        if self._bounds is None:
            host = torch.zeros(2, self.num_local, dtype=torch.int32)
            blocks = self.causal_blocks()
            if blocks:
                q_start, q_end, k_start, k_end = torch.tensor(blocks).unbind(1)
                length = q_end - q_start
                rows = _runs(torch.stack((q_start, length), 1))
                host[0, rows] = k_start.repeat_interleave(length).int()
                host[1, rows] = _runs(torch.stack((k_end - length + 1, length), 1)).int()
            # Every rank holds as many rows of a sequence as the others.
            num_rows = int((host[1] > host[0]).sum()) * self.cp_size
            self._bounds = KeyBounds(*host.to(self.positions.device), host, num_rows)
        return self._bounds

    def _make_blocks(self):
        if self.cu_seqlens is None:
            bounds = [0, self.num_global]
        else:
            bounds = self.cu_seqlens.tolist()
            layout.check_host_cu_seqlens(bounds, self.cp_size, self.num_global)
            if self.cu_seqlens_kv is not None and self.cu_seqlens_kv.tolist() != bounds:
                raise ValueError(
                    "PackedSeqParams.cu_seqlens_kv must equal cu_seqlens_q in self-attention, got "
                    f"{self.cu_seqlens_kv.tolist()[:8]} and {bounds[:8]}"
                )
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


# Built outside inference mode, here and above: what a generation or evaluation in that mode makes
# first, training may have to save for a backward later.
@torch.inference_mode(False)
def _build(num_local, cp_rank, cp_size, tp_chunks, device, cu_seqlens) -> Rows:
    num_global = num_local * cp_size
    if cu_seqlens is None:
        positions = layout.sbhd_positions(num_local, cp_rank, cp_size, device=device)
        key_positions = layout.sbhd_positions(num_global, device=device)
    else:
        positions = layout.thd_positions(cu_seqlens, num_local, cp_rank, cp_size)
        key_positions = positions
        if cp_size > 1:
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
    query, key = _padded_cu_seqlens(packed_seq_params)
    # The tensors themselves, which keeps their identity from being used again, and their versions:
    # an object that is filled anew is another micro-batch.
    made_of = (num_local, cp_rank, cp_size, tp_chunks, device, _version(query), _version(key))
    cached = packed_seq_params.__dict__.get(_ATTRIBUTE)
    if cached is not None and cached[0] == made_of and cached[1] is query and cached[2] is key:
        return cached[3]
    if packed_seq_params.local_cp_size not in (None, cp_size):
        raise ValueError(
            "PackedSeqParams.local_cp_size must be None or context_parallel_size = "
            f"{cp_size}, got {packed_seq_params.local_cp_size}; hybrid context parallelism is not "
            "supported with MLA"
        )
    rows = _build(num_local, cp_rank, cp_size, tp_chunks, device, query.to(device))
    if key is not None and key is not query:
        rows.cu_seqlens_kv = key
    packed_seq_params.__dict__[_ATTRIBUTE] = (made_of, query, key, rows)
    return rows


def _version(t: Tensor | None) -> int:
    """Number of in-place changes of a tensor; tensors of inference mode do not count theirs."""
    return 0 if t is None or t.is_inference() else t._version


def _padded_cu_seqlens(params) -> tuple[Tensor, Tensor | None]:
    """Cumulative lengths that say where the rows of each query and key sequence lie."""
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
    return query, key
