"""The benchmark of the rotary operators: its cases, its arithmetic, and all of it but the GPU."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.bench import rope, rope_cases, rope_tiles
from scripts.bench.common import COLUMNS

ROOT = Path(__file__).resolve().parents[3]
CASES = {f"{c.op} {c.name}": c for c in rope_cases.CASES}
ABOUT = {"gpu": "H200", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-30"}


def call_main(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rope.py", *words])
    rope.main()


def test_list_needs_no_gpu(monkeypatch, capsys):
    call_main(monkeypatch, "--list", "--only", "kv-glm")
    assert capsys.readouterr().out.split("\n") == [
        "rope_kv_split kv-glm-4096x64-view-of-v forward",
        "rope_kv_split kv-glm-4096x64-packed-v forward",
        "rope_kv_split kv-glm-4096x64-packed-v backward",
        "",
    ]


def test_names_are_unique():
    assert len(CASES) == len(rope_cases.CASES)


def test_swept_cases_exist():
    assert all(way in CASES[name].directions for name, way in rope_tiles.SWEPT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_said(monkeypatch):
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        call_main(monkeypatch)


@pytest.mark.parametrize(
    ("name", "direction", "elements", "rows_of_tables"),
    [
        pytest.param("rope_concat pack-q-4096x64", "forward", 2 * 4096 * 64 * 576, 4096, id="pack"),
        pytest.param(
            "rope_concat pack-q-4096x64", "backward", 2 * 4096 * 64 * 576, 4096, id="pack-backward"
        ),
        pytest.param(
            "rope_concat pack-q-32768x16-512-sequences",
            "forward",
            2 * 32768 * 16 * 576,
            64,
            id="rows-of-tables-that-occur",
        ),
        pytest.param(
            "rope_ rotate-q-4096x128", "forward", 2 * 4096 * 128 * 64, 4096, id="in-place"
        ),
        pytest.param(
            "rope_kv_split kv-4096x128-view-of-v",
            "forward",
            4096 * 128 * (128 + 192) + 4096 * 64,
            4096,
            id="view-of-v",
        ),
        pytest.param(
            "rope_kv_split kv-glm-4096x64-packed-v",
            "backward",
            4096 * 64 * (256 + 256 + 448) + 4096 * 64,
            4096,
            id="kv-backward",
        ),
        pytest.param(
            "absorb_query absorb-q-4096x64",
            "forward",
            4096 * 64 * 256 + 64 * 192 * 512 + 4096 * 64 * 576,
            4096,
            id="absorb",
        ),
        pytest.param(
            "absorb_query absorb-q-4096x64",
            "backward",
            # gradient, q_nope and wk in; gradients of q and of wk out
            4096 * 64 * (576 + 192) + 64 * 192 * 512 + 4096 * 64 * 256 + 64 * 192 * 512,
            4096,
            id="absorb-backward",
        ),
    ],
)
def test_moved_bytes(name, direction, elements, rows_of_tables):
    tables = rows_of_tables * 2 * 32 * 2
    positions = 4 * CASES[name].tokens
    assert rope_cases.moved_bytes(CASES[name], direction) == 2 * elements + tables + positions


def test_flops_are_of_the_products():
    case = CASES["absorb_query absorb-q-4096x64"]
    assert rope_cases.flops(case, "forward") == 2 * 4096 * 64 * 192 * 512
    assert rope_cases.flops(case, "backward") == 4 * 4096 * 64 * 192 * 512
    assert rope_cases.flops(CASES["rope_ rotate-q-4096x128"], "forward") == 0


@pytest.mark.parametrize("name", [name for name, _ in rope_tiles.SWEPT])
def test_tiles_are_about_a_dozen(name):
    for direction in CASES[name].directions:
        options = rope_tiles.tile_options(CASES[name], direction)
        assert options[0] == {}
        assert 8 <= len({str(option) for option in options}) <= 13
        sizes = [size for option in options[1:] for size in option.get("tile", (1,))]
        assert all(size & (size - 1) == 0 for size in sizes)


def measured(calls):
    return {name: {"median_us": 1e3, "peak_mib": "0", "kernels": 1} for name in calls}


def bench_with(monkeypatch, implementations):
    case = CASES["rope_concat pack-q-4096x64"].scaled(tokens=4, heads=2)
    monkeypatch.setattr(rope, "implementations", lambda case: implementations)
    how = {"measured": measured, "ceiling_tbps": 1.0, "about": ABOUT}
    return rope.bench(case, "forward", device="cpu", dtype=torch.float32, **how)


def twin(x):
    return torch.cat(x.leaves, dim=-1)


def fails(x):
    raise NotImplementedError("no such\nGPU")


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        pytest.param(lambda x: twin(x) * 1.001, "off its twin by 1.0e-03", id="wrong"),
        pytest.param(fails, "NotImplementedError: no such GPU", id="cannot-run"),
    ],
)
def test_red_case_is_named_and_nothing_timed(monkeypatch, capsys, ours, why):
    with pytest.raises(SystemExit, match=f"pack-q-4096x64 forward: ours .*{why}.*not timed"):
        bench_with(monkeypatch, {"eager": (twin, twin, 0.0), "ours": (ours, twin, 0.0)})
    assert capsys.readouterr().out == ""


def test_peer_that_fails_or_is_wrong_is_left_out(monkeypatch, capsys):
    implementations = {
        "ours": (twin, twin, 0.0),
        "absent": (fails, twin, 2e-2),
        "near": (lambda x: 1.01 * twin(x), twin, 2e-2),
        "far": (lambda x: 1.1 * twin(x), twin, 2e-2),
    }
    rows, complaints = bench_with(monkeypatch, implementations)
    assert [row["impl"] for row in rows] == ["ours", "near"]
    assert [c.split(": ")[1] for c in complaints] == ["far is left out, off by 1.0e-01"]
    assert "absent is left out (NotImplementedError: no such GPU)" in capsys.readouterr().out


def test_row_holds_every_column(monkeypatch):
    rows, _ = bench_with(monkeypatch, {"ours": (twin, twin, 0.0)})
    assert set(rows[0]) == set(COLUMNS)
    moved = (2 * 4 * 2 * 576 + 4 * 64) * 2 + 4 * 4
    assert float(rows[0]["tbps"]) == pytest.approx(moved / 1e3 / 1e6, abs=1e-3)


PROGRAM = """
import functools, sys
from pathlib import Path
import torch
from scripts.bench import common, rope, rope_cases, rope_tiles

common.ROOT = Path(sys.argv[1])
torch.compile = functools.partial(torch.compile, backend="aot_eager")

def measured(calls):
    figures = {"median_us": 1.0, "peak_mib": "0", "kernels": 1}
    return {name: figures for name, turn in calls.items() for _ in [turn[-1]()]}

def clock(calls, **how):
    return {name: 1.0 for name, turn in calls.items() for _ in [turn[-1]()]}

how = {"device": "cpu", "dtype": torch.float32}
small = [(c.scaled(tokens=8, heads=3), way) for c in rope_cases.CASES for way in c.directions]
wrong = rope.run_cases(small, 0, measured=measured, ceiling_tbps=1.0, about={}, **how)
cases = {f"{c.op} {c.name}": c.scaled(tokens=8, heads=3) for c in rope_cases.CASES}
for name, way in rope_tiles.SWEPT:
    rope_tiles.sweep(cases[name], way, 1.0, clock, **how)
assert not wrong, wrong
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs what runs without a GPU")
def test_every_case_and_tile_runs_in_the_interpreter(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    with (tmp_path / "benchmarks/rope.csv").open(newline="") as file:
        found = {(r["op"], r["case"], r["direction"], r["impl"]) for r in csv.DictReader(file)}
    for case in rope_cases.CASES:
        names = ["ours"] + ["ours fp32"] * case.fp32 + ["torch.compile"] * case.compiled
        names += ["einsum + rope_concat"] * (case.op == "absorb_query")
        names += ["ours with positions"] * (case.sequences is not None)
        names += ["eager"] * (case.sequences in (None, 1))
        for direction in case.directions:
            missing = {(case.op, case.name, direction, name) for name in names} - found
            assert not missing, f"{missing}\n{run.stdout[-4000:]}"
    tiles = [line for line in run.stdout.splitlines() if "default" in line]
    assert len(tiles) == len(rope_tiles.SWEPT)
    assert "bits differ" not in run.stdout


def write_rows(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def test_chart_shows_the_newest_rows(tmp_path):
    pytest.importorskip("matplotlib")
    from scripts.bench.chart import draw

    def row(impl, us, share, case="pack-q", **other):
        words = {"op": "rope_concat", "case": case, "direction": "forward", "impl": impl}
        return {**words, "median_us": us, "share": share, **ABOUT, **other}

    rows = [
        row("ours", "911.1", "0.100", commit="old"),
        row("eager", "822.2", "0.200"),
        row("ours", "151.4", "0.930"),
        row("ours", "25.0", "6.300", case="beyond"),
        row("unheard of", "33.0", "0.500", case="beyond"),
        row("torch", "244.0", "1.000", op="copy", case="512-mib"),
    ]
    write_rows(tmp_path / "rows.csv", rows)
    before = sorted((ROOT / "docs").iterdir())
    text = draw(tmp_path / "rows.csv", tmp_path / "new folder" / "chart.svg").read_text()
    for shown in ("151 µs", "822 µs", "25 µs, 630%", "unheard of", "H200", "torch 2.11", "abc"):
        assert shown in text, shown
    for absent in ("911", "old", "512-mib"):
        assert f">{absent}" not in text, absent
    assert sorted((ROOT / "docs").iterdir()) == before


def test_chart_of_every_case_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from scripts.bench.chart import draw

    rows = [
        {"op": c.op, "case": c.name, "direction": way, "impl": impl, "median_us": "10",
         "share": "0.5", **ABOUT}
        for c in rope_cases.CASES for way in c.directions for impl in ("ours", "eager", *c.peers)
    ]  # fmt: skip
    write_rows(tmp_path / "rows.csv", rows)
    chart = draw(tmp_path / "rows.csv", tmp_path / "chart.png")
    assert 10_000 < chart.stat().st_size < 500_000


def test_chart_of_nothing_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    from scripts.bench.chart import draw

    write_rows(tmp_path / "rows.csv", [])
    with pytest.raises(ValueError, match="got none"):
        draw(tmp_path / "rows.csv", tmp_path / "chart.svg")


def test_compile_can_be_left_out():
    case = replace(CASES["rope_concat pack-q-4096x64"], compiled=False)
    assert "torch.compile" not in rope_cases.implementations(case)
