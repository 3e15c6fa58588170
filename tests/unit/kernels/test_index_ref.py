"""Choice of keys: the greatest scores a row may see, ties by the lowest index, memory bounded."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.kernels.chunks import add_rows_, places, row_chunks, seen_keys, visible
from megatron_mla.kernels.index_ref import index_scores_ref, index_topk_ref
from tests.helpers.chunked import Largest, bounds_of, causal
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, examples

RELU = pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
CHUNK = "megatron_mla.kernels.chunks.CHUNK_ELEMENTS"


def whole(*shape: int, most: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Whole numbers: their scores are exact in fp32, so that an order is right or wrong."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


def indexer(rows, keys, heads, width, *, most=2, dtype=torch.float32, seed=0):
    q = whole(rows, heads, width, most=most, dtype=dtype, seed=seed)
    k = whole(keys, width, most=most, dtype=dtype, seed=seed + 1)
    return q, k, whole(rows, heads, most=3, dtype=dtype, seed=seed + 2) / 4


def scores_by_hand(q: Tensor, k: Tensor, w: Tensor, relu: bool) -> list[list[float]]:
    """Python's floats are fp64."""
    keys, rows = k.tolist(), []
    for heads, weights in zip(q.tolist(), w.tolist(), strict=True):
        rows.append([])
        for key in keys:
            products = [sum(a * b for a, b in zip(head, key, strict=True)) for head in heads]
            products = [max(p, 0.0) if relu else p for p in products]
            rows[-1].append(sum(a * b for a, b in zip(weights, products, strict=True)))
    return rows


def ranked(scores: list[list[float]], bounds, width: int) -> list[list[int]]:
    rows = []
    for row, start, end in zip(scores, *bounds.host.tolist(), strict=True):
        best = sorted(range(start, end), key=lambda s, row=row: (-row[s], s))[:width]
        rows.append(best + [-1] * (width - len(best)))
    return rows


@st.composite
def spans(draw):
    """Bounds of rows and the number of keys: anything, or packed sequences and rows of none."""
    if draw(st.booleans()):
        keys = draw(st.integers(1, 14))
        edge = st.integers(0, keys)
        row = st.tuples(edge, edge).map(sorted) | edge.map(lambda s: (s, s))
        rows = draw(st.lists(row, min_size=1, max_size=10))
        return bounds_of(rows), keys
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    host = causal(*lengths).host.t().tolist() + [[0, 0]] * draw(st.integers(1, 2))
    return bounds_of(host), max(sum(lengths), 1)


@examples(150)
@given(
    spans=spans(), heads=st.integers(1, 9), width=st.integers(1, 40), relu=st.booleans(),
    most=st.sampled_from([1, 2, 100]), chunk=st.sampled_from([1, 40, 300, 1 << 25]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 999), data=st.data(),
)  # fmt: skip
def test_choice_is_that_of_sorting_by_hand(
    spans, heads, width, relu, most, chunk, dtype, seed, data
) -> None:
    bounds, keys = spans
    topk = data.draw(st.integers(1, keys + 3))
    # Up to 100: 16 bits of a product decide, which scores in bf16 would lose.
    inputs = indexer(len(bounds.starts), keys, heads, width, most=most, dtype=dtype, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHUNK, chunk)
        got = index_topk_ref(*inputs, bounds, topk=topk, relu=relu)
    assert got.dtype == torch.int32
    want = ranked(scores_by_hand(*inputs, relu), bounds, min(topk, keys))
    assert got.tolist() == want


def test_ties_among_zeros_go_to_the_lowest_index_every_time() -> None:
    # ReLU makes 90 % of the scores exact zeros, and the last chosen key is one of many.
    q, w = torch.ones(40, 4, 8, device=DEVICE), torch.full((40, 4), 0.25, device=DEVICE)
    k = -whole(400, 8, most=9).abs() - 1
    positive = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:40]
    k[positive] = -k[positive]
    bounds = bounds_of([(0, 400)] * 40)
    scores = scores_by_hand(q[:1], k, w[:1], True)
    assert scores[0].count(0.0) == 360
    want = ranked(scores * 40, bounds, 100)
    for _ in range(25):
        assert index_topk_ref(q, k, w, bounds, topk=100).tolist() == want


@RELU
def test_zeros_of_either_sign_are_equal(relu) -> None:
    k = torch.tensor([[-0.0], [0.0], [-0.0], [0.0]], device=DEVICE)
    q = torch.tensor([1.0, -1.0, 1.0], device=DEVICE).view(3, 1, 1)
    w = torch.tensor([1.0, 1.0, -1.0], device=DEVICE).view(3, 1)
    got = index_topk_ref(q, k, w, bounds_of([(0, 4)] * 3), topk=4, relu=relu)
    assert got.tolist() == [[0, 1, 2, 3]] * 3


def test_choice_is_the_same_with_and_without_gradients_and_makes_no_graph() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (48, 3, 16), (48, 16), (48, 3)
    plain = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    leaves = [t.clone().requires_grad_() for t in plain]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        tracked = index_topk_ref(*leaves, causal(17, 31), topk=9)
    assert not saved
    assert not tracked.requires_grad
    assert torch.is_grad_enabled()
    for inputs in (plain, leaves):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(index_topk_ref(*inputs, causal(17, 31), topk=9), tracked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("chunk", "bound"), [(1 << 12, 1 << 12), (1, 8 * 256)])
def test_no_tensor_is_larger_than_a_chunk_or_a_row(monkeypatch, chunk, bound, dtype) -> None:
    inputs = indexer(256, 256, 8, 4, most=100, dtype=dtype)
    scores = index_scores_ref(*(t.double() for t in inputs)).tolist()
    monkeypatch.setattr(CHUNK, chunk)
    with Largest() as made:
        got = index_topk_ref(*inputs, causal(256), topk=8)
    assert 0 < made.elements <= bound
    assert got.tolist() == ranked(scores, causal(256), 8)


def test_long_rows() -> None:
    keys = 262_209
    inputs = indexer(3, keys, 1, 2, most=100)
    bounds = bounds_of([(0, keys), (7, keys - 1), (keys - 3, keys)])
    got = index_topk_ref(*inputs, bounds, topk=2048)
    assert got.tolist() == ranked(index_scores_ref(*inputs).tolist(), bounds, 2048)


def test_packed_sequences_choose_as_each_alone(monkeypatch) -> None:
    lengths = (1040, 1, 700, 1040)
    q, k, w = indexer(sum(lengths), sum(lengths), 2, 8)
    monkeypatch.setattr(CHUNK, 1 << 20)
    got = index_topk_ref(q, k, w, causal(*lengths), topk=512)
    assert torch.equal(index_topk_ref(q, k, w, causal(*lengths), topk=512), got)
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        own = slice(end - length, end)
        alone = index_topk_ref(q[own], k[own], w[own], causal(length), topk=512)
        alone = torch.where(alone >= 0, alone + own.start, -1)
        assert torch.equal(got[own, : alone.shape[1]], alone)
        assert (got[own, alone.shape[1] :] == -1).all()


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_keys_that_a_row_cannot_see_do_not_matter(strange) -> None:
    q, k, w = indexer(12, 12, 3, 4)
    want = index_topk_ref(q, k, w, causal(12), topk=5)
    k[7:] = strange
    assert torch.equal(index_topk_ref(q, k, w, causal(12), topk=5)[:7], want[:7])


def test_a_score_of_minus_infinity_is_no_reason_to_look_elsewhere() -> None:
    sizes = ((2, 1, 1), 1e30), ((4, 1), 1e30), ((2, 1), -1.0)
    q, k, w = (torch.full(*size, device=DEVICE) for size in sizes)
    got = index_topk_ref(q, k, w, bounds_of([(0, 2), (2, 4)]), topk=2)
    assert got.tolist() == [[0, 1], [2, 3]]


class TestScores:
    @RELU
    @pytest.mark.parametrize("heads", [1, 3, 8])
    def test_are_the_formula_in_fp32_whatever_the_inputs(self, heads, relu) -> None:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            inputs = indexer(5, 7, heads, 33, most=100, dtype=dtype)
            got = index_scores_ref(*inputs, relu=relu)
            assert got.dtype == torch.promote_types(dtype, torch.float32)
            assert got.tolist() == scores_by_hand(*inputs, relu)

    @RELU
    def test_have_the_gradients_of_the_formula(self, relu) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (3, 2, 5), (4, 5), (3, 2)
        leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        leaves = [t.to(DEVICE).requires_grad_() for t in leaves]
        assert torch.autograd.gradcheck(lambda *t: index_scores_ref(*t, relu=relu), leaves)


class TestChunks:
    @given(rows=st.integers(0, 50), per_row=st.integers(0, 40), limit=st.integers(1, 100))
    def test_hold_every_row_once_and_as_many_as_fit(self, rows, per_row, limit) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CHUNK, limit)
            chunks = [range(chunk.start, chunk.stop) for chunk in row_chunks(rows, per_row)]
        assert [row for chunk in chunks for row in chunk] == list(range(rows))
        assert all(len(chunk) == 1 or len(chunk) * per_row <= limit for chunk in chunks)
        assert all((len(chunk) + 1) * max(per_row, 1) > limit for chunk in chunks[:-1])

    @given(spans=spans(), data=st.data())
    def test_see_the_keys_from_the_first_to_the_last_that_a_row_sees(self, spans, data) -> None:
        bounds, keys = spans
        count = len(bounds.starts)
        rows = slice(*sorted(data.draw(st.tuples(*[st.integers(0, count)] * 2))))
        pairs = bounds.host.t().tolist()[rows]
        seen = [[start <= s < end for s in range(keys)] for start, end in pairs]
        assert visible(bounds, rows, slice(0, keys)).tolist() == seen
        some = [s for s in range(keys) if any(row[s] for row in seen)] or [0]
        got = seen_keys(bounds, rows)
        assert got == (slice(some[0], some[-1] + 1) if any(map(any, seen)) else slice(0, 0))
        assert visible(bounds, rows, got).tolist() == [row[got] for row in seen]

    def test_see_nothing_for_rows_without_keys(self) -> None:
        assert seen_keys(bounds_of([(9, 9), (3, 5), (0, 0), (4, 6)]), slice(0, 3)) == slice(3, 5)

    def test_places_are_rows_of_keys_and_those_of_empty_slots_are_spread(self) -> None:
        indices = torch.tensor([[4, -1, 5, 0], [-7, -1, 9, 6]], dtype=torch.int32, device=DEVICE)
        live, place = places(indices, 5)
        assert live.tolist() == [[True, False, False, True], [False] * 4]
        assert place.tolist() == [[4, 1, 2, 0], [0, 1, 2, 3]] and place.dtype == torch.int64
        _, place = places(indices[1:], 3)
        assert place.tolist() == [[0, 1, 2, 0]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_rows_are_added_with_the_same_bits_every_time(self, dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        place = torch.randint(0, 7, (300, 8), generator=generator).to(DEVICE)
        values = torch.randn(300, 8, 5, generator=generator).to(DEVICE, dtype)
        first = torch.ones(9, 5, dtype=dtype, device=DEVICE)
        add_rows_(first, place, values)
        for _ in range(20):
            again = torch.ones(9, 5, dtype=dtype, device=DEVICE)
            add_rows_(again, place, values)
            assert torch.equal(again, first)
        want = [
            1 + values[place == row].double().sum(0) if row < 7 else torch.ones(5)
            for row in range(9)
        ]
        want = torch.stack([t.to("cpu", torch.float64) for t in want])
        assert_close("sums", first, want, rel=1e-6, reason="340 summands a row, in fp32")
