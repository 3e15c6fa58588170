"""Small GPT models that write varied text, and text without a cache to compare with."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_mla.attention.index_sharing import install_index_books
from megatron_mla.specs import mla_block_spec
from tests.helpers.layers import small_config

VOCABULARY = 64
PROMPTS = [[5, 9, 33, 2, 7, 61, 12], [40], [8, 8, 3, 19]]


def small_gpt(num_layers: int = 3, **changes) -> torch.nn.Module:
    """GPTModel in evaluation mode, with weights large enough that no two bytes look alike."""
    config = small_config(
        num_layers=num_layers,
        ffn_hidden_size=64,
        gated_linear_unit=True,
        normalization="RMSNorm",
        init_method_std=0.3,
        use_cpu_initialization=not torch.cuda.is_available(),
        **changes,
    )
    model = GPTModel(
        config,
        transformer_layer_spec=mla_block_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    if config.dsa_indexer_topk_freq > 1:
        install_index_books(model)
    return model.to(torch.cuda.current_device()).eval()


@torch.no_grad()
def assert_greedy(model, prompts, texts) -> None:
    """Every token is the likeliest one in a forward pass, without a cache, over all before it."""
    for prompt, text in zip(prompts, texts, strict=True):
        row = torch.tensor([[*prompt, *text[:-1]]], device=torch.cuda.current_device())
        likeliest = model(row, None, None)[0, len(prompt) - 1 :].argmax(-1)
        assert likeliest.tolist() == list(text)


def collected(passes) -> list[list[int]]:
    """Tokens of every sequence, from what :func:`generate` yields."""
    return [list(tokens) for tokens in zip(*passes, strict=True)]
