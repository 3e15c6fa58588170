"""Small MLA layers for tests."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module

from megatron_mla import MLATransformerConfig
from megatron_mla.specs import mla_attention_spec

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
