"""Whole runs of sparse attention: splits, resuming, and the stages of an indexer's training."""

from __future__ import annotations

import pytest
import torch

from tests.functional.test_recipe import (
    assert_same_checkpoint,
    checkpoint,
    logged,
    train_alone,
    train_on,
)
from tests.helpers.launch import under_torchrun

NAME = "glm5_dsa_debug"
SHORT = ("--train-iters", "6", "--lr-warmup-iters", "2", "--eval-interval", "3")
FEW = ("--dsa-indexer-topk", "8", "--dsa-indexer-loss-coeff", "1.0")

pytestmark = pytest.mark.skipif(under_torchrun(), reason="starts its own ranks")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    train_alone(NAME, folder, *SHORT, *FEW, "--save-interval", "3", "--keep-last", "0")
    return folder


def weights(folder, iteration: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = folder / "weights.pt"
    dcp_to_torch_save(checkpoint(folder, iteration), path)
    found = {}

    def walk(prefix, value):
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)

    walk("", torch.load(path, weights_only=True))
    return found


def test_run_logs_the_indexers(one_rank):
    for name in ("indexer_loss", "indexer_loss_layer_1"):
        losses = logged(one_rank, name)
        assert list(losses) == [1, 2, 3, 4, 5, 6] and all(v > 0 for v in losses.values()), name
    assert not logged(one_rank, "indexer_loss_layer_2")  # it shares layer 1's keys
    overlap = logged(one_rank, "indexer_overlap")
    assert list(overlap) == [0, 3, 6] and all(0 < v < 1 for v in overlap.values())


def test_tp2_cp2_equals_one_rank(one_rank, tmp_path):
    train_on(4, NAME, tmp_path, *SHORT, *FEW)
    for name in ("loss", "grad_norm", "valid_loss", "indexer_loss", "indexer_overlap"):
        values, reference = logged(tmp_path, name), logged(one_rank, name)
        assert list(values) == list(reference)
        # Scores that differ in their last bits may order two keys otherwise.
        assert list(values.values()) == pytest.approx(list(reference.values()), rel=1e-3), name


def test_resumed_run_goes_on_bit_for_bit(one_rank, tmp_path):
    import shutil

    shutil.copytree(checkpoint(one_rank, 3), checkpoint(tmp_path, 3))
    output = train_alone(NAME, tmp_path, *SHORT, *FEW, "--save-interval", "3", "--keep-last", "0")
    assert "at step 3 (bit for bit)" in output
    assert_same_checkpoint(checkpoint(tmp_path, 6), checkpoint(one_rank, 6))


def test_warm_up_trains_the_indexer_alone_and_hands_over(tmp_path):
    warm, joint = tmp_path / "warm", tmp_path / "joint"
    stage = ("--dsa-indexer-stage", "warmup")
    train_alone(NAME, warm, *SHORT, *FEW, *stage, "--save-interval", "3", "--keep-last", "0")
    before, after = weights(warm, 3), weights(warm, 6)
    changed = {n for n in before if n.startswith(".decoder") and not before[n].equal(after[n])}
    assert changed and all(".indexer." in name for name in changed)
    states = {name for name in before if "exp_avg" in name}
    assert states and all(".indexer." in name for name in states)
    losses = list(logged(warm, "indexer_loss").values())
    assert losses[-1] < losses[0]

    load = ("--load", str(checkpoint(warm, 6)), "--no-load-optim")
    output = train_alone(NAME, joint, *SHORT, *FEW, *load, "--save-interval", "3")
    assert "held-out" in output
    assert logged(joint)[1] == pytest.approx(logged(warm)[6], rel=0.5)
    assert any("linear_proj" in name and "exp_avg" in name for name in weights(joint, 6))


def test_frozen_indexer_stays_as_it_is(tmp_path):
    stage = ("--dsa-indexer-stage", "frozen")
    train_alone(NAME, tmp_path, *SHORT, *FEW, *stage, "--save-interval", "3", "--keep-last", "0")
    before, after = weights(tmp_path, 3), weights(tmp_path, 6)
    for name in before:
        if name.startswith(".decoder"):
            assert before[name].equal(after[name]) is (".indexer." in name), name
    assert not logged(tmp_path, "indexer_loss") and logged(tmp_path, "indexer_overlap")
