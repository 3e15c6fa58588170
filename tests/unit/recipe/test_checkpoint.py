"""A checkpoint is whole or not there, and comes back bit for bit."""

import json

import pytest
import torch

from megatron_mla.recipe import checkpoint, schema
from megatron_mla.recipe.checkpoint import Layout, Progress, whole_checkpoints
from megatron_mla.recipe.loop import bare
from megatron_mla.recipe.model import make_config, make_model
from megatron_mla.recipe.optim import make_optimizer

from .test_model import MODEL

LAYOUT = Layout(
    world_size=1,
    tensor_model_parallel_size=1,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    device="cpu",
)
pytestmark = [
    pytest.mark.usefixtures("single_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU's optimiser"),
]


def make(**model):
    run = schema.build_run({"model": {**MODEL, **model}, "data": {"vocab_size": 32}})
    wrapped = make_model(make_config(run, on_gpu=False), run, on_gpu=False)
    return wrapped, make_optimizer(wrapped, run, on_gpu=False)


def step(wrapped, optimizer):
    """One update from gradients that the default generator draws."""
    for param in wrapped.parameters():
        param.main_grad.copy_(torch.randn_like(param))
    optimizer.step()


def tensors(wrapped, optimizer):
    moments = [
        optimizer._adamw.state[p][n]
        for p in wrapped.parameters()
        for n in ("exp_avg", "exp_avg_sq", "step")
    ]
    return [*wrapped.state_dict().values(), *moments]


@pytest.fixture
def saved(tmp_path):
    wrapped, optimizer = make()
    step(wrapped, optimizer)
    progress = Progress(iteration=7, consumed_samples=56)
    path = checkpoint.save(tmp_path, bare(wrapped), optimizer, progress, LAYOUT)
    return path, wrapped, optimizer


def test_everything_comes_back(saved):
    path, wrapped, optimizer = saved
    step(wrapped, optimizer)  # with random numbers from where the checkpoint was written
    torch.manual_seed(99)
    other, other_optimizer = make()
    progress, exact = checkpoint.load(path, bare(other), other_optimizer, LAYOUT)
    assert progress == Progress(iteration=7, consumed_samples=56) and exact
    step(other, other_optimizer)
    for got, expected in zip(
        tensors(other, other_optimizer), tensors(wrapped, optimizer), strict=True
    ):
        assert got is None or torch.equal(got, expected)


def test_weights_alone_start_at_step_0(saved):
    path, wrapped, _ = saved
    other, _ = make()
    assert checkpoint.load(path, bare(other), None, LAYOUT) == (Progress(), False)
    for got, expected in zip(other.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_folder_looks_like_megatrons(saved):
    path, *_ = saved
    assert path.name == "iter_0000007"
    assert (path.parent / checkpoint.TRACKER).read_text() == "7\n"
    record = json.loads((path / "run.json").read_text())
    assert record["consumed_samples"] == 56 and record["layout"]["world_size"] == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["iter_0000007", checkpoint.TRACKER]


def test_another_layout_takes_the_weights_and_not_the_random_states(saved):
    path, *_ = saved
    other, optimizer = make()
    before = torch.get_rng_state()
    elsewhere = Layout(**{**LAYOUT.__dict__, "world_size": 2})
    progress, exact = checkpoint.load(path, bare(other), optimizer, elsewhere)
    assert progress.iteration == 7 and not exact
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"num_layers": 3}, id="deeper"),
        pytest.param({"q_lora_rank": 8}, id="other-parameters"),
        pytest.param({"kv_lora_rank": 24}, id="wider"),
    ],
)
def test_another_model_is_refused(saved, model):
    path, *_ = saved
    with pytest.raises(ValueError, match="does not fit this model"):
        checkpoint.load(path, bare(make(**model)[0]), None, LAYOUT)


def test_fewer_layers_are_refused(saved):
    path, *_ = saved
    other, optimizer = make(num_layers=1)
    with pytest.raises(ValueError, match="does not fit this model"):
        checkpoint.load(path, bare(other), optimizer, LAYOUT)


def test_another_format_is_refused(saved):
    path, wrapped, optimizer = saved
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(ValueError, match="has format 2, this version reads 1"):
        checkpoint.load(path, bare(wrapped), optimizer, LAYOUT)


def test_unfinished_folders_are_no_checkpoints(tmp_path):
    for name in ("iter_0000001", "iter_0000003", "iter_x", ".unfinished_iter_0000009"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["iter_0000001", "iter_0000003"]
    assert whole_checkpoints(tmp_path / "none") == []


def test_a_save_that_fails_leaves_the_last_one(saved, monkeypatch):
    path, wrapped, optimizer = saved

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(path.parent, bare(wrapped), optimizer, Progress(iteration=8), LAYOUT)
    assert whole_checkpoints(path.parent) == [path]
    monkeypatch.undo()
    again = checkpoint.save(path.parent, bare(wrapped), optimizer, Progress(iteration=8), LAYOUT)
    assert whole_checkpoints(path.parent) == [path, again]
    assert not list(path.parent.glob(".unfinished*"))


def test_old_checkpoints_are_removed_last(saved):
    path, wrapped, optimizer = saved
    for iteration in (8, 9):
        checkpoint.save(
            path.parent,
            bare(wrapped),
            optimizer,
            Progress(iteration=iteration),
            LAYOUT,
            keep_last=2,
        )
    assert [p.name for p in whole_checkpoints(path.parent)] == ["iter_0000008", "iter_0000009"]
    assert not list(path.parent.glob(".removed*"))


def test_no_pickle_but_tensors(saved):
    path, *_ = saved
    states = torch.load(path / "rng_00000.pt", weights_only=True)
    assert {"cpu", "device", "tracker/model-parallel-rng"} <= states.keys()
    assert all(state.dtype == torch.uint8 for state in states.values())
