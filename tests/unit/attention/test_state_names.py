"""Checkpoints of stock Megatron-Core and its relatives load strictly, and back."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.layers import small_config, small_layer

pytestmark = pytest.mark.usefixtures("single_rank")


def weights(layer):
    return {n: p.detach().clone() for n, p in layer.named_parameters()}


def assert_loads(state, source) -> None:
    target = small_layer()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(float("nan"))
    target.load_state_dict(state, strict=True)
    for name, weight in source.items():
        assert torch.equal(target.get_parameter(name), weight), name


def test_norms_under_fused_names() -> None:
    source = weights(small_layer())
    state = dict(source)
    for projection, norm in (("q_up", "q"), ("kv_up", "kv")):
        state[f"linear_{projection}_proj.layer_norm_weight"] = state.pop(f"{norm}_layernorm.weight")
    assert_loads(state, source)


def test_split_key_and_value_up_projections() -> None:
    source = weights(small_layer())
    state = dict(source)
    per_head = state.pop("linear_kv_up_proj.weight").view(6, 44, 20)
    state["linear_k_up_proj.weight"] = per_head[:, :24].reshape(-1, 20)
    state["linear_v_up_proj.weight"] = per_head[:, 24:].reshape(-1, 20)
    assert_loads(state, source)


def test_fused_down_projection() -> None:
    source = weights(small_layer())
    state = dict(source)
    q, kv = (state.pop(f"linear_{part}_down_proj.weight") for part in ("q", "kv"))
    state["linear_qkv_down_proj.weight"] = torch.cat((q, kv))
    assert_loads(state, source)


def test_extra_states_may_be_there_or_not() -> None:
    source = weights(small_layer())
    assert_loads(dict(source), source)
    names = ("linear_proj", "linear_q_down_proj", "q_layernorm", "core_attention")
    assert_loads({**source, **{f"{n}._extra_state": None for n in names}}, source)


def test_pieces_of_another_model_are_refused() -> None:
    layer = small_layer()
    state = weights(layer)
    for part in "qkv":
        state.pop(f"linear_{part}_down_proj.weight", None)
    state.pop("linear_kv_down_proj.weight", None)
    state["linear_qkv_down_proj.weight"] = torch.zeros(57, 48)
    with pytest.raises(ValueError, match="linear_qkv_down_proj.*57"):
        layer.load_state_dict(state)


def test_unknown_and_missing_weights_are_still_errors() -> None:
    layer = small_layer()
    with pytest.raises(RuntimeError, match="linear_other"):
        layer.load_state_dict({**weights(layer), "linear_other.weight": torch.zeros(1)})
    state = weights(layer)
    del state["linear_proj.weight"]
    with pytest.raises(RuntimeError, match="linear_proj.weight"):
        layer.load_state_dict(state)


class _AnyCore(torch.nn.Module):
    """Stock MLA builds its core twice, with other arguments; its own local core refuses them."""

    def __init__(self, **arguments) -> None:
        super().__init__()


@pytest.mark.parametrize("down", ["column", "duplicated"])
def test_stock_layer_and_ours_exchange_checkpoints(down) -> None:
    """Stock's own layer (its local spec, with a core that can be built) strictly, both ways."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm"
    ).submodules.self_attention
    spec.submodules.core_attention = _AnyCore
    device = torch.cuda.current_device()
    stock = build_module(spec, config=small_config(), layer_number=1).to(device)
    ours = small_layer(mla_down_proj_parallelism=down)
    ours.load_state_dict(stock.state_dict(), strict=True)
    for name, weight in stock.named_parameters():
        assert torch.equal(ours.get_parameter(name), weight.to(device))
    fresh = small_layer()
    missing = stock.load_state_dict(fresh.state_dict(), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    for name, weight in fresh.named_parameters():
        assert torch.equal(stock.get_parameter(name).to(device), weight)
