"""Sums of rows by place: those of the plain loop, in the order of the rows."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.ordered_sum import add_rows_in_order_
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_same_bits


def problem(places, rows, width, *, dtype=torch.int32, outside=2):
    generator = torch.Generator().manual_seed(rows)
    place = torch.randint(-outside, places + outside, (rows,), generator=generator, dtype=dtype)
    total, values = (torch.randn(n, width, generator=generator) for n in (places, rows))
    return total.to(DEVICE), place.to(DEVICE), values.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 24, 256, 300])
@pytest.mark.parametrize(("places", "rows"), [(1, 1), (1, 40), (7, 100), (60, 20), (5, 0), (0, 3)])
def test_adds_every_row_to_its_place(places, rows, width, dtype) -> None:
    total, place, values = problem(places, rows, width, dtype=dtype)
    want = total.double()
    for at, value in zip(place.tolist(), values.double(), strict=True):
        if 0 <= at < places:
            want[at] += value
    add_rows_in_order_(total, place, values)
    assert_close("total", total, want, rel=2e-6, reason="order of fp32 sums")


def test_replays_have_the_same_bits() -> None:
    total, place, values = problem(3, 500, 70)
    answers = []
    for _ in range(25 if DEVICE != "cpu" else 2):
        answers.append(total.clone())
        add_rows_in_order_(answers[-1], place, values)
    for answer in answers[1:]:
        assert_same_bits("total", answer, answers[0])


def test_places_without_a_row_and_rows_without_a_place_are_left_alone() -> None:
    total, place, values = problem(6, 8, 5)
    place[:] = torch.tensor([-1, 6, 2, 2, 1 << 30, -(1 << 31), 2, 2], device=DEVICE)
    values[:2], values[4:6] = torch.nan, torch.nan
    want = total.double()
    want[2] += values[[2, 3, 6, 7]].double().sum(0)
    others = total[[0, 1, 3, 4, 5]].clone()
    add_rows_in_order_(total, place, values)
    assert_same_bits("other places", total[[0, 1, 3, 4, 5]], others)
    assert_close("total", total, want)
