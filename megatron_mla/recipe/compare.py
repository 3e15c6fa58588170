"""One recipe twice, with two implementations of the same layer, held side by side.

Both runs see the same tokens from the same weights. Their curves are drawn in ``curves.png``, and
what they say is kept in ``comparison.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .cli import quiet_libraries
from .flags import parse_run
from .log import _optional, read_log

COMPARED = ("loss", "grad_norm", "valid_loss")
_DRAWN = {
    "loss": "loss (nats per token)",
    "grad_norm": "gradient norm",
    "indexer_loss": "indexer loss",
}
_WARM_UP_STEPS = 2
_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain.py"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ways to run a recipe.

    Attributes:
        program: name of the script.
        about: what it says of itself.
        names, flags: of the runs; the first is the one in question.
        tolerance: of the relative difference of mean losses over the last tenth of the steps; None
            where every number has to be the same.
        fallback: words of the line in which a run says that it does not take the first way.
    """

    program: str
    about: str
    names: tuple[str, str]
    flags: tuple[tuple[str, ...], tuple[str, ...]]
    tolerance: float | None
    fallback: str


ROPE = Pair(
    program="compare_rope_fusion.py",
    about="""One recipe twice, with the fused rotary kernels and with --no-rope-fusion.

Both paths promise the same bits, so every logged loss and gradient norm has to be the same number;
what may differ is time and memory. On a GPU that takes --deterministic-mode, because torch's
backward of cuDNN attention is not deterministic; measure time without it.""",
    names=("fused", "unfused"),
    flags=((), ("--no-rope-fusion",)),
    tolerance=None,
    fallback="unfused path",
)
DSA = Pair(
    program="compare_dsa_backends.py",
    about="""One recipe twice, with Triton's operators of sparse attention and with plain PyTorch's.

They round differently, and a key of which the score is nearly that of another may be chosen by one
alone: curves run beside each other. Over the last tenth of the steps their mean losses have to
agree within 1 %.""",
    names=("triton", "none"),
    flags=(("--dsa-kernel-backend", "triton"), ("--dsa-kernel-backend", "none")),
    tolerance=0.01,
    fallback="eager operators of sparse attention",
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two logs say.

    Attributes:
        steps: optimiser steps that both logged.
        differences: "name at step: first, second" where numbers differ or are missing, in order.
        gaps: largest relative difference of the numbers of a name that both logged.
        last_losses: means over the last tenth of the steps that both logged.
        tokens_per_s: medians without the first steps; NaN for short runs.
        memory_bytes: peaks.
    """

    steps: int
    differences: list[str]
    gaps: dict[str, float]
    last_losses: tuple[float, float]
    tokens_per_s: tuple[float, float]
    memory_bytes: tuple[int, int]


def compare_logs(first: Path, second: Path) -> Comparison:
    """Compare two ``log.jsonl``.

    Raises:
        ValueError: a log holds no step, or they have none in common.
    """
    differences, gaps = [], {}
    for name in COMPARED:
        a, b = read_log(first, name), read_log(second, name)
        if name == "loss" and not (a and b):
            raise ValueError(f"{first if not a else second} must hold a step, got none")
        differences += [
            f"{name} at step {i}: {a.get(i)}, {b.get(i)}"
            for i in sorted(a.keys() | b.keys())
            if a.get(i) != b.get(i)
        ]
        both = sorted(a.keys() & b.keys())
        if both:
            gaps[name] = max(_relative(a[i], b[i]) for i in both)
    speeds, peaks, ends = [], [], []
    steps = sorted(read_log(first, "loss").keys() & read_log(second, "loss").keys())
    if not steps:
        raise ValueError(f"{first} and {second} must have a step in common, got none")
    for path in (first, second):
        values = list(read_log(path, "tokens_per_s").values())[_WARM_UP_STEPS:]
        speeds.append(statistics.median(values) if values else float("nan"))
        peaks.append(max(read_log(path, "memory_bytes").values(), default=0))
        losses = read_log(path, "loss")
        ends.append(statistics.fmean(losses[i] for i in steps[-max(1, len(steps) // 10) :]))
    return Comparison(
        steps=len(steps),
        differences=differences,
        gaps=gaps,
        last_losses=(ends[0], ends[1]),
        tokens_per_s=(speeds[0], speeds[1]),
        memory_bytes=(peaks[0], peaks[1]),
    )


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    gap = abs(a - b) / max(abs(b), sys.float_info.min)
    return gap if math.isfinite(gap) else math.inf  # of NaN too


def agrees(found: Comparison, pair: Pair) -> bool:
    """Whether two runs say what the pair promises."""
    if pair.tolerance is None:
        return not found.differences
    return _relative(*found.last_losses) <= pair.tolerance


def _report(found: Comparison, pair: Pair) -> str:
    first, second = found.tokens_per_s
    lines = [f"{found.steps} steps; {', '.join(pair.names)}:"]
    lines.append(f"  tokens/s   {first:12.0f} {second:12.0f}   {first / second - 1:+.1%}")
    lines.append("  peak MiB   {:12.0f} {:12.0f}".format(*(b / 2**20 for b in found.memory_bytes)))
    if pair.tolerance is not None:
        gap = _relative(*found.last_losses)
        lines.append("  last loss  {:12.4f} {:12.4f}".format(*found.last_losses) + f"   {gap:.1e}")
        gaps = ", ".join(f"{name} {gap:.1e}" for name, gap in found.gaps.items())
        lines.append(f"  largest relative differences at a step: {gaps}")
    elif found.differences:
        lines.append(f"  {len(found.differences)} numbers differ, first:")
        lines += [f"    {line}" for line in found.differences[:5]]
    else:
        lines.append(f"  every {', '.join(COMPARED)} is the same number")
    return "\n".join(lines)


def write_report(found: Comparison, pair: Pair, out: Path) -> None:
    """``comparison.json``, and ``curves.png`` where matplotlib is there."""
    logs = {name: out / name / "log.jsonl" for name in pair.names}
    curves = {key: {name: read_log(log, key) for name, log in logs.items()} for key in _DRAWN}
    curves = {key: lines for key, lines in curves.items() if all(lines.values())}
    whole = {"names": pair.names, **asdict(found), "agrees": agrees(found, pair), "curves": curves}
    (out / "comparison.json").write_text(json.dumps(_no_nan(whole), indent=1) + "\n")
    if _optional("matplotlib", "curves") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(curves), figsize=(7, 1 + 2.5 * len(curves)), squeeze=False, sharex=True
    )
    for panel, (key, lines) in zip(axes[:, 0], curves.items(), strict=True):
        for (name, points), style in zip(lines.items(), ("-", "--"), strict=True):
            panel.plot(list(points), list(points.values()), style, linewidth=0.9, label=name)
        panel.set_ylabel(_DRAWN[key])
        panel.grid(alpha=0.3)
    axes[0, 0].legend()
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(out / "curves.png", dpi=120)
    pyplot.close(figure)


def _no_nan(value):
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _no_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: list[str] | None = None, pair: Pair = ROPE) -> int:
    """Returns 0 when the runs agree, 1 when they do not, 2 when one failed."""
    parser = argparse.ArgumentParser(
        prog=pair.program,
        description=pair.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Everything else goes to pretrain.py, e.g. --config configs/mla_debug_cpu.yaml "
        "--train-iters 20.",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks of each run")
    parser.add_argument(
        "--out",
        default=f"runs/{pair.program.removesuffix('.py')}",
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
    for name, flags in zip(pair.names, pair.flags, strict=True):
        folder = out / name
        if folder.exists():
            print(f"error: --out must have no folder {name!r}, {folder} exists; remove it or name "
                  "another", file=sys.stderr)  # fmt: skip
            return 2
        where = ["--log-dir", str(folder)]
        if run.checkpoint.save is not None:
            where += ["--save", str(folder / "checkpoints")]
        status, said = _run(options.nproc_per_node, [*rest, *flags, *where])
        if status:
            print(f"error: the {name} run ended with {status}", file=sys.stderr)
            return 2
        fell_back = [line for line in said.splitlines() if pair.fallback in line]
        if fell_back and name == pair.names[0]:
            print(f"error: nothing to compare, the run was not {name}: {fell_back[0]}",
                  file=sys.stderr)  # fmt: skip
            return 2
    found = compare_logs(*(out / name / "log.jsonl" for name in pair.names))
    print(_report(found, pair))
    write_report(found, pair, out)
    same = agrees(found, pair)
    if pair.tolerance is None and not same and torch.cuda.is_available():
        if not run.model.get("deterministic_mode"):
            print("  On a GPU two runs of one path may differ too; add --deterministic-mode.")
    return 0 if same else 1


def _run(nproc: int, arguments: list[str]) -> tuple[int, str]:
    """Exit status of a run, and the lines in which it says that it takes another path."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", str(_SCRIPT), *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    for line in process.stdout:
        print(line, end="", flush=True)
        if any(pair.fallback in line for pair in (ROPE, DSA)):
            said.append(line.strip())
    return process.wait(), "\n".join(said)
