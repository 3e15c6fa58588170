"""Small MLA layers for tests."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module

from megatron_mla import MLATransformerConfig
from megatron_mla.specs import mla_attention_spec
from tests.helpers.close import assert_close

SMALL = {
    "num_layers": 1,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 20,
    "rope_type": "rope",
    "qk_layernorm": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "apply_rope_fusion": False,
}


DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 5,
    "dsa_indexer_loss_coeff": 0.5,
    "dsa_kernel_backend": "none",
}
# Prefix of the names of the indexer's parameters.
INDEXER = "core_attention.indexer."


def small_config(**changes) -> MLATransformerConfig:
    """A valid small configuration with some fields changed."""
    return MLATransformerConfig(**{**SMALL, **changes})


def small_layer(layer_number: int = 1, **changes) -> torch.nn.Module:
    """An attention layer with random weights, the norms' too; needs the ``single_rank`` fixture."""
    config = small_config(**changes)
    layer = build_module(mla_attention_spec(config), config=config, layer_number=layer_number)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, weight in sorted(layer.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5)
    return layer.to(torch.cuda.current_device())


def packed(lengths: list[int], padded: list[int] | None = None, *, dtype=torch.int32, device=None):
    """PackedSeqParams of these lengths over all ranks."""

    def cumulative(values: list[int]) -> torch.Tensor:
        total = torch.tensor([0, *torch.tensor(values).cumsum(0).tolist()])
        return total.to(dtype).to(device or torch.cuda.current_device())

    cu, cu_padded = cumulative(lengths), None if padded is None else cumulative(padded)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=max(lengths, default=0),
        max_seqlen_kv=max(lengths, default=0),
    )


def gradients(layer, x, grad, **kwargs):
    """Output, input gradient and weight gradients of one forward and backward."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out, _ = layer(x, None, **kwargs)
    out.backward(grad)
    return out.detach(), x.grad, {n: p.grad.clone() for n, p in layer.named_parameters()}


def dsa_layer(layer_number: int = 1, **changes) -> torch.nn.Module:
    """A small layer of sparse attention; needs the ``single_rank`` fixture."""
    return small_layer(layer_number, **{**DSA, **changes})


def hidden(rows: int = 24, batch: int = 1, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random hidden states of the small layers, [rows, batch, 48]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, batch, 48, generator=generator).to(torch.cuda.current_device(), dtype)


def trained_gradients(layer, x, grad, **kwargs):
    """As :func:`gradients`, for layers of which parts may be frozen: those have no gradient."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out, _ = layer(x, None, **kwargs)
    out.backward(grad)
    grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, grads


def assert_same_bits(got, want) -> None:
    """Output, input gradient and weight gradients of two runs are equal bit for bit."""
    assert torch.equal(got[0], want[0]), "output"
    assert torch.equal(got[1], want[1]), "input gradient"
    assert got[2].keys() == want[2].keys()
    for name, grad in want[2].items():
        assert torch.equal(got[2][name], grad), name


def without_indexer(answer):
    """Output, input gradient and the weight gradients of all but the indexer."""
    return *answer[:2], {n: g for n, g in answer[2].items() if not n.startswith(INDEXER)}


def dense_twin(layer, chosen=None, **changes) -> torch.nn.Module:
    """A dense layer with the weights of a layer of sparse attention, the oracle of its results.

    Args:
        chosen: [L, B, K], -1 for none: expanded attention, masked so that rows see these alone.
            None: absorbed attention over all keys.
        changes: fields of the layer; those of the indexer are left out.
    """
    changes = {name: value for name, value in changes.items() if not name.startswith("dsa")}
    twin = small_layer(mla_form="absorbed" if chosen is None else "expanded", **changes)
    weights = {n: w for n, w in layer.state_dict().items() if not n.startswith(INDEXER)}
    twin.load_state_dict(weights, strict=True)
    if chosen is not None:
        twin.core_attention = MaskedCore(chosen, layer.core_attention.softmax_scale)
    return twin


class MaskedCore(torch.nn.Module):
    """Core attention over all keys, with a mask that leaves each row the keys it has chosen."""

    def __init__(self, chosen, scale):
        super().__init__()
        self.chosen, self.scale = chosen.long(), scale

    def forward(self, query, key, value, rows):
        if rows.packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        slots = self.chosen.masked_fill(self.chosen < 0, len(key))
        mask = torch.zeros(*slots.shape[:2], len(key) + 1, dtype=torch.bool, device=key.device)
        mask = mask.scatter(2, slots, True)[..., :-1].unsqueeze(2)  # [L, B, 1, S]
        scores = torch.einsum("tbhe,sbhe->tbhs", query, key) * self.scale
        # A finite stand-in: rows without a key shall give 0.
        weights = scores.masked_fill(~mask, -1e30).softmax(-1) * mask
        out = torch.einsum("tbhs,sbhv->tbhv", weights, value).flatten(2)
        return out.squeeze(1) if rows.packed else out


def assert_close_answers(got, want) -> None:
    """Output, input gradient and weight gradients agree up to rounding (fp32)."""
    assert got[2].keys() == want[2].keys()
    names = "output", "input gradient", *got[2]
    pairs = zip((*got[:2], *got[2].values()), (*want[:2], *want[2].values()), strict=True)
    for name, pair in zip(names, pairs, strict=True):
        if pair[1].any():
            assert_close(name, *pair, rel=1e-5, reason="the same sums in another order")
        else:  # one key has weight 1 whatever the query: the truth is 0
            assert pair[0].abs().max() < 1e-5, name
