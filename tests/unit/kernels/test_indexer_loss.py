"""Indexer loss: the twin's numbers over chosen and over all keys, however gradients are summed.

Legend: t query rows, s keys, h heads, e channels, k slots; the indexer has n heads, d channels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.kernels import indexer_dense, indexer_grads, indexer_loss, indexer_target
from megatron_mla.kernels.indexer_loss_ref import indexer_loss_ref
from megatron_mla.kernels.indexer_target import launch_log_sum_exp
from tests.helpers.chunked import bounds_of
from tests.helpers.close import assert_close
from tests.helpers.rotations import (
    DEVICE,
    Layout,
    assert_each_same_bits,
    assert_same_bits,
    examples,
    laid_out,
)

NAMES = "loss q.grad k.grad w.grad"
CHUNK = "megatron_mla.kernels.chunks.CHUNK_ELEMENTS"
TILED = "megatron_mla.kernels.indexer_loss.TILED_KEYS_PER_SLOT"
BF16 = torch.bfloat16

# How the gradient of the keys is summed, and whether over chosen keys: keys per slot up to which
# tiles do it, and whether order may matter.
WAYS = {"tiles": (10**9, False), "atomics": (0, False), "fixed": (0, True)}
WAY = pytest.mark.parametrize("way", WAYS)
FORM = pytest.mark.parametrize("form", [*WAYS, "dense"])


@pytest.fixture(autouse=True)
def small_sums(monkeypatch):
    """Parts of the rows have sums of their own here too."""
    monkeypatch.setattr("megatron_mla.kernels.indexer_dense_grads.PARTIAL_ELEMENTS", 1 << 11)


def tensors(t, s, n, d, h, e, *, dtype=torch.float32, seed=0) -> list[Tensor]:
    """q, k, w, query, key."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (t, n, d), (s, d), (t, n), (t, h, e), (s, e)
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    normal[2] /= n**0.5
    return [x.to(DEVICE, dtype) for x in normal]


def slots(t: int, s: int, k: int, *, seed: int = 0) -> Tensor:
    """[t, k] int32: keys in any order, none of them twice in a row, and slots without one."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(t, s + 4, generator=generator).argsort(1)[:, :k] - 2
    return torch.nn.functional.pad(order, (0, k - order.shape[1]), value=-1).int().to(DEVICE)


def run(q, k, w, query, key, bounds, *, op=None, form=None, scale=0.3, **how):
    """Loss and the gradients of q, k and w."""
    op = op or indexer_loss.indexer_loss
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, w)]
    with pytest.MonkeyPatch.context() as patch:
        if form in WAYS:
            up_to, how["deterministic"] = WAYS[form]
            patch.setattr(TILED, up_to)
        loss = op(*leaves, query, key, bounds, scale=scale, **how)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def truth(q, k, w, query, key, bounds, **how):
    how.pop("form", None), how.pop("lse", None)
    wide = (t.double() for t in (q, k, w, query, key))
    return run(*wide, bounds, op=indexer_loss_ref, **how)


def assert_each_close(got, want, *, rel=1e-5, reason="sums of both signs in fp32") -> None:
    for name, one, other in zip(NAMES.split(), got, want, strict=True):
        # A divergence that is 0 has no scale.
        floor = name == "loss" and abs(one - other) <= 1e-6
        if not floor:
            assert_close(name, one, other, rel=rel, reason=reason)


def case(form, t=None, s=37, n=3, d=24, h=2, e=20, k=21, *, dtype=torch.float32, seed=0):
    """Inputs and keywords of a problem with several blocks of everything."""
    t = t or (18 if form in ("tiles", "dense") else 6)
    bounds = bounds_of([(3, 3), *((min(i, 7), s - i) for i in range(t - 1))])
    how = {"form": form, "indices": None if form == "dense" else slots(t, s, k, seed=seed)}
    return (*tensors(t, s, n, d, h, e, dtype=dtype, seed=seed), bounds), how


@pytest.mark.timeout(900)
@examples(40)
@given(
    spans=st.lists(st.tuples(*[st.integers(0, 40)] * 2).map(sorted), min_size=1, max_size=20),
    n=st.sampled_from([1, 3, 5]), d=st.sampled_from([1, 9, 24]),
    h=st.sampled_from([1, 2, 18]), e=st.sampled_from([5, 16, 20, 72]),
    k=st.sampled_from([1, 4, 17, 45]), form=st.sampled_from([*WAYS, "dense", "dense"]),
    relu=st.booleans(), scale=st.sampled_from([1.0, 0.2]),
    chunk=st.sampled_from([200, 600, 1 << 25]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_is_the_divergence_of_the_twin(
    spans, n, d, h, e, k, form, relu, scale, chunk, seed
) -> None:
    inputs = *tensors(len(spans), 40, n, d, h, e, seed=seed), bounds_of(spans)
    indices = None if form == "dense" else slots(len(spans), 40, k, seed=seed)
    how = {"form": form, "relu": relu, "scale": scale, "indices": indices}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHUNK, chunk)
        got = run(*inputs, **how)
    assert_each_close(got, truth(*inputs, **how))


@FORM
@pytest.mark.parametrize("h", [1, 20, 96, 130])
def test_any_number_of_heads(form, h) -> None:
    inputs, how = case(form, t=3, n=h if h < 96 else 130 - h, h=h, d=16, e=20)
    assert_each_close(run(*inputs, **how), truth(*inputs, **how))


@FORM
@pytest.mark.parametrize(("d", "e"), [(16, 576), (128, 40), (100, 200), (7, 3)])
def test_any_width(form, d, e) -> None:
    inputs, how = case(form, t=3, d=d, e=e)
    how["scale"] = e**-0.5
    assert_each_close(run(*inputs, **how), truth(*inputs, **how))


@FORM
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_narrow_dtypes_are_summed_in_fp32(form, dtype) -> None:
    inputs, how = case(form, n=20 if form in WAYS else 3, dtype=dtype)
    got, want = run(*inputs, **how), truth(*inputs, **how)
    assert_close("loss", got[0], want[0], rel=1e-6, reason="sum of 19 rows in fp32")
    assert [t.dtype for t in got] == [torch.float32, *[dtype] * 3]
    reason = "a slope and the gradient are rounded to the dtype once each"
    assert_each_close(got, want, rel=torch.finfo(dtype).eps, reason=reason)


def test_weights_may_be_wider_than_queries() -> None:
    for form in (*WAYS, "dense"):
        (q, k, w, *rest), how = case(form, dtype=BF16)
        inputs = q, k, w.float() * 1.001, *rest
        got = run(*inputs, **how)
        assert got[3].dtype == torch.float32
        reason = "weights and slopes are rounded to the dtype of the keys"
        assert_each_close(got, truth(*inputs, **how), rel=8e-3, reason=reason)


@FORM
@pytest.mark.parametrize("factors", [(1, 1e-2, 1e-2), (1e-5, 1, 1e-4)], ids=["weights", "queries"])
def test_slopes_that_fp16_cannot_hold_are_kept(form, factors) -> None:
    (*inputs, key, _), how = case(form, t=4, s=100, k=100, dtype=torch.float16)
    # Nearly equal distributions: slopes, or their products with weights, are 1e-6.
    scaled = (t * factor for t, factor in zip((*inputs[:1], *inputs[2:]), factors, strict=True))
    q, w, query = scaled
    inputs = q, inputs[1], w, query, key, bounds_of([(0, 100)] * 4)
    wide = *(t.float() for t in inputs[:-1]), inputs[-1]
    got, want = run(*inputs, **how), run(*wide, **how)
    for name, one, other in zip(NAMES.split()[1:], got[1:], want[1:], strict=True):
        if other.abs().max() > 1e-5:  # else the result is what fp16 cannot hold
            reason = "results are rounded to fp16, subnormal or not"
            assert_close(name, one, other.double(), rel=5e-3, reason=reason)


@FORM
def test_log_sum_exp_of_the_attention_saves_a_pass(form, monkeypatch) -> None:
    inputs, how = case(form)
    want = run(*inputs, **how)
    rows = range(len(inputs[0]))
    if form == "dense":
        how["indices"] = torch.full((len(rows), 37), -1, dtype=torch.int32, device=DEVICE)
        for row, (start, end) in enumerate(inputs[-1].host.t().tolist()):
            how["indices"][row, : end - start] = torch.arange(start, end, device=DEVICE)
    keys = inputs[4].double()[how["indices"].clamp(0, 36).long()]
    live = (how["indices"] >= 0) & (how["indices"] < 37)
    products = (inputs[3].double() @ keys.transpose(1, 2) * 0.3).masked_fill(
        ~live[:, None], -torch.inf
    )
    lse = products.logsumexp(-1).float()
    got = launch_log_sum_exp(inputs[3], inputs[4], how["indices"], 0.3)
    assert_close("log-sum-exp", got, products.logsumexp(-1), rel=1e-6, reason="fp32")
    if form == "dense":
        how["indices"] = None
    for name in ("launch_log_sum_exp", "launch_dense_log_sum_exp"):
        monkeypatch.setattr(indexer_loss, name, None)
    transposed = lse.t().contiguous().t()
    assert_each_close(run(*inputs, lse=transposed, **how), [t.double() for t in want])
    # A head whose log-sum-exp is infinite has no weight.
    lse[:, 0] = torch.inf
    q, k, w, query, key, bounds = inputs
    assert_each_close(
        run(*inputs, lse=lse, **how), truth(q, k, w, query[:, 1:], key, bounds, **how)
    )


@FORM
def test_rows_without_keys_count_nothing_whatever_they_hold(form) -> None:
    (q, k, w, query, key, bounds), how = case(form, t=6)
    spans = [(0, 37), (1, 4), (2, 3), (0, 0), (37, 37), (0, 9)]
    if form != "dense":
        how["indices"][3], how["indices"][4] = -1, 37
    want = truth(q, k, w, query, key, bounds_of(spans), **how)
    for t in (q, w, query):
        t[3:5] = torch.nan
    loss, *got = run(q, k, w, query, key, bounds_of(spans), **how)
    assert_each_close((loss, *got), want)
    for t in (got[0], got[2]):
        assert_same_bits("rows without keys", t[3:5], torch.zeros_like(t[3:5]))
    if form != "dense":
        how["indices"] = torch.full_like(how["indices"], -1)
    for t in run(q, k, w, query, key, bounds_of([(5, 5)] * 6), **how):
        assert_same_bits("no keys at all", t, torch.zeros_like(t))


@FORM
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_keys_that_no_row_uses_do_not_matter(form, strange) -> None:
    (q, k, w, query, key, _), how = case(form, t=4)
    bounds = bounds_of([(1, 5), (2, 5), (6, 37), (7, 8)])
    if how["indices"] is not None:
        how["indices"] = how["indices"].masked_fill((how["indices"] % 5) == 0, -1)
    want = run(q, k, w, query, key, bounds, **how)
    unused = [0, 5]
    k[unused], key[unused] = strange, strange
    got = run(q, k, w, query, key, bounds, **how)
    if form == "atomics" and DEVICE != "cpu":  # keys are summed in any order
        assert_each_close(got, want)
    else:
        assert_each_same_bits(NAMES, got, want)


@FORM
@pytest.mark.parametrize("which", ["q", "k", "query"])
def test_what_is_not_a_number_shows(form, which) -> None:
    inputs, how = case(form)
    place = "q k w query key".split().index(which)
    inputs[place][5] = torch.nan
    if which != "k":
        assert run(*inputs, **how)[0].isnan()
    for got in run(*inputs, **how)[1:]:
        assert got.isnan().any()


@FORM
@pytest.mark.parametrize("chunk", [80, 1 << 25])
def test_heads_of_two_ranks_add_up(monkeypatch, form, chunk) -> None:
    monkeypatch.setattr(CHUNK, chunk)
    (q, k, w, query, *rest), how = case(form, t=9, h=8)
    ranks = query[:, :1], query[:, 1:]  # unequal shares: neither may be normalised alone
    shares = [], []
    for heads, mine in zip(ranks, shares, strict=True):
        run(q, k, w, heads, *rest, sum_heads=lambda t, mine=mine: mine.append(t.clone()), **how)
    assert all(share.isfinite().all() for share in shares[0])
    want = truth(q, k, w, query, *rest, **how)
    for heads, other in zip(ranks, map(iter, reversed(shares)), strict=True):
        got = run(q, k, w, heads, *rest, sum_heads=lambda t, of=other: t.add_(next(of)), **how)
        assert next(other, None) is None
        assert_each_close(got, want)


@FORM
def test_ranks_add_up_probabilities_of_their_heads_in_bounded_chunks(monkeypatch, form) -> None:
    monkeypatch.setattr(CHUNK, 100)
    inputs, how = case(form)
    shares = []
    run(*inputs, sum_heads=lambda t: shares.append(t.clone()), **how)
    assert max(t.numel() for t in shares) <= 100 < sum(t.numel() for t in shares)
    shares = torch.cat([t.sum(1) for t in shares])
    heads = torch.full_like(shares, inputs[3].shape[1])
    if form == "dense":
        heads[0] = 0
    assert_close("sums of heads", shares, heads, rel=1e-6, reason="sums of 37 keys in fp32")


@WAY
def test_a_key_in_two_slots_counts_twice(way) -> None:
    inputs, how = case(way, t=4, k=8)
    how["indices"][:, 5] = how["indices"][:, 2]
    assert_each_close(run(*inputs, **how), truth(*inputs, **how))


@FORM
def test_tensors_may_lie_apart(form) -> None:
    (q, k, w, query, key, bounds), how = case(form)
    want = run(q, k, w, query, key, bounds, **how)
    apart = [
        laid_out(q, Layout((1, 0, 2), (2, 1, 3))),
        laid_out(k, Layout((0, 1), (1, 5))),
        laid_out(w, Layout((1, 0), (3, 1), step=2)),
        laid_out(query, Layout((0, 1, 2), (1, 2, 5))),
        laid_out(key, Layout((0, 1), (3, 8))),
    ]
    leaves = [t.detach().requires_grad_() for t in apart[:3]]
    if how["indices"] is not None:
        wide = torch.full((len(q), 3, 25), 1, dtype=torch.int64, device=DEVICE)
        wide[:, 1, :21] = how["indices"]
        how["indices"] = wide[:, 1, :21]
    form = how.pop("form")
    with pytest.MonkeyPatch.context() as patch:
        if form in WAYS:
            up_to, how["deterministic"] = WAYS[form]
            patch.setattr(TILED, up_to)
        loss = indexer_loss.indexer_loss(*leaves, *apart[3:], bounds, scale=0.3, **how)
    got = loss.detach(), *torch.autograd.grad(loss, leaves)
    if form == "atomics":
        assert_each_close(got, [t.double() for t in want])
    else:
        assert_each_same_bits(NAMES, got, want)


def test_fixed_point_sums_do_not_mind_the_order_of_rows() -> None:
    (q, k, w, query, key, bounds), how = case("fixed", t=12, h=2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want = run(q, k, w, query, key, bounds, **how)
    how["indices"] = how["indices"][order]
    mixed = bounds_of(bounds.host.t()[order.cpu()].tolist())
    got = run(q[order], k, w[order], query[order], key, mixed, **how)
    assert_same_bits("gradient of the keys", got[2], want[2])


@pytest.mark.parametrize("factor", [1e-18, 1e-6, 1e6, 1e15])
def test_fixed_point_sums_have_the_range_of_the_inputs(factor) -> None:
    (q, k, *rest), how = case("fixed", n=2)
    # Scores stay as they are.
    inputs = q * factor, k / factor, *rest
    assert_each_close(run(*inputs, **how), truth(*inputs, **how))


def test_determinism_that_is_asked_of_torch_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(TILED, 0)
    inputs, _ = case("dense")
    asked = []
    monkeypatch.setattr(indexer_loss, "launch_grads", lambda *args, way, **how: asked.append(way))
    how = {"indices": slots(18, 37, 21)}
    run(*inputs, **how)
    run(*inputs, deterministic=False, **how)
    assert asked == [indexer_grads.FIXED.value, indexer_grads.ATOMICS.value]


def test_few_keys_per_slot_are_worked_in_tiles() -> None:
    dense, atomics, fixed = (getattr(indexer_grads, name) for name in ("DENSE", "ATOMICS", "FIXED"))
    for deterministic, otherwise in ((False, atomics), (True, fixed)):
        assert indexer_loss.way_of(8192, 2048, deterministic) is dense
        assert indexer_loss.way_of(131_072, 2048, deterministic) is otherwise


@FORM
def test_attention_is_a_constant_and_the_incoming_gradient_a_factor(form) -> None:
    (q, k, w, query, key, bounds), how = case(form)
    form = how.pop("form")
    how["deterministic"] = True
    leaves = [t.requires_grad_() for t in (q, k, w, query, key)]
    loss = indexer_loss.indexer_loss(*leaves, bounds, scale=0.3, **how)
    want = run(*leaves, bounds, **how)[1:]
    (loss * 3).backward()
    for leaf, grad in zip(leaves, want, strict=False):
        assert_same_bits("gradient", leaf.grad, grad * 3)
    assert query.grad is None and key.grad is None


@FORM
def test_without_gradients_none_are_made(form, monkeypatch) -> None:
    inputs, how = case(form)
    want = run(*inputs, **how)[0]
    for name in ("launch_key_grad", "launch_query_grad", "fixed_unit"):
        monkeypatch.setattr(indexer_loss, name, None)
    up_to, how["deterministic"] = WAYS.get(how.pop("form"), (0, False))
    monkeypatch.setattr(TILED, up_to)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    with torch.no_grad():
        got = indexer_loss.indexer_loss(*leaves, *inputs[3:], scale=0.3, **how)
    assert_same_bits("loss", got, want)


@FORM
@pytest.mark.parametrize("none", ["rows", "keys", "slots", "heads"])
def test_nothing_is_no_work(form, none) -> None:
    sizes = {"rows": {"t": 0}, "keys": {"s": 0}, "slots": {"k": 0}, "heads": {"h": 0}}[none]
    t, s = sizes.get("t", 3), sizes.get("s", 7)
    inputs = tensors(t, s, 2, 4, sizes.get("h", 2), 5)
    bounds = bounds_of([(0, s)] * t)
    indices = None if form == "dense" else slots(t, max(s, 7), sizes.get("k", 5))
    loss, *grads = run(*inputs, bounds, form=form, indices=indices)
    for got, t in zip(grads, inputs, strict=False):
        assert got.shape == t.shape and got.isfinite().all()
        if none != "heads" and not (none == "slots" and form == "dense"):
            assert_same_bits("gradient", got, torch.zeros_like(t))
    if none == "heads":
        assert_same_bits("loss", loss, torch.zeros_like(loss))


@FORM
@pytest.mark.parametrize("student", ["same", "none"])
def test_uniform_target_over_many_keys(form, student, monkeypatch) -> None:
    monkeypatch.setattr(indexer_target, "target_tile", lambda *_: _large(heads=16))
    monkeypatch.setattr(indexer_dense, "target_tile", lambda *_: _large(rows=16))
    monkeypatch.setattr(indexer_grads, "grads_tile", lambda *_: _large())
    monkeypatch.setattr(indexer_dense, "dense_tile", lambda *_: _large(rows=16))
    path = "megatron_mla.kernels.indexer_dense_grads.dense_tile"
    monkeypatch.setattr(path, lambda *_: _large(rows=512, keys=512))
    if DEVICE != "cpu":
        monkeypatch.undo()
    many = 65_536
    q, k, w, query, key = tensors(2, many, 2, 4, 3, 4)
    query.zero_()
    if student == "same":
        q.zero_()
    else:  # exp(-30) for half of the keys
        q.fill_(1.0), w.fill_(1.0), k.zero_()
        k[::2] = -3.75
    every = torch.arange(many, dtype=torch.int32, device=DEVICE).expand(2, many)
    how = {"relu": False, "indices": None if form == "dense" else every, "form": form}
    inputs = q, k, w, query, key, bounds_of([(0, many)] * 2)
    got, want = (f(*inputs, **how)[0].double() for f in (run, truth))
    # Blocks of equal terms, added one after the other in fp32, all round the same way: a thousand
    # small blocks on a GPU.
    bound = 1e-6 if DEVICE == "cpu" else 5e-5
    assert abs(got - want) <= bound * max(1.0, want)


def _large(**rest) -> dict:
    return {"slots": 4096, "keys": 4096, "stages": 1, "warps": 4, **rest}


def arguments(**changed):
    """By name, of a problem that is right but for what is changed."""
    q, k, w, query, key = tensors(3, 7, 2, 4, 2, 5)
    given = {"q": q, "k": k, "w": w, "query": query, "key": key, "bounds": bounds_of([(0, 7)] * 3)}
    given |= {"scale": 0.3, "indices": slots(3, 7, 4), "lse": None}
    return given | {name: change(given[name]) for name, change in changed.items()}


@pytest.mark.parametrize(
    ("name", "change", "condition"),
    [
        ("q", lambda t: t[0], "[rows, heads, channels]"),
        ("q", lambda t: t.double(), "bfloat16, float16 or float32"),
        ("k", lambda t: t.to(BF16), "dtype and device of q"),
        ("k", lambda t: t[:5], "keys of key"),
        ("k", lambda t: t.t().contiguous().t(), "last stride 1"),
        ("w", lambda t: t[:, :1], "rows and heads of q"),
        ("query", lambda t: t[:2], "rows of q"),
        ("query", lambda t: t[..., :4], "channels of key"),
        ("key", lambda t: t.to(BF16), "dtype and device of query"),
        ("indices", lambda t: t.float(), "int32 or int64"),
        ("indices", lambda t: t[:2], "rows of q"),
        ("indices", lambda t: t[0], "[rows, slots]"),
        ("indices", lambda t: t.t().contiguous().t(), "last stride 1"),
        ("lse", lambda t: torch.zeros(3, 2, dtype=BF16, device=DEVICE), "float32"),
        ("lse", lambda t: torch.zeros(3, 3, device=DEVICE), "rows and heads of query"),
        ("bounds", lambda t: bounds_of([(0, 7)] * 2), "rows of q"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, change, condition) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\S* ") as raised:
        indexer_loss.indexer_loss(**arguments(**{name: change}))
    assert condition in str(raised.value) and "got" in str(raised.value)


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_operators_are_registered_as_they_behave(form) -> None:
    (q, k, w, query, key, bounds), how = case("dense", t=3)
    over = (bounds.starts, bounds.ends) if form == "dense" else (slots(3, 37, 21), None)
    target = torch.ops.megatron_mla.indexer_target.default
    torch.library.opcheck(target, (query, key, *over, None, 0.3))
    out = (torch.zeros(shape, device=DEVICE) for shape in ((3,), q.shape, k.shape, w.shape))
    way = indexer_grads.DENSE.value
    given = q, k, w, *over, target(query, key, *over, None, 0.3), *out, True, way
    torch.library.opcheck(torch.ops.megatron_mla.indexer_grads_.default, given)


@pytest.mark.gpu
class TestOnGPU:
    """Real shapes, tensors past 2**31 elements, and what only races or atomics could show."""

    @staticmethod
    def problem(t, s, h, n, k, dtype=BF16):
        """The last t of s causal rows."""
        inputs = tensors(t, 1, n, 128, h, 576, dtype=dtype)
        generator = torch.Generator(DEVICE).manual_seed(0)
        inputs[1], inputs[4] = (
            torch.randn(s, width, device=DEVICE, generator=generator).to(dtype)
            for width in (128, 576)
        )
        ends = range(s - t + 1, s + 1)
        seen = torch.rand(t, s, device=DEVICE, generator=generator)
        seen.masked_fill_(
            torch.arange(s, device=DEVICE) >= torch.tensor(ends, device=DEVICE)[:, None], -1
        )
        best = seen.topk(k, dim=1)
        indices = best.indices.masked_fill(best.values < 0, -1).int()
        return (*inputs, bounds_of((0, end) for end in ends)), indices

    @FORM
    @pytest.mark.parametrize(("h", "n"), [(64, 32), (8, 64), (128, 32), (20, 5)])
    @pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
    def test_real_shapes(self, form, h, n, dtype) -> None:
        inputs, indices = self.problem(160, 3000, h, n, 2048, dtype)
        how = {"form": form, "indices": None if form == "dense" else indices, "scale": 576**-0.5}
        reason = "sums of 3000 keys, slopes rounded once; a score near 0 may be cut or not"
        rel = max(3e-4, torch.finfo(dtype).eps)
        assert_each_close(run(*inputs, **how), truth(*inputs, **how), rel=rel, reason=reason)

    @pytest.mark.parametrize("form", ["tiles", "fixed", "dense"])
    def test_every_run_has_the_same_bits(self, form) -> None:
        inputs, indices = self.problem(512, 1500, 64, 32, 1024)
        how = {"form": form, "indices": None if form == "dense" else indices}
        want = run(*inputs, **how)
        for _ in range(25):
            assert_each_same_bits(NAMES, run(*inputs, **how), want)

    def test_last_rows_past_2_31_elements(self) -> None:
        rows, last = 60_000, 64
        assert rows * 64 * 576 > 2**31
        generator = torch.Generator(DEVICE).manual_seed(0)
        query = torch.zeros(rows, 64, 576, dtype=BF16, device=DEVICE).normal_(generator=generator)
        q, k, w, _, key = tensors(rows, 4096, 4, 32, 1, 576, dtype=BF16)
        indices = torch.randint(-9, 4096, (rows, 128), device=DEVICE, generator=generator)
        bounds = bounds_of([(0, 4096)] * rows)
        got = run(q, k, w, query, key, bounds, form="fixed", indices=indices)
        few = q[-last:], k, w[-last:], query[-last:], key, bounds_of([(0, 4096)] * last)
        want = run(*few, form="fixed", indices=indices[-last:])
        assert_same_bits("last rows of q.grad", got[1][-last:], want[1])
        assert_same_bits("last rows of w.grad", got[3][-last:], want[3])
