"""Megatron-Core's fused functions by their own names: its unfused path's bits, its conventions."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch

pytest.importorskip("triton")

from megatron_mla import fusions  # noqa: E402
from megatron_mla.fusions import (  # noqa: E402
    fused_apply_mla_rope_for_kv,
    fused_apply_mla_rope_for_q,
    fused_mla_rope_concat,
    fused_mla_rope_inplace,
    fused_mla_rope_kv_split,
    fused_mla_rope_out_of_place,
)
from megatron_mla.parallel import layout  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
HEADS, NOPE, D, V = 5, 6, 8, 4
LENGTHS = (8, 0, 16, 8)
CU = [0, 8, 8, 24, 32]


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def angles(rows):
    """Megatron's angles, [rows, 1, 1, D] fp32 with equal halves."""
    inverse = 10000.0 ** -(torch.arange(0, D, 2) / D)
    return torch.outer(torch.arange(rows).float(), inverse).repeat(1, 2)[:, None, None].to(DEVICE)


def tables(rows, dtype=torch.float32):
    return angles(rows).cos().to(dtype), angles(rows).sin().to(dtype)


def cu_seqlens(values=CU, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Group:
    """What Megatron-Core's unfused path asks of a context-parallel group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def megatron(t, cu=None, rank=0, size=1, rows=64):
    """Megatron-Core's unfused rotation of all channels of ``t``."""
    from megatron.core.models.common.embeddings import rope_utils

    if cu is None:
        return rope_utils._apply_rotary_pos_emb_bshd(
            t, angles(rows)[: t.shape[0]], mla_rotary_interleaved=True
        )
    # Longer than a sequence and shorter than the batch: every sequence starts at angle 0.
    longest = int(cu.diff().max())
    return rope_utils._apply_rotary_pos_emb_thd(
        t, cu, angles(longest), mla_rotary_interleaved=True, cp_group=Group(rank, size)
    )


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
def test_query_has_the_bits_of_the_unfused_path(packed, dtype) -> None:
    shape = (sum(LENGTHS), HEADS) if packed else (12, 2, HEADS)
    cu = cu_seqlens() if packed else None
    t, grad = random(*shape, NOPE + D, dtype=dtype), random(*shape, NOPE + D, dtype=dtype, seed=1)
    stock = t.clone().requires_grad_()
    want = torch.cat((stock[..., :NOPE], megatron(stock[..., NOPE:], cu)), dim=-1)
    want.backward(grad)
    for function in (
        fused_apply_mla_rope_for_q,
        fused_mla_rope_inplace,
        fused_mla_rope_out_of_place,
    ):
        leaf = t.clone().requires_grad_()
        got = function(leaf, *tables(16, dtype), NOPE, D, cu)
        got.backward(grad)
        assert_same((got, leaf.grad), (want, stock.grad))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_context_parallel_ranks_rotate_their_own_rows(size, index) -> None:
    cu = cu_seqlens(dtype=index)
    whole = random(sum(LENGTHS), HEADS, NOPE + D)
    want = fused_mla_rope_out_of_place(whole, *tables(16), NOPE, D, cu)
    for rank in range(size):
        rows = layout.rows_of_rank(sum(LENGTHS), rank, size, cu)
        got = fused_mla_rope_out_of_place(whole[rows], *tables(16), NOPE, D, cu, rank, size)
        assert torch.equal(got, want[rows])
        if index == torch.int32 and size == 2:
            stock = megatron(whole[rows][..., NOPE:], cu, rank, size)
            assert torch.equal(got[..., NOPE:], stock)


def test_unpacked_context_parallel_ranks_take_cut_and_whole_tables() -> None:
    whole = random(16, 2, HEADS, NOPE + D)
    cos, sin = tables(32)
    want = fused_mla_rope_out_of_place(whole, cos, sin, NOPE, D)
    for rank in range(2):
        rows = layout.rows_of_rank(16, rank, 2, device=DEVICE)
        mine = whole[rows]
        for table in ((cos[rows], sin[rows]), (cos[:16], sin[:16]), (cos, sin)):
            got = fused_mla_rope_out_of_place(mine, *table, NOPE, D, None, rank, 2)
            assert torch.equal(got, want[rows])
        with pytest.raises(ValueError, match="at least 16 rows.* got 12"):
            fused_mla_rope_out_of_place(mine, cos[:12], sin[:12], NOPE, D, None, rank, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
def test_key_and_value_have_the_bits_of_the_unfused_path(packed, dtype) -> None:
    shape = (sum(LENGTHS),) if packed else (12, 2)
    cu = cu_seqlens() if packed else None
    kv = random(*shape, HEADS, NOPE + V, dtype=dtype)
    k_pe = random(*shape, 1, D, dtype=dtype, seed=1)
    pe = megatron(k_pe, cu).expand(*shape, HEADS, D)
    want = torch.cat((kv[..., :NOPE], pe), dim=-1), kv[..., NOPE:]
    got = fused_apply_mla_rope_for_kv(kv, k_pe, *tables(16, dtype), D, NOPE, V, cu)
    assert_same(got, want)
    assert all(t.is_contiguous() for t in got)


def test_gradients_of_key_and_value_equal_autograds() -> None:
    kv, k_pe = random(12, 2, HEADS, NOPE + V), random(12, 2, 1, D, seed=1)
    grads = random(12, 2, HEADS, NOPE + D, seed=2), random(12, 2, HEADS, V, seed=3)
    answers = []
    for fused in (True, False):
        leaves = kv.clone().requires_grad_(), k_pe.clone().requires_grad_()
        if fused:
            outputs = fused_mla_rope_kv_split(*leaves, *tables(16), D, NOPE, V)
        else:
            pe = megatron(leaves[1]).expand(12, 2, HEADS, D)
            outputs = torch.cat((leaves[0][..., :NOPE], pe), dim=-1), leaves[0][..., NOPE:]
        answers.append(torch.autograd.grad(outputs, leaves, grads))
    (got_kv, got_pe), (want_kv, want_pe) = answers
    assert torch.equal(got_kv, want_kv)
    # The sum over heads is ours: a fixed order instead of torch's.
    torch.testing.assert_close(got_pe, want_pe, rtol=1e-6, atol=1e-6)


def test_pairs_can_come_out_again() -> None:
    kv, k_pe = random(12, 2, HEADS, NOPE), random(12, 2, 1, D, seed=1)
    halves, _ = fused_mla_rope_kv_split(kv, k_pe, *tables(16), D, NOPE, 0)
    pairs, value = fused_mla_rope_kv_split(
        kv, k_pe, *tables(16), D, NOPE, 0, remove_interleaving=True
    )
    assert value.shape == (12, 2, HEADS, 0)
    left, right = halves[..., NOPE:].chunk(2, dim=-1)
    assert torch.equal(pairs[..., NOPE:], torch.stack((left, right), dim=-1).flatten(-2))


@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
def test_concat_takes_any_strides(packed) -> None:
    shape = (sum(LENGTHS), HEADS) if packed else (12, 2, HEADS)
    cu = cu_seqlens() if packed else None
    wide = random(*shape, 2 * (NOPE + D))
    nope, rope = wide[..., : 2 * NOPE : 2], wide[..., 2 * NOPE :: 2]
    got = fused_mla_rope_concat(nope, rope, *tables(16), cu)
    assert got.is_contiguous()
    assert torch.equal(got, torch.cat((nope, megatron(rope, cu)), dim=-1))


def test_rows_past_the_last_sequence_are_position_0() -> None:
    t = random(40, HEADS, NOPE + D)
    got = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu_seqlens())
    pairs = t[32:, :, NOPE:]
    assert torch.equal(got[32:, :, NOPE:], torch.cat((pairs[..., 0::2], pairs[..., 1::2]), dim=-1))


@pytest.mark.parametrize("start", [-2, 0, 5])
def test_consecutive_rows_of_the_packed_batch(start) -> None:
    row = torch.arange(start, start + 38, device=DEVICE)
    inside = layout.thd_positions(cu_seqlens(), 48)[row.clamp(min=0)]
    positions = torch.where(row < 0, 0, inside)
    t = random(38, HEADS, NOPE + D)
    got = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu_seqlens(), thd_global_start=start)
    want = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, position_ids=positions)
    assert torch.equal(got, want)


def test_leading_channels_and_the_inverse() -> None:
    t = random(12, 2, HEADS, D + NOPE)
    turned = fused_mla_rope_out_of_place(
        t, *tables(16), NOPE, D, rope_first=True, remove_interleaving=True
    )
    assert torch.equal(turned[..., D:], t[..., D:]) and not torch.equal(turned, t)
    back = fused_mla_rope_inplace(
        turned, *tables(16), NOPE, D, rope_first=True, remove_interleaving=True, inverse=True
    )
    assert back is turned
    torch.testing.assert_close(back, t)


def test_in_place_changes_the_storage_and_out_of_place_keeps_it() -> None:
    t = random(12, 2, HEADS, NOPE + D)
    kept = t.clone()
    new = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D)
    assert torch.equal(t, kept) and new.data_ptr() != t.data_ptr()
    same = fused_apply_mla_rope_for_q(t, *tables(16), NOPE, D)
    assert same.data_ptr() == t.data_ptr() and torch.equal(same, new)


def test_in_place_is_told_to_autograd() -> None:
    """exp saves its result for the backward: changing it has to be an error and not a number."""
    leaf = random(12, 2, HEADS, NOPE + D).requires_grad_()
    saved = leaf.exp()
    fused_mla_rope_inplace(saved, *tables(16), NOPE, D)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("make", [lambda t: t.split(6)[0], lambda t: t.unbind(0)[0]])
def test_views_that_autograd_protects_get_a_new_tensor(make) -> None:
    leaf = random(1, 12, 2, HEADS, NOPE + D).requires_grad_()
    view = make(leaf * 1) if make(leaf).dim() == 4 else make((leaf * 1)[0])
    kept = view.detach().clone()
    out = fused_mla_rope_inplace(view, *tables(16), NOPE, D)
    assert torch.equal(view, kept) and not torch.equal(out, kept)
    out.sum().backward()
    assert leaf.grad is not None


def test_positions_are_computed_once_and_anew_when_lengths_change(monkeypatch) -> None:
    calls = []
    real = layout.thd_positions
    monkeypatch.setattr(layout, "thd_positions", lambda *a: calls.append(a) or real(*a))
    t, cu = random(32, HEADS, NOPE + D), cu_seqlens()
    first = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu)
    fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu)
    assert len(calls) == 1
    cu.copy_(cu_seqlens([0, 16, 16, 16, 32]))
    second = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu)
    assert len(calls) == 2 and not torch.equal(first, second)
    known = len(fusions._computed)
    del cu
    calls.clear()
    gc.collect()
    assert len(fusions._computed) == known - 1


def test_lengths_of_inference_mode_are_read_every_time() -> None:
    with torch.inference_mode():
        cu = cu_seqlens()
    t = random(32, HEADS, NOPE + D)
    got = fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu)
    assert torch.equal(got, fused_mla_rope_out_of_place(t, *tables(16), NOPE, D, cu_seqlens()))


def test_whole_graph_compiles() -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    cos, sin = tables(64)

    def layer(q, kv, k_pe, cu):
        q = fused_mla_rope_inplace(q * 1, cos, sin, NOPE, D, cu)
        key, value = fused_mla_rope_kv_split(kv, k_pe, cos, sin, D, NOPE, V, cu)
        return q, key, value, fused_mla_rope_concat(q[..., :NOPE], q[..., NOPE:], cos, sin, cu)

    inputs = random(32, HEADS, NOPE + D), random(32, HEADS, NOPE + V), random(32, 1, D)
    want = layer(*inputs, cu_seqlens())
    # The tests' CPU shim keeps compilers off.
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        got = torch.compile(layer, fullgraph=True, backend=backend)(*inputs, cu_seqlens())
    assert len(graphs) == 1
    assert_same(got, want)


T_4D, T_3D = (12, 2, HEADS, NOPE + D), (32, HEADS, NOPE + D)


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        pytest.param(T_3D, {}, r"\[rows, batch, heads, width\]", id="packed-without-lengths"),
        pytest.param(
            T_4D, {"cu_seqlens_q": CU}, r"\[tokens, heads, width\]", id="lengths-for-sbhd"
        ),
        pytest.param(T_4D, {"rows": 11}, "at least 12 rows.* got 11", id="short-table"),
        pytest.param(
            T_3D, {"cu_seqlens_q": CU, "rows": 15}, "16 rows.* longest packed", id="short-packed"
        ),
        pytest.param(T_3D, {"cu_seqlens_q": [0, 40]}, r"cu_seqlens\[-1\] = 40", id="too-many"),
        pytest.param(T_3D, {"cu_seqlens_q": [0, 9, 5]}, "never fall", id="falling-lengths"),
        pytest.param(
            T_3D,
            {"cu_seqlens_q": [0, 6, 32], "cp_size": 2},
            "multiple of 2 . context_parallel_size",
            id="length-that-cannot-be-cut",
        ),
        pytest.param(T_4D, {"cp_rank": 2, "cp_size": 2}, "cp_rank must be in", id="rank"),
        pytest.param(T_4D, {"nope_dim": NOPE - 2}, r"nope_dim \+ emb_dim = 12", id="width"),
        pytest.param(
            T_4D, {"emb_dim": D - 2, "nope_dim": NOPE + 2}, "cos must be as wide", id="cos"
        ),
        pytest.param(T_4D, {"rotary_interleaved": True}, "rotary_interleaved", id="interleaved"),
        pytest.param(T_4D, {"position_ids": [16] * 12}, "17 rows.* position_ids", id="position"),
        pytest.param(T_4D, {"position_ids": [-1] * 12}, "must not be negative", id="negative"),
        pytest.param(T_4D, {"position_ids": [0] * 5}, "positions must be", id="too-few-positions"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(shape, change, message) -> None:
    change = dict(change)
    rows = change.pop("rows", 16)
    for name in ("cu_seqlens_q", "position_ids"):
        if name in change:
            change[name] = cu_seqlens(change[name])
    t = random(*shape)
    kept = t.clone()
    arguments = {"nope_dim": NOPE, "emb_dim": D, **change}
    for function in (fused_mla_rope_inplace, fused_mla_rope_out_of_place):
        with pytest.raises(ValueError, match=message):
            function(t, *tables(rows), **arguments)
    assert torch.equal(t, kept)


def test_signatures_hold_megatron_cores() -> None:
    from megatron.core.fusions import fused_mla_yarn_rope_apply as stock

    for name in ("fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv"):
        theirs = list(inspect.signature(getattr(stock, name)).parameters.values())
        ours = list(inspect.signature(getattr(fusions, name)).parameters.values())
        for a, b in zip(theirs, ours, strict=False):
            assert (a.name, a.default) == (b.name, b.default)
        assert len(ours) >= len(theirs)
        assert all(p.default is not p.empty for p in ours[len(theirs) :])
