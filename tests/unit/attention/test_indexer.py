"""The indexer: layouts of channels, norm, weights, and whether it reads what it should."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron_mla.attention.index_sharing import IndexBook, with_index_book
from megatron_mla.attention.rotary import FusedRotary
from megatron_mla.parallel.microbatch import rows_of_microbatch
from tests.helpers.close import assert_close
from tests.helpers.layers import dsa_layer, hidden, packed

pytestmark = pytest.mark.usefixtures("single_rank")

PLAIN = {"dsa_indexer_rotate_activation": False}
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}


def rows_of(x, lengths=None):
    where = {"cp_rank": 0, "cp_size": 1, "tp_chunks": 1, "device": x.device}
    params = packed(lengths) if lengths else None
    return rows_of_microbatch(x.shape[0], **where, packed_seq_params=params)


def index(layer, rows=9, batch=2, dtype=torch.float32, lengths=None):
    """q, k and w of the layer's indexer for random inputs, and these."""
    x = hidden(rows, batch, 0, dtype)
    qr = hidden(rows, batch, 1, dtype)[..., :28].contiguous()
    return layer.core_attention.indexer(x, qr, rows_of(x, lengths)), x, qr


def by_hand(layer, x, qr, *, width=8, pairs=False, relu=True, dtype=torch.float64):
    """Scores [B, S, S] of numerics.md (7), -inf for keys that are later; of an unpacked batch.

    On the host, wherever the layer is.
    """
    indexer = layer.core_attention.indexer
    of = {name: p.detach().to("cpu", dtype) for name, p in indexer.named_parameters()}
    x, qr = (t.detach().to("cpu", dtype) for t in (x, qr))
    n, channels = indexer.num_heads, indexer.width
    q = (qr @ of["linear_wq_b.weight"].T).unflatten(-1, (n, channels))
    k = x @ of["linear_wk.weight"].T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    k = k * of["k_norm.weight"] + of["k_norm.bias"]
    w = x @ of["linear_weights_proj.weight"].T * n**-0.5 * channels**-0.5

    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=dtype) / width)
    angle = torch.outer(torch.arange(len(x), dtype=dtype), frequency)

    def turn(t):  # [S, B, D] or [S, B, n, D]
        shape = (-1, *(1,) * (t.dim() - 2), width // 2)
        cos, sin = angle.cos().view(shape), angle.sin().view(shape)
        lead = t[..., :width]
        a, b = (lead[..., 0::2], lead[..., 1::2]) if pairs else lead.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, t[..., width:]), dim=-1)

    products = torch.einsum("tbhd,sbd->bhts", turn(q), turn(k))
    products = products.relu() if relu else products
    scores = torch.einsum("tbh,bhts->bts", w, products)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf)


def best(scores, topk):
    """[S, B, K] by falling score, then rising index; -1 where a row sees fewer."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    chosen = order.indices.masked_fill(order.values == -torch.inf, -1)
    return chosen[..., :topk].transpose(0, 1).int()


def as_sets(chosen):
    return [set(row) for row in chosen.flatten(0, 1).tolist()]


def chosen_by(layer, x):
    book = IndexBook()
    layer(x, None, packed_seq_params=with_index_book(None, book))
    return book.chosen[1]


def normalised(layer, x):
    """The query latent, written out."""
    latent = x @ layer.linear_q_down_proj.weight.T
    scale = (latent.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return latent * scale * layer.q_layernorm.weight, latent


# 1 to 8 at position 3: four channels turn by 3 and 0.03 radians.
C, S, c, s = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
HALVES = [1 * C - 3 * S, 2 * c - 4 * s, 3 * C + 1 * S, 4 * c + 2 * s, 5, 6, 7, 8]
PAIRS = [1 * C - 2 * S, 3 * c - 4 * s, 2 * C + 1 * S, 4 * c + 3 * s, 5, 6, 7, 8]


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize(
    ("changes", "want", "other"),
    [
        ({}, HALVES, PAIRS),
        ({"dsa_indexer_rope_interleaved": False}, HALVES, PAIRS),
        ({"dsa_indexer_rope_interleaved": True}, PAIRS, HALVES),
    ],
    ids=["default", "halves", "pairs"],
)
def test_leading_channels_turn(changes, want, other, fused) -> None:
    if fused:
        pytest.importorskip("triton")
    sizes = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "qk_pos_emb_head_dim": 4}
    layer = dsa_layer(**sizes, **PLAIN, **changes, apply_rope_fusion=fused)
    indexer = layer.core_attention.indexer
    assert isinstance(indexer.rotary, FusedRotary) == fused
    ramp = torch.arange(1.0, 9.0)
    with torch.no_grad():
        indexer.linear_wq_b.weight.zero_()
        indexer.linear_wq_b.weight[:, 0] = ramp.repeat(2)  # both heads
        indexer.k_norm.weight.zero_()
        indexer.k_norm.bias.copy_(ramp)
    x, qr = hidden(4), torch.ones(4, 1, 28, device=indexer.k_norm.bias.device)
    q, k, _ = indexer(x, qr, rows_of(x))
    assert q.shape == (4, 1, 2, 8) and k.shape == (4, 1, 8)
    want, other = torch.tensor(want), torch.tensor(other)
    for got in (*q[3, 0], k[3, 0]):
        assert_close("position 3", got, want, rel=1e-6, reason="tables are made in fp32")
        assert (got.cpu() - other).abs().max() > 0.9
    # Nothing turns at position 0, but pairs leave as halves.
    if changes.get("dsa_indexer_rope_interleaved"):
        ramp = torch.tensor([1.0, 3, 2, 4, 5, 6, 7, 8])
    assert torch.equal(q[0, 0, 0].cpu(), ramp) and torch.equal(k[0, 0].cpu(), ramp)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(("percent", "width"), [(1.0, 8), (0.5, 4)])
def test_chosen_keys_are_those_of_the_equations(pairs, relu, percent, width) -> None:
    changes = {"dsa_indexer_rope_interleaved": pairs, "dsa_indexer_scoring_relu": relu}
    layer = dsa_layer(rotary_percent=percent, **changes)
    x = hidden(32, 2)
    qr, _ = normalised(layer, x)
    scores = by_hand(layer, x, qr, width=width, pairs=pairs, relu=relu)
    got = chosen_by(layer, x)
    assert got.dtype == torch.int32 and torch.equal(got.cpu(), best(scores, 5))
    for wrong in ({"pairs": not pairs}, {"relu": not relu}, {"width": 12 - width}):
        how = {"width": width, "pairs": pairs, "relu": relu, **wrong}
        assert not torch.equal(got.cpu(), best(by_hand(layer, x, qr, **how), 5)), wrong


def test_indexer_reads_the_normalised_latent() -> None:
    """The norm's weight is not constant: a constant one only scales the scores."""
    layer = dsa_layer(dsa_indexer_topk=4)
    with torch.no_grad():
        layer.q_layernorm.weight.copy_(torch.tensor([0.5, 2.0]).repeat(14))
    x = hidden(16)
    qr, latent = normalised(layer, x)
    got = chosen_by(layer, x).cpu()
    assert torch.equal(got, best(by_hand(layer, x, qr), 4))
    before_norm = best(by_hand(layer, x, latent / latent.std()), 4)
    assert as_sets(got) != as_sets(before_norm)


def test_main_attention_keeps_its_own_layout() -> None:
    x = hidden(24, 2)
    outputs = []
    for pairs in (False, True):
        layer = dsa_layer(dsa_indexer_rope_interleaved=pairs)
        own = chosen_by(layer, x)
        given = with_index_book(None, IndexBook(given={1: outputs[0][1] if outputs else own}))
        outputs.append((layer(x, None, packed_seq_params=given)[0], own))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize(
    ("fields", "epsilon"),
    [
        ({"layernorm_epsilon": 3e-6}, 3e-6),
        ({"layernorm_epsilon": 3e-6, "dsa_indexer_k_norm_epsilon": None}, 3e-6),
        ({"layernorm_epsilon": 3e-6, "dsa_indexer_k_norm_epsilon": 0.5}, 0.5),
        ({"mla_latent_norm_epsilon": 0.1}, 1e-5),
    ],
    ids=str,
)
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_keys_have_a_layer_norm_with_its_own_epsilon(fields, epsilon, fp32, normalization) -> None:
    layer = dsa_layer(
        **PLAIN,
        **fields,
        normalization=normalization,
        dsa_indexer_k_norm_fp32=fp32,
        no_rope_freq=[1],  # k is what the norm gives
    )
    indexer = layer.core_attention.indexer
    assert type(indexer.k_norm) is torch.nn.LayerNorm
    (_, k, _), x, _ = index(layer)
    of = dict(indexer.k_norm.named_parameters())
    assert of.keys() == {"weight", "bias"}
    before = x @ indexer.linear_wk.weight.T
    centred = before - before.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    want = want * of["weight"] + of["bias"]
    assert_close("keys", k, want, rel=1e-6, reason="another order of sums")
    assert layer.config.normalization == normalization  # only the indexer's copy is changed


@pytest.mark.parametrize("fp32", [False, True])
def test_precision_of_the_norm(fp32, monkeypatch) -> None:
    seen, layer_norm = [], F.layer_norm
    layer = dsa_layer(**PLAIN, **BF16, dsa_indexer_k_norm_fp32=fp32, no_rope_freq=[1])

    def spy(t, *args, **kwargs):
        seen.append(t.dtype)
        return layer_norm(t, *args, **kwargs)

    monkeypatch.setattr(F, "layer_norm", spy)
    (_, k, _), x, _ = index(layer, dtype=torch.bfloat16)
    norm = layer.core_attention.indexer.k_norm
    assert norm.weight.dtype == k.dtype == torch.bfloat16
    wide = (lambda t: t.float()) if fp32 else (lambda t: t)
    before = F.linear(x, layer.core_attention.indexer.linear_wk.weight)
    want = layer_norm(wide(before), (16,), wide(norm.weight), wide(norm.bias), norm.eps)
    assert torch.equal(k, want.bfloat16())
    assert set(seen) == {torch.float32 if fp32 else torch.bfloat16}


def test_hadamard_keeps_the_products_and_needs_no_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_hadamard_transform", None)  # importing it fails
    turned, plain = dsa_layer(), dsa_layer(**PLAIN)
    (q, k, w), *_ = index(turned)
    (q0, k0, w0), *_ = index(plain)
    assert torch.equal(w, w0)
    products, products0 = (torch.einsum("tbhd,sbd->bths", *t) for t in ((q, k), (q0, k0)))
    assert_close("products", products, products0, rel=1e-6, reason="another order of sums")
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix = (matrix / 4).to(q.device)
    for name, got, before in (("q", q, q0), ("k", k, k0)):
        assert_close(name, got, before @ matrix, rel=1e-6, reason="another order of sums")
        assert not torch.allclose(got, before, atol=0.1)


def test_weights_are_rounded_after_each_scale() -> None:
    layer = dsa_layer(**BF16, dsa_indexer_head_dim=8)  # neither scale is a power of two
    (_, _, w), x, _ = index(layer, rows=64, dtype=torch.bfloat16)
    raw = F.linear(x, layer.core_attention.indexer.linear_weights_proj.weight)
    assert w.dtype == torch.bfloat16
    assert torch.equal(w, (raw * 3**-0.5) * 8**-0.5)
    assert not torch.equal(w, raw * (3**-0.5 * 8**-0.5))
    assert not torch.equal(w, (raw.float() * 3**-0.5 * 8**-0.5).bfloat16())


def test_weights_in_fp32() -> None:
    layer = dsa_layer(**BF16, dsa_indexer_head_dim=8, dsa_indexer_weights_fp32=True)
    (q, _, w), x, _ = index(layer, rows=64, dtype=torch.bfloat16)
    weight = layer.core_attention.indexer.linear_weights_proj.weight
    assert weight.dtype == q.dtype == torch.bfloat16 and w.dtype == torch.float32
    assert torch.equal(w, F.linear(x.float(), weight.float()) * 3**-0.5 * 8**-0.5)
    assert not torch.equal(w, w.bfloat16().float())


def test_parameters() -> None:
    layer = dsa_layer()
    shapes = {n: tuple(p.shape) for n, p in layer.core_attention.named_parameters()}
    assert shapes == {
        "indexer.linear_wq_b.weight": (3 * 16, 28),
        "indexer.linear_wk.weight": (16, 48),
        "indexer.k_norm.weight": (16,),
        "indexer.k_norm.bias": (16,),
        "indexer.linear_weights_proj.weight": (3, 48),
    }
    tensors = {k for k, v in layer.state_dict().items() if v is not None and "indexer" in k}
    assert tensors == {f"core_attention.{name}" for name in shapes}


@pytest.mark.parametrize("lengths", [None, [5, 0, 3]], ids=["sbhd", "thd"])
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("numerics", ["megatron", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_rotation_has_the_eager_bits(dtype, numerics, pairs, lengths) -> None:
    pytest.importorskip("triton")
    changes = {"mla_rope_numerics": numerics, "dsa_indexer_rope_interleaved": pairs}
    changes |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    answers = []
    for fused in (False, True):
        layer = dsa_layer(**changes, apply_rope_fusion=fused)
        indexer = layer.core_attention.indexer
        assert isinstance(indexer.rotary, FusedRotary) == fused
        scored, *_ = index(layer, batch=1 if lengths else 2, dtype=dtype, lengths=lengths)
        sum((t.float() * t.detach().float().cos()).sum() for t in scored).backward()
        answers.append([*scored, *(p.grad for p in indexer.parameters())])
    for eager, fused in zip(*answers, strict=True):
        assert eager.abs().max() > 0 and torch.equal(eager, fused)
