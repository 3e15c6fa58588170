"""Rows of queries in chunks: what bounds the memory of the operators of sparse attention.

Legend: T query rows, S key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

# Elements of the largest tensor that a chunk makes: 128 MiB in fp32.
CHUNK_ELEMENTS = 1 << 25


class KeyBounds(Protocol):
    """Query row i may see keys ``starts[i]`` to ``ends[i] - 1``; none where they are equal.

    Attributes:
        starts, ends: [T] int32 on the device of the tensors.
        host: [2, T] the same on the host, so that no chunk waits for the device.
    """

    starts: Tensor
    ends: Tensor
    host: Tensor


def row_chunks(num_rows: int, elements_per_row: int) -> Iterator[slice]:
    """Slices of rows that hold :data:`CHUNK_ELEMENTS` elements at most, one row at least."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements_per_row))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def seen_keys(bounds: KeyBounds, rows: slice) -> slice:
    """The keys that any of the rows may see."""
    starts, ends = bounds.host[0, rows], bounds.host[1, rows]
    seeing = ends > starts
    if not bool(seeing.any()):
        return slice(0, 0)
    return slice(int(starts[seeing].min()), int(ends[seeing].max()))


def visible(bounds: KeyBounds, rows: slice, keys: slice) -> Tensor:
    """[rows, keys] bool."""
    key = torch.arange(keys.start, keys.stop, device=bounds.starts.device)
    return (key >= bounds.starts[rows, None]) & (key < bounds.ends[rows, None])


def wide_dtype(t: Tensor) -> torch.dtype:
    """fp32, or the dtype itself where that is wider."""
    return torch.promote_types(t.dtype, torch.float32)


def places(indices: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Whether a slot holds a key, bool, and the row that it reads, int64; both like ``indices``.

    Empty slots read rows far and wide, of which nothing is used: :func:`add_rows_` adds to one row
    after the other, and would take long where all of them meet in one.
    """
    live = (indices >= 0) & (indices < num_keys)
    anywhere = torch.arange(indices.shape[-1], device=indices.device) % num_keys
    return live, torch.where(live, indices, anywhere)


def add_rows_(total: Tensor, place: Tensor, values: Tensor) -> None:
    """``total[place[i]] += values[i]`` for all i, in an order that is the same in every run.

    Args:
        total: [S, D]. place: [...] int64. values: [..., D], in the dtype of ``total``.
    """
    place, values = place.flatten(), values.reshape(-1, total.shape[1])
    if total.is_cuda:
        # index_add_ adds with atomics there, in any order; this one sorts.
        total.index_put_((place,), values, accumulate=True)
    else:
        total.index_add_(0, place, values)
