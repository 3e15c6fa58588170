"""Specs build whole models without Transformer Engine: dense, experts, and the right errors."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention.kda import KimiDeltaAttention
from megatron_mla.attention.latent import LatentAttention
from megatron_mla.attention.mla import MLASelfAttention
from megatron_mla.specs import (
    _check_index_sharing,
    mla_attention_spec,
    mla_block_spec,
    mla_layer_spec,
    mla_mtp_block_spec,
)
from tests.helpers.layers import small_config

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": [0, 1],
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 16,
}


def gpt(config, spec):
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    ).to(torch.cuda.current_device())


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_gpt_trains_a_step_with_gradients_everywhere(single_rank, changes) -> None:
    config = small_config(num_layers=2, ffn_hidden_size=32, gated_linear_unit=True, **changes)
    model = gpt(config, mla_block_spec(config))
    attentions = [m for m in model.modules() if isinstance(m, MLASelfAttention)]
    assert [a.layer_number for a in attentions] == [1, 2]
    assert sum(type(m).__name__ == "MoELayer" for m in model.modules()) == bool(changes)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (2, 16), generator=generator).to(torch.cuda.current_device())
    loss = model(tokens, None, None, labels=tokens).mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if "experts.local_experts" not in name:  # an expert that no token chose has none
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_layer_spec_builds_a_layer(single_rank) -> None:
    config = small_config(num_layers=1, ffn_hidden_size=32)
    model = gpt(config, mla_layer_spec(config))
    assert any(isinstance(m, MLASelfAttention) for m in model.modules())


def test_norms_carry_the_mark_of_sequence_parallelism(single_rank) -> None:
    from megatron_mla.attention.projections import LocalNorm

    for on in (False, True):
        tp = 2 if on else 1
        norm = LocalNorm(small_config(sequence_parallel=on, tensor_model_parallel_size=tp), 8)
        assert norm.weight.sequence_parallel is on
    layer_norm = LocalNorm(small_config(normalization="LayerNorm"), 8)
    assert isinstance(layer_norm, torch.nn.LayerNorm)


def test_te_without_te_is_an_error_with_the_reason(monkeypatch) -> None:
    from megatron_mla import specs

    monkeypatch.setattr(specs, "te_missing_reason", lambda: "it is not installed here")
    for changes in ({"transformer_impl": "transformer_engine"}, {"mla_core_attention": "te"}):
        with pytest.raises(ImportError, match=r"not installed here.*megatron-mla\[te\]"):
            mla_attention_spec(small_config(**changes))


DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 4,
}


@pytest.mark.parametrize(
    ("layers", "source"),
    [(range(1, 7), None), (range(7, 11), None), (range(5, 9), (5, 3)), (range(8, 9), (8, 7))],
    ids=str,
)
def test_stage_that_shares_another_stages_indices_is_refused(layers, source) -> None:
    """GLM-5.2: layers 1, 2, 3, 7, 11, ... choose."""
    config = small_config(
        **DSA, num_layers=12, dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3
    )
    if source is None:
        _check_index_sharing(config, layers)
        return
    with pytest.raises(ValueError, match="layer {} of the stage .* layer {};".format(*source)):
        _check_index_sharing(config, layers)


def test_pipeline_split_of_shared_indices_is_checked_where_specs_are_made(single_rank) -> None:
    fields = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    config = small_config(**DSA, **fields, dsa_indexer_topk_freq=2)
    assert len(mla_block_spec(config, pp_rank=1).layer_specs) == 2
    config = small_config(**DSA, **fields, dsa_indexer_topk_freq=4)
    mla_block_spec(config, pp_rank=0)
    with pytest.raises(ValueError, match="begin with a layer that chooses"):
        mla_block_spec(config, pp_rank=1)


@pytest.mark.parametrize("sparse", [False, True], ids=["mla", "dsa"])
def test_mtp_layers_are_counted_after_the_decoder(sparse, single_rank) -> None:
    from megatron.core.models.gpt import GPTModel

    from megatron_mla.attention.index_sharing import IndexBook, with_index_book
    from megatron_mla.attention.indexer_loss import IndexerLossLog
    from tests.helpers.layers import packed

    dsa = {**DSA, "dsa_indexer_loss_coeff": 1.0, "dsa_indexer_topk_freq": 2} if sparse else {}
    config = small_config(**dsa, **{"num_layers": 2, "mtp_num_layers": 1})
    block = mla_block_spec(config)
    model = GPTModel(
        config,
        transformer_layer_spec=block,
        mtp_block_spec=mla_mtp_block_spec(config, block),
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="none",
    ).to(torch.cuda.current_device())
    numbers = [m.layer_number for m in model.modules() if isinstance(m, LatentAttention)]
    assert numbers == [1, 2, 3]
    log = IndexerLossLog(3, torch.cuda.current_device())
    log.attach(model)
    tokens = torch.arange(16, device=torch.cuda.current_device())[None]
    book = IndexBook()
    params = with_index_book(packed([12, 4]), book)
    loss = model(tokens, None, None, labels=tokens, packed_seq_params=params)
    loss.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert set(log.read()) == set(book.chosen) == ({1, 3} if sparse else set())


def test_mtp_layer_that_would_share_indices_is_refused(single_rank) -> None:
    config = small_config(**DSA, **{"num_layers": 3, "mtp_num_layers": 1}, dsa_indexer_topk_freq=4)
    with pytest.raises(ValueError, match="layer 4 of the stage .* layer 1;"):
        mla_mtp_block_spec(config, mla_block_spec(config))


KDA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "no_rope_freq": 1,
}
KIMI_LINEAR = [4, 8, 12, 16, 20, 24, 27]  # full_attn_layers of its checkpoint


@pytest.mark.parametrize("stages", [1, 3, 9])
def test_layers_of_kimi_linear_stand_where_its_checkpoint_says(stages, single_rank) -> None:
    fields = {"num_layers": 27, "pipeline_model_parallel_size": stages}
    config = small_config(
        **KDA, **fields, pipeline_dtype=torch.float32, mla_full_attn_layers=KIMI_LINEAR
    )
    kinds = []
    for stage in range(stages):
        block = mla_block_spec(config, pp_rank=stage)
        kinds += [layer.submodules.self_attention.module for layer in block.layer_specs]
    assert len(kinds) == 27
    assert [n for n, kind in enumerate(kinds, 1) if kind is MLASelfAttention] == KIMI_LINEAR
    assert kinds.count(KimiDeltaAttention) == 20


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_hybrid_trains_a_step_with_gradients_everywhere(single_rank, changes) -> None:
    changes = {**changes, "moe_layer_freq": [0, 1, 1]} if changes else {}
    config = small_config(
        **KDA,
        num_layers=3,
        mla_full_attn_layers=[2],
        ffn_hidden_size=32,
        gated_linear_unit=True,
        **changes,
    )
    model = gpt(config, mla_block_spec(config))
    kinds = [type(layer.self_attention) for layer in model.decoder.layers]
    assert kinds == [KimiDeltaAttention, MLASelfAttention, KimiDeltaAttention]
    assert [layer.self_attention.layer_number for layer in model.decoder.layers] == [1, 2, 3]
    assert not model.decoder.layers[1].self_attention.has_rope
    tokens = torch.arange(16, device=torch.cuda.current_device())[None]
    model(tokens, None, None, labels=tokens).mean().backward()
    for name, parameter in model.named_parameters():
        if "experts.local_experts" not in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("full", [[2], [1]], ids=["mla", "kda"])
def test_mtp_layer_is_like_the_last_layer(full, single_rank) -> None:
    from megatron.core.models.gpt import GPTModel

    config = small_config(**KDA, num_layers=2, mtp_num_layers=1, mla_full_attn_layers=full)
    block = mla_block_spec(config)
    model = GPTModel(
        config,
        transformer_layer_spec=block,
        mtp_block_spec=mla_mtp_block_spec(config, block),
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="none",
    ).to(torch.cuda.current_device())
    layers = [m for m in model.modules() if isinstance(m, LatentAttention | KimiDeltaAttention)]
    assert sorted(m.layer_number for m in layers) == [1, 2, 3]
    by_number = {m.layer_number: type(m) for m in layers}
    assert by_number[3] is by_number[2] is not by_number[1]
    tokens = torch.arange(16, device=torch.cuda.current_device())[None]
    model(tokens, None, None, labels=tokens).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_hybrid_with_sparse_attention_chooses_keys_in_its_mla_layers(single_rank) -> None:
    config = small_config(**DSA, **KDA, num_layers=2, mla_full_attn_layers=[2])
    model = gpt(config, mla_block_spec(config))
    kinds = [type(layer.self_attention).__name__ for layer in model.decoder.layers]
    assert kinds == ["KimiDeltaAttention", "DSASelfAttention"]
    tokens = torch.arange(16, device=torch.cuda.current_device())[None]
    loss = model(tokens, None, None, labels=tokens).mean()
    loss.backward()
    assert torch.isfinite(loss)
