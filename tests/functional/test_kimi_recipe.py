"""Whole runs of Kimi Linear: splits, resuming, and a loss that falls."""

from __future__ import annotations

import shutil

import pytest

from tests.functional.test_recipe import (
    assert_same_checkpoint,
    checkpoint,
    logged,
    train_alone,
    train_on,
)
from tests.helpers.launch import under_torchrun

NAME = "kimi_linear_debug"
SHORT = ("--train-iters", "12", "--lr-warmup-iters", "4", "--eval-interval", "6")
# The short runs have two layers.
SHORT += ("--mla-full-attn-layers", "[2]", "--moe-layer-freq", "[0, 1]")
SAVING = ("--save-interval", "6", "--keep-last", "0")

pytestmark = pytest.mark.skipif(under_torchrun(), reason="starts its own ranks")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    train_alone(NAME, folder, *SHORT, *SAVING)
    return folder


def test_loss_falls(one_rank):
    losses = list(logged(one_rank, "valid_loss").values())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1.5, losses


def test_tp2_equals_one_rank(one_rank, tmp_path):
    """The same weights from the same seed, and the same steps, whoever holds the heads."""
    train_on(2, NAME, tmp_path, *SHORT)
    for name in ("loss", "grad_norm", "valid_loss"):
        values, reference = logged(tmp_path, name), logged(one_rank, name)
        assert list(values) == list(reference)
        # Twelve steps grow the last bits of sums in another order.
        assert list(values.values()) == pytest.approx(list(reference.values()), rel=1e-3), name


def test_resumed_run_goes_on_bit_for_bit(one_rank, tmp_path):
    shutil.copytree(checkpoint(one_rank, 6), checkpoint(tmp_path, 6))
    output = train_alone(NAME, tmp_path, *SHORT, *SAVING)
    assert "at step 6 (bit for bit)" in output
    assert_same_checkpoint(checkpoint(tmp_path, 12), checkpoint(one_rank, 12))
