"""Frequencies and scales against closed forms, check values and Megatron-Core's own classes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_mla.rope.frequencies import (
    RopeParams,
    concentration,
    inv_freq,
    softmax_scale,
    yarn_mscale,
)
from tests.helpers.layers import small_config


@pytest.mark.parametrize(
    ("mscale", "all_dim", "on_table", "on_softmax"),
    [(1, 1, 1.0, 1.873854), (0.707, 0.707, 1.0, 1.589626), (1, 0, 1.3689, 1.0)],
)
def test_the_two_yarn_factors_are_independent(mscale, all_dim, on_table, on_softmax) -> None:
    params = RopeParams(dim=64, rope_type="yarn", factor=40, mscale=mscale, mscale_all_dim=all_dim)
    assert concentration(params) == pytest.approx(on_table, abs=5e-5)
    assert softmax_scale(params, 192) * math.sqrt(192) == pytest.approx(on_softmax, abs=5e-7)


def test_softmax_factor_uses_all_dim_not_mscale() -> None:
    params = RopeParams(dim=64, rope_type="yarn", factor=40, mscale=1.0, mscale_all_dim=0.707)
    assert softmax_scale(params, 192) * math.sqrt(192) == pytest.approx(1.589626, abs=5e-7)
    assert concentration(params) == pytest.approx(yarn_mscale(40, 1) / yarn_mscale(40, 0.707))


@pytest.mark.parametrize(
    ("factor", "all_dim", "scale"),
    [(40, 0.707, 0.1147214), (40, 1, 0.1352338), (32, 1, 0.1308608), (64, 1, 0.1446796)],
    ids=["v2-lite", "v3", "k2", "k2-thinking"],
)
def test_softmax_scale_of_released_models(factor, all_dim, scale) -> None:
    params = RopeParams(dim=64, rope_type="yarn", factor=factor, mscale_all_dim=all_dim)
    assert softmax_scale(params, 192) == pytest.approx(scale, abs=5e-8)


def test_plain_rope_has_no_factors_even_with_mscale_set() -> None:
    params = RopeParams(dim=64, rope_type="rope", factor=40, mscale=1.0, mscale_all_dim=1.0)
    assert concentration(params) == 1.0
    assert softmax_scale(params, 256) == 1 / 16


def test_plain_frequencies() -> None:
    want = [10000 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(inv_freq(RopeParams(dim=8)), torch.tensor(want))


@pytest.mark.parametrize("dim", [2, 8, 12, 64])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("beta", [(32, 1), (1, 1)], ids=str)
def test_frequencies_are_megatron_cores_to_the_bit(dim, factor, beta) -> None:
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    stock = YarnRotaryEmbedding(
        dim,
        rotary_base=10000,
        scaling_factor=factor,
        original_max_position_embeddings=4096,
        beta_fast=beta[0],
        beta_slow=beta[1],
        mscale=1.0,
        mscale_all_dim=0.707,
    )
    params = RopeParams(
        dim=dim, rope_type="yarn", factor=factor, beta_fast=beta[0], beta_slow=beta[1],
        mscale=1.0, mscale_all_dim=0.707,
    )  # fmt: skip
    angles, mscale = stock.get_emb(130)
    device = torch.cuda.current_device()  # both on the same device: pow differs between devices
    ours = torch.outer(torch.arange(130.0, device=device), inv_freq(params, device))
    assert torch.equal(ours, angles[:, 0, 0, : dim // 2])
    assert concentration(params) == pytest.approx(mscale, rel=1e-12)
    plain = RotaryEmbedding(dim, rotary_percent=1.0)
    assert torch.equal(inv_freq(RopeParams(dim=dim), device), plain.inv_freq)


def test_rotary_percent_narrows_the_table() -> None:
    assert RopeParams.from_config(small_config(rotary_percent=0.5)).dim == 4
    assert RopeParams.from_config(small_config()).dim == 8


@pytest.mark.parametrize("dim", [7, -2])
def test_odd_table_is_refused(dim) -> None:
    with pytest.raises(ValueError, match="dim"):
        RopeParams(dim=dim)
