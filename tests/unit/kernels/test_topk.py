"""Selection: the set that sorting finds, for any width, any k and any scores, every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.kernels.index_ref import best_keys
from megatron_mla.kernels.topk import launch_select, select_topk, tiles_of
from tests.helpers.rotations import DEVICE, examples

# The interpreter's guesses between infinities, which are not used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

INF, NAN = torch.inf, torch.nan
LEAST = torch.finfo(torch.float32).min


def rising(chosen: Tensor) -> Tensor:
    """Columns of every row in order, -1 last."""
    last = torch.iinfo(torch.int32).max
    chosen = torch.where(chosen < 0, last, chosen).sort(-1).values
    return torch.where(chosen == last, -1, chosen).to(torch.int32)


def by_sorting(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    column = torch.arange(scores.shape[1], device=scores.device)
    seen = (column >= starts[:, None]) & (column < ends[:, None])
    return rising(best_keys(scores, seen, min(topk, scores.shape[1])))


def spans_of(*spans: tuple[int, int]) -> tuple[Tensor, Tensor]:
    starts, ends = torch.tensor(spans, dtype=torch.int32, device=DEVICE).reshape(-1, 2).t()
    return starts.contiguous(), ends.contiguous()


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def assert_chosen(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.int32
    assert got.shape == want.shape
    wrong = (got != want).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}: {got[wrong[0]].tolist()}, not {want[wrong[0]].tolist()}"


# All kinds of rows: many magnitudes, ties at zero of both signs, ties everywhere, numbers that are
# none, and one row in which a single column stands out by more than any other two differ.
KINDS = {
    "spread": lambda t, u: t * 10 ** (6 * u),
    "zeros": lambda t, u: torch.where(u < 0.9, t.sign() * 0.0, t),
    "tied": lambda t, u: t.round(),
    "equal": lambda t, u: t * 0 + 1.5,
    "below-zero": lambda t, u: -t.abs() - u,
    "strange": lambda t, u: torch.where(
        u < 0.7, torch.tensor([NAN, INF, -INF, LEAST, 0.0, -0.0, 1e-45, -1e-45])[
            (u * 11).long().clamp(max=7)], t
    ),
    "outlier": lambda t, u: torch.where(u == u.max(), 3e38, t),
}  # fmt: skip


def scores_of(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(rows, columns, generator=generator)
    return KINDS[kind](t, torch.rand(rows, columns, generator=generator)).to(DEVICE)


@examples(40)
@given(
    kind=st.sampled_from([*KINDS]), columns=st.integers(1, 3000), share=st.floats(0, 1.1),
    block=st.sampled_from([None, 512, 1024]), seed=st.integers(0, 999), data=st.data(),
)  # fmt: skip
def test_choice_is_that_of_sorting(kind, columns, share, block, seed, data) -> None:
    # Segments, segments of segments, rows read again and again, and rows that fit.
    topk = data.draw(st.sampled_from([1, max(1, int(columns * share)), 100]))
    edge = st.integers(0, columns)
    spans = [(0, columns), sorted(data.draw(st.tuples(edge, edge)))]
    scores = scores_of(kind, 2, columns, seed)
    bounds = spans_of(*spans)
    out = torch.empty(2, min(topk, columns), dtype=torch.int32, device=DEVICE)
    launch_select(scores, *bounds, out, block=block)
    assert_chosen(out, by_sorting(scores, *bounds, topk))


def test_ties_among_zeros_go_to_the_lowest_index_every_time() -> None:
    # ReLU makes 90 % of the scores exact zeros, and the last chosen key is one of many.
    scores = scores_of("zeros", 2, 3000, 1).abs()
    bounds = spans_of((0, 3000), (50, 2000))
    want = by_sorting(scores, *bounds, 1000)
    assert (scores.gather(1, want.long()) == 0).any(1).all()
    for _ in range(25):
        assert_chosen(select_topk(scores, *bounds, 1000), want)


@pytest.mark.parametrize("block", [None, 512], ids=["whole", "segments"])
def test_order_of_strange_scores(block) -> None:
    # Greatest first: NaN, inf, numbers, then -inf like the least number.
    scores = torch.zeros(1, 1500, device=DEVICE) - 1
    for column, score in {
        1400: NAN, 30: -NAN, 700: INF, 10: 1e-45, 20: -0.0, 1200: 0.0, 5: -1e-45, 0: -INF, 1: LEAST,
    }.items():  # fmt: skip
        scores[0, column] = score
    found = [{30, 1400}, {700}, {10}, {20, 1200}, {5}]
    for topk in range(1, 8):
        out = torch.empty(1, topk, dtype=torch.int32, device=DEVICE)
        launch_select(scores, *spans_of((0, 1500)), out, block=block)
        best = [c for tied in found for c in sorted(tied)]
        assert out.tolist() == [sorted(best[:topk])]
    out = torch.empty(1, 1499, dtype=torch.int32, device=DEVICE)
    launch_select(scores, *spans_of((0, 1500)), out, block=block)
    assert out.tolist() == [[c for c in range(1500) if c != 1]]


def test_what_a_row_cannot_see_is_not_read() -> None:
    spans = (0, 90), (17, 401), (600, 700), (5, 5), (399, 400)
    scores = normal(5, 700)
    bounds = spans_of(*spans)
    want = by_sorting(scores, *bounds, 40)
    for strange in (NAN, INF, -INF):
        dirty = torch.full_like(scores, strange)
        for row, (start, end) in enumerate(spans):
            dirty[row, start:end] = scores[row, start:end]
        assert_chosen(select_topk(dirty, *bounds, 40), want)


def test_rows_that_see_no_more_than_topk_take_all_without_scores() -> None:
    scores = torch.full((4, 700), NAN, device=DEVICE)
    got = select_topk(scores, *spans_of((650, 700), (3, 3), (0, 49), (9, 10)), 50)
    assert got[0].tolist() == [*range(650, 700)]
    assert got[1].tolist() == [-1] * 50
    assert got[2].tolist() == [*range(49), -1]
    assert got[3].tolist() == [9] + [-1] * 49


def test_columns_may_be_a_part_of_the_keys_and_slots_a_part_of_a_tensor() -> None:
    whole = normal(3, 1300)
    spans = spans_of((400, 1100), (512, 1024), (400, 401))
    slots = torch.full((3, 90), -7, dtype=torch.int32, device=DEVICE)
    launch_select(whole[:, 400:1100], *spans, slots[:, 20:70], first=400, span=700, block=512)
    assert_chosen(slots[:, 20:70], by_sorting(whole, *spans, 50))
    assert (slots[:, :20] == -7).all()
    assert (slots[:, 70:] == -7).all()


def test_bounds_beyond_the_columns_are_cut() -> None:
    scores = normal(1, 600)
    assert_chosen(
        select_topk(scores, *spans_of((-5, 10_000)), 9), by_sorting(scores, *spans_of((0, 600)), 9)
    )


@pytest.mark.parametrize("topk", [2047, 2048, 20_000])
def test_long_rows(topk) -> None:
    columns = 262_209
    scores = normal(2, columns)
    scores[1] = scores[1].clamp(min=1)  # ties at the border
    bounds = spans_of((0, columns), (7, columns - 1))
    assert_chosen(select_topk(scores, *bounds, topk), by_sorting(scores, *bounds, topk))


def test_rows_may_begin_beyond_the_reach_of_32_bits(tmp_path) -> None:
    count, apart = 2**31 + 5000, 2**30
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 5 * count:
            pytest.skip("needs 11 GB of GPU memory")
        memory = torch.zeros(count, device=DEVICE)
    else:
        # A file with holes: pages that nothing touches take no memory.
        path = tmp_path / "holes"
        try:
            memory = torch.from_file(str(path), shared=True, size=count, dtype=torch.float32)
        except RuntimeError as error:
            pytest.skip(f"needs a file system that lets files have holes: {error}")
        path.unlink()
    scores = memory.as_strided((3, 4000), (apart, 1)).copy_(normal(3, 4000))
    bounds = spans_of((0, 4000), (9, 3999), (1, 4000))
    want = by_sorting(scores.contiguous(), *bounds, 300)
    for block in (None, 1024):
        out = torch.empty(3, 300, dtype=torch.int32, device=DEVICE)
        launch_select(scores, *bounds, out, block=block)
        assert_chosen(out, want)


def test_what_is_expanded_or_cut_out_is_read_by_its_strides() -> None:
    bounds = spans_of((0, 60), (30, 90))
    assert_chosen(
        select_topk(normal(1, 90).expand(2, 90), *bounds, 20),
        by_sorting(normal(1, 90).expand(2, 90), *bounds, 20),
    )
    part = normal(4, 150)[::2, 33:123]
    assert_chosen(select_topk(part, *bounds, 20), by_sorting(part, *bounds, 20))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_choose_from_is_no_work(rows, columns) -> None:
    got = select_topk(
        torch.empty(rows, columns, device=DEVICE), *spans_of(*[(0, columns)] * rows), 4
    )
    assert got.shape == (rows, min(4, columns))
    assert got.dtype == torch.int32


def test_segments_always_leave_something_out() -> None:
    for span in (1, 600, 1 << 15, 1 << 20):
        for topk in (1, 2048, 1 << 14, 40_000):
            block, stream = tiles_of(span, topk)
            assert block >= min(span, 1 << 15)
            assert stream or span <= block or 2 * topk <= block


BAD = {
    "bf16": ({"scores": normal(3, 9).bfloat16()}, "scores must be fp32"),
    "one-dim": ({"scores": normal(9)}, "scores must be fp32"),
    "last-stride": ({"scores": normal(3, 18)[:, ::2]}, "scores must have last stride 1"),
    "int64": ({"starts": torch.zeros(3, dtype=torch.int64, device=DEVICE)}, "starts must be cont"),
    "few": ({"ends": torch.zeros(2, dtype=torch.int32, device=DEVICE)}, "ends must be contiguous"),
    "apart": (
        {"ends": torch.zeros(6, dtype=torch.int32, device=DEVICE)[::2]},
        "ends must be contiguous",
    ),
    "elsewhere": (
        {"starts": torch.zeros(3, dtype=torch.int32, device="meta")},
        "starts must be on the device",
    ),
    "none": ({"topk": 0}, "topk must be positive"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(change, message) -> None:
    starts, ends = spans_of((0, 9), (0, 5), (2, 3))
    arguments = {"scores": normal(3, 9), "starts": starts, "ends": ends, "topk": 2} | change
    with pytest.raises(ValueError, match=message):
        select_topk(**arguments)


def test_is_an_operator() -> None:
    starts, ends = spans_of((0, 9), (0, 5), (2, 3))
    torch.library.opcheck(
        torch.ops.megatron_mla.select_topk.default, (normal(3, 9), starts, ends, 4)
    )
