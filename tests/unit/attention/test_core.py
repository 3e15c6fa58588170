"""Core attention against a plain softmax, row by row, and cuDNN against both."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from megatron_mla import selection
from megatron_mla.attention import core as core_module
from megatron_mla.attention.core import SDPACoreAttention
from megatron_mla.parallel.layout import rows_of_rank
from megatron_mla.parallel.microbatch import rows_of_microbatch
from tests.helpers.close import assert_close, rel_error
from tests.helpers.layers import packed, small_config


def make_core(scale=0.2, **changes):
    config = small_config(**changes)
    return SDPACoreAttention(
        config, 1, AttnMaskType.causal, softmax_scale=scale, k_channels=8, v_channels=6
    )


def plain(q, k, v, scale, mask):
    """Softmax attention in fp64; rows that see nothing are zero. q [L, H, D], mask [L, T]."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    return torch.einsum("hqk,khv->qhv", weights, v)


def causal_mask(lengths, total):
    sequence = torch.full((total,), -1)
    start = 0
    for index, length in enumerate(lengths):
        sequence[start : start + length] = index
        start += length
    token = torch.arange(total)
    same = (sequence[:, None] == sequence[None]) & (sequence[:, None] >= 0)
    return same & (token[:, None] >= token[None])


def inputs(total, heads, qk, v, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    shapes = [(total, heads, qk), (total, heads, qk), (total, heads, v), (total, heads, v)]
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths", [[32], [16, 0, 8, 24], [8, 0], [16, 8, 16, 24, 0, 16], [8] * 5], ids=str
)
def test_packed_attention_and_gradients_match_plain_softmax(cp, lengths) -> None:
    total = sum(lengths) + 8
    q, k, v, grad = inputs(total, 3, 8, 6)
    truth = [t.double().requires_grad_() for t in (q, k, v)]
    want = plain(*truth, 0.2, causal_mask(lengths, total))
    want.backward(grad.double())
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    core = make_core()
    for rank in range(cp):
        params = packed(lengths, device="cpu")
        rows = rows_of_microbatch(
            total // cp, cp_rank=rank, cp_size=cp, tp_chunks=1, device=torch.device("cpu"),
            packed_seq_params=params,
        )  # fmt: skip
        mine = rows_of_rank(total, rank, cp, params.cu_seqlens_q)
        leaves = [q[mine].requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()]
        out = core(*leaves, rows)
        assert_close(f"rank {rank}", out.detach(), want[mine].flatten(1).detach())
        out.backward(grad[mine].flatten(1))
        grads[0][mine] = leaves[0].grad
        for index in (1, 2):
            grads[index] += leaves[index].grad
    for name, got, leaf in zip("qkv", grads, truth, strict=True):
        assert_close(f"{name} gradient", got, leaf.grad)


def test_unpacked_attention_keeps_batches_apart() -> None:
    q, k, v, _ = inputs(16, 6, 8, 6)
    q, k, v = (t.view(16, 2, 3, -1) for t in (q, k, v))  # [S, B, H, D]
    rows = rows_of_microbatch(16, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cpu"))
    out = make_core()(q, k, v, rows)
    assert out.shape == (16, 2, 18)
    for b in range(2):
        want = plain(q[:, b], k[:, b], v[:, b], 0.2, causal_mask([16], 16))
        assert_close(f"batch {b}", out[:, b], want.flatten(1))


def test_future_tokens_change_nothing_before_them() -> None:
    q, k, v, _ = inputs(24, 2, 8, 6)
    rows = rows_of_microbatch(
        24, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cpu"),
        packed_seq_params=packed([10, 14], device="cpu"),
    )  # fmt: skip
    core = make_core()
    before = core(q, k, v, rows)
    k[23], v[23], k[9], v[9] = 9.0, 9.0, 9.0, 9.0
    after = core(q, k, v, rows)
    untouched = [i for i in range(24) if i not in (9, 23)]
    assert torch.equal(before[untouched], after[untouched])
    assert not torch.equal(before[23], after[23])


def test_dropout_acts_in_training_only(single_rank) -> None:
    q, k, v, _ = inputs(16, 2, 8, 6)
    device = torch.device(torch.cuda.current_device())
    q, k, v = (t.to(device) for t in (q, k, v))
    rows = rows_of_microbatch(
        16, cp_rank=0, cp_size=1, tp_chunks=1, device=device,
        packed_seq_params=packed([16], device=device),
    )  # fmt: skip
    core = make_core(attention_dropout=0.5)
    core.eval()
    quiet = core(q, k, v, rows)
    assert torch.equal(quiet, core(q, k, v, rows))
    core.train()
    first, second = core(q, k, v, rows), core(q, k, v, rows)
    assert not torch.equal(first, quiet) and not torch.equal(first, second)


def test_padding_mask_type_is_refused() -> None:
    with pytest.raises(ValueError, match="attn_mask_type"):
        SDPACoreAttention(
            small_config(), 1, AttnMaskType.no_mask, softmax_scale=1, k_channels=8, v_channels=8
        )


def test_backend_is_logged_once(caplog) -> None:
    selection.forget_said()
    q, k, v, _ = inputs(8, 2, 8, 6)
    rows = rows_of_microbatch(8, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cpu"))
    with caplog.at_level("INFO", logger="megatron_mla"):
        for _ in range(2):
            make_core()(q[:, None], k[:, None], v[:, None], rows)
    said = [r.message for r in caplog.records if "Core attention" in r.message]
    assert len(said) == 1 and "not on a CUDA device" in said[0]


def test_asking_for_cudnn_without_it_is_an_error_not_a_fallback() -> None:
    core = make_core(attention_backend=AttnBackend.fused)
    q, k, v, _ = inputs(8, 2, 8, 6)
    rows = rows_of_microbatch(8, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="fused.*cuDNN"):
        core(q[:, None], k[:, None], v[:, None], rows)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(192, 128), (256, 256), (96, 64)], ids=str)
@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("lengths", [[512, 0, 128, 384], [1008, 4, 0, 12]], ids=str)
def test_cudnn_takes_unequal_widths_and_prefix_blocks(widths, heads, lengths, monkeypatch) -> None:
    """Rectangles (as under context parallelism) go through cuDNN twice; gradients too."""
    calls = []
    real = core_module._PrefixThenCausal.apply
    monkeypatch.setattr(
        core_module._PrefixThenCausal, "apply", lambda *a: calls.append(1) or real(*a)
    )
    scale = widths[0] ** -0.5
    total = sum(lengths)
    q, k, v, grad = inputs(total, heads, *widths, dtype=torch.bfloat16, device="cuda")
    truth = [t.double().requires_grad_() for t in (q, k, v)]
    want = plain(*truth, scale, causal_mask(lengths, total).cuda())
    want.backward(grad.double())
    core = make_core(scale)
    grads = [torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v)]
    for rank in range(2):
        params = packed(lengths, device="cuda")
        rows = rows_of_microbatch(
            total // 2, cp_rank=rank, cp_size=2, tp_chunks=1, device=torch.device("cuda:0"),
            packed_seq_params=params,
        )  # fmt: skip
        mine = rows_of_rank(total, rank, 2, params.cu_seqlens_q)
        leaves = [q[mine].requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()]
        out = core(*leaves, rows)
        # bf16 probabilities: a few units in the last place of the largest value.
        assert rel_error(out.detach(), want[mine].flatten(1).detach()) < 1e-2
        out.backward(grad[mine].flatten(1))
        grads[0][mine] = leaves[0].grad.float()
        for index in (1, 2):
            grads[index] += leaves[index].grad.float()
    # Two chunks on each rank, of which rank 0's first is a square; of one row all are simple.
    assert len(calls) == 3 * sum(length > 4 for length in lengths)
    for name, got, leaf in zip("qkv", grads, truth, strict=True):
        assert rel_error(got, leaf.grad) < 2e-2, name


@pytest.mark.gpu
def test_cudnn_is_what_runs_on_hopper() -> None:
    from torch.profiler import ProfilerActivity, profile

    q, k, v, _ = inputs(256, 4, 192, 128, dtype=torch.bfloat16, device="cuda")
    rows = rows_of_microbatch(256, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cuda:0"))
    core = make_core(0.07)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        core(*(t[:, None] for t in (q, k, v)), rows)
    names = " ".join(event.key for event in seen.key_averages())
    assert "cudnn" in names.lower(), names


@pytest.fixture
def fixed_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("by_config", [False, True])
def test_deterministic_gradients_repeat_bit_for_bit(by_config, fixed_order) -> None:
    """Of a shape that cuDNN would take; torch has no deterministic backward of its attention."""
    *tensors, grad = inputs(4096, 16, 192, 128, dtype=torch.bfloat16, device="cuda")
    rows = rows_of_microbatch(
        4096, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cuda:0")
    )
    core = make_core(0.07, deterministic_mode=by_config)

    def gradients():
        leaves = [t[:, None].clone().requires_grad_() for t in tensors]
        out = core(*leaves, rows)
        return out, *torch.autograd.grad(out, leaves, grad[:, None].flatten(2))

    first = gradients()
    for _ in range(5):
        for name, got, want in zip("oqkv", gradients(), first, strict=True):
            assert torch.equal(got, want), name


@pytest.mark.gpu
def test_deterministic_mode_needs_torch_to_be_deterministic() -> None:
    q, k, v, _ = inputs(64, 4, 192, 128, dtype=torch.bfloat16, device="cuda")
    rows = rows_of_microbatch(64, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cuda:0"))
    core = make_core(0.07, deterministic_mode=True)
    with pytest.raises(ValueError, match="use_deterministic_algorithms"):
        core(*(t[:, None] for t in (q, k, v)), rows)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 20)],
        [(0, 5), (5, 9), (12, 20)],
        [(0, 4), (0, 16), (16, 18), (16, 20)],
        [(2, 10), (2, 4), (3, 12), (15, 16)],
    ],
    ids=str,
)
def test_cut_is_slicing(spans) -> None:
    t = torch.randn(20, 3, requires_grad=True)
    cut = core_module._cut(t, spans)
    assert len(cut) == len(spans)
    for piece, (start, stop) in zip(cut, spans, strict=True):
        assert torch.equal(piece, t[start:stop])
        assert piece.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()  # no copy
    if len(spans) == 1:
        assert cut[0] is t  # and so no gradient of it is copied
    if spans:
        sum((i + 1) * piece.sum() for i, piece in enumerate(cut)).backward()
        want = torch.zeros(20, 3)
        for i, (start, stop) in enumerate(spans):
            want[start:stop] += i + 1
        assert torch.equal(t.grad, want)


def test_rank_of_padding_only_gives_zeros_and_zero_gradients() -> None:
    q, k, v, grad = (t.requires_grad_() for t in inputs(8, 2, 8, 6))
    rows = rows_of_microbatch(
        8, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cpu"),
        packed_seq_params=packed([0, 0], device="cpu"),
    )  # fmt: skip
    out = make_core()(q, k, v, rows)
    out.backward(grad.flatten(1))
    for t in (out, q.grad, k.grad, v.grad):
        assert torch.equal(t, torch.zeros_like(t))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[512, 0, 100, 384, 1], [1500, 64, 64, 40], [997]], ids=str)
@pytest.mark.parametrize("tail", [0, 27])
@pytest.mark.parametrize("heads", [3, 16])
def test_packed_sequences_on_cudnn_equal_plain_softmax(lengths, tail, heads) -> None:
    total = sum(lengths) + tail
    q, k, v, grad = inputs(total, heads, 192, 128, dtype=torch.bfloat16, device="cuda")
    # As in the layer: V is a view of a wider projection.
    wide = torch.cat((torch.randn_like(v), v), dim=-1)
    truth = [t.double().requires_grad_() for t in (q, k, v)]
    want = plain(*truth, 0.07, causal_mask(lengths, total).cuda())
    want.backward(grad.double())
    rows = rows_of_microbatch(
        total, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device("cuda:0"),
        packed_seq_params=packed(lengths, device="cuda"),
    )  # fmt: skip
    leaves = [q.requires_grad_(), k.requires_grad_(), wide.requires_grad_()]
    out = make_core(0.07)(q, k, wide[..., 128:], rows)
    out.backward(grad.flatten(1))
    assert rel_error(out.detach(), want.flatten(1).detach()) < 1e-2
    got = [leaves[0].grad, leaves[1].grad, leaves[2].grad[..., 128:]]
    for name, gradient, leaf in zip("qkv", got, truth, strict=True):
        assert rel_error(gradient, leaf.grad) < 2e-2, name
    assert torch.equal(out[sum(lengths) :], torch.zeros_like(out[sum(lengths) :]))
