"""Absorbed attention on one rank: the expanded layer's results, fused bits, recompute."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention.absorbed import AbsorbedMLASelfAttention
from megatron_mla.attention.rotary import FusedRotary
from megatron_mla.specs import mla_attention_spec
from tests.helpers.close import assert_close
from tests.helpers.layers import (
    assert_same_bits,
    gradients,
    hidden,
    packed,
    small_config,
    small_layer,
)

pytestmark = pytest.mark.usefixtures("single_rank")

ABSORBED = {"mla_form": "absorbed"}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0}
ROPES = {
    "rope": {"rope_type": "rope"},
    "yarn": {**YARN, "mscale_all_dim": 1.0},
    "yarn-ratio": {**YARN, "mscale_all_dim": 0.707},  # tables have a concentration
}
ropes = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
# Unequal and empty sequences, and two rows behind the last.
layouts = pytest.mark.parametrize("lengths", [None, [10, 0, 1, 11]], ids=["sbhd", "thd"])


def problem(lengths, dtype=torch.float32):
    """Hidden states, output gradient and further arguments of a layer."""
    x, grad = (hidden(24, 1 if lengths else 2, seed, dtype) for seed in (0, 1))
    return x, grad, {"packed_seq_params": packed(lengths)} if lengths else {}


def solve(lengths, *, dtype=torch.float32, **changes):
    from megatron.core import tensor_parallel

    layer = small_layer(params_dtype=dtype, bf16=dtype == torch.bfloat16, **changes)
    x, grad, kwargs = problem(lengths, dtype)
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    return gradients(layer, x, grad, **kwargs)


def assert_same_layer(absorbed, expanded) -> None:
    how = {"rel": 1e-5, "reason": "the same sums in another order"}
    assert_close("output", absorbed[0], expanded[0], **how)
    assert_close("input gradient", absorbed[1], expanded[1], **how)
    assert absorbed[2].keys() == expanded[2].keys()
    for name, grad in expanded[2].items():
        assert grad.abs().max() > 0, name
        assert_close(name, absorbed[2][name], grad, **how)


@layouts
@pytest.mark.parametrize("q_lora_rank", [28, None])
@ropes
def test_absorbed_equals_expanded(rope, q_lora_rank, lengths) -> None:
    changes = {"q_lora_rank": q_lora_rank, **rope}
    assert_same_layer(solve(lengths, **ABSORBED, **changes), solve(lengths, **changes))


@layouts
@pytest.mark.parametrize(
    "changes",
    [
        {"no_rope_freq": [1]},
        {"no_rope_freq": [1], "apply_rope_fusion": True},
        {"rotary_percent": 0.5},
        {"rotary_percent": 0.5, **YARN},
        {"softmax_scale": 0.5},
        {"qk_layernorm": False},
        {"mla_latent_norm_epsilon": 0.3},
        {"v_head_dim": 8, "qk_head_dim": 40},
    ],
    ids=str,
)
def test_absorbed_equals_expanded_off_the_beaten_track(changes, lengths) -> None:
    absorbed = solve(lengths, **ABSORBED, **changes)
    assert_same_layer(absorbed, solve(lengths, **changes))
    if not changes.keys() & {"v_head_dim", "qk_layernorm"}:  # the option has an effect
        assert not torch.allclose(absorbed[0], solve(lengths, **ABSORBED)[0], atol=1e-3)


@pytest.mark.parametrize("q_lora_rank", [28, None])
def test_spec_and_state_dicts(q_lora_rank) -> None:
    absorbed = small_layer(**ABSORBED, q_lora_rank=q_lora_rank)
    expanded = small_layer(q_lora_rank=q_lora_rank)
    assert type(absorbed) is AbsorbedMLASelfAttention
    assert mla_attention_spec(small_config(**ABSORBED)).module is AbsorbedMLASelfAttention
    assert mla_attention_spec(small_config()).module is not AbsorbedMLASelfAttention
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (absorbed, expanded)]
    assert shapes[0] == shapes[1]
    with torch.no_grad():
        for parameter in absorbed.parameters():
            parameter.mul_(1.5)
    expanded.load_state_dict(absorbed.state_dict(), strict=True)
    x = hidden()
    want = absorbed(x, None)[0]
    assert_close("expanded", expanded(x, None)[0], want, rel=1e-5, reason="another order")
    fresh = small_layer(**ABSORBED, q_lora_rank=q_lora_rank)
    assert not torch.allclose(fresh(x, None)[0], want, atol=1e-3)
    fresh.load_state_dict(expanded.state_dict(), strict=True)
    assert torch.equal(fresh(x, None)[0], want)


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numerics", ["megatron", "fp32"])
@ropes
def test_fused_layer_has_the_bits_of_the_eager_one(rope, numerics, dtype, lengths) -> None:
    pytest.importorskip("triton")
    changes = {"mla_rope_numerics": numerics, "dtype": dtype, **ABSORBED, **rope}
    assert isinstance(small_layer(apply_rope_fusion=True, **ABSORBED).rotary, FusedRotary)
    eager, fused = (solve(lengths, apply_rope_fusion=fused, **changes) for fused in (False, True))
    assert_same_bits(fused, eager)
    assert eager[2]["linear_q_up_proj.weight"].abs().max() > 0


@layouts
@pytest.mark.parametrize("modules", [["mla_up_proj"], ["core_attn"], ["mla_up_proj", "core_attn"]])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None},
        {"apply_rope_fusion": True},
        {"apply_rope_fusion": True, "q_lora_rank": None},
        {"no_rope_freq": [1]},
        {"qk_layernorm": False},
        {"attention_dropout": 0.3},
    ],
    ids=str,
)
def test_recompute_changes_no_bit(changes, modules, lengths) -> None:
    again = {"recompute_granularity": "selective", "recompute_modules": modules}
    plain = solve(lengths, **ABSORBED, **changes)
    assert_same_bits(solve(lengths, **ABSORBED, **changes, **again), plain)
    assert all(grad.abs().max() > 0 for grad in plain[2].values())


@pytest.mark.parametrize("modules", [[], ["mla_up_proj"], ["core_attn"]], ids=str)
def test_recompute_repeats_what_it_is_asked_to(modules) -> None:
    how = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    layer = small_layer(**ABSORBED, **how)
    calls = []
    for name in ("linear_q_up_proj", "core_attention", "linear_proj"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    gradients(layer, *problem(None)[:2])
    assert calls.count("linear_q_up_proj") == 1 + ("mla_up_proj" in modules)
    assert calls.count("core_attention") == 1 + ("core_attn" in modules)
    assert calls.count("linear_proj") == 1


def test_partial_rotation_leaves_the_last_channels() -> None:
    """4 of 8 positional channels turn, with the frequencies of 4."""
    layer = small_layer(**ABSORBED, rotary_percent=0.5)
    seen = []
    layer.core_attention.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    x = hidden()
    layer(x, None)
    key = seen[0].squeeze(-2)  # [S, B, 20 + 8]
    before = layer.linear_kv_down_proj(x)[0][..., 20:]
    assert torch.equal(key[..., 24:], before[..., 4:])
    angle = torch.outer(torch.arange(24.0), torch.tensor([1.0, 0.01])).unsqueeze(1).to(x.device)
    x1, x2 = before[..., 0:4:2], before[..., 1:4:2]
    want = torch.cat(
        (x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()), dim=-1
    )
    assert_close("rotated", key[..., 20:24], want, rel=1e-6, reason="cos and sin of another call")


@pytest.mark.parametrize("variant", [ABSORBED, {"experimental_attention_variant": "dsa"}], ids=str)
def test_te_core_is_refused_and_others_are_taken(variant) -> None:
    sizes = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 5}
    with pytest.raises(ValueError, match="mla_core_attention .*absorbed.*'te'"):
        small_config(**variant, **sizes, mla_core_attention="te")
    for core in ("auto", "sdpa"):
        config = small_config(**variant, **sizes, mla_core_attention=core)
        assert config.is_absorbed and not config.uses_te_core_attention


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="mla_form"):
        small_config(mla_form="absorb")


@pytest.mark.parametrize(
    ("rope_type", "explicit", "scale"),
    [
        ("rope", None, 32**-0.5),  # of the head of 24 + 8, never of the latent's 20 + 8
        ("yarn", None, 32**-0.5 * 1.873854),
        ("yarn", 0.5, 0.5),
    ],
)
def test_softmax_scale_is_that_of_the_expanded_head(rope_type, explicit, scale) -> None:
    changes = {"rope_type": rope_type, "mscale_all_dim": 1.0, "rotary_scaling_factor": 40}
    layer = small_layer(**ABSORBED, **changes, softmax_scale=explicit)
    assert layer.core_attention.softmax_scale == pytest.approx(scale, rel=1e-6)


def test_hooks_of_the_key_value_up_projection_run() -> None:
    """The layer reads its weight without calling it; DDP waits for parameters in such hooks."""
    layer = small_layer(**ABSORBED)
    calls = []
    layer.linear_kv_up_proj.register_forward_pre_hook(lambda *args: calls.append(args))
    layer.linear_kv_up_proj.register_forward_pre_hook(
        lambda *args: calls.append(args), with_kwargs=True
    )
    layer(hidden(), None)
    assert [len(args) for args in calls] == [2, 3]
    assert all(args[0] is layer.linear_kv_up_proj for args in calls)


@pytest.mark.parametrize("argument", ["key_value_states", "rotary_pos_emb"])
def test_argument_without_meaning_is_refused_by_name(argument) -> None:
    with pytest.raises(ValueError, match=argument):
        small_layer(**ABSORBED)(hidden(), None, **{argument: torch.ones(1)})
