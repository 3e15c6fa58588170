"""Two logs side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_mla.recipe.compare import DSA, ROPE, agrees, compare_logs, main

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


def assert_runs(pair, losses, arguments, tmp_path, monkeypatch, said=("", "")):
    """Exit status of a comparison whose runs have these losses; checks what they were told."""
    seen = []

    def run(nproc, told):
        index = len(seen)
        seen.append(told)
        assert told[-2:] == ["--log-dir", str(tmp_path / pair.names[index])]
        assert [*pair.flags[index]] == told[len(told) - 2 - len(pair.flags[index]) : -2]
        (tmp_path / pair.names[index]).mkdir()
        extra = {"tokens_per_s": 100.0 * (index + 1), "indexer_loss": 0.5}
        write(tmp_path / pair.names[index] / "log.jsonl", losses[index], **extra)
        return 0, said[index]

    monkeypatch.setattr("megatron_mla.recipe.compare._run", run)
    return main(["--out", str(tmp_path), *arguments], pair)


GLM = ["--config", str(CONFIGS / "glm5_dsa_proxy_h200.yaml"), "--train-iters", "20"]


@pytest.mark.parametrize(("gap", "status"), [(1.009, 0), (0.991, 0), (1.011, 1), (math.nan, 1)])
def test_backends_have_to_agree_at_the_end(gap, status, tmp_path, monkeypatch, capsys) -> None:
    curve = [4.0 - 0.1 * i for i in range(20)]
    other = [5.0] * 18 + [gap * loss for loss in curve[18:]]  # far off until then
    assert assert_runs(DSA, (other, curve), GLM, tmp_path, monkeypatch) == status
    said = capsys.readouterr().out
    assert "20 steps; triton, none:" in said and "-50.0%" in said and "last loss" in said
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["names"] == ["triton", "none"] and found["agrees"] is (status == 0)
    assert found["tokens_per_s"] == [100.0, 200.0] and found["steps"] == 20
    assert found["curves"]["loss"]["none"]["20"] == curve[-1]
    assert found["curves"].keys() == {"loss", "grad_norm", "indexer_loss"}
    pytest.importorskip("matplotlib")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_rotation_has_to_give_the_same_numbers(tmp_path, monkeypatch) -> None:
    curve, other = [3.0, 2.0], [3.0, math.nextafter(2.0, 3.0)]
    assert assert_runs(ROPE, (other, curve), GLM, tmp_path, monkeypatch) == 1


@pytest.mark.parametrize("pair", [ROPE, DSA], ids=lambda pair: pair.program)
def test_run_that_took_the_other_way_is_no_comparison(pair, tmp_path, monkeypatch, capsys) -> None:
    said = f"WARNING: {pair.fallback}, because", ""
    assert assert_runs(pair, ([1.0], [1.0]), GLM, tmp_path, monkeypatch, said) == 2
    assert f"the run was not {pair.names[0]}" in capsys.readouterr().err


def test_fallback_of_another_pair_does_not_matter(tmp_path, monkeypatch) -> None:
    said = ROPE.fallback, DSA.fallback
    assert assert_runs(DSA, ([1.0], [1.0]), GLM, tmp_path, monkeypatch, said) == 0


def test_mean_is_of_the_last_tenth(tmp_path) -> None:
    a = write(tmp_path / "a", [9.0] * 28 + [1.0, 2.0, 3.0, 50.0])
    b = write(tmp_path / "b", [9.0] * 28 + [1.0, 2.0, 3.0])
    found = compare_logs(a, b)  # 31 steps in common
    assert found.steps == 31 and found.last_losses == (2.0, 2.0)
    assert found.gaps == {"loss": 0.0, "grad_norm": 0.0}
    assert agrees(found, DSA) and not agrees(found, ROPE)


def test_runs_without_a_common_step_are_refused(tmp_path) -> None:
    a = tmp_path / "a"
    a.write_text(json.dumps({"iteration": 7, "loss": 1.0}) + "\n")
    with pytest.raises(ValueError, match="a step in common"):
        compare_logs(a, write(tmp_path / "b", [1.0, 2.0]))
