"""One recipe twice, with the fused rotary kernels and with ``--no-rope-fusion``, held side by side.

Both paths promise the same bits, so every logged loss and gradient norm has to be the same number;
what may differ is time and memory. On a GPU that takes --deterministic-mode, because torch's
backward of cuDNN attention is not deterministic; measure time without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .cli import quiet_libraries
from .flags import parse_run
from .log import read_log

COMPARED = ("loss", "grad_norm", "valid_loss")
_WARM_UP_STEPS = 2
_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain.py"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two logs say.

    Attributes:
        steps: optimiser steps that both logged.
        differences: "name at step: fused, unfused" where numbers differ or are missing, in order.
        tokens_per_s: medians without the first steps, fused and unfused; NaN for short runs.
        memory_bytes: peaks, fused and unfused.
    """

    steps: int
    differences: list[str]
    tokens_per_s: tuple[float, float]
    memory_bytes: tuple[int, int]


def compare_logs(fused: Path, unfused: Path) -> Comparison:
    """Compare two ``log.jsonl``.

    Raises:
        ValueError: a log holds no step.
    """
    differences = []
    for name in COMPARED:
        a, b = read_log(fused, name), read_log(unfused, name)
        if name == "loss" and not (a and b):
            raise ValueError(f"{fused if not a else unfused} must hold a step, got none")
        differences += [
            f"{name} at step {i}: {a.get(i)}, {b.get(i)}"
            for i in sorted(a.keys() | b.keys())
            if a.get(i) != b.get(i)
        ]
    speeds, peaks = [], []
    for path in (fused, unfused):
        values = list(read_log(path, "tokens_per_s").values())[_WARM_UP_STEPS:]
        speeds.append(statistics.median(values) if values else float("nan"))
        peaks.append(max(read_log(path, "memory_bytes").values(), default=0))
    steps = len(read_log(fused, "loss").keys() & read_log(unfused, "loss").keys())
    return Comparison(
        steps=steps,
        differences=differences,
        tokens_per_s=(speeds[0], speeds[1]),
        memory_bytes=(peaks[0], peaks[1]),
    )


def _report(found: Comparison) -> str:
    fused, unfused = found.tokens_per_s
    lines = [f"{found.steps} steps; fused, unfused:"]
    lines.append(f"  tokens/s   {fused:12.0f} {unfused:12.0f}   {fused / unfused - 1:+.1%}")
    lines.append("  peak MiB   {:12.0f} {:12.0f}".format(*(b / 2**20 for b in found.memory_bytes)))
    if found.differences:
        lines.append(f"  {len(found.differences)} numbers differ, first:")
        lines += [f"    {line}" for line in found.differences[:5]]
    else:
        lines.append(f"  every {', '.join(COMPARED)} is the same number")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when all numbers are the same, 1 when some differ, 2 when a run failed."""
    parser = argparse.ArgumentParser(
        prog="compare_rope_fusion.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Everything else goes to pretrain.py, e.g. --config configs/mla_debug_cpu.yaml "
        "--train-iters 20.",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks of each run")
    parser.add_argument(
        "--out",
        default="runs/compare_rope_fusion",
        help="folder for logs, and for checkpoints of a recipe that saves any",
    )
    options, rest = parser.parse_known_args(arguments)
    out = Path(options.out)
    quiet_libraries()
    try:
        run = parse_run(rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, flags in (("fused", []), ("unfused", ["--no-rope-fusion"])):
        folder = out / name
        if folder.exists():
            print(f"error: --out must have no folder {name!r}, {folder} exists; remove it or name "
                  "another", file=sys.stderr)  # fmt: skip
            return 2
        where = ["--log-dir", str(folder)]
        if run.checkpoint.save is not None:
            where += ["--save", str(folder / "checkpoints")]
        status, fell_back = _run(options.nproc_per_node, [*rest, *flags, *where])
        if status:
            print(f"error: the {name} run ended with {status}", file=sys.stderr)
            return 2
        if fell_back and name == "fused":
            print(f"error: nothing to compare, the run was not fused: {fell_back}", file=sys.stderr)
            return 2
    found = compare_logs(out / "fused" / "log.jsonl", out / "unfused" / "log.jsonl")
    print(_report(found))
    if found.differences and torch.cuda.is_available() and not run.model.get("deterministic_mode"):
        print("  On a GPU two runs of one path may differ too; add --deterministic-mode.")
    return 1 if found.differences else 0


def _run(nproc: int, arguments: list[str]) -> tuple[int, str]:
    """Exit status of a run, and the line in which it says that it takes the unfused path."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", str(_SCRIPT), *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    fell_back = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if "unfused path" in line:
            fell_back = line.strip()
    return process.wait(), fell_back
