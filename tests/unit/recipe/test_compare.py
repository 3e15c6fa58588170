"""Two logs side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_mla.recipe.compare import compare_logs, main

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def write(path, losses, **extra):
    lines = [{"iteration": i + 1, "loss": x, "grad_norm": 2 * x} for i, x in enumerate(losses)]
    path.write_text("".join(json.dumps({**line, **extra}) + "\n" for line in lines))
    return path


def test_same_numbers_have_no_differences(tmp_path) -> None:
    speed = {"tokens_per_s": 100.0, "memory_bytes": 7}
    a = write(tmp_path / "a", [3.0, 2.0, 1.0, 0.5], **speed)
    b = write(tmp_path / "b", [3.0, 2.0, 1.0, 0.5], **{**speed, "tokens_per_s": 50.0})
    found = compare_logs(a, b)
    assert found.steps == 4 and found.differences == []
    assert found.tokens_per_s == (100.0, 50.0) and found.memory_bytes == (7, 7)


def test_last_bit_and_missing_steps_are_differences(tmp_path) -> None:
    a = write(tmp_path / "a", [3.0, math.nextafter(2.0, 3.0)])
    b = write(tmp_path / "b", [3.0, 2.0, 1.0])
    found = compare_logs(a, b)
    assert [line.split(":")[0] for line in found.differences] == [
        "loss at step 2",
        "loss at step 3",
        "grad_norm at step 2",
        "grad_norm at step 3",
    ]


def test_run_without_steps_is_refused(tmp_path) -> None:
    a, b = write(tmp_path / "a", [1.0]), write(tmp_path / "b", [])
    with pytest.raises(ValueError, match="b must hold a step"):
        compare_logs(a, b)


def test_folder_of_an_earlier_comparison_is_kept(tmp_path, capsys) -> None:
    (tmp_path / "fused").mkdir()
    assert main(["--out", str(tmp_path), "--config", str(CONFIGS / "mla_debug_cpu.yaml")]) == 2
    assert "remove it or name another" in capsys.readouterr().err


def test_bad_flag_is_refused_before_a_run(tmp_path, capsys) -> None:
    arguments = ["--config", str(CONFIGS / "mla_debug_cpu.yaml"), "--train-iterz", "3"]
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert "did you mean --train-iters" in capsys.readouterr().err


@pytest.mark.parametrize("deterministic", [False, True])
def test_other_numbers_on_a_gpu_are_explained(deterministic, tmp_path, monkeypatch, capsys) -> None:
    def run(nproc, arguments):
        unfused = "--no-rope-fusion" in arguments
        folder = tmp_path / ("unfused" if unfused else "fused")
        folder.mkdir()
        write(folder / "log.jsonl", [1.0 + unfused])
        return 0, ""

    monkeypatch.setattr("megatron_mla.recipe.compare._run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = ["--config", str(CONFIGS / "mla_debug_cpu.yaml")]
    arguments += ["--deterministic-mode"] * deterministic
    assert main(["--out", str(tmp_path), *arguments]) == 1
    assert ("--deterministic-mode" in capsys.readouterr().out) is not deterministic


@pytest.mark.parametrize(
    ("recipe", "saves"), [("mla_debug_cpu", True), ("dsv3_expanded_proxy_h200", False)]
)
def test_checkpoints_are_kept_apart_where_a_recipe_saves_any(
    recipe, saves, tmp_path, monkeypatch
) -> None:
    seen = []

    def run(nproc, arguments):
        seen.append(arguments)
        folder = tmp_path / ("unfused" if "--no-rope-fusion" in arguments else "fused")
        folder.mkdir()
        write(folder / "log.jsonl", [1.0])
        return 0, ""

    monkeypatch.setattr("megatron_mla.recipe.compare._run", run)
    assert main(["--out", str(tmp_path), "--config", str(CONFIGS / f"{recipe}.yaml")]) == 0
    assert len(seen) == 2
    for arguments, name in zip(seen, ("fused", "unfused"), strict=True):
        folder = str(tmp_path / name / "checkpoints")
        assert (folder in arguments) is saves and ("--save" in arguments) is saves
