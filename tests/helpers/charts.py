"""Charts of benchmarks that have not run."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from scripts.bench.common import COLUMNS


def assert_chart(cases: Iterable, names: tuple[str, ...], about: dict, folder: Path) -> None:
    """A chart of rows of all cases and implementations is drawn into ``folder``.

    Args:
        cases: with ``op`` and ``name``. about: columns of the machine.
    """
    from scripts.bench.chart import draw

    rows = [
        {"op": c.op, "case": c.name, "direction": "forward", "impl": impl, "median_us": "10",
         "share": "0.5", **about}
        for c in cases for impl in names
    ]  # fmt: skip
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    assert draw(folder / "rows.csv", folder / "chart.svg").stat().st_size > 10_000
