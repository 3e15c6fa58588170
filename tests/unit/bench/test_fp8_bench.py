"""The benchmark of FP8 packing: its cases, its arithmetic, and all of it but the GPU."""

from __future__ import annotations

import csv
import sys

import pytest
import torch

from scripts.bench import common, fp8
from scripts.bench.common import COLUMNS
from tests.helpers.charts import assert_chart

CASES = {c.name: c for c in fp8.CASES}
ABOUT = {"gpu": "H200", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-30"}


def call_main(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8.py", *words])
    fp8.main()


def measured(calls):
    figures = {"median_us": 1e3, "peak_mib": "0", "kernels": 1}
    return {name: figures for name, turn in calls.items() for _ in [turn[-1]()]}


def test_list_needs_no_gpu(monkeypatch, capsys):
    call_main(monkeypatch, "--list", "--only", "nope-4096")
    assert capsys.readouterr().out.split("\n") == [
        "fp8_pack nope-4096x8 forward",
        "fp8_pack nope-4096x128 forward",
        "fp8_pack nope-4096x1-latent forward",
        "fp8_pack nope-4096x64-latent forward",
        "",
    ]


def test_names_are_unique_and_every_mode_has_the_same_sizes():
    assert len(CASES) == len(fp8.CASES)
    sizes = {mode: [(c.tokens, c.heads, c.n) for c in fp8.CASES if c.mode == mode]
             for mode in fp8.MODES}  # fmt: skip
    assert sizes["nope"] == sizes["neox"] == sizes["adjacent"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_said(monkeypatch):
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        call_main(monkeypatch)


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        # query and key out, query and unrotated keys in, and one shared key
        ("nope-4096x128", 4096 * (2 * 128 * 192 + 2 * 128 * (192 + 128) + 2 * 64)),
        ("neox-4096x8", 4096 * (2 * 8 * 192 + 2 * 8 * (192 + 128) + 2 * 64 + 4 * 64 + 4)),
        ("adjacent-65536x1-latent", 65536 * (2 * 576 + 2 * 2 * 576 + 4 * 64 + 4)),
        ("nope-4096x64-latent", 4096 * 65 * (576 + 2 * 576)),
    ],
)
def test_moved_bytes(name, moved):
    assert fp8.moved_bytes(CASES[name]) == moved


def test_every_case_runs_and_every_row_is_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = [(fp8.replace(c.scaled(6, 3), compiled=False), "forward") for c in fp8.CASES]
    how = {"measured": measured, "ceiling_tbps": 1.0, "about": ABOUT, "device": device}
    assert fp8.run_cases(small, 0, **how) == []
    with (tmp_path / "benchmarks/fp8.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(fp8.CASES)
    assert all(None not in row and set(row) == set(COLUMNS) for row in rows)
    assert {row["impl"] for row in rows} == {"ours", "eager", "copy"}
    tbps = fp8.moved_bytes(small[0][0]) / 1e3 / 1e6
    assert float(rows[0]["tbps"]) == pytest.approx(tbps, abs=1e-3)


def bench_with(monkeypatch, change):
    real = fp8.implementations
    monkeypatch.setattr(fp8, "implementations", lambda c: real(c) | change)
    how = {"measured": measured, "ceiling_tbps": 1.0, "about": ABOUT, "device": "cpu"}
    return fp8.bench(CASES["neox-4096x8"].scaled(4, 2), **how)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs what runs without a GPU")
def test_wrong_bytes_stop_the_run(monkeypatch):
    ours = fp8.implementations(CASES["neox-4096x8"])["ours"]

    def wrong(x):
        query, key = ours(x)
        key.view(torch.uint8)[0, 0, 0] ^= 1
        return query, key

    with pytest.raises(SystemExit, match="neox-4x2: ours is off its twin by .*not timed"):
        bench_with(monkeypatch, {"ours": wrong})

    def fails(x):
        raise NotImplementedError("no such\nGPU")

    with pytest.raises(SystemExit, match=r"ours cannot run \(NotImplementedError: no such GPU\)"):
        bench_with(monkeypatch, {"ours": fails})
    monkeypatch.undo()
    rows, complaints = bench_with(monkeypatch, {"eager": wrong, "peer": fails, "far": lambda x: (
        ours(x)[0], ours(x)[0])})  # fmt: skip
    assert [row["impl"] for row in rows] == ["ours", "eager", "copy"]
    assert [c.split(": ")[1][:16] for c in complaints] == ["far is left out,"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs what runs without a GPU")
@pytest.mark.parametrize("name", ["neox-4096x8", "adjacent-4096x64-latent"])
def test_tiles_write_the_same_bytes(name, capsys):
    pytest.importorskip("triton")
    case = CASES[name].scaled(6, 3)
    fp8.sweep(case, lambda calls: dict.fromkeys(calls, 1.0), device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(fp8.tile_options(case)) == 11
    assert not any("differ" in line for line in lines)


def test_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert_chart(fp8.CASES, ("ours", "eager", "torch.compile", "copy"), ABOUT, tmp_path)
