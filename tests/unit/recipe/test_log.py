"""Logs: one JSON line per step, the same after a restart, and a sentence for what is missing."""

import importlib
import json

import pytest

from megatron_mla import selection
from megatron_mla.recipe import log
from megatron_mla.recipe.schema import Logging

VALUES = {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 10.0, "memory_bytes": 2**30}


def make(folder, *, done=0, active=True, **options):
    options = Logging(log_dir=str(folder), progress=False, tensorboard=False, **options)
    return log.Log(options, train_iters=4, done=done, active=active)


def test_lines_hold_every_digit(tmp_path):
    own = make(tmp_path)
    own.held_out(0, 5.5)
    own.step(1, {**VALUES, "loss": 1 / 3}, write=True)
    own.step(2, VALUES, write=False)
    own.close()
    assert log.read_log(own.jsonl, "loss") == {1: 1 / 3}
    assert log.read_log(own.jsonl, "valid_loss") == {0: 5.5}
    assert own.curve.stat().st_size > 1000


def test_restart_forgets_what_it_does_again(tmp_path):
    own = make(tmp_path)
    for iteration in (1, 2, 3):
        own.step(iteration, VALUES, write=True)
    own.jsonl.open("a").write('{"iteration": 4, "lo')  # killed while it wrote
    again = make(tmp_path, done=2)
    again.step(3, {**VALUES, "loss": 9.0}, write=True)
    again.close()
    assert log.read_log(again.jsonl, "loss") == {1: 2.5, 2: 2.5, 3: 9.0}


def test_fresh_start_begins_a_new_log(tmp_path):
    make(tmp_path).step(1, VALUES, write=True)
    own = make(tmp_path)
    own.close()
    assert own.jsonl.read_text() == ""


def test_other_ranks_write_nothing(tmp_path):
    own = make(tmp_path / "none", active=False)
    own.step(1, VALUES, write=True)
    own.held_out(1, 2.0)
    own.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("error", [ImportError, AttributeError])
@pytest.mark.parametrize("module", ["tqdm", "torch.utils.tensorboard", "matplotlib"])
def test_missing_or_broken_extra_is_said_in_one_line(tmp_path, monkeypatch, capsys, module, error):
    real = importlib.import_module

    def without(name):
        if name == module:
            raise error("half installed")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    selection.missing_reason.cache_clear()
    own = log.Log(Logging(log_dir=str(tmp_path)), train_iters=1, done=0, active=True)
    own.step(1, VALUES, write=True)
    own.close()
    selection.missing_reason.cache_clear()
    lines = [line for line in capsys.readouterr().out.splitlines() if "half installed" in line]
    assert len(lines) == 1
    assert module in lines[0] and "pip install 'megatron-mla[train]'" in lines[0]
    assert json.loads(own.jsonl.read_text())["loss"] == 2.5


def test_curve_has_a_panel_for_each_value_of_the_indexers(tmp_path, monkeypatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    seen = []
    subplots = pyplot.subplots
    monkeypatch.setattr(pyplot, "subplots", lambda n, **how: seen.append(n) or subplots(n, **how))
    for folder, extra in (("plain", {}), ("sparse", {"indexer_loss": 0.5})):
        own = make(tmp_path / folder)
        own.held_out(0, 3.0, {"indexer_overlap": 0.25} if extra else None)
        own.step(1, {"loss": 2.0, **extra}, write=True)
        own.close()
        assert own.curve.is_file()
    assert seen == [1, 3]
    assert log.read_log(tmp_path / "sparse" / "log.jsonl", "indexer_overlap") == {0: 0.25}
