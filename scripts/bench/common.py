"""What the benchmarks share: timing side by side, rows of the CSV, names of this machine."""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "op case direction impl median_us tbps tflops share peak_mib kernels "
    "gpu torch triton commit date"
).split()


def machine() -> dict[str, str]:
    """GPU, versions, commit and date of a row."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    commit = os.environ.get("BENCH_COMMIT", "")  # for a copy of the tree without its history
    if not commit:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def times_us(calls: dict[str, callable], *, rounds: int = 5, repeats: int = 20) -> dict[str, float]:
    """Median microseconds of each call, the calls taking turns, so that all see the same clocks."""
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            events = []
            for _ in range(repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                events.append((start, end))
            torch.cuda.synchronize()
            samples[name] += [1000 * start.elapsed_time(end) for start, end in events]
    return {name: statistics.median(values) for name, values in samples.items()}


def peak_mib(call) -> float:
    """Memory that one call allocates above what is held before it, MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def held_mib(call):
    """Answer of a call and the memory that is held because of it, MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    answer = call()
    torch.cuda.synchronize()
    return answer, (torch.cuda.memory_allocated() - before) / 2**20


def count_kernels(call) -> int:
    """GPU kernels of one call; copies and fills count too."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def append_rows(name: str, rows: list[dict]) -> Path:
    """Append rows to ``benchmarks/<name>.csv`` (with a header when it is new)."""
    path = ROOT / "benchmarks" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)
    return path
