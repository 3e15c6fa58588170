"""What only a GPU can show: tensors past 2**31 elements, races of warps, graphs, other devices."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.absorb import absorb_query
from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope import launch_rope, rope, rope_
from megatron_mla.kernels.rope_ref import rope_ref, rows_of_tables, turn_ref
from megatron_mla.parallel.layout import thd_positions
from tests.helpers.rotations import assert_each_same_bits, assert_same_bits, tables, values

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LAST = 64


def vast(*shape, seed=0):
    """Random bf16 values, made without a wider copy."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.zeros(shape, dtype=BF16, device="cuda").normal_(generator=generator)


def room_for(elements: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 2 * elements:
        pytest.skip(f"needs {2 * elements / 1e9:.0f} GB of free GPU memory")


def where(rows: int, length: int = 4096):
    positions = torch.arange(rows, dtype=torch.int32, device="cuda") % length
    return *tables(length, 64, BF16), positions


@pytest.mark.parametrize("in_place", [False, True], ids=["out-of-place", "in-place"])
def test_last_rows_of_a_rotation_past_2_31_elements(in_place) -> None:
    rows, heads, nope = 30_000, 128, 512
    room_for((2 if not in_place else 1) * rows * heads * (nope + 64) + 10**9)
    assert rows * heads * (nope + 64) > 2**31
    t = vast(rows, heads, nope + 64)
    cos, sin, positions = where(rows)
    want = rope_ref(t[-LAST:], cos, sin, positions[-LAST:], nope_dim=nope)
    with torch.no_grad():
        got = (rope_ if in_place else rope)(t, cos, sin, positions, nope_dim=nope)
    assert_same_bits("last rows", got[-LAST:], want)


def test_last_rows_of_keys_values_and_gradients_past_2_31_elements() -> None:
    # The key is the narrowest that has to pass.
    rows, heads, nope, value = 88_000, 128, 128, 128
    assert rows * heads * (nope + 64) > 2**31
    room_for(rows * heads * (2 * (nope + value) + 2 * (nope + 64) + 2 * value) + 10**9)
    kv, k_pe = vast(rows, heads, nope + value), vast(rows, 1, 64, seed=1)
    grads = vast(rows, heads, nope + 64, seed=2), vast(rows, heads, value, seed=3)
    cos, sin, positions = where(rows)

    def run(op, kv, k_pe, positions, grads):
        leaves = [kv.detach().requires_grad_(), k_pe.detach().requires_grad_()]
        outputs = op(*leaves, cos, sin, positions, k_dim=nope, pack_value=True)
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    end = slice(-LAST, None)
    want = run(rope_kv_split_ref, kv[end], k_pe[end], positions[end], [g[end] for g in grads])
    got = run(rope_kv_split, kv, k_pe, positions, grads)
    assert_each_same_bits("key value kv.grad k_pe.grad", [t[end] for t in got], want)


@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("block_h", [1, 4, 8, 32])
@pytest.mark.parametrize("pairs_in", [True, False], ids=["pairs-to-halves", "halves-to-pairs"])
def test_no_warp_stores_in_place_before_all_have_loaded(num_warps, block_h, pairs_in) -> None:
    """A thousand times the shape of Megatron-LM pull request 4640, where 31 of 786,432 differed."""
    t = vast(128, 32, 192)
    cu_seqlens = torch.tensor([0, 27, 54, 99, 128], device="cuda")
    arguments = (*tables(64, 64, BF16), thd_positions(cu_seqlens, 128))
    how = {"pairs_in": pairs_in, "pairs_out": not pairs_in}
    cos, sin, positions = arguments
    want = turn_ref(t[..., 128:], *rows_of_tables(t, cos, sin, positions), **how)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for block_t in (1, 4):
        for _ in range(1000):
            pe = t.clone()[..., 128:]
            launch_rope(pe, pe, *arguments, **how, tile=(block_t, block_h), num_warps=num_warps)
            differ += (pe.contiguous().view(torch.int16) != want.view(torch.int16)).sum()
    assert differ.item() == 0


def _rope(t, kv, k_pe, q, wk, *where):
    return (rope(t, *where, nope_dim=128),)


def _concat(t, kv, k_pe, q, wk, *where):
    return (rope_concat(t[..., :128], k_pe.expand(*t.shape[:-1], 64), *where),)


def _kv_split(t, kv, k_pe, q, wk, *where):
    return rope_kv_split(kv, k_pe, *where, k_dim=128, pack_value=True)


def _absorb(t, kv, k_pe, q, wk, *where):
    return (absorb_query(q, wk, *where, nope_dim=128),)


INPUTS = {
    "t": (32, 12, 192), "kv": (32, 12, 256), "k_pe": (32, 1, 64), "q": (32, 12, 192),
    "wk": (12, 128, 512),
}  # fmt: skip
OPERATORS = pytest.mark.parametrize(
    "op", [_rope, _concat, _kv_split, _absorb], ids=["rope", "concat", "kv-split", "absorb"]
)


def forward_and_backward(op, inputs, grads, *where):
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = op(*leaves, *where)
    found = torch.autograd.grad(outputs, leaves, grads[: len(outputs)], allow_unused=True)
    return [*(t.detach() for t in outputs), *(t for t in found if t is not None)]


def output_gradients(op, inputs, *where):
    return [vast(*t.shape, seed=9 + n) for n, t in enumerate(op(*inputs, *where))]


@OPERATORS
def test_replayed_graph_has_the_eager_bits(op) -> None:
    inputs = [vast(*shape, seed=n) for n, shape in enumerate(INPUTS.values())]
    arguments = where(32)
    grads = output_gradients(op, inputs, *arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_and_backward(op, inputs, grads, *arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(op, inputs, grads, *arguments)
    for seed in (20, 40):
        for n, t in enumerate((*inputs, *grads)):
            t.copy_(vast(*t.shape, seed=seed + n))
        arguments[2].copy_(arguments[2].flip(0))
        graph.replay()
        want = forward_and_backward(op, inputs, grads, *arguments)
        for n, (one, other) in enumerate(zip(captured, want, strict=True)):
            assert_same_bits(f"result {n}", one, other)


def test_graph_of_a_rotation_in_place_rotates_once_per_replay() -> None:
    t, arguments = vast(32, 12, 192), where(32)
    rope_(t.clone(), *arguments, nope_dim=128)  # compiles
    torch.cuda.synchronize()
    want = rope_ref(rope_ref(t, *arguments, nope_dim=128), *arguments, nope_dim=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope_(t, *arguments, nope_dim=128)
    graph.replay()
    graph.replay()
    assert_same_bits("t", t, want)


@OPERATORS
def test_tensors_may_lie_on_a_device_that_is_not_current(op) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    inputs = [vast(*shape, seed=n) for n, shape in enumerate(INPUTS.values())]
    arguments = where(32)
    grads = output_gradients(op, inputs, *arguments)
    want = forward_and_backward(op, inputs, grads, *arguments)
    there = torch.device("cuda", 1)
    moved = [[t.to(there) for t in group] for group in (inputs, grads, arguments)]
    with torch.cuda.device(0):
        got = forward_and_backward(op, moved[0], moved[1], *moved[2])
    for n, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.device == there
        assert_same_bits(f"result {n}", one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["megatron", "fp32"])
def test_real_widths_have_the_bits_of_the_twin(dtype, wide) -> None:
    """The heads of DeepSeek-V3."""
    t = values(512, 128, 192, dtype=dtype)
    cos, sin = tables(512, 64, torch.float32 if wide else dtype)
    positions = torch.arange(512, device="cuda")
    got = rope(t, cos, sin, positions, nope_dim=128)
    assert_same_bits("rope", got, rope_ref(t, cos, sin, positions, nope_dim=128))
