"""A run file is read strictly."""

import dataclasses

import pytest

from megatron_mla.recipe import schema

MODEL = {"num_layers": 2, "hidden_size": 64}


def run_of(**sections):
    return schema.build_run({"model": dict(MODEL), **sections})


def test_sections_become_a_run():
    run = run_of(data={"seq_length": 512}, optimizer={"lr": "1e-3"}, training={"bf16": True})
    assert run.model == MODEL
    assert run.data.seq_length == 512
    assert run.optimizer.lr == 1e-3  # YAML 1.1 reads 1e-3 as text
    assert run.training.bf16 is True
    assert run.checkpoint == schema.Checkpoint()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        pytest.param({"data": {"seq_len": 1}}, "did you mean seq_length", id="key"),
        pytest.param({"trainign": {}}, "did you mean training", id="section"),
        pytest.param(
            {"model": {**MODEL, "kv_lora_rnk": 1}}, "did you mean kv_lora_rank", id="model-key"
        ),
        pytest.param({"data": {"zzzz": 1}}, "known: data_path, packing", id="nothing-near"),
    ],
)
def test_unknown_name_names_nearest(tree, message):
    with pytest.raises(ValueError, match=message):
        schema.build_run({"model": dict(MODEL), **tree})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        pytest.param({"data": {"seq_length": "long"}}, "data.seq_length must be", id="text"),
        pytest.param({"data": {"seq_length": True}}, "must be an integer", id="bool-for-int"),
        pytest.param({"data": {"packing": 1}}, "data.packing must be of type bool", id="int"),
        pytest.param({"optimizer": {"lr": "fast"}}, "optimizer.lr must be a number", id="float"),
        pytest.param({"optimizer": {"lr_decay_style": "step"}}, "cosine, linear", id="choice"),
        pytest.param({"data": [1]}, "section data must be a mapping", id="list"),
        pytest.param({"checkpoint": {"save_interval": "x"}}, "save_interval must be", id="union"),
        pytest.param(
            {"model": {**MODEL, "moe_router_topk": "two"}}, "model.moe_router_topk", id="model"
        ),
    ],
)
def test_wrong_type_is_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        schema.build_run({"model": dict(MODEL), **sections})


@pytest.mark.parametrize("key", ["bf16", "params_dtype", "tensor_model_parallel_size"])
def test_a_number_has_one_place(key):
    with pytest.raises(ValueError, match=f"model.{key} is not set here; set "):
        schema.build_run({"model": {**MODEL, key: 1}})


def test_model_is_needed():
    with pytest.raises(ValueError, match="needs a model: section"):
        schema.build_run({"data": {}})


def test_every_field_has_a_help_text():
    for cls in schema.SECTIONS.values():
        assert cls.__doc__
        for field in dataclasses.fields(cls):
            assert len(field.metadata["help"]) > 10, field.name


def test_file_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        schema.read_yaml(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: [1, 2\n")
    with pytest.raises(ValueError, match=r"bad\.yaml is not valid YAML"):
        schema.read_yaml(bad)
    bad.write_text("- 1\n")
    with pytest.raises(ValueError, match="mapping of sections"):
        schema.read_yaml(bad)


def test_yaml_cannot_make_objects(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        schema.read_yaml(bad)
