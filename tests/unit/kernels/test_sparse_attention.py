"""The kernels of attention over chosen keys against their twin and fp64, on strange lists too."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import torch

from megatron_mla.kernels import sparse_backward
from megatron_mla.kernels.sparse_attention import (
    runs_on_hopper,
    sparse_attention,
    sparse_attention_with_lse,
)
from megatron_mla.kernels.sparse_attention_ref import sparse_attention_ref
from megatron_mla.kernels.sparse_forward import launch_forward
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_each_same_bits, assert_same_bits

NAMES = "output query.grad key.grad"
BF16 = "probabilities and slopes are rounded to bf16 before tensor cores multiply them"
FP32 = "order of fp32 sums"


def problem(t, s, h, d, k, c, *, dtype=torch.float32, outside=0, seed=0, slots=torch.int32):
    """query, key, the gradient of the output, and indices, up to ``outside`` beyond the keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (t, h, d), (s, d), (t, h, c)
    tensors = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    indices = torch.randint(-outside, s + outside, (t, k), generator=generator, dtype=slots)
    return *tensors, indices.to(DEVICE)


def run(query, key, grad, indices, *, op=sparse_attention, scale=None):
    """Output and the gradients of query and key."""
    leaves = [t.detach().clone().requires_grad_() for t in (query, key)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = op(*leaves, indices, scale=scale, v_dim=grad.shape[-1])
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def truth(query, key, grad, indices, **how):
    wide = (t.double() for t in (query, key, grad))
    return run(*wide, indices, **{"op": sparse_attention_ref, **how})


def assert_right(tensors, indices, *, scale=None) -> None:
    """Errors beside what is summed: a row with one key has a query gradient of 0, and parts of it
    that are not 0."""
    dtype = tensors[0].dtype
    query, key, grad = (t.double() for t in tensors)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    got, want = run(*tensors, indices, scale=scale), truth(*tensors, indices, scale=scale)
    of_weights = torch.einsum("thc,kc->thk", grad, key[:, : grad.shape[-1]]).abs().max()
    parts = (
        key.abs().max(),
        scale * of_weights * key.abs().max(),
        scale * of_weights * query.abs().max(),
    )
    rel = 5e-6 if dtype == torch.float32 else 1.5e-2
    for name, one, other, part in zip(NAMES.split(), got, want, parts, strict=True):
        assert one.dtype == dtype and one.shape == other.shape, name
        error = (one.double() - other).abs().max().item()
        bound = rel * max(other.abs().max().item(), part.item())
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}; {FP32 if rel < 1e-5 else BF16}"


@contextlib.contextmanager
def strict_order():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", range(36))
def test_random_problems(seed) -> None:
    random = Random(seed)
    c, pe = random.randint(1, 40), random.choice([0, 0, 1, 8, 20])
    t, s, k = random.randint(1, 4), random.randint(1, 150), random.randint(1, 150)
    how = {
        "dtype": [torch.float32, torch.bfloat16, torch.float16][seed % 3],
        "outside": random.choice([0, 3, 300]),
        "slots": random.choice([torch.int32, torch.int64]),
        "seed": seed,
    }
    *tensors, indices = problem(t, s, random.choice([1, 2, 3, 8, 17, 20]), c + pe, k, c, **how)
    with strict_order() if seed % 2 else contextlib.nullcontext():
        assert_right(tensors, indices, scale=random.choice([1.0, 0.1]))


@pytest.mark.parametrize("strict", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("heads", [1, 63, 65, 100, 130])
def test_heads_past_a_block(monkeypatch, heads, strict) -> None:
    *tensors, indices = problem(3, 70, heads, 40, 70, 24, outside=5)
    with strict_order() if strict else contextlib.nullcontext():
        assert_right(tensors, indices)


@pytest.mark.parametrize("strict", [False, True], ids=["atomic", "ordered"])
def test_chunks_of_rows(monkeypatch, strict) -> None:
    """Every chunk but the last is full, the buffers are reused, and no larger than they may be."""
    *tensors, indices = problem(7, 30, 3, 24, 20, 16, outside=3)
    most = 3 * 2 * 3 * 128  # three rows of slopes and probabilities
    made = []
    launch, add = sparse_backward.launch_slopes, sparse_backward.add_rows_in_order_
    monkeypatch.setattr(sparse_backward, "BUFFER_ELEMENTS", most)
    monkeypatch.setattr(
        sparse_backward, "launch_slopes", lambda *a: (made.append(a[6].numel()), launch(*a))
    )
    monkeypatch.setattr(
        sparse_backward, "add_rows_in_order_", lambda *a: (made.append(a[2].numel()), add(*a))
    )
    with strict_order() if strict else contextlib.nullcontext():
        assert_right(tensors, indices)
    assert len(made) == (6 if strict else 3)
    assert max(made) <= most


LISTS = {
    "holes": [3, -1, 0, 7, -5, 8, 9, -1, 1],
    "hole first": [-1, -1, 4, 2, 1, 0, 8, 7, 6],
    "whole blocks of holes": [-1] * 290 + [2] + [-1] * 150 + [5, 1] + [-1] * 40,
    "full blocks, then holes": list(range(64)) + [-1, 3, -1],
    "outside": [9, 64, 1 << 30, -(1 << 31), (1 << 31) - 1, 0, 1, 2, 3],
    "twice": [4, 4, 4, 1, 1, 2, 0, 0, 0],
    "one": [5],
    "descending": list(range(63, -1, -1)),
}


@pytest.mark.parametrize("strict", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_any_kind(name, dtype, strict) -> None:
    *tensors, _ = problem(3, 64, 5, 24, 1, 16, dtype=dtype)
    chosen = torch.tensor(LISTS[name], dtype=torch.int32, device=DEVICE)
    indices = torch.stack([chosen, torch.full_like(chosen, -1), chosen.flip(0)])
    with strict_order() if strict else contextlib.nullcontext():
        assert_right(tensors, indices)
        got = run(*tensors, indices)
    assert (got[0][1] == 0).all() and (got[1][1] == 0).all()
    live = chosen[(chosen >= 0) & (chosen < 64)].long()
    unchosen = torch.ones(64, dtype=torch.bool, device=DEVICE).index_fill(0, live, False)
    assert (got[2][unchosen] == 0).all()


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_what_nobody_chose_does_not_matter(strange) -> None:
    query, key, grad, indices = problem(4, 9, 3, 8, 70, 4, outside=1)
    indices[torch.isin(indices, torch.tensor([0, 8], device=DEVICE))] = -1
    indices[2] = -1
    with strict_order():
        want = run(query, key, grad, indices)
        key[0] = key[8] = strange
        query[2] = grad[2] = strange
        assert_each_same_bits(NAMES, run(query, key, grad, indices), want)


@pytest.mark.parametrize("where", [(0, 1), (3, 0), (3, 1)], ids=str)
def test_nothing_at_all(where) -> None:
    rows, keys = where
    for slots in (0, 2):
        *tensors, _ = problem(rows, keys, 3, 8, 0, 4, outside=1)
        indices = torch.full((rows, slots), -1, dtype=torch.int32, device=DEVICE)
        for t in run(*tensors, indices):
            assert_same_bits("nothing", t, torch.zeros_like(t))


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_near_100(sign) -> None:
    query, key, grad, indices = problem(6, 90, 3, 8, 80, 4, outside=1)
    query[..., 0], key[:, 0] = sign * 10.0, 10.0
    got, want = (f(query, key, grad, indices, scale=1.0) for f in (run, truth))
    for name, one, other in zip(NAMES.split(), got, want, strict=True):
        assert_close(name, one, other, rel=5e-5, reason="rounding of logits of 100 in fp32")


def test_log_sum_exp_is_of_the_chosen_keys() -> None:
    query, key, _, indices = problem(5, 40, 3, 12, 33, 8, outside=4)
    indices[3] = -1
    out, lse = sparse_attention_with_lse(query, key, indices, scale=0.3, v_dim=8)
    live = (indices >= 0) & (indices < 40)
    scores = torch.einsum("thd,tkd->thk", query.double(), key.double()[indices.clamp(0, 39).long()])
    want = (0.3 * scores).masked_fill(~live[:, None], -torch.inf).logsumexp(-1)
    assert lse.dtype == torch.float32 and not lse.requires_grad
    assert_close("lse", lse, want, rel=1e-6, reason="rounding of fp32")
    assert (lse[3] == -torch.inf).all()
    assert_same_bits("output", out, sparse_attention(query, key, indices, scale=0.3, v_dim=8))


def test_views_with_far_strides() -> None:
    query, key, grad, indices = problem(4, 30, 3, 24, 20, 16, outside=2)
    want = run(query, key, grad, indices)

    def far(t, pad):
        wide = torch.full((*t.shape[:-1], t.shape[-1] + pad), torch.nan, device=DEVICE)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]

    heads_outside = far(query.transpose(0, 1), 5).transpose(0, 1)
    wide_lists = torch.cat([indices, indices], -1)[:, :20]
    leaves = [t.detach().requires_grad_() for t in (heads_outside, far(key, 3))]
    out = sparse_attention(*leaves, wide_lists, scale=24**-0.5, v_dim=16)
    got = (
        out.detach(),
        *torch.autograd.grad(out, leaves, grad.transpose(0, 1).clone().transpose(0, 1)),
    )
    for name, one, other in zip(NAMES.split(), got, want, strict=True):
        assert_close(name, one, other.double(), rel=1e-6, reason="atomics add in any order")


def test_expanded_gradient() -> None:
    query, key, grad, indices = problem(4, 30, 3, 24, 20, 16)
    ones = torch.ones(1, 1, 1, device=DEVICE).expand(4, 3, 16)
    assert_right([query, key, ones], indices)


def test_25_replays_have_the_same_bits() -> None:
    *tensors, indices = problem(20, 12, 3, 24, 40, 16, dtype=torch.bfloat16, outside=2)
    with strict_order():
        want = run(*tensors, indices)
        for _ in range(24 if DEVICE != "cpu" else 3):
            assert_each_same_bits(NAMES, run(*tensors, indices), want)


@pytest.mark.parametrize("tile", [(16, 16, 4, 1), (16, 32, 4, 2), (32, 16, 4, 3)], ids=str)
def test_tiles_do_not_matter(tile) -> None:
    query, key, _, indices = problem(3, 60, 20, 40, 55, 24, outside=2)
    want = truth(query, key, torch.zeros(3, 20, 24, device=DEVICE), indices, scale=0.2)[0]
    out, lse = torch.empty(3, 20, 24, device=DEVICE), torch.empty(3, 20, device=DEVICE)
    launch_forward(query, key, indices, out, lse, 0.2, tile=tile)
    assert_close("output", out, want, rel=5e-6, reason=FP32)


def test_library_operators_keep_their_contracts() -> None:
    query, key, _, indices = problem(3, 9, 2, 8, 5, 4)
    leaves = query.requires_grad_(), key.requires_grad_()
    torch.library.opcheck(
        torch.ops.megatron_mla.sparse_attention.default, (*leaves, indices, 0.3, 4),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 3, 8, dtype=torch.float64)}, "query must be bfloat16"),
        ({"query": torch.zeros(2, 24)}, r"query must be \[tokens"),
        ({"key": torch.zeros(5, 8).bfloat16()}, "key must have dtype and device of query"),
        ({"key": torch.zeros(8, 5).t()}, "key must have last stride 1"),
        ({"key": torch.zeros(5, 9)}, "query and key must have the same width"),
        ({"v_dim": 9}, "v_dim is a part"),
        ({"v_dim": 0}, "v_dim is a part"),
        ({"indices": torch.zeros(2, 4)}, "indices must be int32 or int64"),
        ({"indices": torch.zeros(2, 4, 1, dtype=torch.int32)}, "indices must be int32 or int64"),
        ({"indices": torch.zeros(3, 4, dtype=torch.int32)}, "indices must have the rows"),
    ],
)
def test_refusals(changes, message) -> None:
    arguments = {
        "query": torch.zeros(2, 3, 8),
        "key": torch.zeros(5, 8),
        "indices": torch.zeros(2, 4, dtype=torch.int32),
        "v_dim": 4,
    } | changes
    arguments = {
        n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()
    }
    double = arguments["query"].dtype == torch.float64
    if double:
        arguments["key"] = arguments["key"].double()
    with pytest.raises(ValueError, match=message):
        sparse_attention(**arguments, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [8, 33, 64, 100])
@pytest.mark.parametrize("name", LISTS)
def test_widths_of_models(name, heads, dtype) -> None:
    """512 + 64 channels, on Hopper with a kernel of their own from 33 heads on."""
    *tensors, _ = problem(4, 64, heads, 576, 1, 512, dtype=dtype)
    if torch.cuda.get_device_capability()[0] == 9:
        assert runs_on_hopper(tensors[0], 512) == (heads > 32)
    chosen = torch.tensor(LISTS[name], dtype=torch.int32, device=DEVICE)
    empty = torch.full_like(chosen, -1)
    assert_right(tensors, torch.stack([chosen, empty, chosen.flip(0), chosen.roll(1)]))


@pytest.mark.gpu
def test_last_rows_past_2_31_elements() -> None:
    rows, heads, keys, slots = 60_000, 64, 4096, 100
    assert rows * heads * 576 > 2**31
    if torch.cuda.mem_get_info()[0] < 8 * rows * heads * 576:
        pytest.skip("needs 18 GB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    how = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.zeros(rows, heads, 576, **how).normal_(generator=generator)
    grad = torch.zeros(rows, heads, 512, **how).normal_(generator=generator)
    key = torch.zeros(keys, 576, **how).normal_(generator=generator)
    # The last rows alone choose the last keys.
    indices = torch.randint(2000, (rows, slots), device="cuda", generator=generator)
    indices[-64:] += 2000
    got = run(query, key, grad, indices)
    last = query[-64:], key, grad[-64:]
    want = truth(*last, indices[-64:])
    got = got[0][-64:], got[1][-64:], got[2][2000:4000]
    want = *want[:2], want[2][2000:4000]
    for part, one, other in zip(NAMES.split(), got, want, strict=True):
        assert_close(part, one, other, rel=2e-2, reason=BF16)
