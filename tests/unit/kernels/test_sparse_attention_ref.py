"""Attention over chosen keys: softmax over exactly those, and nothing comes of what was not chosen.

Legend: t query rows, s keys, h heads, d channels, c channels of the value, k slots of a row.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.kernels.sparse_attention_ref import sparse_attention_ref
from tests.helpers.chunked import Largest
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_each_same_bits, assert_same_bits, examples

NAMES = "output query.grad key.grad"
CHUNK = "megatron_mla.kernels.chunks.CHUNK_ELEMENTS"


@pytest.fixture(autouse=True)
def nan_in_new_memory(nan_in_fresh_memory):
    """What the operator leaves unwritten cannot pass."""
    new_empty = torch.Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(torch.nan)
        )
        yield


def problem(t, s, h, d, k, c, *, dtype=torch.float32, outside=0, seed=0):
    """query, key, the gradient of the output, and indices, up to ``outside`` beyond the keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (t, h, d), (s, d), (t, h, c)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    slots = torch.randint(-outside, s + outside, (t, k), generator=generator, dtype=torch.int32)
    return *(t.to(DEVICE, dtype) for t in tensors), slots.to(DEVICE)


def past(length: int) -> Tensor:
    """All keys up to the row's own, in order, and -1 behind."""
    slot = torch.arange(length, dtype=torch.int32, device=DEVICE)
    return torch.where(slot <= slot[:, None], slot, -1)


def plain(query, key, indices, *, scale, v_dim):
    """Row by row over the list of its keys, each as often as it was chosen."""
    rows = []
    for row, chosen in zip(query, indices.tolist(), strict=True):
        keys = key[[s for s in chosen if 0 <= s < len(key)]]
        rows.append((row @ keys.t() * scale).softmax(-1) @ keys[:, :v_dim])
    return torch.stack(rows)


def run(query, key, grad, indices, *, op=sparse_attention_ref, scale=None):
    """Output and the gradients of query and key."""
    leaves = [t.detach().clone().requires_grad_() for t in (query, key)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = op(*leaves, indices, scale=scale, v_dim=grad.shape[-1])
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def truth(query, key, grad, indices, **how):
    return run(query.double(), key.double(), grad.double(), indices, **{"op": plain, **how})


def assert_each_close(got, want, **how) -> None:
    for name, one, other in zip(NAMES.split(), got, want, strict=True):
        assert_close(name, one, other, **how)


@examples(120)
@given(
    t=st.integers(1, 6), s=st.integers(1, 9), k=st.integers(1, 12), c=st.integers(1, 20),
    h=st.sampled_from([1, 2, 3, 8, 20]), pe=st.integers(0, 9), seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.int32, torch.int64]), chunk=st.sampled_from([1, 99, 1 << 25]),
    scale=st.sampled_from([1.0, 0.1]),
)  # fmt: skip
def test_is_softmax_over_the_chosen_keys(t, s, k, c, h, pe, seed, dtype, chunk, scale) -> None:
    *tensors, slots = problem(t, s, h, c + pe, k, c, dtype=torch.float64, outside=3, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHUNK, chunk)
        got = run(*tensors, slots.to(dtype), scale=scale)
    assert_each_close(got, truth(*tensors, slots, scale=scale))


@pytest.mark.parametrize("heads", [1, 3, 8, 20, 130])
@pytest.mark.parametrize(("width", "v_dim"), [(24, 16), (37, 29), (5, 5), (7, 1)])
def test_all_keys_in_order_are_dense_causal_attention(width, v_dim, heads) -> None:
    *tensors, _ = problem(13, 13, heads, width, 1, v_dim)

    def dense(query, key, _, *, scale, v_dim):
        scores = torch.einsum("thd,sd->hts", query, key) * scale
        scores = scores.masked_fill(torch.ones(13, 13, device=DEVICE).triu(1).bool(), -torch.inf)
        return torch.einsum("hts,sc->thc", scores.softmax(-1), key[:, :v_dim])

    got, want = run(*tensors, past(13)), truth(*tensors, None, op=dense)
    assert_close("output", got[0], want[0])
    assert_each_close(got, want, rel=2e-6, reason="fp32 sums over 13 rows of 130 heads")


@pytest.mark.parametrize("chunk", [1, 1 << 25])
def test_gradients_are_the_derivatives(monkeypatch, chunk) -> None:
    monkeypatch.setattr(CHUNK, chunk)
    query, key, _, indices = problem(4, 5, 3, 4, 6, 3, dtype=torch.float64, outside=2)
    indices[1] = -1
    leaves = query.requires_grad_(), key.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: sparse_attention_ref(*x, indices, scale=0.7, v_dim=3), leaves
    )


@pytest.mark.parametrize("bad", [[-1], [-2, -9], [9, 10, 400], [-(1 << 31), (1 << 31) - 1]])
def test_slots_that_hold_no_key_count_for_nothing(bad) -> None:
    *tensors, indices = problem(6, 9, 3, 8, 8, 4)
    row, slot = torch.arange(6, device=DEVICE)[:, None], torch.arange(8, device=DEVICE)
    empty = slot >= row  # the first row has no key
    filled = torch.where(empty, torch.tensor(bad * 8, device=DEVICE)[:8].int(), indices)
    got = run(*tensors, filled)
    assert_each_same_bits(NAMES, got, run(*tensors, indices.masked_fill(empty, -1)))
    assert_each_close(got, truth(*tensors, filled))


def test_order_does_not_matter_and_a_key_twice_counts_twice() -> None:
    *tensors, indices = problem(5, 9, 3, 8, 7, 6, outside=1)
    got = run(*tensors, indices.flip(-1))
    assert_each_close(got, [t.double() for t in run(*tensors, indices)])
    values = torch.ones(1, 1, 2), torch.tensor([[1.0, 0], [3, 0]]), torch.tensor([[1, 0, 1, -1]])
    out = sparse_attention_ref(*(t.to(DEVICE) for t in values), scale=0.0, v_dim=1)
    assert_close("output", out, torch.full((1, 1, 1), 7 / 3, dtype=torch.float64))


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("unchosen", [[0], [8], [0, 4, 8]], ids=str)
def test_keys_that_nobody_chose_do_not_matter(unchosen, strange) -> None:
    query, key, grad, indices = problem(7, 9, 3, 8, 5, 4, outside=1)
    indices[torch.isin(indices, torch.tensor(unchosen, device=DEVICE))] = -1
    indices[2], indices[3] = -1, 9
    want = run(query, key, grad, indices)
    key[unchosen] = strange
    got = run(query, key, grad, indices)
    assert_each_same_bits(NAMES, got, want)
    assert (got[2][unchosen] == 0).all()
    # Rows without a key, and only those, are exactly 0.
    live = ((indices >= 0) & (indices < 9)).any(-1)
    assert torch.equal((got[0] != 0).all((1, 2)), live)
    assert (got[0][~live] == 0).all() and (got[1][~live] == 0).all()


@pytest.mark.parametrize("where", ["query", "grad"])
def test_a_row_without_keys_does_not_matter(where) -> None:
    query, key, grad, indices = problem(4, 5, 3, 8, 6, 4)
    indices[1] = -1
    want = run(query, key, grad, indices)
    {"query": query, "grad": grad}[where][1] = torch.nan
    assert_each_same_bits(NAMES, run(query, key, grad, indices), want)


def test_no_row_or_no_key_at_all() -> None:
    query, key, grad, indices = problem(4, 5, 3, 8, 6, 4)
    for t in run(query, key, grad, torch.full_like(indices, -1)):
        assert_same_bits("without keys", t, torch.zeros_like(t))
    got = run(query[:0], key, grad[:0], indices[:0])
    assert [t.shape for t in got] == [(0, 3, 4), (0, 3, 8), (5, 8)]
    assert_same_bits("key.grad", got[2], torch.zeros_like(key))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [100, 10_000])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_large_logits_lose_nothing(part, size, sign) -> None:
    query, key, grad, indices = problem(6, 9, 3, 4, 5, 3, outside=1)
    # Logits of about ``size`` that differ by a few, exact in fp32.
    query[:] = torch.tensor([sign * size, 1.0, 2.0, -1.0])
    key[:] = torch.randint(-1, 2, (9, 4), generator=torch.Generator().manual_seed(0))
    key[:, 0] = 2.0
    got, want = (f(query, key, grad, indices, scale=0.5)[part] for f in (run, truth))
    assert_close(NAMES.split()[part], got, want, rel=1.5e-6, reason="a few roundings of fp32")


@pytest.mark.parametrize("h", [1, 3, 20])
@pytest.mark.parametrize(("d", "c"), [(48, 32), (37, 29)])
def test_size_of_chunks_does_not_matter(monkeypatch, d, c, h) -> None:
    tensors = problem(40, 64, h, d, 20, c, outside=2)
    want = run(*tensors)
    for chunk in (1, 1 << 12, 1 << 14):
        monkeypatch.setattr(CHUNK, chunk)
        got = run(*tensors)
        assert_each_close(got, [t.double() for t in want], rel=2e-6, reason="order of fp32 sums")
        # Else MKL sums rows in an order that depends on their alignment, and cuBLAS in one that
        # depends on their number.
        if d % 4 == 0 and DEVICE == "cpu":
            assert_same_bits("output", got[0], want[0])


@pytest.mark.parametrize("h", [1, 3, 130])
def test_bf16_is_rounded_once(h) -> None:
    tensors = problem(16, 32, h, 48, 12, 32, dtype=torch.bfloat16, outside=1)
    got = run(*tensors)
    assert {t.dtype for t in got} == {torch.bfloat16}
    assert_each_close(got, truth(*tensors))


def test_bf16_gradient_is_rounded_once_where_one_key_dominates() -> None:
    query = torch.tensor([[[8.0, 0, 0, 0]]]).bfloat16()
    key = torch.tensor([[1, 1.1, 0.7, 0.3], [0, -1, 1, 2]]).bfloat16()
    tensors = query, key, torch.ones(1, 1, 4).bfloat16(), torch.tensor([[0, 1]])
    tensors = [t.to(DEVICE) for t in tensors]
    assert_each_close(run(*tensors, scale=1.0), truth(*tensors, scale=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("h", "d"), [(2, 4), (8, 2)])
def test_no_tensor_is_larger_than_a_chunk(monkeypatch, h, d, dtype) -> None:
    query, key, grad, indices = problem(256, 256, h, d, 64, 2, dtype=dtype, outside=1)
    leaves = query.requires_grad_(), key.requires_grad_()
    monkeypatch.setattr(CHUNK, 1 << 12)
    with Largest() as forward:
        out = sparse_attention_ref(*leaves, indices, scale=1.0, v_dim=2)
    kept = out.grad_fn.saved_tensors
    with Largest() as backward:
        out.backward(grad)
    assert 64 * d <= forward.elements <= 1 << 12
    assert 64 * d <= backward.elements <= 1 << 12
    arguments = query.numel() + key.numel() + indices.numel()
    assert 0 < sum(t.numel() for t in kept) <= arguments + out.numel() + 256 * h
