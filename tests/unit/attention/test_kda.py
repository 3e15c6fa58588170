"""Kimi Delta Attention against its recurrence in fp64, packed, over a context, and what it refuses.

transformers' layer is in test_golden.py, tensor parallelism in tests/functional.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.spec_utils import build_module

from megatron_mla import selection
from megatron_mla.attention.kda_ops import delta_rule, log_decay, short_conv
from megatron_mla.inference.context import LatentInferenceContext
from megatron_mla.parallel.microbatch import rows_of_microbatch
from megatron_mla.specs import kda_attention_spec
from tests.helpers.close import rel_error
from tests.helpers.layers import gradients, hidden, packed, small_config
from tests.helpers.untuned import use_first_configurations

KDA = {
    "num_layers": 2,
    "mla_full_attn_layers": [2],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
ON_GPU = torch.cuda.is_available()
# fla-core's kernels multiply in TF32, in chunks; the naive recurrence is this one in fp32.
BOUND = 1e-2 if ON_GPU else 1e-5
# A sum over all rows of slopes of either sign, each with the error of TF32: 3.7e-2 seen.
SUM_BOUND = 6e-2 if ON_GPU else 1e-5
# What is left of gradients that cancel: 5.7e-6 seen on a GPU.
NOTHING = 1e-4 if ON_GPU else 1e-6


@pytest.fixture(scope="module", autouse=True)
def untuned() -> None:
    if ON_GPU:
        assert use_first_configurations() > 5


def kda_layer(**changes):
    """A layer with random weights, strong and weak decays; needs ``single_rank``."""
    config = small_config(**{**KDA, **changes})
    layer = build_module(kda_attention_spec(config), config=config, layer_number=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in sorted(layer.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name == "o_norm.weight":
                weight.copy_(1 + 0.3 * noise)
            elif name == "A_log":
                weight.copy_(torch.linspace(0, 2.7, len(weight)))
            elif name == "dt_bias":
                weight.copy_(noise - 1)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
    return layer.to(torch.cuda.current_device())


def reference(x, weights, *, heads=3, lower_bound=None, full_gate=False):
    """The layer in fp64, row by row, for one sequence x [T, hidden]."""
    w = {name.removesuffix(".weight"): t for name, t in weights.items()}

    def conv(part):
        rows = torch.nn.functional.pad(x @ w[f"linear_{part}_proj"].t(), (0, 0, 3, 0))
        taps = w[f"{part}_conv1d"][:, 0]
        out = torch.stack([(rows[t : t + 4] * taps.t()).sum(0) for t in range(len(x))])
        return torch.nn.functional.silu(out).unflatten(-1, (heads, -1))

    def unit(t):
        return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = unit(conv("q")), unit(conv("k")), conv("v")
    beta = torch.sigmoid(x @ w["linear_b_proj"].t())
    f = x @ w["linear_f_down_proj"].t() @ w["linear_f_up_proj"].t() + w["dt_bias"]
    f, rate = f.unflatten(-1, (heads, -1)), w["A_log"].exp()[:, None]
    if lower_bound is None:
        g = -rate * torch.nn.functional.softplus(f)
    else:
        g = lower_bound * torch.sigmoid(rate * f)
    state = x.new_zeros(heads, k.shape[-1], v.shape[-1])
    outs = []
    for t in range(len(x)):
        state = g[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + beta[t][:, None, None] * k[t][..., None] * error[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * k.shape[-1] ** -0.5)
    out = torch.stack(outs)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm"]
    if full_gate:
        gate = x @ w["linear_g_proj"].t()
    else:
        gate = x @ w["linear_g_down_proj"].t() @ w["linear_g_up_proj"].t()
    out = out.flatten(1) * torch.sigmoid(gate)
    return out @ w["linear_proj"].t()


VARIANTS = {
    "kimi-linear": {},
    "k3": {"kda_gate_lower_bound": -5.0, "kda_output_gate": "full"},
    "rank": {"kda_gate_rank": 5, "kda_gate_lower_bound": -2.0},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("rows", [1, 3, 70], ids="rows{}".format)
def test_layer_is_its_recurrence(changes, rows, single_rank) -> None:
    layer = kda_layer(**changes)
    x, grad = hidden(rows, 2), hidden(rows, 2, seed=1)
    out, grad_x, grads = gradients(layer, x, grad)
    names = [n for n, _ in layer.named_parameters()]
    weights = {n: p.detach().cpu().double().requires_grad_() for n, p in layer.named_parameters()}
    x = x.cpu().double().requires_grad_()
    how = {"lower_bound": changes.get("kda_gate_lower_bound")}
    how["full_gate"] = changes.get("kda_output_gate") == "full"
    want = torch.stack([reference(x[:, b], weights, **how) for b in range(2)], dim=1)
    wanted = torch.autograd.grad(want, [x, *weights.values()], grad.cpu().double())
    assert rel_error(out.cpu(), want.detach()) <= BOUND
    for name, got, right in zip(
        ["input", *names], [grad_x, *(grads[n] for n in names)], wanted, strict=True
    ):
        if right.abs().max() > 1e-9:  # a single row meets one tap and no decay
            bound = SUM_BOUND if name == "A_log" else BOUND
            assert rel_error(got.cpu(), right) <= bound, name
        else:
            assert got.abs().max() <= NOTHING, name


def test_packed_sequences_are_what_each_is_alone(single_rank) -> None:
    layer = kda_layer()
    lengths, padded = [10, 0, 1, 66], [12, 0, 3, 66]
    x, grad = hidden(90), hidden(90, seed=1)
    grad[sum(padded) :] *= 1e6  # of rows past the last sequence, from where nothing may come
    params = packed(lengths, padded)
    out, grad_x, grads = gradients(layer, x, grad, packed_seq_params=params)
    total = {}
    start = 0
    for length in padded:
        if not length:
            continue
        part = slice(start, start + length)
        alone, alone_x, alone_grads = gradients(layer, x[part], grad[part])
        assert rel_error(out[part], alone) <= BOUND
        assert rel_error(grad_x[part], alone_x) <= BOUND
        for name, g in alone_grads.items():
            total[name] = total.get(name, 0) + g
        start += length
    assert not out[start:].any() and not grad_x[start:].any()
    for name, g in total.items():
        assert rel_error(grads[name], g) <= 2 * BOUND, name


def test_packed_batch_without_rows_is_zero(single_rank) -> None:
    layer = kda_layer()
    out, grad_x, _ = gradients(layer, hidden(8), hidden(8), packed_seq_params=packed([0, 0]))
    assert not out.any() and not grad_x.any()


def test_recompute_of_whole_layers_changes_no_bit(single_rank) -> None:
    from megatron.core.models.gpt import GPTModel

    from megatron_mla.specs import mla_block_spec

    answers = []
    tokens = torch.arange(24, device=torch.cuda.current_device())[None]
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    for recompute in ({}, {**full, "recompute_num_layers": 1}, selective):
        config = small_config(
            **KDA, ffn_hidden_size=32, gated_linear_unit=True, no_rope_freq=1, **recompute
        )
        torch.manual_seed(5)
        model = GPTModel(
            config,
            transformer_layer_spec=mla_block_spec(config),
            vocab_size=32,
            max_sequence_length=24,
            position_embedding_type="none",
        )
        state = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, weight in sorted(model.named_parameters()):
                weight.copy_(torch.randn(weight.shape, generator=state) * 0.1)
        model.to(torch.cuda.current_device())
        loss = model(tokens, None, None, labels=tokens)
        loss.sum().backward()
        answers.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    for loss, grads in answers[1:]:
        assert torch.equal(loss, answers[0][0])
        for name, grad in answers[0][1].items():
            assert torch.equal(grads[name], grad), name


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_pieces_over_a_context_are_the_whole(changes, single_rank) -> None:
    """Prompts, pieces of prompts, sequences that rest, single tokens, and padding anywhere."""
    layer = kda_layer(**changes)
    lengths = (20, 9, 14)
    x = hidden(20, 3)
    with torch.no_grad():
        want, _ = layer(x, None)
    context = LatentInferenceContext(4, 32)
    done = [0, 0, 0]
    for new in ([5, 2, 1], [7, 0, 4], [1, 1, 1], [0, 1, 0], [3, 5, 8], [4, 0, 0]):
        rows = max(new)
        piece = torch.full((rows, 3, 48), 7.0, device=x.device)  # what padding holds is not seen
        for b, n in enumerate(new):
            piece[:n, b] = x[done[b] : done[b] + n, b]
        out, _ = layer(piece, None, inference_context=context.begin(new))
        context.advance()
        for b, n in enumerate(new):
            part = slice(done[b], done[b] + n)
            if n:
                assert rel_error(out[:n, b], want[part, b]) <= BOUND, (new, b)
            done[b] += n
    assert tuple(done) == lengths


def test_context_is_used_again(single_rank) -> None:
    """After a reset, and by Megatron-Core's own static context."""
    layer = kda_layer()
    x = hidden(8, 2)
    with torch.no_grad():
        want, _ = layer(x, None)
    context = LatentInferenceContext(2, 16)
    for _ in range(2):
        out, _ = layer(x, None, inference_context=context)
        context.advance()
        assert rel_error(out, want) <= BOUND and not out.requires_grad
        context.reset()
    static = StaticInferenceContext(2, 16)
    first, _ = layer(x[:6], None, inference_context=static)
    static.sequence_len_offset = 6
    rest, _ = layer(x[6:], None, inference_params=static)
    assert rel_error(torch.cat((first, rest)), want) <= BOUND


def test_hybrid_model_over_a_context_is_the_whole(single_rank) -> None:
    """Layers with a state and layers with a cache of latents, from prompts to single tokens."""
    from megatron.core.models.gpt import GPTModel

    from megatron_mla.specs import mla_block_spec

    fields = {**KDA, "num_layers": 4, "mla_full_attn_layers": [2, 4]}
    config = small_config(**fields, no_rope_freq=1, ffn_hidden_size=32, gated_linear_unit=True)
    model = GPTModel(
        config,
        transformer_layer_spec=mla_block_spec(config),
        vocab_size=32,
        max_sequence_length=32,
        position_embedding_type="none",
    ).to(torch.cuda.current_device())
    model.eval()
    tokens = torch.randint(32, (2, 20), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(torch.cuda.current_device())
    context, outs = LatentInferenceContext(2, 32), []
    with torch.no_grad():
        want = model(tokens, None, None)
        for piece in tokens.split([7, 8, 1, 1, 3], dim=1):
            context.begin([piece.shape[1]] * 2)
            outs.append(model(piece, None, None, inference_context=context))
            context.advance()
    assert rel_error(torch.cat(outs, 1), want) <= BOUND


def test_strong_decays_have_finite_gradients() -> None:
    """Where fla-core's naive chunk form has none, which is why it is not used."""
    device = torch.cuda.current_device()
    generator = torch.Generator().manual_seed(0)
    shape = (1, 64, 2, 16)
    q, k, v, f = (torch.randn(shape, generator=generator).to(device) for _ in range(4))
    beta = torch.rand(shape[:3], generator=generator).to(device)
    a_log, bias = torch.full((2,), 2.7, device=device), torch.zeros(32, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v, f, beta, a_log, bias)]
    rows = rows_of_microbatch(64, cp_rank=0, cp_size=1, tp_chunks=1, device=torch.device(device))
    delta_rule(*leaves, rows, lower_bound=None).square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in leaves)


def test_decays_stay_within_their_bound() -> None:
    f = torch.linspace(-200, 200, 64).view(1, 2, 32)
    a_log, bias = torch.tensor([0.0, 2.7]), torch.zeros(64)
    bounded = log_decay(f, a_log, bias, -5.0)
    assert bounded.min() >= -5 and bounded.max() <= 0 and bounded.dtype == torch.float32
    free = log_decay(f.bfloat16(), a_log, bias, None)
    assert torch.isfinite(free).all() and free.max() <= 0 and free.min() < -2000


def test_convolution_sees_its_sequence_alone() -> None:
    device = torch.cuda.current_device()
    x = torch.randn(12, 1, 8, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(device)
    rows = rows_of_microbatch(
        12,
        cp_rank=0,
        cp_size=1,
        tp_chunks=1,
        device=x.device,
        packed_seq_params=packed([2, 7]),
    )
    out = short_conv(x, weight, rows)
    for start, end in ((0, 2), (2, 9)):
        lone = torch.nn.functional.conv1d(
            x[start:end].permute(1, 2, 0), weight[:, None], padding=3, groups=8
        )[..., : end - start]
        want = torch.nn.functional.silu(lone).permute(2, 0, 1)
        assert rel_error(out[start:end], want) <= BOUND


def test_weights_start_as_the_paper_says(single_rank) -> None:
    config = small_config(**{**KDA, "linear_num_key_heads": 64, "linear_num_value_heads": 64})
    layer = build_module(kda_attention_spec(config), config=config, layer_number=1)
    rate = layer.A_log.exp()
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16
    dt = torch.nn.functional.softplus(layer.dt_bias)
    assert 1e-3 <= dt.min() < 2e-3 and 0.05 < dt.max() <= 0.1001
    assert layer.A_log.dim() == layer.dt_bias.dim() == 1  # vectors do not decay
    assert 0.45 < layer.q_conv1d.weight.abs().max() <= 0.5
    assert layer.A_log.tensor_model_parallel and layer.q_conv1d.weight.tensor_model_parallel


def test_bf16_is_as_close_as_rounding(single_rank) -> None:
    layer = kda_layer(params_dtype=torch.float32)
    x, grad = hidden(40).bfloat16().float(), hidden(40, seed=1).bfloat16().float()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())
    want = gradients(layer, x, grad)
    got = gradients(layer.bfloat16(), x.bfloat16(), grad.bfloat16())
    assert got[0].dtype == torch.bfloat16
    assert rel_error(got[0].float(), want[0]) < 2e-2
    assert rel_error(got[1].float(), want[1]) < 4e-2


@pytest.mark.parametrize("name", ["key_value_states", "rotary_pos_emb", "sequence_len_offset"])
def test_meaningless_arguments_are_refused_by_name(name, single_rank) -> None:
    with pytest.raises(ValueError, match=f"{name} must be None for Kimi Delta Attention"):
        kda_layer()(hidden(4), None, **{name: torch.zeros(1)})


def test_shapes_and_contexts_that_do_not_fit_are_refused(single_rank) -> None:
    layer = kda_layer()
    with pytest.raises(ValueError, match="batch 1 when packed"):
        layer(hidden(4, 2), None, packed_seq_params=packed([4]))
    with pytest.raises(ValueError, match="packed_seq_params must be None with an inference"):
        context = LatentInferenceContext(1, 8)
        layer(hidden(4), None, packed_seq_params=packed([4]), inference_context=context)


def test_absent_fla_is_an_error_with_reason_and_way_out(monkeypatch, single_rank) -> None:
    monkeypatch.setattr(selection, "fla_missing_reason", lambda: "it is broken here")
    with pytest.raises(ImportError, match=r"broken here; pip install megatron-mla\[fla\]"):
        kda_layer()


def test_deterministic_mode_is_refused_on_a_gpu_only(monkeypatch, single_rank) -> None:
    monkeypatch.setattr(selection, "fla_missing_reason", lambda: None)
    config = small_config(**KDA, deterministic_mode=True)
    if not ON_GPU:
        selection.check_kda_can_run(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="deterministic_mode must be off .* got True; .*CPU"):
        selection.check_kda_can_run(config)


def test_checkpoint_is_cut_by_heads(single_rank) -> None:
    layer = kda_layer()
    sharded = layer.sharded_state_dict("x.")
    for name, parameter in layer.named_parameters():
        assert sharded[f"x.{name}"].data is parameter or torch.equal(
            sharded[f"x.{name}"].data, parameter
        )
    weights = {n: w for n, w in layer.state_dict().items() if not n.endswith("_extra_state")}
    layer.load_state_dict(weights, strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "sigmoid"])
@pytest.mark.parametrize("packing", [False, True], ids=["sbhd", "thd"])
def test_kernels_agree_with_the_naive_recurrence(lower_bound, packing) -> None:
    """Of real head widths, in bf16, against the same numbers in fp32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 200, 4, 128)
    q, k, v, f, grad = (torch.randn(shape, generator=generator).bfloat16() for _ in range(5))
    beta = torch.rand(shape[:3], generator=generator).bfloat16()
    a_log, bias = torch.linspace(0, 2.7, 4), torch.randn(512, generator=generator) - 3
    answers = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        leaves = [t.to(device, dtype).requires_grad_() for t in (q, k, v, f, beta)]
        leaves += [t.to(device).requires_grad_() for t in (a_log.clone(), bias.clone())]
        rows = rows_of_microbatch(
            200,
            cp_rank=0,
            cp_size=1,
            tp_chunks=1,
            device=leaves[0].device,
            packed_seq_params=packed([70, 0, 100], device=device) if packing else None,
        )
        out = delta_rule(*leaves, rows, lower_bound=lower_bound)
        out.backward(grad.to(device, dtype))
        answers.append([out.detach(), *(leaf.grad for leaf in leaves)])
    names = ("output", "q", "k", "v", "f", "beta", "A_log", "dt_bias")
    for name, got, want in zip(names, *answers, strict=True):
        assert rel_error(got.float().cpu(), want) < 3e-2, name
