"""Layers of sparse attention on their kernels give what they give on the eager operators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_mla import selection
from megatron_mla.attention.dsa_operators import dsa_operators
from megatron_mla.attention.index_sharing import IndexBook, with_index_book
from megatron_mla.kernels.index_ref import index_topk_ref
from tests.helpers.close import assert_close
from tests.helpers.layers import DSA, dsa_layer, hidden, packed, small_config, trained_gradients

pytestmark = pytest.mark.usefixtures("single_rank")

LENGTHS = [10, 0, 1, 11]  # and two rows behind the last sequence


def answers(lengths, **changes):
    """Output, input gradient, weight gradients and chosen keys of the kernels and of the twins."""
    found = []
    for backend in ("triton", "none"):
        layer = dsa_layer(dsa_kernel_backend=backend, **changes)
        batch = 1 if lengths else 2
        x, grad = (hidden(24, batch, seed, layer.config.params_dtype) for seed in (0, 1))
        book = IndexBook()
        params = with_index_book(packed(lengths) if lengths else None, book)
        answer = trained_gradients(layer, x, grad, packed_seq_params=params)
        found.append((answer, book.chosen.get(1)))
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["sbhd", "thd"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dsa_indexer_use_sparse_loss": True},
        {"dsa_indexer_use_sparse_loss": True, "dsa_indexer_topk": 100},
        {"dsa_indexer_stage": "warmup"},
        {"dsa_indexer_stage": "frozen"},
        {"dsa_indexer_scoring_relu": False, "dsa_indexer_rope_interleaved": True},
        {"dsa_indexer_loss_coeff": None},
        {"no_rope_freq": [1], "dsa_indexer_n_heads": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=str,
)
def test_kernels_equal_eager_operators(changes, lengths) -> None:
    (got, chosen), (want, expected) = answers(lengths, **changes)
    if expected is not None:
        assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)
    reason = "order of fp32 sums, through an attention and an indexer"
    assert_close("output", got[0], want[0].double(), rel=5e-6, reason=reason)
    assert_close("input gradient", got[1], want[1].double(), rel=2e-5, reason=reason)
    assert got[2].keys() == want[2].keys()
    for name, grad in want[2].items():
        assert_close(name, got[2][name], grad.double(), rel=5e-5, reason=reason)


def test_given_indices_are_replayed() -> None:
    given = torch.randint(-1, 24, (24, 2, 7), generator=torch.Generator().manual_seed(0))
    outs = []
    for backend in ("triton", "none"):
        layer = dsa_layer(dsa_kernel_backend=backend)
        params = with_index_book(None, IndexBook(given={1: given}))
        outs.append(
            trained_gradients(layer, hidden(24, 2), hidden(24, 2, 1), packed_seq_params=params)
        )
    reason = "order of fp32 sums"
    assert_close("output", outs[0][0], outs[1][0].double(), rel=5e-6, reason=reason)
    assert_close("input gradient", outs[0][1], outs[1][1].double(), rel=2e-5, reason=reason)


def is_eager(config, tp_size: int = 1) -> bool:
    groups = SimpleNamespace(tp_size=tp_size, tp=None)
    return dsa_operators(config, groups).topk is index_topk_ref


def test_backend_follows_the_machine(monkeypatch) -> None:
    on_gpu = torch.cuda.is_available()
    fields = {**DSA, "dsa_kernel_backend": None}
    assert small_config().dsa_kernel_backend is None  # what stock validation leaves
    assert is_eager(small_config(**fields)) is not on_gpu
    assert is_eager(small_config(**{**DSA, "dsa_kernel_backend": "none"}))
    assert not is_eager(small_config(**{**DSA, "dsa_kernel_backend": "triton"}))


@pytest.mark.parametrize("cause", ["dtype", "wrong", "triton"])
def test_what_cannot_run_is_said_once_and_runs_eagerly(monkeypatch, cause) -> None:
    fields = {**DSA, "dsa_kernel_backend": "triton"}
    if cause == "dtype":
        fields["params_dtype"] = torch.float64
        message = "they take bf16, fp16 and fp32"
    elif cause == "wrong":
        message = "a wrong output"
        monkeypatch.setattr(
            "megatron_mla.kernels.dsa_selfcheck.dsa_fault", lambda *a: "they give a wrong output"
        )
    else:
        message = "no triton here"
        monkeypatch.setattr(selection, "triton_missing_reason", lambda: "no triton here")
    selection.forget_said()
    with pytest.warns(UserWarning, match=message) as said:
        assert is_eager(small_config(**fields))
        assert is_eager(small_config(**fields))
    assert sum(message in str(warning.message) for warning in said) == 1
    selection.forget_said()


@pytest.mark.parametrize("others", [0, 1])
def test_tensor_parallel_ranks_agree(monkeypatch, others) -> None:
    """One that falls back alone would sum over heads in chunks of another size, and hang."""
    config = small_config(**{**DSA, "dsa_kernel_backend": "triton"})

    def minimum(flag, op, group):
        assert op == torch.distributed.ReduceOp.MIN
        flag.clamp_(max=others)

    monkeypatch.setattr(torch.distributed, "all_reduce", minimum)
    selection.forget_said()
    if others:
        assert not is_eager(config, tp_size=2)
    else:
        with pytest.warns(UserWarning, match="another tensor-parallel rank"):
            assert is_eager(config, tp_size=2)
    selection.forget_said()
