"""Layers that rotate nothing: by layer, in the whole model, and with no positional channels."""

from __future__ import annotations

import pytest
import torch

from megatron_mla import should_use_fused_mla_rope
from megatron_mla.rope.tables import RopeTables
from megatron_mla.selection import missing_reason
from tests.helpers.close import assert_close
from tests.helpers.layers import (
    DSA,
    assert_close_answers,
    hidden,
    packed,
    small_config,
    small_layer,
    trained_gradients,
)

pytestmark = pytest.mark.usefixtures("single_rank")

FORMS = {
    "expanded": {},
    "expanded-without-q-lora": {"q_lora_rank": None},
    "absorbed": {"mla_form": "absorbed"},
    "dsa": {**DSA, "dsa_indexer_use_sparse_loss": True},
    "dsa-all-keys": {**DSA, "dsa_indexer_topk": 64, "dsa_indexer_loss_coeff": None},
    "dsa-kernels": {**DSA, "dsa_indexer_use_sparse_loss": True, "dsa_kernel_backend": "triton"},
}
FORM = pytest.mark.parametrize("form", FORMS)
LENGTHS = [7, 0, 1, 16]
SCALE = 0.2  # that of the width would tell the layers apart


def nope_layer(form: str, **changes):
    if form.endswith("kernels") and missing_reason("triton") is not None:
        pytest.skip("needs Triton")
    changes = {"no_rope_freq": 1, "softmax_scale": SCALE, **changes}
    return small_layer(**{**FORMS[form], **changes})


def answer(layer, x, **how):
    torch.manual_seed(5)
    return trained_gradients(layer, x, torch.randn_like(x), **how)


@FORM
@pytest.mark.parametrize("thd", [False, True], ids=["sbhd", "thd"])
def test_width_0_is_a_positional_width_of_which_the_weights_are_zero(form, thd) -> None:
    narrow = nope_layer(form, qk_pos_emb_head_dim=0)
    wide = nope_layer(form)
    nope, d = wide.q_head_split
    queries = "linear_q_proj.weight" if narrow.config.q_lora_rank is None else (
        "linear_q_up_proj.weight"
    )  # fmt: skip
    keep = {
        queries: torch.arange(6 * (nope + d)) % (nope + d) < nope,
        "linear_kv_down_proj.weight": torch.arange(20 + d) < 20,
    }

    def cut(name, weight):
        return weight[keep[name].to(weight.device)] if name in keep else weight

    weights = {n: w.detach().clone() for n, w in wide.named_parameters()}
    for name, kept in keep.items():
        weights[name][~kept.to(weights[name].device)] = 0.0
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            weight.copy_(weights[name])
        for name, weight in narrow.named_parameters():
            weight.copy_(cut(name, weights[name]))
    x = hidden(sum(LENGTHS), 1 if thd else 2)
    how = {"packed_seq_params": packed(LENGTHS)} if thd else {}
    out, grad, grads = answer(wide, x, **how)
    want = out, grad, {name: cut(name, grad) for name, grad in grads.items()}
    assert_close_answers(answer(narrow, x, **how), want)


def test_expanded_layer_without_positional_channels_is_plain_attention() -> None:
    layer = nope_layer("expanded-without-q-lora", qk_pos_emb_head_dim=0, softmax_scale=None)
    x = hidden(9, 2)
    out, _ = layer(x)
    weights = {n: w.detach().double() for n, w in layer.named_parameters()}
    wide = x.double()
    q = (wide @ weights["linear_q_proj.weight"].T).unflatten(-1, (6, 24))
    latent = wide @ weights["linear_kv_down_proj.weight"].T
    epsilon = layer.config.layernorm_epsilon
    latent = latent * (latent.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    latent = latent * weights["kv_layernorm.weight"]
    k, v = (
        (latent @ weights["linear_kv_up_proj.weight"].T).unflatten(-1, (6, 44)).split([24, 20], -1)
    )
    scores = torch.einsum("tbhd,sbhd->bhts", q, k) * 24**-0.5
    unseen = torch.ones(9, 9, dtype=torch.bool, device=x.device).triu(1)
    probabilities = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    want = torch.einsum("bhts,sbhv->tbhv", probabilities, v).flatten(2)
    want = want @ weights["linear_proj.weight"].T
    assert_close("output", out, want, rel=1e-5, reason="sums of 48 and more products in fp32")


@FORM
@pytest.mark.parametrize("width", [8, 0])
def test_order_of_earlier_tokens_does_not_matter(form, width) -> None:
    layer = nope_layer(form, qk_pos_emb_head_dim=width).eval()
    x = hidden(24)
    order = torch.tensor([*torch.randperm(23, generator=torch.Generator().manual_seed(0)), 23])
    with torch.no_grad():
        want, got = (layer(t)[0][-1] for t in (x, x[order.to(x.device)]))
    assert_close("last row", got, want, rel=1e-5, reason="the same sums in another order")
    rotating = nope_layer(form, no_rope_freq=None).eval()
    with torch.no_grad():
        want, got = (rotating(t)[0][-1] for t in (x, x[order.to(x.device)]))
    assert (got - want).abs().max() > 1e-3 * want.abs().max()


@FORM
@pytest.mark.parametrize("width", [8, 0])
def test_no_table_is_made(form, width, monkeypatch) -> None:
    def make(*_):
        raise AssertionError("a table for a layer that does not rotate")

    layer = nope_layer(form, qk_pos_emb_head_dim=width)
    monkeypatch.setattr(RopeTables, "get", make)
    monkeypatch.setattr(RopeTables, "_make", make)
    answer(layer, hidden(12))


def test_nothing_to_rotate_needs_no_kernel_and_no_word(capsys, caplog) -> None:
    config = small_config(qk_pos_emb_head_dim=0, apply_rope_fusion=True, rotary_percent=0.5)
    assert not should_use_fused_mla_rope(config)
    assert not caplog.records and not any(capsys.readouterr())
    assert not any(config.layer_has_rope(number) for number in (1, 2))


@pytest.mark.parametrize("form", ["expanded", "absorbed", "dsa"])
def test_layers_of_one_model_rotate_or_not(form) -> None:
    changes = {**FORMS[form], "num_layers": 2, "no_rope_freq": [1, 0]}
    x = hidden(12)
    first, second = (small_layer(number, **changes).eval() for number in (1, 2))
    with torch.no_grad():
        assert not torch.equal(first(x)[0], second(x)[0])
        second.has_rope, second.rotary = first.has_rope, first.rotary
        if form == "dsa":
            indexers = first.core_attention.indexer, second.core_attention.indexer
            indexers[1].has_rope, indexers[1].rotary = indexers[0].has_rope, indexers[0].rotary
        assert torch.equal(first(x)[0], second(x)[0])
