"""Rotation, packing, key-value split and absorbed queries beside their peers in one run.

    python scripts/bench/rope.py                     # tests of the kernels, then all cases
    python scripts/bench/rope.py --only pack-q       # cases whose "op case direction" has this text
    python scripts/bench/rope.py --quick --no-tests --no-compile  # the fastest look
    python scripts/bench/rope.py --list              # the cases; needs no GPU
    python scripts/bench/rope.py --tiles             # tile sizes of the kernels, a minute, no rows
    python scripts/bench/rope.py --chart             # draw the newest rows again; needs no GPU

Before a case is timed, ours is held against its PyTorch twin: bit for bit (absorbed queries:
relative norm below 1e-2), outputs and gradients. The run stops if they differ. A peer that is not
installed or cannot run is left out with its reason; so is one that is off by more than 2e-2, and
then the run ends with status 1. Rows go to benchmarks/rope.csv, the chart to docs/rope_bench.svg.

``tbps`` is what the operation has to move (every input read once, every output written once) over
the time, with the same bytes for every implementation of a case; ``share`` is of a 512 MiB copy on
the device in the same run. Both compare times and pass the copy's where less is moved than that:
our backward of rope_concat rotates its 64 channels and returns a view of the others, and upstream's
backward of q overwrites the gradient it is given, which autograd forbids and ours does not. A
backward is timed alone, on a graph that is kept.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import (  # noqa: E402
    LEAD_CYCLES,
    ROOT,
    append_rows,
    closed,
    distance,
    machine,
    measure,
    opened,
    parser_of,
    reason,
    timed_call,
    times_us,
)
from scripts.bench.rope_cases import (  # noqa: E402
    CASES,
    Case,
    build,
    flops,
    halves_to_pairs,
    implementations,
    moved_bytes,
)
from scripts.bench.rope_tiles import sweep_all  # noqa: E402


def checked_calls(
    c: Case, direction: str, device: str, dtype: torch.dtype, sets: int
) -> tuple[dict[str, list[Callable]], list[str]]:
    """Calls of every implementation on ``sets`` inputs, and complaints about wrong peers.

    Raises:
        SystemExit: ours does not run, or is not what its twin is.
    """
    calls, wrong = {}, []
    inputs = functools.partial(build, c, device, dtype, grad=direction == "backward")
    for name, (run, twin, limit) in implementations(c).items():
        what = f"{c.op} {c.name} {direction}: {name}"
        try:
            turn = [timed_call(direction, run, inputs(seed), seed) for seed in range(sets)]
            answer = halves_to_pairs(turn[0]()) if name == "liger" else turn[0]()
            off = distance(answer, timed_call(direction, twin, inputs(0), 0)())
            for call in turn:
                call()  # on other inputs, and again: what fails only then is left out too
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            if name.startswith("ours"):
                raise SystemExit(f"{what} cannot run ({reason(error)}); not timed") from error
            print(f"{what} is left out ({reason(error)})", flush=True)
            continue
        if off <= limit:
            calls[name] = turn
        elif name.startswith("ours"):
            raise SystemExit(f"{what} is off its twin by {off:.1e}; not timed")
        else:
            wrong.append(f"{what} is left out, off by {off:.1e}")
            print(wrong[-1], flush=True)
    return calls, wrong


def bench(c: Case, direction: str, *, measured: Callable, ceiling_tbps: float, about: dict,
          sets: int = 2, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[dict], list[str]]:  # fmt: skip
    """Rows of a case, and complaints about wrong peers.

    Args:
        measured: from calls by implementation to columns by implementation.
        ceiling_tbps: TB/s of a copy on the device.
        about: columns of the machine.
        sets: inputs that the calls rotate over.
    """
    calls, wrong = checked_calls(c, direction, device, dtype, sets)
    rows = []
    for name, figures in measured(calls).items():
        us = figures["median_us"]
        tbps, tflops = moved_bytes(c, direction) / us / 1e6, flops(c, direction) / us / 1e6
        row = {"op": c.op, "case": c.name, "direction": direction, "impl": name, **figures, **about}
        row |= {"median_us": f"{us:.1f}", "tbps": f"{tbps:.3f}"}
        row |= {"tflops": f"{tflops:.0f}" * bool(tflops), "share": f"{tbps / ceiling_tbps:.3f}"}
        rows.append(row)
        print(
            f"{c.op:13s} {c.name:32s} {direction:8s} {name:21s} {us:8.1f} us {tbps:6.2f} TB/s "
            f"{tbps / ceiling_tbps:7.1%} of copy {row['peak_mib']:>5} MiB {row['kernels']:3} "
            f"kernels{f' {tflops:4.0f} TF/s' * bool(tflops)}",
            flush=True,
        )
    return rows, wrong


def copy_row(about: dict) -> dict:
    """The ceiling: a copy of 512 MiB on the device."""
    source = torch.randn(2**27, device="cuda")
    target = torch.empty_like(source)
    us = times_us({"copy": lambda: target.copy_(source)}, lead_cycles=LEAD_CYCLES)["copy"]
    row = {"op": "copy", "case": "512-mib", "impl": "torch", **about}
    tbps = 2 * source.nbytes / us / 1e6
    return {**row, "median_us": f"{us:.1f}", "tbps": f"{tbps:.3f}", "share": "1.000"}


def run_cases(chosen: list[tuple[Case, str]], l2_bytes: int, **how) -> list[str]:
    """Append the rows of every case as it ends. Returns complaints; ``how`` goes to bench."""
    complaints = []
    for c, direction in chosen:
        # Together far more than the L2 holds.
        sets = min(32, max(2, math.ceil(4 * l2_bytes / moved_bytes(c, direction))))
        rows, wrong = bench(c, direction, sets=sets, **how)
        append_rows("rope", rows)
        complaints += wrong
        torch.cuda.empty_cache()
    return complaints


def draw_chart() -> None:
    from scripts.bench.chart import draw

    print("chart in", draw(ROOT / "benchmarks/rope.csv", ROOT / "docs/rope_bench.svg"))


def main() -> None:
    parser = parser_of(__doc__)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--tiles", action="store_true", help="sweep tile sizes instead")
    parser.add_argument("--compile", action=switch, default=True, help="time torch.compile too")
    options = parser.parse_args()
    chosen = opened(options, CASES, draw_chart, ["tests/unit/kernels"])
    if chosen is None:
        return
    about = machine()
    ceiling = copy_row(about)
    ceiling_tbps = float(ceiling["tbps"])
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(f"{about['gpu']}: copy {ceiling_tbps:.2f} TB/s, L2 {l2 / 1e6:.0f} MB", flush=True)
    if options.tiles:
        sweep_all(options.only, ceiling_tbps)
        return
    append_rows("rope", [ceiling])
    chosen = [(replace(c, compiled=c.compiled and options.compile), way) for c, way in chosen]
    measured = functools.partial(measure, quick=options.quick)
    complaints = run_cases(chosen, l2, measured=measured, ceiling_tbps=ceiling_tbps, about=about)
    closed(options, draw_chart, complaints)


if __name__ == "__main__":
    main()
