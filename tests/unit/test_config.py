"""MLATransformerConfig accepts what the layers support and refuses the rest by name."""

from __future__ import annotations

import dataclasses

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_mla import MLATransformerConfig
from tests.helpers.layers import small_config

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
}


def test_bare_mla_config_starts_with_fusion_on() -> None:
    config = MLATransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    assert config.apply_rope_fusion is True
    assert config.mla_rope_numerics == "megatron"


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
@pytest.mark.parametrize("variant", [{}, DSA], ids=["dense", "dsa"])
def test_fusion_is_accepted_with_every_rope_type_and_with_dsa(rope_type, variant) -> None:
    config = small_config(apply_rope_fusion=True, rope_type=rope_type, **variant)
    assert config.apply_rope_fusion is True
    assert dataclasses.replace(config, mla_latent_norm_epsilon=1e-6).apply_rope_fusion is True


def test_triton_backend_survives_stock_validation() -> None:
    assert small_config(**DSA, dsa_kernel_backend="triton").dsa_kernel_backend == "triton"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qk_pos_emb_head_dim", 33),
        ("qk_pos_emb_head_dim", -2),
        ("qk_head_dim", -1),
        ("v_head_dim", 0),
        ("kv_lora_rank", None),
        ("q_lora_rank", 0),
        ("num_layers", 0),
        ("num_query_groups", 2),
        ("rope_type", "alibi"),
        ("mla_rope_numerics", "bf16"),
        ("rotary_percent", 0.0),
        ("rotary_percent", 1.5),
        ("rotary_percent", float("nan")),
        ("rotary_percent", 0.125),  # leaves one channel of eight
        ("rotary_base", 1),
        ("softmax_scale", 0.0),
        ("softmax_scale", float("inf")),
        ("layernorm_epsilon", 0.0),
        ("mla_latent_norm_epsilon", -1e-6),
        ("attention_dropout", 1.0),
        ("mla_down_proj_parallelism", "row"),
        ("mla_core_attention", "flash"),
        ("attention_backend", AttnBackend.flash),
        ("transformer_impl", "inference_optimized"),
        ("dsa_kernel_backend", "cuda"),
        ("fp8", "e4m3"),
        ("layernorm_zero_centered_gamma", True),
        ("attention_output_gate", True),
        ("apply_query_key_layer_scaling", True),
        ("qk_l2_norm", True),
        ("qk_clip", True),
        ("softmax_type", "learnable"),
        ("window_size", (128, 0)),
        ("add_qkv_bias", True),
        ("use_mup", True),
        ("cache_mla_latents", True),
        ("mla_down_proj_fusion", True),
        ("delay_wgrad_compute", True),
        ("multi_latent_attention", False),
        ("experimental_attention_variant", "gated_delta_net"),
    ],
)
def test_bad_value_is_refused_by_name_with_a_way_out(field, value) -> None:
    with pytest.raises(ValueError, match=rf"{field}.*got .*;") as caught:
        small_config(**{field: value})
    assert (
        repr(value) in str(caught.value)
        or str(value) in str(caught.value)
        or "flash" in str(caught.value)
    )


@pytest.mark.parametrize(
    "field", ["dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"]
)
def test_missing_indexer_field_is_refused(field) -> None:
    with pytest.raises(ValueError, match=field):
        small_config(**{**DSA, field: None})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dsa_indexer_head_dim": 4}, "dsa_indexer_head_dim"),
        ({"dsa_indexer_head_dim": 24}, "dsa_indexer_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"dsa_indexer_loss_coeff": -1.0}, "dsa_indexer_loss_coeff"),
    ],
)
def test_indexer_fields_that_do_not_fit_are_refused(changes, field) -> None:
    with pytest.raises(ValueError, match=field):
        small_config(**{**DSA, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_attention_heads": 5, "tensor_model_parallel_size": 2}, "num_attention_heads"),
        (
            {
                "mla_down_proj_parallelism": "column",
                "tensor_model_parallel_size": 3,
                "num_attention_heads": 6,
            },
            r"kv_lora_rank \+ qk_pos_emb_head_dim",
        ),
        (
            {
                "mla_down_proj_parallelism": "column",
                "tensor_model_parallel_size": 2,
                "q_lora_rank": 27,
            },
            "q_lora_rank",
        ),
        ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, "cp_comm_type"),
        ({"context_parallel_size": 2, "cp_comm_type": ["a2a"]}, "cp_comm_type"),
    ],
)
def test_split_that_does_not_fit_is_refused(changes, field) -> None:
    with pytest.raises(ValueError, match=field):
        small_config(**changes)


def test_yarn_fields_are_checked_for_yarn_only() -> None:
    assert small_config(rope_type="rope", rotary_scaling_factor=0.5)
    for bad in (
        {"rotary_scaling_factor": 0.5},
        {"original_max_position_embeddings": 0},
        {"beta_fast": 1, "beta_slow": 2},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            small_config(rope_type="yarn", **bad)


def test_every_field_of_the_refusal_table_exists_and_defaults_are_supported() -> None:
    from megatron_mla.config_checks import SUPPORTED

    fields = {field.name: field for field in dataclasses.fields(MLATransformerConfig)}
    for name, (allowed, way_out) in SUPPORTED.items():
        assert fields[name].default in allowed
        assert way_out


def test_no_rope_freq_pattern() -> None:
    config = small_config(num_layers=8, no_rope_freq=4)
    assert [config.layer_has_rope(n) for n in range(1, 9)] == [True, True, True, False] * 2
    assert config.layer_has_rope(9)  # a multi-token-prediction layer behind the decoder
    nowhere = small_config(num_layers=8, no_rope_freq=1)
    assert not any(nowhere.layer_has_rope(n) for n in range(1, 10))


KDA = {
    "num_layers": 4,
    "mla_full_attn_layers": [4],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}


def test_layers_of_kimi_delta_attention_count_from_one() -> None:
    config = small_config(**KDA)
    assert [n for n in range(1, 6) if config.layer_has_mla(n)] == [4]
    assert all(small_config(num_layers=4).layer_has_mla(n) for n in range(1, 5))
    assert dataclasses.replace(config, layernorm_epsilon=1e-5).mla_full_attn_layers == [4]


def test_without_such_layers_their_fields_do_not_matter() -> None:
    odd = {"linear_num_key_heads": 3, "kda_gate_lower_bound": 1.0, "context_parallel_size": 2}
    small_config(**odd)
    small_config(**odd, num_layers=2, mla_full_attn_layers=[1, 2])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mla_full_attn_layers": [0, 4]}, "mla_full_attn_layers"),
        ({"mla_full_attn_layers": [5]}, "mla_full_attn_layers"),
        ({"mla_full_attn_layers": [3, 1]}, "mla_full_attn_layers"),
        ({"mla_full_attn_layers": [1, 1]}, "mla_full_attn_layers"),
        ({"mla_full_attn_layers": 4}, "mla_full_attn_layers"),
        ({"mla_full_attn_layers": ["4"]}, "mla_full_attn_layers"),
        ({"linear_num_value_heads": 8}, "linear_num_value_heads"),
        ({"linear_num_key_heads": 0, "linear_num_value_heads": 0}, "linear_num_key_heads"),
        (
            {
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 3,
                "tensor_model_parallel_size": 2,
            },
            "linear_num_key_heads",
        ),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"linear_value_head_dim": None}, "linear_value_head_dim"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"kda_gate_rank": 0}, "kda_gate_rank"),
        ({"kda_gate_lower_bound": 0.0}, "kda_gate_lower_bound"),
        ({"kda_gate_lower_bound": float("nan")}, "kda_gate_lower_bound"),
        ({"kda_output_gate": "none"}, "kda_output_gate"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"fp8": "hybrid", "transformer_impl": "transformer_engine"}, "fp8"),
        ({**DSA, "dsa_indexer_topk_freq": 2}, "dsa_indexer_topk_freq"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_kimi_delta_attention_that_cannot_be_is_refused_by_name(changes, field) -> None:
    with pytest.raises(ValueError, match=f"^{field} .*; "):
        small_config(**{**KDA, **changes})
