"""Chosen keys among those that dense attention weighs most, against sets in Python."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels import chunks
from megatron_mla.kernels.index_overlap_ref import index_overlap_ref
from tests.helpers.chunked import bounds_of
from tests.helpers.rotations import DEVICE

STARTS = [0, 0, 0, 3, 3, 3, 0, 2, 0]
ENDS = [1, 2, 9, 4, 9, 8, 0, 9, 7]


def bounds():
    return bounds_of(zip(STARTS, ENDS, strict=True))


def problem(width: int):
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(9, 4, 6, generator=generator)
    key = torch.randn(9, 6, generator=generator)
    indices = torch.rand(9, 9, generator=generator).argsort(-1)[:, :width].int()
    indices[torch.rand(indices.shape, generator=generator) < 0.2] = -1
    return [t.to(DEVICE) for t in (query, key, indices)]


def by_sets(query, key, indices, width: int) -> tuple[int, int]:
    common = keys = 0
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        if end - start <= width:
            continue
        scores = query[row].double() @ key[start:end].double().t() * 0.3
        weight = scores.softmax(-1).sum(0).tolist()
        best = sorted(range(end - start), key=lambda i: (-weight[i], i))[:width]
        common += len({start + i for i in best} & set(indices[row].tolist()))
        keys += width
    return common, keys


@pytest.mark.parametrize("elements", [1, 50, 1 << 25])
@pytest.mark.parametrize("width", [1, 3, 5, 9])
def test_overlap_counts_what_sets_count(width, elements, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", elements)
    query, key, indices = problem(width)
    common, keys = index_overlap_ref(query, key, bounds(), indices, scale=0.3)
    assert (int(common), int(keys)) == by_sets(query, key, indices, width)


def test_heads_of_other_ranks_count() -> None:
    query, key, indices = problem(3)
    whole = index_overlap_ref(query, key, bounds(), indices, scale=0.3)
    others = []
    index_overlap_ref(
        query[:, 1:],
        key,
        bounds(),
        indices,
        scale=0.3,
        sum_heads=lambda t: others.append(t.clone()),
    )
    share = iter(others)
    halves = index_overlap_ref(
        query[:, :1], key, bounds(), indices, scale=0.3, sum_heads=lambda t: t.add_(next(share))
    )
    assert [int(t) for t in halves] == [int(t) for t in whole]
    alone = index_overlap_ref(query[:, :1], key, bounds(), indices, scale=0.3)
    assert [int(t) for t in alone] != [int(t) for t in whole]
