"""The benchmark of attention over a cache: its cases, its arithmetic, and all of it but the GPU."""

from __future__ import annotations

import csv
import sys

import pytest
import torch

from scripts.bench import common, decode
from scripts.bench.common import COLUMNS
from tests.helpers.charts import assert_chart

CASES = {c.name: c for c in decode.CASES}
ABOUT = {"gpu": "H200", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-30"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def call_main(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *words])
    decode.main()


def measured(calls):
    figures = {"median_us": 1e3, "peak_mib": "0", "kernels": 1}
    return {name: figures for name, turn in calls.items() for _ in [turn[-1]()]}


HOW = {"measured": measured, "ceiling_tbps": 1.0, "about": ABOUT, "device": DEVICE}


def test_list_needs_no_gpu(monkeypatch, capsys):
    call_main(monkeypatch, "--list", "--only", "fp8-h16-32x4096")
    found = capsys.readouterr().out.split()[1::3]
    assert found == ["fp8-h16-32x4096", "fp8-h16-32x4096-s4"]


def test_names_are_unique():
    assert len(CASES) == len(decode.CASES) == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_said(monkeypatch):
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        call_main(monkeypatch)


def test_what_is_counted():
    assert decode.moved_bytes(CASES["bf16-h128-32x32768"]) == 32 * 32768 * 576 * 2
    assert decode.moved_bytes(CASES["fp8-h16-1x131072"]) == 131072 * 576
    assert decode.flops(CASES["fp8-h16-32x4096-s4"]) == 2 * 32 * 4 * 16 * 4096 * 1088
    assert decode.sets_for(CASES["fp8-h16-1x4096"], 60_000_000) == 32
    assert decode.sets_for(CASES["bf16-h16-32x32768"], 60_000_000) == 2


def test_every_kind_of_case_runs_and_every_row_is_whole(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    kinds = {(c.heads, c.cache, c.tokens): c.scaled(2, 40) for c in decode.CASES}
    decode.run_cases([(c, "forward") for c in kinds.values()], 0, **HOW)
    with (tmp_path / "benchmarks/decode.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(kinds) == 24
    assert all(None not in row and set(row) == set(COLUMNS) for row in rows)
    assert {row["impl"] for row in rows} == {"ours", "eager", "copy"}
    tbps = decode.moved_bytes(next(iter(kinds.values()))) / 1e3 / 1e6
    assert float(rows[0]["tbps"]) == pytest.approx(tbps, abs=1e-3)
    assert bool(rows[0]["tflops"]) and not rows[2]["tflops"]


@pytest.mark.parametrize("which", [0, 1], ids=["output", "log-sum-exp"])
def test_wrong_results_stop_the_run(monkeypatch, which):
    real = decode.implementations()

    def wrong(x):
        answer = list(real["eager"](x))
        answer[which] = answer[which] * 1.02
        return tuple(answer)

    def fails(x):
        raise NotImplementedError("no such\nGPU")

    case = CASES["bf16-h16-1x4096"].scaled(1, 20)
    monkeypatch.setattr(decode, "implementations", lambda: real | {"ours": wrong})
    with pytest.raises(SystemExit, match="bf16-h16-1x20: ours is off its twin by .*not timed"):
        decode.bench(case, **HOW)
    monkeypatch.setattr(decode, "implementations", lambda: real | {"ours": fails})
    with pytest.raises(SystemExit, match=r"ours cannot run \(NotImplementedError: no such GPU\)"):
        decode.bench(case, **HOW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs what runs without a GPU")
def test_tiles_and_splits_are_right(capsys):
    pytest.importorskip("triton")
    case = CASES["fp8-h16-1x4096"].scaled(1, 70)
    decode.sweep(case, lambda calls: dict.fromkeys(calls, 1.0), sets=1, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(decode.tile_options(case)) == 15
    assert not any("off" in line for line in lines)


def test_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert_chart(decode.CASES, ("ours", "eager", "copy"), ABOUT, tmp_path)
