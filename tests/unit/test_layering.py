"""Imports go one way, third-party packages stay in their rooms, files stay readable.

The order of rooms, each may use those to its left:

    config_checks -> config -> selection -> parallel -> rope -> kernels -> fusions -> inference ->
    attention -> specs -> recipe

Read from the source, imports inside functions and under ``TYPE_CHECKING`` included.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_mla"
MAX_LINES = 400

ORDER = (
    "config_checks",
    "config",
    "selection",
    "parallel",
    "rope",
    "kernels",
    "fusions",
    "inference",
    "attention",
    "specs",
    "recipe",
)
MAY_IMPORT = {room: set(ORDER[:place]) for place, room in enumerate(ORDER)}
# Stricter than the order: index arithmetic and kernels are leaves, they know no configuration.
MAY_IMPORT["selection"] = {"config"}
MAY_IMPORT["parallel"] = set()
MAY_IMPORT["kernels"] = set()
# Explicit and only for programs: no layer depends on it.
MAY_IMPORT["cpu_shim"] = set()
MAY_IMPORT["recipe"] |= {"cpu_shim"}
# The public names.
MAY_IMPORT["__init__"] = set(ORDER)

EVERYWHERE = {"torch", "megatron", *sys.stdlib_module_names}
# Where a package that is optional, or no business of a layer, may be imported.
THIRD_PARTY = {
    "triton": ("kernels", "selection"),
    "transformer_engine": ("selection", "attention/core", "specs"),
    "fast_hadamard_transform": ("selection", "attention"),
    "fla": ("selection", "attention"),
    "yaml": ("recipe",),
    "tqdm": ("recipe",),
    "matplotlib": ("recipe",),
    "tensorboard": ("recipe",),
    "numpy": ("recipe",),
    "safetensors": ("recipe",),
    "transformers": ("recipe",),
}
# torch and Megatron-Core bring these; what is behind them follows the rule of the package.
ALIASES = {
    "torch.utils.tensorboard": "tensorboard",
    "megatron.core.extensions.transformer_engine": "transformer_engine",
}


def room_of(path: str) -> str:
    """Room of a file, ``path`` relative to the package without suffix."""
    return path.split("/")[0]


def imported_modules(source: str, path: str) -> list[tuple[int, str]]:
    """(line, absolute dotted module) of every import; ``from a import b`` counts as ``a.b``."""
    package = ["megatron_mla", *path.split("/")[:-1]]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def complaints(source: str, path: str) -> list[str]:
    """What the imports of one file do against the rules."""
    found = []
    for line, module in imported_modules(source, path):
        reason = _complaint(module, path)
        if reason:
            found.append(f"megatron_mla/{path}.py:{line}: {module}: {reason}")
    return found


def _complaint(module: str, path: str) -> str | None:
    room = room_of(path)
    top, *rest = module.split(".")
    if top == "megatron_mla":
        if not rest or rest[0] not in MAY_IMPORT:
            # The recipe stands outside of the library and uses its public names as people do.
            return None if room == "recipe" else "name the room, not the package of them all"
        if rest[0] == room or rest[0] in MAY_IMPORT[room]:
            return None
        return f"{room} must not import {rest[0]}"
    for prefix, package in ALIASES.items():
        if f"{module}.".startswith(f"{prefix}."):
            top = package
    if top in EVERYWHERE:
        return None
    if top not in THIRD_PARTY:
        return "unknown package: say in THIRD_PARTY who may import it"
    if any(f"{path}/".startswith(f"{place}/") for place in THIRD_PARTY[top]):
        return None
    return f"{top} is for {', '.join(THIRD_PARTY[top])}"


FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("path", FILES)
def test_imports_go_one_way(path):
    assert room_of(path) in MAY_IMPORT, "a new room: put it in its place in ORDER"
    found = complaints(FILES[path].read_text(encoding="utf-8"), path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", FILES)
def test_file_can_be_read_in_one_sitting(path):
    lines = len(FILES[path].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines; it has probably become two things"


def test_the_package_was_found():
    assert {"config", "parallel/layout"} <= FILES.keys()


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        pytest.param("rope/tables", "import megatron_mla.attention.mla", "rope must not", id="up"),
        pytest.param("rope/tables", "from ..attention import mla", "rope must not", id="relative"),
        pytest.param("rope/tables", "from .. import attention", "rope must", id="relative-room"),
        pytest.param(
            "selection",
            "def f():\n    from megatron_mla.specs import g",
            r"selection\.py:2: .*selection must not import specs",
            id="inside-a-function",
        ),
        pytest.param("parallel/layout", "import megatron_mla.config", "parallel must", id="leaf"),
        pytest.param(
            "kernels/rope_q", "import megatron_mla.rope.tables", "kernels must", id="kernel"
        ),
        pytest.param("specs", "import megatron_mla.cpu_shim", "specs must not", id="shim"),
        pytest.param("specs", "from megatron_mla import f", "name the room", id="root"),
        pytest.param("rope/tables", "import triton.language as tl", "triton is for", id="triton"),
        pytest.param("config", "import yaml", "yaml is for recipe", id="yaml"),
        pytest.param("config", "import numpy", "numpy is for recipe", id="numpy"),
        pytest.param(
            "attention/mla", "import transformer_engine.pytorch", "is for", id="te-outside-core"
        ),
        pytest.param(
            "attention/mla",
            "from megatron.core.extensions.transformer_engine import TELinear",
            "transformer_engine is for",
            id="te-by-megatron",
        ),
        pytest.param(
            "attention/core_extra", "import transformer_engine", "is for", id="te-beside-core"
        ),
        pytest.param("config", "import requests", "unknown package", id="unknown"),
    ],
)
def test_violations_are_seen(path, source, complaint):
    assert re.search(complaint, "\n".join(complaints(source, path)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param("rope/tables", "from megatron_mla.rope.frequencies import f", id="same-room"),
        pytest.param("rope/tables", "from .frequencies import f", id="same-room-relative"),
        pytest.param("attention/mla", "from megatron_mla.kernels.rope_q import f", id="left"),
        pytest.param("attention/core", "import transformer_engine.pytorch", id="te-in-core"),
        pytest.param("kernels/rope_q", "import triton", id="triton-in-kernels"),
        pytest.param("recipe/main", "import yaml, tqdm, matplotlib.pyplot", id="recipe"),
        pytest.param("recipe/model", "from megatron_mla import f", id="recipe-as-a-user"),
        pytest.param("__init__", "from megatron_mla.config import f", id="public-names"),
        pytest.param("config", "import math, torch, megatron.core", id="everywhere"),
    ],
)
def test_lawful_imports_pass(path, source):
    assert complaints(source, path) == []
