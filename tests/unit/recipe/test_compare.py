"""Two logs side by side."""

from __future__ import annotations

import json
import math

import pytest

from megatron_mla.recipe.compare import compare_logs, main


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
    assert main(["--out", str(tmp_path)]) == 2
    assert "remove it or name another" in capsys.readouterr().err
