"""What the benchmarks share: timing side by side, rows of the CSV, names of this machine."""

from __future__ import annotations

import argparse
import collections
import csv
import datetime
import functools
import itertools
import math
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "op case direction impl median_us tbps tflops share peak_mib kernels "
    "gpu torch triton commit date"
).split()
# About 1 ms: longer than the host takes to launch what is timed.
LEAD_CYCLES = 2_000_000


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
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def times_us(
    calls: dict[str, Callable | list[Callable]],
    *,
    rounds: int = 5,
    repeats: int = 20,
    lead_cycles: int = 0,
) -> dict[str, float]:
    """Median microseconds of each call, the calls taking turns, so that all see the same clocks.

    Args:
        calls: by name; a list is gone through in rotation and its latest answers are held, so that
            neither inputs nor outputs are found in the L2 by the next call.
        lead_cycles: GPU clock cycles of idling before every timed call. The launch of a short
            kernel takes the host longer than the kernel takes; meanwhile it gets queued.
    """
    turns = {name: call if isinstance(call, list) else [call] for name, call in calls.items()}
    for turn in turns.values():
        for call in itertools.islice(itertools.cycle(turn), 3):
            call()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, turn in turns.items():
            events = []
            held = collections.deque(maxlen=len(turn) if len(turn) > 1 else 0)
            for call in itertools.islice(itertools.cycle(turn), repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if lead_cycles:
                    torch.cuda._sleep(lead_cycles)
                start.record()
                held.append(call())
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
    return len(kernel_times(call))


def kernel_times(call) -> list[tuple[str, float]]:
    """Name and microseconds of every GPU kernel of one call, in order; copies and fills too."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.elapsed_us())
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def measure(calls: dict[str, list[Callable]], quick: bool) -> dict[str, dict]:
    """Median microseconds, peak MiB and kernels of every implementation's calls."""
    rounds, repeats = (2, 10) if quick else (5, 20)
    medians = times_us(calls, rounds=rounds, repeats=repeats, lead_cycles=LEAD_CYCLES)
    return {
        name: {
            "median_us": medians[name],
            "peak_mib": f"{peak_mib(turn[0]):.0f}",
            "kernels": kernels_or_blank(turn[0]),
        }
        for name, turn in calls.items()
    }


def kernels_or_blank(call: Callable) -> int | str:
    """A machine whose profiler does not work still has its times."""
    try:
        return count_kernels(call)
    except Exception as error:
        print(f"kernels are not counted ({reason(error)})", flush=True)
        return ""


@functools.cache
def compiled(function: Callable) -> Callable:
    """``torch.compile`` for fixed shapes, with a backward that can be called many times."""
    import torch._functorch.config

    # A backward that gave its buffers away refuses to keep the graph.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def as_tuple(answer: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def timed_call(direction: str, run: Callable, inputs, seed: int) -> Callable:
    """What is timed: a forward, or a backward alone on a graph that is made here and kept.

    Args:
        run: from ``inputs`` to answers; ``inputs.leaves`` get the gradients.
        seed: of the incoming gradients.
    """
    if direction == "forward":
        return torch.no_grad()(lambda: run(inputs))
    outputs = as_tuple(run(inputs))
    device = outputs[0].device
    generator = torch.Generator(device).manual_seed(1000 + seed)
    # Of its own for every implementation: there are some that overwrite them.
    grads = [
        torch.randn(t.shape, generator=generator, device=device, dtype=t.dtype) for t in outputs
    ]
    return lambda: torch.autograd.grad(outputs, inputs.leaves, grads, retain_graph=True)


def distance(got, want) -> float:
    """Largest relative norm of a difference; 0 only where all are equal, infinite for NaN."""
    worst = 0.0
    for a, b in zip(as_tuple(got), as_tuple(want), strict=True):
        if a.shape != b.shape:
            return math.inf
        if not torch.equal(a, b):
            off = ((a.float() - b.float()).norm() / b.float().norm()).item()
            worst = max(worst, off if off > 0 else math.inf)
    return worst


def reason(error: BaseException) -> str:
    """One line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def forward_rows(
    c, figures: dict[str, dict], *, moved: int, ceiling_tbps: float, about: dict, flops: int = 0
) -> list[dict]:
    """Rows of a forward that is measured by its bytes; prints them.

    Args:
        c: a case with ``op`` and ``name``.
        figures: columns by implementation, ``median_us`` a number.
        moved: bytes. flops: of implementations that do more than copy; 0 where nobody counts them.
        ceiling_tbps: TB/s of a copy on the device.
        about: columns of the machine.
    """
    rows = []
    for name, columns in figures.items():
        us = columns["median_us"]
        tbps = moved / us / 1e6
        row = {"op": c.op, "case": c.name, "direction": "forward", "impl": name, **columns, **about}
        row |= {"median_us": f"{us:.1f}", "tbps": f"{tbps:.3f}"}
        row["tflops"] = f"{flops / us / 1e6:.1f}" if flops and name != "copy" else ""
        rows.append({**row, "share": f"{tbps / ceiling_tbps:.3f}"})
        print(
            f"{c.op:9s} {c.name:24s} {name:14s} {us:9.1f} us {tbps:6.2f} TB/s "
            f"{tbps / ceiling_tbps:7.1%} of copy {row['tflops']:>6} TF/s {row['peak_mib']:>5} MiB "
            f"{row['kernels']!s:>3} kernels",
            flush=True,
        )
    return rows


def append_rows(name: str, rows: list[dict], columns=COLUMNS, folder: Path | None = None) -> Path:
    """Append rows to ``<folder>/<name>.csv``, with a header when it is new; None: benchmarks/."""
    path = (folder or ROOT / "benchmarks") / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)
    return path


def parser_of(doc: str) -> argparse.ArgumentParser:
    """What benchmarks of operators are asked for."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--only", default="", help='cases whose "op case direction" has this text')
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing else")
    parser.add_argument("--chart", action=switch, help="draw and do nothing else; --no-: never")
    parser.add_argument("--tests", action=switch, default=True, help="run their tests first")
    return parser


def opened(options: argparse.Namespace, cases, draw: Callable, tests: list[str]) -> list | None:
    """Cases and directions to time; None when ``--list`` or ``--chart`` was all.

    Args:
        draw: makes the chart.
        tests: paths that have to be green first.
    """
    chosen = [(c, direction) for c in cases for direction in c.directions
              if options.only in f"{c.op} {c.name} {direction}"]  # fmt: skip
    if options.list:
        print(*(f"{c.op} {c.name} {direction}" for c, direction in chosen), sep="\n")
        return None
    if options.chart:
        draw()
        return None
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and this machine has none.")
    warnings.simplefilter("ignore")
    if options.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise SystemExit("The tests of the operators are red: nothing is timed.")
    return chosen


def closed(options: argparse.Namespace, draw: Callable, complaints: list[str]) -> None:
    """Draw what was timed, and end with what was wrong."""
    if options.chart is None:
        try:
            draw()
        except Exception as error:  # rows are there, and --chart draws them anywhere
            print(f"no chart ({reason(error)})")
    if complaints:
        raise SystemExit("\n".join(complaints))
