"""The MLA layer on one rank: recompute, NoPE layers, packing, scales, checks."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.rope.frequencies import RopeParams, softmax_scale
from tests.helpers.close import assert_close
from tests.helpers.layers import gradients, packed, small_config, small_layer

pytestmark = pytest.mark.usefixtures("single_rank")


def hidden(rows=24, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(rows, batch, 48, generator=generator)
    return t.to(torch.cuda.current_device())


@pytest.mark.parametrize("modules", [["mla_up_proj"], ["core_attn"], ["mla_up_proj", "core_attn"]])
@pytest.mark.parametrize("is_packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize("q_lora_rank", [28, None])
@pytest.mark.parametrize(
    ("dropout", "fused"), [(0.0, False), (0.3, False), (0.0, True)], ids=["", "dropout", "fused"]
)
def test_recompute_changes_no_bit(modules, is_packed, q_lora_rank, dropout, fused) -> None:
    from megatron.core import tensor_parallel

    changes = {"q_lora_rank": q_lora_rank, "attention_dropout": dropout}
    changes["apply_rope_fusion"] = fused
    plain = small_layer(**changes)
    again = small_layer(**changes, recompute_granularity="selective", recompute_modules=modules)
    again.load_state_dict(plain.state_dict())
    x, grad = (hidden(24, 1 if is_packed else 2, seed) for seed in (0, 1))
    answers = []
    for layer in (plain, again):
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        kwargs = {"packed_seq_params": packed([10, 0, 14])} if is_packed else {}
        answers.append(gradients(layer, x, grad, **kwargs))
    (out, gx, gw), (out2, gx2, gw2) = answers
    assert torch.equal(out, out2)
    assert torch.equal(gx, gx2)
    for name in gw:
        assert torch.equal(gw[name], gw2[name]), name


# Concentrations of the tables: none, 1, and not 1.
ROPES = [
    {"rope_type": "rope"},
    {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numerics", ["megatron", "fp32"])
@pytest.mark.parametrize("rope", ROPES, ids=["rope", "yarn", "yarn-ratio"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["sbhd", "thd"])
def test_fused_layer_has_the_bits_of_the_eager_one(dtype, numerics, rope, is_packed) -> None:
    """Output, input gradient and every weight gradient: the q up projection's above all, whose
    result is rotated in place."""
    pytest.importorskip("triton")
    from megatron_mla.attention.rotary import FusedRotary

    changes = {"mla_rope_numerics": numerics, "params_dtype": dtype, **rope}
    changes["bf16"] = dtype == torch.bfloat16
    x, grad = (hidden(24, 1 if is_packed else 2, seed).to(dtype) for seed in (0, 1))
    kwargs = {"packed_seq_params": packed([10, 0, 14])} if is_packed else {}
    answers = []
    for fused in (False, True):
        layer = small_layer(**changes, apply_rope_fusion=fused)
        assert isinstance(layer.rotary, FusedRotary) == fused
        answers.append(gradients(layer, x, grad, **kwargs))
    (out, gx, gw), (out2, gx2, gw2) = answers
    assert torch.equal(out, out2) and torch.equal(gx, gx2)
    for name in gw:
        assert torch.equal(gw[name], gw2[name]), name
    assert gw["linear_q_up_proj.weight"].abs().max() > 0


class _FirstOutput(torch.nn.Module):
    """A graphed callable may return nothing but tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, None)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_layer_in_a_cuda_graph_has_the_bits_of_the_layer(fused) -> None:
    changes = {"apply_rope_fusion": fused, "params_dtype": torch.bfloat16, "bf16": True}
    layer, plain = small_layer(**changes), small_layer(**changes)
    sample = hidden().bfloat16().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(_FirstOutput(layer), (sample,))
    for seed in (1, 2):
        x, grad = (hidden(seed=10 * seed + n).bfloat16() for n in (0, 1))
        want_out, want_x, want_weights = gradients(plain, x, grad)
        leaf = x.requires_grad_()
        layer.zero_grad(set_to_none=True)
        out = graphed(leaf)
        out.backward(grad)
        assert torch.equal(out, want_out)
        assert torch.equal(leaf.grad, want_x)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, want_weights[name]), name


def test_packed_sequences_equal_separate_ones() -> None:
    layer = small_layer()
    lengths = [10, 1, 0, 13]
    x = hidden(sum(lengths), 1)
    together, _ = layer(x, None, packed_seq_params=packed(lengths))
    apart = torch.cat([layer(part, None)[0] for part in x.split(lengths) if len(part)])
    assert_close("packed", together.detach(), apart.detach())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_padded_lengths_and_tail_do_not_reach_real_tokens(dtype) -> None:
    layer = small_layer()
    x = hidden(32, 1)
    params = packed([9, 11], padded=[12, 12], dtype=dtype)
    out, _ = layer(x, None, packed_seq_params=params)
    real = [*range(9), *range(12, 23)]
    other = x.clone()
    other[[i for i in range(32) if i not in real]] = 7.0
    changed, _ = layer(other, None, packed_seq_params=packed([9, 11], padded=[12, 12], dtype=dtype))
    assert torch.equal(out[real], changed[real])
    alone, _ = layer(x[:9], None)
    assert_close("first sequence", out[:9].detach(), alone.detach())
    assert torch.equal(out[24:], torch.zeros_like(out[24:]))


def test_tail_rows_get_no_gradient() -> None:
    layer = small_layer()
    x = hidden(16, 1).requires_grad_()
    out, _ = layer(x, None, packed_seq_params=packed([8]))
    out.sum().backward()
    assert torch.equal(x.grad[8:], torch.zeros_like(x.grad[8:]))
    assert x.grad[:8].abs().min() > 0


def test_layer_without_rope_ignores_positions() -> None:
    def permuted_difference(layer):
        x = hidden(9, 1)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
        mixed = torch.cat((x[:8][order.to(x.device)], x[8:]))
        return (layer(x, None)[0][-1] - layer(mixed, None)[0][-1]).abs().max()

    changes = {"num_layers": 2, "no_rope_freq": [1, 0]}
    assert permuted_difference(small_layer(1, **changes)) < 1e-5  # the last row sees a set
    assert permuted_difference(small_layer(2, **changes)) > 1e-3


def test_partial_rotation_differs_from_full_and_warns_nothing_when_fusion_is_off() -> None:
    x = hidden()
    full, half = (small_layer(rotary_percent=p)(x, None)[0] for p in (1.0, 0.5))
    assert not torch.allclose(full, half, atol=1e-3)


def test_explicit_softmax_scale_is_honoured() -> None:
    layer = small_layer(softmax_scale=0.5)
    assert layer.core_attention.softmax_scale == 0.5
    x = hidden()
    assert not torch.allclose(layer(x, None)[0], small_layer()(x, None)[0], atol=1e-4)


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_mscale_enters_the_softmax_scale_for_yarn_only(rope_type) -> None:
    layer = small_layer(rope_type=rope_type, mscale_all_dim=1.0, rotary_scaling_factor=40)
    params = RopeParams.from_config(layer.config)
    factor = 1.873854 if rope_type == "yarn" else 1.0
    assert layer.core_attention.softmax_scale == pytest.approx(32**-0.5 * factor, rel=1e-6)
    assert layer.core_attention.softmax_scale == softmax_scale(params, 32)


def test_latent_norms_have_their_own_epsilon() -> None:
    layer = small_layer(mla_latent_norm_epsilon=1e-2, layernorm_epsilon=1e-6)
    assert layer.q_layernorm.eps == layer.kv_layernorm.eps == 1e-2
    assert small_layer(layernorm_epsilon=1e-6).kv_layernorm.eps == 1e-6


def test_parameter_names_and_norms_follow_the_config() -> None:
    def names(**changes):
        return {n for n, _ in small_layer(**changes).named_parameters()}

    projections = {f"linear_{p}_proj.weight" for p in ("kv_down", "kv_up")} | {"linear_proj.weight"}
    q_lora = {"linear_q_down_proj.weight", "linear_q_up_proj.weight"}
    norms = {"q_layernorm.weight", "kv_layernorm.weight"}
    assert names() == projections | q_lora | norms
    assert names(qk_layernorm=False) == projections | q_lora
    assert names(q_lora_rank=None) == projections | {"linear_q_proj.weight", "kv_layernorm.weight"}


def test_head_splits_describe_the_up_projections() -> None:
    layer = small_layer()
    assert layer.q_head_split == (24, 8)
    assert layer.kv_head_split == (24, 20)
    assert layer.linear_q_up_proj.weight.shape[0] == 6 * sum(layer.q_head_split)
    assert layer.linear_kv_up_proj.weight.shape[0] == 6 * sum(layer.kv_head_split)


def test_tables_are_in_no_state_dict() -> None:
    layer = small_layer(rope_type="yarn")
    layer(hidden(), None)
    tensors = {k for k, v in layer.state_dict().items() if v is not None}
    assert tensors == {n for n, _ in layer.named_parameters()}


@pytest.mark.parametrize(
    "argument",
    [
        "key_value_states",
        "rotary_pos_emb",
        "rotary_pos_cos_sin",
        "attention_bias",
        "sequence_len_offset",
    ],
)
def test_argument_without_meaning_is_refused_by_name(argument) -> None:
    with pytest.raises(ValueError, match=argument):
        small_layer()(hidden(), None, **{argument: torch.ones(1)})


def test_wrong_shapes_and_configs_are_refused() -> None:
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig as Stock

    from megatron_mla.specs import mla_attention_spec

    layer = small_layer()
    with pytest.raises(ValueError, match="hidden_states"):
        layer(hidden()[:, 0], None)
    with pytest.raises(ValueError, match="batch size 1"):
        layer(hidden(), None, packed_seq_params=packed([24]))
    spec = mla_attention_spec(small_config())
    stock = Stock(num_layers=1, hidden_size=48, num_attention_heads=6)
    with pytest.raises(ValueError, match="megatron_mla.MLATransformerConfig"):
        build_module(spec, config=stock, layer_number=1)
    with pytest.raises(ValueError, match="tensor_model_parallel_size"):
        build_module(spec, config=small_config(tensor_model_parallel_size=2), layer_number=1)


@pytest.mark.parametrize("is_packed", [False, True], ids=["sbhd", "thd"])
def test_training_after_inference_mode(is_packed) -> None:
    """Tables and indices that an evaluation in inference mode made first serve training too."""
    layer = small_layer(rotary_base=12345.0)  # a table that no other test has made
    params = packed([700, 700, 30]) if is_packed else None
    x = hidden(1430, 1)
    with torch.inference_mode():
        quiet, _ = layer(x, None, packed_seq_params=params)
    out, _, grads = gradients(layer, x, torch.ones_like(x), packed_seq_params=params)
    assert torch.equal(out, quiet)
    assert all(torch.isfinite(g).all() for g in grads.values())


def test_weight_used_without_its_layer_waits_for_what_its_forward_waits_for(single_rank) -> None:
    """DDP hooks into the forward of every module to finish an overlapped parameter gather."""
    layer = small_layer(mla_form="absorbed")
    plain, with_kwargs = [], []
    layer.linear_kv_up_proj.register_forward_pre_hook(lambda m, args: plain.append(args))
    layer.linear_kv_up_proj.register_forward_pre_hook(
        lambda m, args, kwargs: with_kwargs.append((args, kwargs)), with_kwargs=True
    )
    layer(hidden(), None)
    assert plain == [()] and with_kwargs == [((), {})]
