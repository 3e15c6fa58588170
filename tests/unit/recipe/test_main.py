"""What a user got wrong is one line and exit code 2, before any rank or file exists."""

import os
import re
from pathlib import Path

import pytest
import torch

from megatron_mla.recipe.main import main

CONFIG = str(Path(__file__).parents[3] / "configs" / "mla_debug_cpu.yaml")
ALONE = ["--tensor-model-parallel-size", "1", "--context-parallel-size", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--config", "none.yaml"], "none.yaml: no such file", id="config"),
        pytest.param(["--config", CONFIG, "--no-such"], "unknown flag '--no-such'", id="flag"),
        pytest.param(["--config", CONFIG], "the number of ranks must be a multiple", id="ranks"),
        pytest.param([*ALONE, "--lr", "x"], "--lr: invalid float value", id="number"),
        pytest.param([*ALONE, "--data-path", "/no/such"], "no such file or folder", id="data"),
        pytest.param([*ALONE, "--load", "."], "holds no whole checkpoint", id="load"),
        pytest.param([*ALONE, "--log-dir", CONFIG], "logging.log_dir .* cannot be", id="log-dir"),
        pytest.param([*ALONE, "--seq-length", "100000"], "held-out part", id="too-long"),
        pytest.param([*ALONE, "--qk-pos-emb-head-dim", "3"], "must be even", id="model"),
        pytest.param([*ALONE, "--bf16"], "pass --no-bf16", id="bf16"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages are those of a CPU run")
def test_user_error(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if "--config" not in arguments:
        arguments = ["--config", CONFIG, *arguments]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)
    if "log_dir" not in message:
        assert not list(tmp_path.iterdir())


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["--config", "none.yaml"]) == 2
    assert capsys.readouterr().err == ""


def test_more_ranks_than_gpus_is_refused_with_both_ways_out() -> None:
    from megatron_mla.recipe.main import _check_gpus

    _check_gpus(4, 4)
    with pytest.raises(ValueError, match=r"GPUs, 2, got 4; .*nproc-per-node=2.*CUDA_VISIBLE"):
        _check_gpus(2, 4)


def test_deterministic_mode_sets_what_the_libraries_read(monkeypatch) -> None:
    from megatron_mla.recipe.main import _make_deterministic

    monkeypatch.setattr(os, "environ", {})
    fill = torch.utils.deterministic.fill_uninitialized_memory
    try:
        _make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        os.environ["NCCL_ALGO"] = "Tree"
        with pytest.raises(ValueError, match="deterministic_mode .* NCCL_ALGO='Tree'.* Unset it"):
            _make_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
