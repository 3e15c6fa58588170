"""The twins, which are the eager path too: bits of Megatron-Core's unfused path, their algebra."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope_ref import rope_ref
from megatron_mla.rope.frequencies import RopeParams
from megatron_mla.rope.tables import RopeTables
from tests.helpers.close import assert_close

PARAMS = RopeParams(dim=8, rope_type="yarn", factor=4, original_max_position=16)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table(dtype, numerics="megatron", params=PARAMS, length=64):
    return RopeTables(params, numerics).get(length, dtype, "cpu")


def rotate(t, cos, sin, positions, **how):
    return rope_ref(t, cos, sin, positions, nope_dim=0, **how)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
def test_bits_are_megatron_cores_forward_and_backward(dtype, interleaved) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from megatron_mla.rope.frequencies import concentration, inv_freq

    t, grad = random(33, 2, 3, 8, dtype=dtype), random(33, 2, 3, 8, dtype=dtype, seed=1)
    angles = torch.outer(torch.arange(33.0), inv_freq(PARAMS)).repeat(1, 2)[:, None, None]
    stock_t = t.clone().requires_grad_()
    stock = _apply_rotary_pos_emb_bshd(
        stock_t, angles, mla_rotary_interleaved=interleaved, mscale=concentration(PARAMS)
    )
    stock.backward(grad)
    ours_t = t.clone().requires_grad_()
    ours = rotate(ours_t, *table(dtype), torch.arange(33), interleaved=interleaved)
    ours.backward(grad)
    assert torch.equal(ours, stock)
    assert torch.equal(ours_t.grad, stock_t.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_numerics_round_once(dtype) -> None:
    t = random(33, 3, 8, dtype=dtype)
    positions = torch.arange(33, dtype=torch.int32)
    got = rotate(t, *table(dtype, "fp32"), positions)
    want = rotate(t.float(), *table(torch.float32), positions)
    assert torch.equal(got, want.to(dtype))
    assert not torch.equal(got, rotate(t, *table(dtype), positions))  # the modes do differ


@pytest.mark.parametrize("numerics", ["megatron", "fp32"])
def test_inverse_undoes_and_backward_is_the_inverse(numerics) -> None:
    t, grad = random(20, 3, 8), random(20, 3, 8, seed=1)
    cos, sin = table(torch.float32, numerics)
    positions = torch.arange(20).flip(0)
    scale = cos[0, 0] ** 2  # concentration, twice
    turned = rotate(t.requires_grad_(), cos, sin, positions, remove_interleaving=True)
    back = rotate(turned, cos, sin, positions, inverse=True, remove_interleaving=True)
    assert_close("there and back", back.detach() / scale, t.detach())
    (got,) = torch.autograd.grad(turned, t, grad)
    want = rotate(grad, cos, sin, positions, inverse=True, remove_interleaving=True)
    assert torch.equal(got, want + 0.0)


def test_gradcheck_of_every_layout() -> None:
    t = random(5, 2, 4).double().requires_grad_()
    angle = torch.rand(7, 2, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    positions = torch.tensor([6, 0, 0, 3, 1], dtype=torch.int32)
    for interleaved, again, inverse in [
        (True, False, False),
        (True, True, True),
        (False, False, True),
    ]:
        assert torch.autograd.gradcheck(
            lambda x, a=(interleaved, again, inverse): rotate(
                x, cos, sin, positions, interleaved=a[0], remove_interleaving=a[1], inverse=a[2]
            ),
            t,
        )


def test_dot_products_depend_on_the_distance_only() -> None:
    q, k = random(1, 8).expand(12, 8), random(1, 8, seed=1).expand(12, 8)
    cos, sin = table(torch.float32)
    q, k = (rotate(t, cos, sin, torch.arange(12)) for t in (q, k))
    products = q @ k.T
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        assert_close(f"distance {distance}", diagonal, diagonal[:1].expand_as(diagonal),
                     rel=1e-5, reason="sums of eight products in fp32")  # fmt: skip


def test_position_zero_is_only_a_change_of_order() -> None:
    t = random(4, 8)
    cos, sin = table(torch.float32, params=RopeParams(dim=8))
    got = rotate(t, cos, sin, torch.zeros(4, dtype=torch.int32))
    assert torch.equal(got, torch.cat((t[:, 0::2], t[:, 1::2]), dim=-1))


def test_query_and_key_assembly_leaves_other_channels_alone() -> None:
    cos, sin = table(torch.float32)
    positions = torch.arange(9, dtype=torch.int32)
    q, kv, k_pe = random(9, 2, 3, 14), random(9, 2, 3, 11, seed=1), random(9, 2, 1, 8, seed=2)
    query = rope_ref(q, cos, sin, positions, nope_dim=6)
    assert torch.equal(query[..., :6], q[..., :6])
    assert torch.equal(query[..., 6:], rotate(q[..., 6:], cos, sin, positions))
    key, value = rope_kv_split_ref(kv, k_pe, cos, sin, positions, k_dim=6)
    assert torch.equal(key[..., :6], kv[..., :6])
    for head in range(3):
        assert torch.equal(key[..., head, 6:], rotate(k_pe, cos, sin, positions)[..., 0, :])
    assert torch.equal(value, kv[..., 6:])
    assert value.data_ptr() == kv[..., 6:].data_ptr()  # a view, not a copy


def test_partial_rotation_passes_the_rest_through() -> None:
    t = random(9, 3, 8)
    cos, sin = table(torch.float32, params=RopeParams(dim=4))
    got = rotate(t, cos, sin, torch.arange(9), partial=True)
    assert torch.equal(got[..., 4:], t[..., 4:])
    assert torch.equal(got[..., :4], rotate(t[..., :4], cos, sin, torch.arange(9)))


def test_wrong_table_is_refused_by_name() -> None:
    t = random(4, 64)
    cos, sin = table(torch.float32)
    with pytest.raises(ValueError, match="cos and sin must be .* 64"):
        rotate(t, cos, sin, torch.arange(4))
    t = random(4, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="cos must be torch.bfloat16 .* or float32"):
        rotate(t, *table(torch.float16), torch.arange(4))
