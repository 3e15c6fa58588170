"""The benchmark of sparse attention: its cases, its arithmetic, and all of it but the GPU."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench import dsa, dsa_cases
from scripts.bench.common import COLUMNS

ROOT = Path(__file__).resolve().parents[3]
CASES = {f"{c.op} {c.name}": c for c in dsa_cases.CASES}
ABOUT = {"gpu": "H200", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-30"}
CEILINGS = {"tbps": 1.0, "tflops": 1.0}


def call_main(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["dsa.py", *words])
    dsa.main()


def test_list_needs_no_gpu(monkeypatch, capsys) -> None:
    call_main(monkeypatch, "--list", "--only", "sparse_attention 8192x8")
    assert capsys.readouterr().out.split("\n") == [
        "sparse_attention 8192x8 forward",
        "sparse_attention 8192x8 backward",
        "",
    ]


def test_names_are_unique() -> None:
    assert len(CASES) == len(dsa_cases.CASES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_said(monkeypatch) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        call_main(monkeypatch)


def test_flops_count_slots_that_hold_a_key() -> None:
    valid = 2048 * 2049 // 2 + (8192 - 2048) * 2048
    case = CASES["sparse_attention 8192x64"]
    assert case.valid() == valid
    forward = 2 * valid * 64 * (576 + 512)
    assert dsa_cases.flops(case, "forward") == forward
    assert dsa_cases.flops(case, "backward") == 2.5 * forward
    loss = 2 * valid * (64 * 576 + 3 * 32 * 128)
    assert dsa_cases.flops(CASES["indexer_loss 8192"], "forward+backward") == loss
    scores = CASES["index_scores 4096x32768-32-heads"]
    assert dsa_cases.flops(scores, "forward") == 2 * 4096 * 32768 * 32 * 128
    selection = CASES["select_topk 4096x32768"]
    assert dsa_cases.flops(selection, "forward") == 0
    assert dsa_cases.moved_bytes(selection) == 4 * 4096 * (32768 + 2048)


@pytest.mark.parametrize("topk", [1, 5, 8, 13])
def test_slots_hold_other_keys_that_the_row_sees(topk) -> None:
    seen = torch.arange(1, 40)
    for seed in range(5):
        slots = dsa_cases.spread_slots(seen, topk, torch.Generator().manual_seed(seed))
        assert slots.dtype == torch.int32 and slots.shape == (39, topk)
        for row, end in zip(slots.tolist(), seen.tolist(), strict=True):
            keys = [key for key in row if key >= 0]
            assert len(keys) == min(topk, end) and keys == sorted(set(keys))
            assert all(key < end for key in keys) and row[len(keys) :] == [-1] * (topk - len(keys))


def test_rows_that_are_checked_are_of_all_parts() -> None:
    rows = dsa_cases.some_rows(CASES["select_topk 8192x8192"]).tolist()
    assert rows == [*range(16), *range(4088, 4104), *range(8176, 8192)]
    assert dsa_cases.some_rows(CASES["select_topk 8192x8192"].scaled()).tolist() == [*range(12)]


def test_part_is_the_problem_of_these_rows() -> None:
    case = CASES["indexer_loss 8192"].scaled()
    x = dsa_cases.build(case, "cpu", torch.float32, seed=0)
    few = dsa_cases.part(x, torch.tensor([3, 7]))
    assert few.ends.tolist() == [4, 8] and few.host.tolist() == [[0, 0], [4, 8]]
    for name in ("q", "w", "query", "indices"):
        assert torch.equal(getattr(few, name), getattr(x, name)[[3, 7]]), name
    for name in ("k", "key"):
        assert getattr(few, name) is getattr(x, name), name


def measured(calls):
    return {name: {"median_us": 1e3, "peak_mib": "0", "kernels": 1} for name in calls}


def bench_with(monkeypatch, name, direction, solvers):
    """Solvers by name, held against the twin of the case."""
    case = CASES[name].scaled()
    twin = dsa_cases.implementations(case, direction)["ours"][1]
    found = {key: (run or twin, twin, 1e-3) for key, run in solvers.items()}
    monkeypatch.setattr(dsa, "implementations", lambda *_: found)
    how = {"measured": measured, "ceilings": CEILINGS, "about": ABOUT}
    return dsa.bench(case, direction, device="cpu", dtype=torch.float32, **how)


def attend(change):
    """The twin, whose inputs are changed first."""
    twin = dsa_cases.attention("sparse_attention_ref", "sparse_attention_ref")

    def run(c, x):
        return twin(c, change(dsa_cases.SimpleNamespace(**vars(x))))

    return run


def without_last_slot(x):
    x.indices = x.indices.masked_fill(torch.arange(5) == 4, -1)
    return x


def value_without_gradient(x):
    x.key = x.key.detach() + 0 * x.key
    return x


def wrong_in_a_long_problem(x):
    """Right for the rows that are solved alone with fewer of them, wrong in the whole."""
    x.query = x.query + (x.query.shape[0] == 12) * torch.arange(12)[-x.query.shape[0] :, None, None]
    return x


def test_backward_that_shall_be_deterministic_is(monkeypatch) -> None:
    """The flag is up in its backward and nowhere else."""
    case = CASES["sparse_attention 8192x64"].scaled()
    x = dsa_cases.build(case, "cpu", torch.float32, seed=0)
    seen = []

    def run(c, x):
        x.query.register_hook(lambda _: seen.append(torch.are_deterministic_algorithms_enabled()))
        return dsa_cases.attention("sparse_attention_ref", "sparse_attention_ref")(c, x)

    for strict in (False, True):
        run.deterministic = strict
        dsa.solve(case, "backward", run, x)()
    assert seen == [False, True] and not torch.are_deterministic_algorithms_enabled()


def fails(c, x):
    raise NotImplementedError("no such\nGPU")


def absent(c, x):
    raise ModuleNotFoundError("No module named 'flash_mla'")


@pytest.mark.parametrize("change", [without_last_slot, value_without_gradient])
def test_what_is_wrong_is_not_timed(monkeypatch, capsys, change) -> None:
    solvers = {"ours": attend(change), "eager": None}
    rows, wrong = bench_with(monkeypatch, "sparse_attention 8192x64", "backward", solvers)
    assert [row["impl"] for row in rows] == ["eager"]
    assert len(wrong) == 1 and "8192x64 backward: ours is off its twin by" in wrong[0]
    assert "not timed" in capsys.readouterr().out


def test_whole_answer_is_looked_at_too(monkeypatch) -> None:
    monkeypatch.setattr(dsa, "some_rows", lambda c: torch.tensor([0, 11]))
    solvers = {"ours": attend(wrong_in_a_long_problem), "eager": None}
    rows, wrong = bench_with(monkeypatch, "sparse_attention 8192x64", "forward", solvers)
    assert [row["impl"] for row in rows] == ["eager"] and len(wrong) == 1


def test_missing_operator_is_a_line_and_one_that_fails_a_complaint(monkeypatch, capsys) -> None:
    solvers = {"ours": absent, "ours too": fails, "tilelang": fails, "eager": None}
    rows, wrong = bench_with(monkeypatch, "indexer_loss 8192", "forward+backward", solvers)
    assert [row["impl"] for row in rows] == ["eager"]
    assert wrong == ["indexer_loss 8192 forward+backward: ours too cannot run"]
    said = capsys.readouterr().out
    assert "ours is left out (ModuleNotFoundError: No module named 'flash_mla')" in said
    assert "tilelang cannot run (NotImplementedError: no such GPU)" in said


def test_nothing_that_runs_is_no_row(monkeypatch) -> None:
    assert bench_with(monkeypatch, "index_topk 8192", "forward", {"ours": absent}) == ([], [])


def test_chosen_keys_are_compared_as_sets() -> None:
    case = CASES["select_topk 4096x32768"].scaled()
    want = (torch.tensor([[4, 2, 0], [1, -1, -1]]),)

    def off(*rows):
        return dsa.difference(case, None, (torch.tensor(rows),), want)

    assert off([0, 2, 4], [1, -1, -1]) == 0
    assert off([0, 2, 3], [1, -1, -1]) == 2 / 8
    assert off([0, 2, -1], [1, -1, -1]) == 1 / 8
    assert off([0, 2, 4], [1, 1, -1]) == 1 / 8


def test_scores_that_no_row_sees_do_not_matter() -> None:
    case = CASES["index_scores 8192x8192-64-heads"].scaled()
    x = dsa_cases.build(case, "cpu", torch.float32, seed=0)
    want = dsa_cases.eager_scores(case, x)
    got = want.masked_fill(torch.ones(12, 12).triu(1).bool(), torch.nan)
    assert dsa.difference(case, x, (got,), (want,)) == 0
    got[5, 5] += 1
    assert dsa.difference(case, x, (got,), (want,)) > 1e-3


@pytest.mark.parametrize(
    ("name", "column", "other"),
    [("select_topk 4096x32768", "tbps", "tflops"), ("sparse_attention 4096x64", "tflops", "tbps")],
)
def test_row_holds_every_column(monkeypatch, name, column, other) -> None:
    rows, _ = bench_with(monkeypatch, name, "forward", {"ours": None})
    assert set(rows[0]) == set(COLUMNS)
    assert rows[0][column] and rows[0][other] == "" and rows[0]["share"]


PROGRAM = """
import sys
from pathlib import Path
import torch
from scripts.bench import common, dsa, dsa_cases

common.ROOT = Path(sys.argv[1])

def measured(calls):
    figures = {"median_us": 1.0, "peak_mib": "0", "kernels": 1}
    return {name: figures for name, turn in calls.items() for _ in [turn[-1]()]}

how = {"device": "cpu", "dtype": torch.float32, "ceilings": {"tbps": 1.0, "tflops": 1.0}}
small = [(c.scaled(), way) for c in dsa_cases.CASES for way in c.directions]
wrong = dsa.run_cases(small, 0, measured=measured, about={}, **how)
assert not wrong, wrong
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs what runs without a GPU")
def test_every_case_runs_in_the_interpreter(tmp_path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    with (tmp_path / "benchmarks/dsa.csv").open(newline="") as file:
        found = {(r["op"], r["case"], r["direction"], r["impl"]) for r in csv.DictReader(file)}
    for case in dsa_cases.CASES:
        names = ["ours"] + ["eager"] * case.eager + ["torch.topk"] * (case.op == "select_topk")
        if case.op == "indexer_loss":
            names += ["ours without lse", "ours deterministic", "ours with choice"]
        for direction in case.directions:
            names += ["ours deterministic"] * (direction == "backward")
            missing = {(case.op, case.name, direction, name) for name in names} - found
            assert not missing, f"{missing}\n{run.stdout[-4000:]}"
    if importlib.util.find_spec("flash_mla") is None:
        assert "flashmla is left out (ModuleNotFoundError" in run.stdout


def test_chart_of_every_case_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from scripts.bench.chart import draw

    rows = [
        {"op": c.op, "case": c.name, "direction": way, "impl": impl, "median_us": "10",
         "share": "0.5", **ABOUT}
        for c in dsa_cases.CASES for way in c.directions
        for impl in dsa_cases.implementations(c, way)
    ]  # fmt: skip
    rows.append({"op": "matmul", "case": "8192-bf16", "impl": "torch", "share": "1.000", **ABOUT})
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    text = draw(tmp_path / "rows.csv", tmp_path / "chart.svg", what="All of it").read_text()
    assert "All of it; bars end at" in text and "8192-bf16" not in text
    assert "tilelang with choice" in text
