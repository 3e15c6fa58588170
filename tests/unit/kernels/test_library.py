"""Operators as PyTorch sees them: their registration, torch.compile, recompute, what is kept."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from megatron_mla.kernels.absorb import absorb_query
from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.rope import rope, rope_
from tests.helpers.rotations import (
    DEVICE,
    assert_same_bits,
    five_rows,
    tables,
    values,
)

SWITCHES = (False, True, False, False, False)  # rope_first, pairs_in, pairs_out, inverse, backward


def transposed(*shape, seed=0):
    """[S, B, ...] in memory of [B, S, ...]."""
    return values(shape[1], shape[0], *shape[2:], seed=seed).transpose(0, 1)


def arguments_of(name):
    t, kv, k_pe = transposed(5, 2, 3, 18), transposed(5, 2, 3, 20), transposed(5, 2, 1, 6)
    q, wk = t, values(3, 12, 7)
    where, rest = five_rows(), (12, *SWITCHES)
    inputs, rest = {
        "rope": ((t,), rest),
        "rope_": ((t,), rest),
        "rope_out": ((t,), (*rest, transposed(5, 2, 3, 18))),
        "rope_concat": ((values(5, 3, 12)[..., ::2], values(5, 1, 6).expand(5, 3, 6)), ()),
        "rope_key": ((kv, k_pe), (12, False)),
        "rope_kv_split": ((kv, k_pe), (12, True)),
        "rope_kv_split_backward": ((transposed(5, 2, 3, 18), values(5, 2, 3, 8)), (12, 8, False)),
        "absorb_query": ((q, wk), (12,)),
        "absorb_query_backward": ((transposed(5, 2, 3, 13), q, wk), (12, True, False)),
    }[name]
    differentiable = name in ("rope", "rope_concat", "rope_key", "rope_kv_split", "absorb_query")
    return *(x.detach().requires_grad_(differentiable) for x in inputs), *where, *rest


@pytest.mark.parametrize(
    "name",
    ["rope", "rope_", "rope_out", "rope_concat", "rope_key", "rope_kv_split"]
    + ["rope_kv_split_backward", "absorb_query", "absorb_query_backward"],
)
def test_operator_is_registered_as_it_behaves(name) -> None:
    operator = getattr(torch.ops.megatron_mla, name).default
    torch.library.opcheck(operator, arguments_of(name))


def split_pairs(kv, k_pe, *where):
    return rope_kv_split(kv, k_pe, *where, k_dim=12, remove_interleaving=True)


PUBLIC = {
    "rope": (lambda t, *where: rope(t, *where, nope_dim=12), [(3, 18)]),
    "in-place": (lambda t, *where: rope_(t * 1, *where, nope_dim=12), [(3, 18)]),
    "flat-in-place": (
        lambda t, *where: rope_(t.flatten(-2) * 1, *where, nope_dim=12, num_heads=3),
        [(3, 18)],
    ),
    "concat": (rope_concat, [(3, 12), (3, 6)]),
    "kv-split": (split_pairs, [(3, 20), (1, 6)]),
    "kv-split-packed": (
        lambda *x: rope_kv_split(*x, k_dim=12, pack_value=True),
        [(3, 20), (1, 6)],
    ),
    "absorb": (
        # A weight per head has no rows.
        lambda q, wk, *where: absorb_query(q, wk[:2].transpose(0, 1), *where, nope_dim=2),
        [(3, 8), (3, 7)],
    ),
}
BY_FUNCTION = pytest.mark.parametrize("name", PUBLIC)


def problem(name, rows=5):
    function, shapes = PUBLIC[name]
    where = five_rows()
    if rows != 5:
        where = (*where[:2], torch.arange(rows, device=DEVICE))
    return function, [values(rows, *shape, seed=n) for n, shape in enumerate(shapes)], where


def outputs_and_gradients(function, inputs, where):
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = function(*leaves, *where)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [values(*t.shape, seed=50 + n) for n, t in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    return [*outputs, *(leaf.grad for leaf in leaves)]


def assert_same_results(got, want) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"result {number} of outputs and gradients", one, other)


@BY_FUNCTION
def test_compiled_bits_are_the_uncompiled(name) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(problem(name)[0], fullgraph=True, backend=counter)
    # The CPU shim has told torch to run everything uncompiled.
    with torch.compiler.set_stance("default"):
        for rows in (5, 7, 8):
            function, inputs, where = problem(name, rows)
            got = outputs_and_gradients(compiled, inputs, where)
            want = outputs_and_gradients(function, inputs, where)
            assert_same_results(got, want)
    # One graph of five rows, one of any number.
    assert counter.frame_count == 2


@BY_FUNCTION
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_recomputed_gradients_are_the_kept_ones(name, reentrant) -> None:
    function, inputs, where = problem(name)

    def recomputed(*arguments):
        return checkpoint(function, *arguments, use_reentrant=reentrant)

    got = outputs_and_gradients(recomputed, inputs, where)
    want = outputs_and_gradients(function, inputs, where)
    assert_same_results(got, want)


@BY_FUNCTION
def test_only_arguments_are_kept_for_the_backward(name) -> None:
    function, inputs, where = problem(name)
    kept = []
    leaves = [t.requires_grad_() for t in inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(*leaves, *where)
    given = {
        t.untyped_storage().data_ptr() for t in (*where, *(inputs if name == "absorb" else ()))
    }
    assert {t.untyped_storage().data_ptr() for t in kept} == given


def test_gradients_accumulate_over_uses_of_one_tensor() -> None:
    """The gradient of nope is a view of what came in; nothing may be added into that."""
    nope, pe = values(5, 3, 12).requires_grad_(), values(5, 3, 6, seed=1).requires_grad_()
    grad = values(5, 3, 18, seed=2)
    before = grad.clone()
    first, second = (rope_concat(nope, pe, *five_rows()) for _ in range(2))
    torch.autograd.backward([first, second], [grad, grad])
    assert_same_bits("incoming gradient", grad, before)
    (once,) = torch.autograd.grad(rope_concat(nope, pe, *five_rows()), nope, grad)
    assert_same_bits("gradient", nope.grad, once + once)


def test_operators_take_tables_of_another_length_without_compiling_anew() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    t, positions = values(5, 3, 18), torch.arange(5, device=DEVICE)
    with torch.compiler.set_stance("default"):
        for length in (8, 16, 32, 64):
            compiled(t, *tables(length, 6, torch.float32), positions, nope_dim=12)
    assert counter.frame_count == 2
