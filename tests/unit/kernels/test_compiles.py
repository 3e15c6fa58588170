"""The compiler takes what the interpreter takes, and makes of it what the kernels rely on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("offline.py")
SPARSE = Path(__file__).with_name("offline_sparse.py")
DECODE = Path(__file__).with_name("offline_decode.py")
MAIN_WIDTHS = [128, 64, 128]


def _compiler_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        return "this build of triton has no backend for NVIDIA GPUs"
    backend = Path(importlib.util.find_spec("triton.backends.nvidia").origin).parent
    if not any((backend / "bin").glob("ptxas*")):
        return "this build of triton has no ptxas"
    return None


CAPABILITIES = pytest.mark.parametrize("capability", [80, 90, 100], ids=lambda c: f"sm_{c}")


@pytest.fixture(scope="module", params=[80, 90, 100], ids=lambda capability: f"sm_{capability}")
def report(request) -> list[dict]:
    return compiled(PROGRAM, request.param)


def compiled(program: Path, capability: int) -> list[dict]:
    if reason := _compiler_missing():
        pytest.skip(reason)
    # Not the interpreter, and no GPU even where there is one.
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, program, str(capability)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def _name(entry: dict) -> str:
    return f"{entry['launch']} {entry['widths']} {entry['dtypes']}"


def test_every_kernel_compiles_and_no_product_is_fused_into_a_sum(report) -> None:
    launches = {entry["launch"] for entry in report}
    assert {"rope", "rope-in-place", "concat", "kv-split", "kv-split-backward"} <= launches
    for entry in report:
        assert entry["accesses"], _name(entry)
        assert not entry["contractions"], f"{_name(entry)}: {entry['contractions']}"


def test_unrotated_channels_move_sixteen_bytes_at_a_time(report) -> None:
    seen = 0
    for entry in report:
        if entry["widths"] == MAIN_WIDTHS and "in-place" not in entry["launch"]:
            seen += 1
            for access in ("ld.global.v", "st.global.v"):
                # 4 x 32 or 2 x 64 bits.
                wide = [f"{access}4.b32", f"{access}2.b64"]
                assert any(i in wide for i in entry["accesses"]), (_name(entry), access)
    assert seen


def test_nothing_is_stored_in_place_before_all_is_loaded(report) -> None:
    seen = 0
    for entry in report:
        if "in-place" in entry["launch"]:
            seen += 1
            kinds = [i.split(".")[0] for i in entry["accesses"]]
            last_load = len(kinds) - 1 - kinds[::-1].index("ld")
            first_store = kinds.index("st")
            between = kinds[last_load:first_store]
            assert last_load < first_store, _name(entry)
            assert {"bar", "barrier"} & set(between), _name(entry)
    assert seen


# Sums and choices, no products.
WITHOUT_PRODUCTS = {"mean", "ordered-sum", "select", "select-long"}


@CAPABILITIES
def test_sparse_attention_compiles_for_tensor_cores_and_fits(capability) -> None:
    """Shared memory of every launch with the widths of GLM-5, for 64 heads and 8."""
    entries = compiled(SPARSE, capability)
    assert len({(e["launch"], e["heads"]) for e in entries}) == 32 + (capability == 90)
    for entry in entries:
        assert entry["fits"], entry
        assert bool(entry["products"]) != (entry["launch"] in WITHOUT_PRODUCTS), entry
        if entry["launch"] == "forward-hopper":
            assert entry["products"] == ["wgmma.mma_async"]


@CAPABILITIES
def test_attention_over_cached_rows_compiles_for_tensor_cores_and_fits(capability) -> None:
    """Keys that fill their tiles, of FP8 too, come by copies that do not hold up the products."""
    entries = compiled(DECODE, capability)
    assert len({e["launch"] for e in entries}) == (8 if capability >= 90 else 6)
    for entry in entries:
        merges = entry["kernel"] == "_merge_kernel"
        assert entry["fits"] and (entry["splits"] > 1 or not merges), entry
        assert bool(entry["products"]) != (merges or entry["launch"] == "fp32"), entry
        if not merges and entry["launch"] not in ("ragged", "fp32"):
            assert entry["copies"] >= 9, entry
        if not merges and capability == 90 and "many" in entry["launch"]:
            assert entry["products"] == ["wgmma.mma_async"]
