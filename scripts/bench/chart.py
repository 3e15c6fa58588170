"""Chart of a benchmark's newest rows: how near every implementation comes to a ceiling."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
# Text stays text: small files, and the same ones for the same rows.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rope", "font.size": 8})

import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {
    "ours": "#0b6e4f",
    "ours fp32": "#59b28f",
    "ours with positions": "#a4d8c0",
    "einsum + rope_concat": "#c7d36f",
    "eager": "#9a9a9a",
    "torch.compile": "#5f7fb8",
    "upstream": "#d9822b",
    "einsum + upstream": "#e9b27a",
    "upstream with a clone": "#e9b27a",
}
PEER_COLOURS = ("#8a63a8", "#b5485d", "#6d4c2f", "#3f3f3f")
# Bars end here and say in words what they are: a backward that moves less than it could need not
# squeeze all others.
MOST = 1.25
BAR = 0.13  # inches
CEILINGS = ("copy", "matmul")
WHAT = "Bytes that have to move over the time, as share of a device-to-device copy in the same run"


def newest(path: Path) -> dict[tuple[str, str, str], dict[str, dict]]:
    """The last row of every implementation, by (op, case, direction) and name."""
    groups: dict[tuple[str, str, str], dict[str, dict]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["op"] not in CEILINGS:
                group = groups.setdefault((row["op"], row["case"], row["direction"]), {})
                group[row["impl"]] = row
    return groups


def caption(rows: list[dict], what: str) -> str:
    def values(column: str) -> str:
        return ", ".join(sorted({row[column] for row in rows}))

    return (
        f"{what}; bars end at {MOST:.0%}.\n{values('gpu')}, torch {values('torch')}, Triton "
        f"{values('triton')}, commit {values('commit')}, {values('date')}"
    )


def _columns(groups: list) -> list[list]:
    """Two columns of about the same number of bars; one where there is little."""
    total = sum(len(group) + 1 for _, group in groups)
    if total < 40:
        return [groups]
    bars, left = 0, []
    for item in groups:
        if bars >= total / 2:
            break
        left.append(item)
        bars += len(item[1]) + 1
    return [left, groups[len(left) :]]


def _draw_column(axis, groups: list, colours: dict[str, str], height: float) -> None:
    place, ticks, labels = 0.0, [], []
    for (op, case, direction), group in groups:
        ticks.append(place + (len(group) - 1) / 2)
        labels.append(f"{case}\n{op}, {direction}" if len(group) > 1 else f"{case}, {direction}")
        for name, row in group.items():
            share = float(row["share"])
            axis.barh(place, min(share, MOST), 0.9, color=colours[name])
            us = float(row["median_us"])
            label = f"{us:.0f} µs" if us >= 20 else f"{us:.1f} µs"
            label += f", {share:.0%}" if share > MOST else ""
            text = axis.text(min(share, MOST) + 0.01, place, label, va="center", fontsize=6.5)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})
            place += 1
        place += 1
    axis.set_yticks(ticks, labels, fontsize=7)
    axis.set_ylim(height, -1)
    axis.set_xlim(0, MOST + 0.3)
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(0.25))
    axis.axvline(1, color="#444444", linewidth=0.8, linestyle="--", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def draw(rows: Path, target: Path, *, what: str = WHAT) -> Path:
    """Draw the newest rows of a CSV of the benchmarks, one group of bars for every case.

    Args:
        rows: CSV with :data:`scripts.bench.common.COLUMNS`; rows of ceilings are not drawn.
        target: .svg or .png, overwritten.
        what: the bars are.
    Returns:
        ``target``.
    Raises:
        ValueError: there is nothing to draw.
    """
    groups = list(newest(rows).items())
    if not groups:
        raise ValueError(
            f"rows must hold measured cases, got none in {rows}; run a benchmark first"
        )
    found = [row for _, group in groups for row in group.values()]
    names = list(dict.fromkeys(row["impl"] for row in found))
    peers = [name for name in names if name not in COLOURS]
    colours = COLOURS | {n: PEER_COLOURS[i % len(PEER_COLOURS)] for i, n in enumerate(peers)}

    columns = _columns(groups)
    height = max(sum(len(group) + 1 for _, group in column) for column in columns)
    inches = height * BAR + 1.6
    figure, axes = plt.subplots(
        1, len(columns), figsize=(6.5 * len(columns), inches), squeeze=False
    )
    for axis, column in zip(axes[0], columns, strict=True):
        _draw_column(axis, column, colours, height)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    per_row = 4 * len(columns)
    figure.legend(handles, names, loc="upper center", ncols=per_row, frameon=False)
    lines = math.ceil(len(names) / per_row)
    figure.text(0.5, 0.08 / inches, caption(found, what), ha="center", va="bottom", fontsize=7)
    figure.tight_layout(rect=(0, 0.45 / inches, 1, 1 - (0.15 + 0.2 * lines) / inches))
    target.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if target.suffix == ".svg" else None
    figure.savefig(target, metadata=metadata)
    plt.close(figure)
    return target
