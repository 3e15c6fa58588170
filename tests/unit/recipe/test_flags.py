"""Every value of a run file has a flag, under Megatron-LM's name."""

import dataclasses

import pytest

from megatron_mla.recipe import flags, schema


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 64, apply_rope_fusion: true}\n"
        "data: {seq_length: 128}\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "section", "key", "value"),
    [
        (["--tensor-model-parallel-size", "2"], "parallel", "tensor_model_parallel_size", 2),
        (["--context-parallel-size", "2"], "parallel", "context_parallel_size", 2),
        (["--sequence-parallel"], "parallel", "sequence_parallel", True),
        (["--no-sequence-parallel"], "parallel", "sequence_parallel", False),
        (["--train-iters", "7"], "training", "train_iters", 7),
        (["--micro-batch-size=3"], "training", "micro_batch_size", 3),
        (["--bf16"], "training", "bf16", True),
        (["--seed", "5"], "training", "seed", 5),
        (["--seq-length", "64"], "data", "seq_length", 64),
        (["--data-path", "text"], "data", "data_path", "text"),
        (["--lr", "1e-4"], "optimizer", "lr", 1e-4),
        (["--lr-decay-style", "linear"], "optimizer", "lr_decay_style", "linear"),
        (["--save", "there"], "checkpoint", "save", "there"),
        (["--no-load-optim"], "checkpoint", "load_optim", False),
        (["--eval-interval", "9"], "training", "eval_interval", 9),
        (["--profile"], "logging", "profile", True),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flag_overrides_file(config, arguments, section, key, value):
    run = flags.parse_run(["--config", config, *arguments])
    assert getattr(getattr(run, section), key) == value


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--no-rope-fusion"], "apply_rope_fusion", False),
        (["--num-layers", "3"], "num_layers", 3),
        (["--q-lora-rank", "null"], "q_lora_rank", None),
        (["--num-experts", "4"], "num_moe_experts", 4),
        (["--norm-epsilon", "1e-6"], "layernorm_epsilon", 1e-6),
        (["--moe-router-topk", "2"], "moe_router_topk", 2),
        (["--moe-layer-freq", "[0, 1]"], "moe_layer_freq", [0, 1]),
        (["--softmax-scale=0.5"], "softmax_scale", 0.5),
        (["--qk-layernorm"], "qk_layernorm", True),
        (["--no-qk-layernorm"], "qk_layernorm", False),
        (["--disable-bias-linear"], "add_bias_linear", False),
        (["--swiglu", "--seed", "1"], "gated_linear_unit", True),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_model_flag_overrides_file(config, arguments, key, value):
    assert flags.parse_run(["--config", config, *arguments]).model[key] == value


def test_file_values_stay_without_a_flag(config):
    run = flags.parse_run(["--config", config])
    assert run.data.seq_length == 128
    assert run.model["apply_rope_fusion"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-iter", "7"], "did you mean --train-iters"),
        (["--kv-lora-rnk", "7"], "did you mean --kv-lora-rank"),
        (["--train-iters", "many"], "--train-iters: invalid int value: 'many'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--params-dtype", "x"], "model.params_dtype is not set here"),
        (["--hidden-size", "wide"], "model.hidden_size must be of type int"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_flag_is_refused(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        flags.parse_run(["--config", config, *arguments])


def test_config_is_needed():
    with pytest.raises(ValueError, match="required: --config"):
        flags.parse_run([])


def test_every_field_is_in_the_help(capsys):
    with pytest.raises(SystemExit) as leave:
        flags.parse_run(["--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    for section, cls in schema.SECTIONS.items():
        assert f"\n{section}:" in text
        for field in dataclasses.fields(cls):
            assert flags.flag_of(field) in text
    assert "--no-rope-fusion" in text
    assert "(default: 256)" in text
