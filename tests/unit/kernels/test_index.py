"""Scores and choice of keys: the twin's, by tiles and chunks, for any heads, widths and bounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.kernels import index
from megatron_mla.kernels.chunks import visible
from megatron_mla.kernels.index import index_scores, index_topk, launch_scores
from megatron_mla.kernels.index_ref import index_scores_ref, index_topk_ref
from tests.helpers.chunked import Largest, bounds_of, causal
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_same_bits, examples, values

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELU = pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
SUMS = "sums of products in fp32 in another order"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several programs for the small problems of a CPU."""
    if DEVICE == "cpu":
        tile = {"M": 16, "N": 32, "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(index, "tile_of", lambda width, dtype: tile)


def whole(*shape: int, most: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Whole numbers: scores are exact in fp32, so that tiles and orders change no bit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


def indexer(rows, keys, heads, width, *, dtype=torch.float32, seed=0) -> tuple[Tensor, ...]:
    q = whole(rows, heads, width, dtype=dtype, seed=seed)
    k = whole(keys, width, dtype=dtype, seed=seed + 1)
    return q, k, whole(rows, heads, dtype=dtype, seed=seed + 2) / 4


def wanted_scores(q, k, w, bounds, relu=True) -> Tensor:
    scores = index_scores_ref(q, k, w, relu=relu)
    seen = visible(bounds, slice(0, len(q)), slice(0, len(k)))
    return scores.masked_fill(~seen, -torch.inf)


def rising(chosen: Tensor) -> Tensor:
    last = torch.iinfo(torch.int32).max
    chosen = torch.where(chosen < 0, last, chosen).sort(-1).values
    return torch.where(chosen == last, -1, chosen).to(torch.int32)


def assert_chosen(got: Tensor, want: Tensor) -> None:
    """``want`` comes from the twin, in its order."""
    assert got.dtype == torch.int32
    assert got.shape == want.shape
    wrong = (got != rising(want)).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}: {got[wrong[0]].tolist()}, not {rising(want)[wrong[0]]}"


@st.composite
def spans(draw):
    """Bounds of rows and a number of keys: anything, or packed sequences and rows of none."""
    if draw(st.booleans()):
        keys = draw(st.integers(1, 90))
        edge = st.integers(0, keys)
        row = st.tuples(edge, edge).map(sorted)
        return bounds_of(draw(st.lists(row, min_size=1, max_size=20))), keys
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    host = causal(*lengths).host.t().tolist() + [[0, 0]] * draw(st.integers(1, 2))
    return bounds_of(host), max(sum(lengths), 1)


@examples(40)
@given(
    spans=spans(), heads=st.integers(1, 9) | st.just(65), width=st.integers(1, 130),
    relu=st.booleans(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999),
)  # fmt: skip
def test_scores_are_those_of_the_twin_and_none_of_what_is_not_seen(
    spans, heads, width, relu, dtype, seed
) -> None:
    bounds, keys = spans
    inputs = indexer(len(bounds.starts), keys, heads, width, dtype=dtype, seed=seed)
    got = index_scores(*inputs, bounds, relu=relu)
    assert_same_bits("scores", got, wanted_scores(*inputs, bounds, relu) + 0.0, finite=False)


@RELU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_any_numbers_are_close_to_the_truth(dtype, relu) -> None:
    shapes = (70, 5, 96), (90, 96), (70, 5)
    inputs = [values(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    bounds = bounds_of([(0, 90)] * 70)
    got = index_scores(*inputs, bounds, relu=relu)
    truth = index_scores_ref(*(t.double() for t in inputs), relu=relu)
    assert_close("scores", got, truth, rel=3e-6, reason=SUMS)


@examples(30)
@given(
    spans=spans(), heads=st.integers(1, 3), relu=st.booleans(), dtype=st.sampled_from(DTYPES),
    chunk=st.sampled_from([1, 300, 1 << 26]), seed=st.integers(0, 999), data=st.data(),
)  # fmt: skip
def test_choice_is_that_of_the_twin(spans, heads, relu, dtype, chunk, seed, data) -> None:
    bounds, keys = spans
    topk = data.draw(st.integers(1, keys + 3))
    inputs = indexer(len(bounds.starts), keys, heads, 8, dtype=dtype, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "SCORE_ELEMENTS", chunk)
        got = index_topk(*inputs, bounds, topk=topk, relu=relu)
    assert_chosen(got, index_topk_ref(*inputs, bounds, topk=topk, relu=relu))


def test_packed_sequences_choose_as_each_alone(monkeypatch) -> None:
    lengths = (40, 0, 1, 33)
    q, k, w = indexer(74, 74, 2, 16, dtype=torch.bfloat16)
    together = index_topk(q, k, w, causal(*lengths), topk=9)
    monkeypatch.setattr(index, "SCORE_ELEMENTS", 1000)
    assert_same_bits("in chunks", index_topk(q, k, w, causal(*lengths), topk=9), together)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = index_topk(q[own], k[own], w[own], causal(length), topk=9)
        alone = torch.where(alone >= 0, alone + start, -1)
        assert_same_bits("alone", together[own, : alone.shape[1]], alone)
        start += length


def test_rows_that_see_no_more_than_topk_are_not_scored(monkeypatch) -> None:
    q, k, w = indexer(20, 20, 2, 8)
    q[:12], w[:12] = torch.nan, torch.nan
    got = index_topk(q, k, w, causal(20), topk=12)
    assert_chosen(got, index_topk_ref(q, k, w, causal(20), topk=12))
    shapes = []
    monkeypatch.setattr(index, "launch_scores", lambda *args, **how: shapes.append(args[5].shape))
    got = index_topk(q, k, w, causal(20), topk=20)
    assert shapes == [(20, 0)]
    assert got.tolist() == [[*range(row + 1)] + [-1] * (19 - row) for row in range(20)]


def test_one_key_more_than_topk_is_a_choice() -> None:
    inputs = indexer(20, 40, 2, 8)
    bounds = bounds_of([(i, i + 13) for i in range(20)])
    assert_chosen(index_topk(*inputs, bounds, topk=12), index_topk_ref(*inputs, bounds, topk=12))


@pytest.mark.parametrize("end", [33, 65, 129, 257])
def test_one_key_of_a_tile_is_scored(end) -> None:
    inputs = indexer(3, 300, 2, 8)
    for span in ((0, end), (end - 2, 300)):
        bounds = bounds_of([span] * 3)
        want = wanted_scores(*inputs, bounds) + 0.0
        assert_same_bits("scores", index_scores(*inputs, bounds), want, finite=False)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_keys_that_a_row_cannot_see_do_not_matter(strange) -> None:
    q, k, w = indexer(40, 40, 3, 8)
    want = index_topk(q, k, w, causal(40), topk=5)
    k[30:] = strange
    assert_same_bits("choice", index_topk(q, k, w, causal(40), topk=5)[:30], want[:30])


def test_a_score_that_is_no_number_is_the_greatest() -> None:
    q, k, w = indexer(1, 40, 2, 8)
    k[[7, 33], 3] = torch.nan
    assert index_topk(q, k, w, bounds_of([(0, 40)]), topk=2).tolist() == [[7, 33]]


def test_choice_is_the_same_with_and_without_gradients_and_every_time() -> None:
    plain = [values(*shape, seed=i) for i, shape in enumerate([(24, 3, 16), (24, 16), (24, 3)])]
    leaves = [t.clone().requires_grad_() for t in plain]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        tracked = index_topk(*leaves, causal(10, 14), topk=4)
    assert not saved
    assert not tracked.requires_grad
    for inputs in (plain, leaves):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert_same_bits("choice", index_topk(*inputs, causal(10, 14), topk=4), tracked)


@pytest.mark.parametrize(("limit", "bound"), [(1 << 11, 1 << 11), (1, 64)])
def test_no_tensor_is_larger_than_the_scores_of_a_chunk_or_a_row(monkeypatch, limit, bound) -> None:
    inputs = indexer(60, 60, 2, 4)
    monkeypatch.setattr(index, "SCORE_ELEMENTS", limit)
    with Largest() as made:
        index_topk(*inputs, causal(60), topk=4)
    assert 0 < made.elements <= max(bound, 60 * 4)


class TestChunks:
    @given(spans=spans(), topk=st.integers(1, 20), limit=st.integers(1, 3000))
    def test_hold_every_row_once_fit_and_see_what_their_rows_need(self, spans, topk, limit) -> None:
        bounds, _ = spans
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index, "SCORE_ELEMENTS", limit)
            chunks = list(index._score_chunks(bounds.host, topk))
        pairs = bounds.host.t().tolist()
        assert [i for rows, _, _ in chunks for i in range(rows.start, rows.stop)] == [
            *range(len(pairs))
        ]
        for rows, keys, span in chunks:
            needy = [(s, e) for s, e in pairs[rows] if e - s > topk]
            assert span == max((e - s for s, e in needy), default=0)
            assert keys.start == min((s for s, _ in needy), default=0)
            assert keys.stop == max((e for _, e in needy), default=0)
            count = rows.stop - rows.start
            assert count == 1 or count * index._padded(keys.stop - keys.start) <= limit

    def test_of_many_rows_are_whole_tiles(self, monkeypatch) -> None:
        monkeypatch.setattr(index, "SCORE_ELEMENTS", 1 << 20)
        rows = [rows for rows, _, _ in index._score_chunks(causal(4000).host, 100)]
        assert len(rows) > 3
        assert all(r.start % 128 == 0 for r in rows)


@pytest.mark.parametrize("fill", [True, False])
def test_scores_may_be_of_some_keys_in_a_part_of_a_tensor(fill) -> None:
    q, k, w = indexer(20, 80, 3, 8)
    bounds = bounds_of([(30 + i, 50 + i) for i in range(20)])
    want = wanted_scores(q, k, w, bounds)[:, 30:70]
    around = torch.full((20, 60), 7.0, device=DEVICE)
    how = {"first": 30, "fill": fill}
    launch_scores(q, k, w, bounds.starts, bounds.ends, around[:, 10:50], **how)
    seen = want > -torch.inf
    assert_same_bits("seen", around[:, 10:50][seen], want[seen] + 0.0)
    assert (around[:, :10] == 7).all()
    assert (around[:, 50:] == 7).all()
    if fill:
        assert (around[:, 10:50][~seen] == -torch.inf).all()


def test_130_heads_are_a_loop_like_any_other() -> None:
    inputs = indexer(5, 9, 130, 16)
    got = index_scores(*inputs, causal(5))
    assert_same_bits("scores", got, wanted_scores(*inputs, causal(5)) + 0.0, finite=False)


def test_strides_are_kept() -> None:
    q, k, w = indexer(20, 30, 3, 8, dtype=torch.bfloat16)
    bounds = causal(20)
    want = index_scores(q, k, w, bounds)
    wide = torch.full((20, 2, 3, 12), torch.nan, device=DEVICE, dtype=q.dtype)
    wide[:, 1, :, 2:10] = q
    far_k = torch.full((30, 2, 9), torch.nan, device=DEVICE, dtype=q.dtype)
    far_k[:, 0, 1:] = k
    heads_first = w.float().t().contiguous().t()
    got = index_scores(wide[:, 1, :, 2:10], far_k[:, 0, 1:], heads_first, bounds)
    assert_same_bits("scores", got, want, finite=False)
    one = index_scores(q[:1].expand(20, 3, 8), k, w, bounds)
    assert_same_bits(
        "expanded", one, wanted_scores(q[:1].expand(20, 3, 8), k, w, bounds) + 0.0, finite=False
    )


def test_queries_and_keys_may_lie_beyond_the_reach_of_32_bits(tmp_path) -> None:
    count, apart = 2**31 + 2**30, 2**30
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 3 * count:
            pytest.skip("needs 10 GB of GPU memory")
        memory = torch.zeros(count, device=DEVICE, dtype=torch.float16)
    else:
        path = tmp_path / "holes"
        try:
            memory = torch.from_file(str(path), shared=True, size=count, dtype=torch.float16)
        except RuntimeError as error:
            pytest.skip(f"needs a file system that lets files have holes: {error}")
        path.unlink()
    q, k, w = indexer(3, 3, 2, 8, dtype=torch.float16)
    far_q = memory.as_strided((3, 2, 8), (apart, 8, 1)).copy_(q)
    far_k = memory.as_strided((3, 8), (apart, 1), 100).copy_(k)
    assert_same_bits(
        "scores", index_scores(far_q, far_k, w, causal(3)), index_scores(q, k, w, causal(3)),
        finite=False,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (0, 0), (3, 0)])
def test_no_rows_or_keys_are_no_work(rows, keys) -> None:
    inputs = indexer(rows, keys, 2, 8)
    bounds = bounds_of([(0, 0)] * rows)
    got = index_topk(*inputs, bounds, topk=3)
    assert got.shape == (rows, min(3, keys))
    assert got.dtype == torch.int32
    assert index_scores(*inputs, bounds).shape == (rows, keys)


def changed(**fields):
    return {"bounds": SimpleNamespace(**(vars(causal(6)) | fields))}


BAD = {
    "fp64": ({n: t.double() for n, t in zip("qk", indexer(6, 6, 2, 8), strict=False)}, "q must be"),
    "wide": ({"q": whole(6, 2, 513), "k": whole(6, 513)}, "no more than 512"),
    "one-head": ({"q": whole(6, 8)}, "q must be"),
    "keys-of-another-width": ({"k": whole(6, 9)}, r"k must be \[6, 8\]"),
    "keys-of-another-dtype": ({"k": whole(6, 8).half()}, "k must have dtype"),
    "weights-of-other-heads": ({"w": whole(6, 3)}, r"w must be \[6, 2\]"),
    "weights-of-whole-numbers": ({"w": whole(6, 2).int()}, "w must be bfloat16"),
    "last-stride": ({"q": whole(6, 2, 16)[..., ::2]}, "q must have last stride 1"),
    "starts": (changed(starts=torch.zeros(5, dtype=torch.int32, device=DEVICE)), "starts must be"),
    "host": (changed(host=torch.zeros(2, 5)), "bounds.host must be"),
    "none": ({"topk": 0}, "topk must be positive"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(change, message) -> None:
    q, k, w = indexer(6, 6, 2, 8)
    arguments = {"q": q, "k": k, "w": w, "bounds": causal(6), "topk": 3} | change
    with pytest.raises(ValueError, match=message):
        index_topk(**arguments)


def test_is_an_operator() -> None:
    bounds = causal(4, 5)
    arguments = *indexer(9, 9, 2, 8), bounds.starts, bounds.ends, bounds.host, 3, True
    torch.library.opcheck(torch.ops.megatron_mla.index_topk.default, arguments)
