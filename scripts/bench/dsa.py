"""Indexer scores, choice of keys, sparse attention and indexer loss beside their peers in one run.

    python scripts/bench/dsa.py                     # tests of the operators, then all cases
    python scripts/bench/dsa.py --only "sparse_attention 8192x64"  # cases with this text
    python scripts/bench/dsa.py --quick --no-tests  # the fastest look
    python scripts/bench/dsa.py --list              # the cases; needs no GPU
    python scripts/bench/dsa.py --chart             # draw the newest rows again; needs no GPU

Before anybody is timed, some rows at the beginning, in the middle and at the end are solved alone,
gradients too, and held against the PyTorch twin; the same rows of the whole answer then have to be
theirs. The relative error is printed. What is off by more than its limit is not timed, and the run
ends with status 1; so it does where one of ours cannot run. An operator or a peer that is not there
is left out with its reason. Rows go to benchmarks/dsa.csv, the chart to docs/dsa_bench.svg.

``tflops`` are those of slots that hold a key (of scores: of all queries and keys, whatever a row
sees), forward 2 * valid * H * (D + C), backward 2.5 times that; ``share`` is of a product of bf16
matrices in the same run. A selection has ``tbps``, its scores read once, and the share of a copy.
A backward is timed alone, on a graph that is kept.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import (  # noqa: E402
    LEAD_CYCLES,
    ROOT,
    append_rows,
    closed,
    count_kernels,
    distance,
    machine,
    opened,
    parser_of,
    peak_mib,
    reason,
    times_us,
)
from scripts.bench.dsa_cases import (  # noqa: E402
    CASES,
    LEAVES,
    Case,
    build,
    flops,
    implementations,
    moved_bytes,
    part,
    seen_columns,
    some_rows,
)

# Seconds: slower calls are timed a few times, and their kernels are not counted.
SLOW = 0.2
TESTS = "index topk sparse_attention indexer_loss"


def solve(c: Case, direction: str, run: Callable, x: SimpleNamespace) -> Callable:
    """What is timed: a forward, a backward on a graph that is kept, or both."""
    if direction == "forward":
        return torch.no_grad()(lambda: (run(c, x),))
    names = LEAVES[c.op]
    leaves = [getattr(x, name).detach().requires_grad_() for name in names]
    inputs = SimpleNamespace(**{**vars(x), **dict(zip(names, leaves, strict=True))})
    if direction == "backward":
        out = run(c, inputs)
        strict = getattr(run, "deterministic", False)

        def gradients() -> tuple[Tensor, ...]:
            torch.use_deterministic_algorithms(strict)
            try:
                return torch.autograd.grad(out, leaves, inputs.grad, retain_graph=True)
            finally:
                torch.use_deterministic_algorithms(False)

        return gradients

    def both() -> tuple[Tensor, ...]:
        out = run(c, inputs)
        return out.detach(), *torch.autograd.grad(out, leaves)

    return both


def answers_by_row(c: Case) -> tuple[int, ...]:
    """Which answers have a row for every query row that depends on it alone."""
    return (1, 3) if c.op == "indexer_loss" else (0,)


def difference(c: Case, x: SimpleNamespace, got, want) -> float:
    """Largest relative norm of a difference, or share of chosen keys that are others."""
    if c.op == "index_scores":
        seen = seen_columns(x, c.keys)
        got, want = ([t.masked_fill(~seen, 0.0) for t in answer] for answer in (got, want))
    if c.op in ("select_topk", "index_topk"):
        marks = []
        for (chosen,) in (got, want):
            slots = chosen.long().masked_fill(chosen < 0, c.keys)
            mark = torch.zeros(len(slots), c.keys + 1, dtype=torch.int32, device=slots.device)
            mark.scatter_add_(1, slots, torch.ones_like(slots, dtype=torch.int32))
            marks.append(mark[:, :-1])
        # A key that was chosen twice counts as a wrong one.
        return (marks[0] - marks[1]).abs().sum().item() / max(1, 2 * int(marks[1].sum()))
    return distance(tuple(got), tuple(want))


def check(c: Case, direction: str, run: Callable, twin: Callable, x: SimpleNamespace,
          call: Callable) -> float:  # fmt: skip
    """Distance from the twin of some rows, solved alone and taken from the whole answer."""
    rows = some_rows(c).to(x.starts.device)
    few = part(x, rows)
    want = solve(c, direction, twin, few)()
    alone = difference(c, few, solve(c, direction, run, few)(), want)
    answer = call()
    which = answers_by_row(c)
    cut = tuple(answer[i][rows] for i in which)
    return max(alone, difference(c, few, cut, tuple(want[i] for i in which)))


def checked_calls(
    c: Case, direction: str, device: str, dtype: torch.dtype, sets: int
) -> tuple[dict[str, list[Callable]], list[str]]:
    """Calls of every implementation that solves the case, and complaints about the others."""
    calls, wrong = {}, []
    inputs = [build(c, device, dtype, seed) for seed in range(sets)]
    for name, (run, twin, limit) in implementations(c, direction).items():
        what = f"{c.op} {c.name} {direction}: {name}"
        try:
            turn = [solve(c, direction, run, x) for x in inputs]
            off = check(c, direction, run, twin, inputs[0], turn[0])
            if device == "cuda":
                torch.cuda.synchronize()
        except ImportError as error:
            print(f"{what} is left out ({reason(error)})", flush=True)
            continue
        except Exception as error:
            print(f"{what} cannot run ({reason(error)})", flush=True)
            wrong += [f"{what} cannot run"] * name.startswith("ours")
            continue
        if off <= limit:
            print(f"{what}: off by {off:.1e}", flush=True)
            calls[name] = turn
        else:
            wrong.append(f"{what} is off its twin by {off:.1e}, more than {limit:.0e}; not timed")
            print(wrong[-1], flush=True)
    return calls, wrong


def measure(calls: dict[str, list[Callable]], quick: bool) -> dict[str, dict]:
    """Median microseconds, peak MiB and kernels of every implementation's calls."""
    figures, fast = {}, {}
    for name, turn in calls.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        turn[0]()
        torch.cuda.synchronize()
        slow = time.perf_counter() - start > SLOW
        figures[name] = {"peak_mib": f"{peak_mib(turn[0]):.0f}", "kernels": ""}
        if slow:
            medians = times_us({name: turn[:1]}, rounds=1, repeats=1 if quick else 3)
            figures[name]["median_us"] = medians[name]
        else:
            fast[name] = turn
    if fast:
        rounds, repeats = (2, 5) if quick else (5, 10)
        medians = times_us(fast, rounds=rounds, repeats=repeats, lead_cycles=LEAD_CYCLES)
        for name, us in medians.items():
            figures[name]["median_us"] = us
            try:
                figures[name]["kernels"] = count_kernels(fast[name][0])
            except Exception as error:  # a machine without a profiler still has its times
                print(f"kernels are not counted ({reason(error)})", flush=True)
    return figures


def bench(c: Case, direction: str, *, measured: Callable, ceilings: dict[str, float], about: dict,
          sets: int = 1, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[dict], list[str]]:  # fmt: skip
    """Rows of a case, and complaints about wrong implementations.

    Args:
        measured: from calls by implementation to columns by implementation.
        ceilings: "tbps" of a copy and "tflops" of a matrix product on the device.
        about: columns of the machine.
        sets: inputs that the calls rotate over.
    """
    calls, wrong = checked_calls(c, direction, device, dtype, sets)
    rows = []
    for name, figures in (measured(calls) if calls else {}).items():
        us = figures["median_us"]
        rates = {"tbps": moved_bytes(c) / us / 1e6, "tflops": flops(c, direction) / us / 1e6}
        column = "tflops" if rates["tflops"] else "tbps"
        share = rates[column] / ceilings[column]
        row = {"op": c.op, "case": c.name, "direction": direction, "impl": name, **figures, **about}
        row |= {"median_us": f"{us:.1f}", "tbps": "", "tflops": "", "share": f"{share:.3f}"}
        row[column] = f"{rates[column]:.3f}" if column == "tbps" else f"{rates[column]:.1f}"
        rows.append(row)
        unit = {"tbps": "TB/s", "tflops": "TF/s"}[column]
        print(
            f"{c.op:16s} {c.name:20s} {direction:16s} {name:20s} {us / 1000:9.3f} ms "
            f"{row[column]:>7} {unit} {share:6.1%} {row['peak_mib']:>6} MiB "
            f"{row['kernels']!s:>4} kernels",
            flush=True,
        )
    return rows, wrong


def ceiling_rows(about: dict) -> tuple[dict[str, float], list[dict]]:
    """What the device can do, and its rows: a copy of 512 MiB and a product of 8192^3 in bf16."""
    source = torch.randn(2**27, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}
    us = times_us(calls, lead_cycles=LEAD_CYCLES)
    ceilings = {
        "tbps": 2 * source.nbytes / us["copy"] / 1e6,
        "tflops": 2 * 8192**3 / us["matmul"] / 1e6,
    }
    common = {"impl": "torch", "share": "1.000", **about}
    rows = [
        {"op": "copy", "case": "512-mib", "tbps": f"{ceilings['tbps']:.3f}", **common},
        {"op": "matmul", "case": "8192-bf16", "tflops": f"{ceilings['tflops']:.1f}", **common},
    ]
    for row in rows:
        row["median_us"] = f"{us[row['op']]:.1f}"
    return ceilings, rows


def run_cases(chosen: list[tuple[Case, str]], l2_bytes: int, **how) -> list[str]:
    """Append the rows of every case as it ends. Returns complaints; ``how`` goes to bench."""
    complaints = []
    for c, direction in chosen:
        # Two small sets push each other out of the L2; a large one does so alone.
        least = (
            2
            * c.rows
            * {"index_scores": c.keys * 2, "select_topk": c.keys * 2}.get(c.op, c.heads * c.width)
        )
        rows, wrong = bench(c, direction, sets=1 if least > 4 * l2_bytes else 3, **how)
        append_rows("dsa", rows)
        complaints += wrong
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return complaints


def draw_chart() -> None:
    from scripts.bench.chart import draw

    what = (
        "Operations that have to be done over the time, as share of a product of bf16 matrices in "
        "the same run (selection: bytes, and a copy)"
    )
    target = draw(ROOT / "benchmarks/dsa.csv", ROOT / "docs/dsa_bench.svg", what=what)
    print("chart in", target)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    paths = [f"tests/unit/kernels/test_{name}.py" for name in TESTS.split()]
    chosen = opened(options, CASES, draw_chart, paths)
    if chosen is None:
        return
    about = machine()
    ceilings, rows = ceiling_rows(about)
    append_rows("dsa", rows)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(f"{about['gpu']}: copy {ceilings['tbps']:.2f} TB/s, bf16 product "
          f"{ceilings['tflops']:.0f} TF/s, L2 {l2 / 1e6:.0f} MB", flush=True)  # fmt: skip
    measured = functools.partial(measure, quick=options.quick)
    complaints = run_cases(chosen, l2, measured=measured, ceilings=ceilings, about=about)
    closed(options, draw_chart, complaints)


if __name__ == "__main__":
    main()
