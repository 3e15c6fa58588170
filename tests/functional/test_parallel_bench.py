"""scripts/bench/parallel.py on two CPU ranks: that it runs, and what its rows say."""

from __future__ import annotations

import csv

import pytest

from scripts.bench.parallel import LAYERS, STEPS
from tests.helpers.launch import ROOT, run_ranks, under_torchrun

pytestmark = [
    pytest.mark.functional,
    pytest.mark.skipif(under_torchrun(), reason="starts ranks of its own"),
]


def test_rows_of_two_ranks(tmp_path) -> None:
    one = {"op": "layer", "case": "glm-5-dsa-32k", "impl": "ours", "ranks": "1", "gpu": "none"}
    script = ROOT / "scripts" / "bench" / "parallel.py"
    how = ("--smoke", "--out", str(tmp_path))
    run_ranks(script, 2, *how, env={"CUDA_VISIBLE_DEVICES": "", "BENCH_COMMIT": "abc"})
    path = tmp_path / "parallel.csv"
    rows = list(csv.DictReader(path.open()))
    assert [(row["op"], row["case"], row["impl"]) for row in rows] == [
        *(("step", case, impl) for case in STEPS for impl in ("fused", "unfused")),
        *(("layer", case, "ours") for case in LAYERS),
    ]
    for row in rows:
        assert (row["ranks"], row["tp"], row["commit"], row["gpu"]) == ("2", "1", "abc", "none")
        assert int(row["cp"]) * int(row["dp"]) == 2
        assert (row["cp"] == "1") == (row["case"] == "glm-5-packed-4k")
        assert float(row["median_us"]) > 0
        # One rank of this commit is not there yet.
        assert row["efficiency"] == row["comm_us"] == row["peak_mib"] == ""
        if row["op"] == "step":  # two layers of attention are a part of a step
            assert 0.1 < float(row["attention_us"]) / float(row["median_us"]) < 1

    with path.open("a", newline="") as file:
        known = {**rows[-1], **one, "median_us": "1000000", "commit": "abc"}
        csv.DictWriter(file, rows[0].keys(), lineterminator="\n").writerow(known)
    env = {"CUDA_VISIBLE_DEVICES": "", "BENCH_COMMIT": "abc"}
    run_ranks(script, 2, *how, "--only", "layer glm-5-dsa-32k", env=env)
    last = list(csv.DictReader(path.open()))[-1]
    assert float(last["efficiency"]) == pytest.approx(5e5 / float(last["median_us"]), abs=1e-3)
