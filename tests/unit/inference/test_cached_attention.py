"""Attention over the rows of a cache against plain softmax attention, row by row."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.inference.attention import attend_to_rows
from megatron_mla.kernels import chunks
from tests.helpers.close import assert_close

SCALE = 0.3


def problem(batch=3, rows=4, heads=2, keys=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, rows, heads, 6, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, keys, 6, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


QUERIES = torch.tensor([[5, 6, 7, 8], [0, 1, -1, -1], [2, -1, 4, 3]])
KEYS = torch.tensor(
    [list(range(9)), [0, 1, *[-1] * 7], [4, -1, 2, 0, 1, 3, -1, -1, -1]]
)  # in any order


def oracle(query, key):
    out = torch.zeros(*query.shape[:3], 4, dtype=torch.float64)
    level = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for b, s, h in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        seen = (KEYS[b] >= 0) & (KEYS[b] <= QUERIES[b, s])
        if seen.any():
            keys = key[b, seen].double()
            scores = keys @ query[b, s, h].double() * SCALE
            out[b, s, h] = scores.softmax(0) @ keys[:, :4]
            level[b, s, h] = scores.logsumexp(0)
    return out, level


@pytest.mark.parametrize("chunk", [1, 60, 1 << 25])
def test_rows_see_keys_up_to_their_own_position(monkeypatch, chunk) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    query, key = problem()
    want = oracle(query, key)
    key[KEYS < 0] = torch.nan
    got = attend_to_rows(query, key, QUERIES, KEYS, scale=SCALE, v_dim=4)
    assert_close("out", got[0], want[0])
    assert_close("log-sum-exp", got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype) -> None:
    query, key = problem(dtype=dtype)
    want = oracle(query, key)
    out, level = attend_to_rows(query, key, QUERIES, KEYS, scale=SCALE, v_dim=4)
    assert out.dtype == dtype and level.dtype == torch.float32
    assert_close("out", out, want[0])
    assert_close("log-sum-exp", level, want[1])


def test_fp8_rows_are_read_as_numbers() -> None:
    query, key = problem(dtype=torch.float32)
    narrow = key.to(torch.float8_e4m3fn)
    got = attend_to_rows(query, narrow, QUERIES, KEYS, scale=SCALE, v_dim=4)
    assert_close("out", got[0], oracle(query, narrow.float())[0])


@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_do(rows, keys) -> None:
    query, key = problem(2, rows, 2, keys, torch.bfloat16)
    positions = torch.zeros(2, rows), torch.zeros(2, keys)
    out, level = attend_to_rows(query, key, *positions, scale=SCALE, v_dim=4)
    assert out.shape == (2, rows, 2, 4) and out.dtype == torch.bfloat16 and not out.any()
    assert level.shape == (2, rows, 2) and level.dtype == torch.float32
    assert level.isneginf().all()
