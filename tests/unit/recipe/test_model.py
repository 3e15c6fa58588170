"""A run is checked before anything starts, and its loss counts every token once."""

from types import SimpleNamespace

import pytest
import torch

from megatron_mla.recipe import flags, schema
from megatron_mla.recipe.model import check_run, make_config, token_loss

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}


def run_of(**sections):
    return schema.build_run({"model": dict(MODEL), **sections})


TP2_CP2 = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}


@pytest.mark.parametrize(
    ("sections", "ranks", "message"),
    [
        pytest.param({"parallel": TP2_CP2}, 6, "multiple of .* = 2 \\* 2, got 6", id="ranks"),
        pytest.param({}, 3, "global_batch_size must be a multiple of .* = 1 \\* 3", id="batch"),
        pytest.param(
            {"parallel": TP2_CP2, "data": {"seq_length": 30}},
            4,
            "data.seq_length must be a multiple of 2 \\* context_parallel_size = 4, got 30",
            id="zigzag",
        ),
        pytest.param(
            {"parallel": TP2_CP2, "data": {"seq_length": 30, "packing": True}},
            4,
            "data.seq_length must be a multiple of 8 .* packing_multiple = 8; got 30",
            id="zigzag-packed",
        ),
        pytest.param(
            {
                "parallel": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
                "data": {"seq_length": 30},
            },
            4,
            "data.seq_length must be a multiple of 4 for tensor_model_parallel_size = 4",
            id="sequence-parallel",
        ),
        pytest.param(
            {"parallel": {"tensor_model_parallel_size": 2}, "data": {"vocab_size": 257}},
            2,
            "data.vocab_size must be a multiple of tensor_model_parallel_size = 2, got 257",
            id="vocabulary",
        ),
        pytest.param(
            {"data": {"valid_fraction": 1.0}}, 1, "valid_fraction must lie between", id="held-out"
        ),
        pytest.param({"optimizer": {"min_lr": 1.0}}, 1, "min_lr must lie between", id="min-lr"),
        pytest.param(
            {"optimizer": {"lr_warmup_iters": 100}}, 1, "below .* = 100, got 100", id="warm-up"
        ),
        pytest.param({"training": {"bf16": True}}, 1, "needs a GPU.*--no-bf16", id="bf16-on-cpu"),
        pytest.param({"training": {"train_iters": 0}}, 1, "train_iters must be at least 1", id="0"),
        pytest.param(
            {"checkpoint": {"save_interval": 0}}, 1, "save_interval must be at least 1", id="save"
        ),
        pytest.param(
            {"logging": {"profile": True, "profile_step_end": 101}},
            1,
            "at most train_iters = 100; got 4 and 101",
            id="profile",
        ),
    ],
)
def test_impossible_run_is_refused(sections, ranks, message):
    with pytest.raises(ValueError, match=message):
        check_run(run_of(**sections), ranks, on_gpu=False)


def test_possible_run_is_not():
    check_run(run_of(), 1, on_gpu=False)
    check_run(run_of(parallel=TP2_CP2), 8, on_gpu=False)
    check_run(run_of(training={"bf16": True}), 1, on_gpu=True)


def test_config_has_the_family_defaults_unless_the_run_says_otherwise():
    config = make_config(run_of(), on_gpu=False)
    assert config.gated_linear_unit and not config.add_bias_linear and config.hidden_dropout == 0
    assert config.activation_func is torch.nn.functional.silu
    assert config.use_cpu_initialization and config.params_dtype is torch.float32
    other = schema.build_run({"model": {**MODEL, "activation_func": "gelu", "hidden_dropout": 0.1}})
    config = make_config(other, on_gpu=True)
    assert config.activation_func is torch.nn.functional.gelu and config.hidden_dropout == 0.1
    assert not config.use_cpu_initialization


def test_sequence_parallelism_ends_with_tensor_parallelism():
    for size in (1, 2):
        parallel = {"tensor_model_parallel_size": size, "sequence_parallel": True}
        assert make_config(run_of(parallel=parallel), on_gpu=False).sequence_parallel == (size > 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param({"activation_func": "tanh"}, "must be one of silu, gelu, relu", id="act"),
        pytest.param({"num_attention_heads": 3}, "num_attention_heads", id="heads"),
        pytest.param({"qk_pos_emb_head_dim": 5}, "qk_pos_emb_head_dim must be even", id="odd"),
    ],
)
def test_impossible_model_is_refused(model, message):
    run = schema.build_run(
        {"model": {**MODEL, **model}, "parallel": {"tensor_model_parallel_size": 2}}
    )
    with pytest.raises(ValueError, match=message):
        make_config(run, on_gpu=False)


def test_token_loss_is_a_sum_over_unmasked_tokens():
    batch = SimpleNamespace(loss_mask=torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    losses = torch.tensor([[1.0, 2.0, 100.0, 4.0]], requires_grad=True)
    total, tokens, report = token_loss(batch, losses)
    total.backward()
    assert total.item() == 7 and tokens.item() == 3 and tokens.dtype == torch.int32
    assert report.tolist() == [7, 3]
    assert losses.grad.tolist() == [[1, 1, 0, 1]]


def test_rope_fusion_can_be_declined(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {MODEL}".replace("None", "null").replace("'", ""))
    run = flags.parse_run(["--config", str(path), "--no-rope-fusion"])
    assert make_config(run, on_gpu=False).apply_rope_fusion is False


def test_pipeline_stages_are_refused_by_name():
    run = schema.build_run({"model": {**MODEL, "pipeline_model_parallel_size": 2}})
    with pytest.raises(ValueError, match="pipeline_model_parallel_size must be 1.*got 2"):
        check_run(run, 2, on_gpu=False)
