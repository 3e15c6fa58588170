"""What the README tells people to do can be done."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def indented_commands() -> list[str]:
    lines = re.sub(r"\\\n\s*", "", TEXT).splitlines()
    commands = [line.strip().split("#")[0].strip() for line in lines if line.startswith("    ")]
    return [c for c in commands if c.startswith(("make ", "python "))]


def test_the_two_commands_stand_first() -> None:
    assert [c.split()[:2] for c in indented_commands()[:2]] == [["make", "train"], ["make", "test"]]


@pytest.mark.parametrize("command", [c for c in indented_commands() if c.startswith("make ")])
def test_make_targets_exist(command) -> None:
    subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("command", [c for c in indented_commands() if "pretrain.py" in c])
def test_training_commands_parse(command) -> None:
    from megatron_mla.recipe.flags import parse_run

    words = shlex.split(command)
    arguments = words[words.index("scripts/pretrain.py") + 1 :]
    config = arguments[arguments.index("--config") + 1]
    arguments[arguments.index("--config") + 1] = str(ROOT / config)
    run = parse_run(arguments)
    assert run.training.train_iters == 50


def test_help_teaches() -> None:
    program = [sys.executable, "scripts/pretrain.py", "--help"]
    shown = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for flag in ("--tensor-model-parallel-size", "--no-rope-fusion", "--data-path", "--profile"):
        assert flag in shown


def test_every_named_file_exists() -> None:
    names = re.findall(r"`((?:megatron_mla|tests|configs|scripts|docs)/[\w./-]+)`", TEXT)
    names += re.findall(r"\]\(([\w./-]+)\)", TEXT)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_snippets_run(single_rank) -> None:
    import_line, snippet = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert sum(p.numel() for p in names["model"].parameters()) > 1e5
    pytest.importorskip("triton")
    exec(compile(import_line, "README.md", "exec"), names)
    assert callable(names["fused_apply_mla_rope_for_q"])
