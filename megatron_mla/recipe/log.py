"""What a run tells: progress bar, log.jsonl, TensorBoard, and the loss curve at the end.

Only rank 0 makes a :class:`Log` that writes. tqdm, TensorBoard and matplotlib are optional: what is
missing is said in one line, with the extra that brings it.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_mla.selection import missing_reason

from .schema import Logging

_EXTRA = "pip install 'megatron-mla[train]'"


def say(text: str) -> None:
    """Print a line on rank 0, above the progress bar."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    print(text, flush=True)


def _optional(module: str, purpose: str) -> ModuleType | None:
    reason = missing_reason(module)
    if reason is not None:
        print(f"no {purpose}: {reason}; {_EXTRA}", flush=True)
        return None
    return importlib.import_module(module)


def peak_memory() -> int:
    """Most memory of this process so far, in bytes: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Log:
    """Logs of one run."""

    def __init__(self, options: Logging, *, train_iters: int, done: int, active: bool) -> None:
        self._active = active
        self.folder = Path(options.log_dir)
        self.jsonl = self.folder / "log.jsonl"
        self.curve = self.folder / "loss.png"
        self._bar: Any = None
        self._tensorboard: Any = None
        if not active:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._started = time.perf_counter()
        if done:
            _forget_after(self.jsonl, done)
        self._file = self.jsonl.open("a" if done else "w", encoding="utf-8")
        if options.progress and (tqdm := _optional("tqdm", "progress bar")):
            self._bar = tqdm.tqdm(
                total=train_iters,
                initial=done,
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
                # In a file every update is a line.
                mininterval=0.1 if sys.stderr.isatty() else 10.0,
            )
        tensorboard = "torch.utils.tensorboard"
        if options.tensorboard and (board := _optional(tensorboard, "TensorBoard events")):
            folder = str(self.folder / "tensorboard")
            self._tensorboard = board.SummaryWriter(folder, purge_step=done + 1)

    def step(self, iteration: int, values: dict[str, float | int], *, write: bool) -> None:
        """One optimiser step. ``values``: loss, grad_norm, lr, tokens_per_s, memory_bytes, ..."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.update(iteration - self._bar.n)
            self._bar.set_postfix_str(
                f"loss {values['loss']:.3f} {_of_indexer(values)}grad {values['grad_norm']:.2f} "
                f"lr {values['lr']:.1e} {values['tokens_per_s']:.0f} tok/s "
                f"{values['memory_bytes'] / 2**30:.1f} GiB",
                refresh=False,
            )
        if write:
            self._write(iteration, values)

    def held_out(
        self, iteration: int, loss: float, overlap: dict[str, float] | None = None
    ) -> None:
        """A held-out loss, in nats per token, and the indexers' overlap with dense attention."""
        if not self._active:
            return
        overlap = overlap or {}
        self._write(iteration, {"valid_loss": loss, **overlap})
        line = f"step {iteration}: held-out loss {loss:.4f}"
        if "indexer_overlap" in overlap:
            line += f", chosen keys {overlap['indexer_overlap']:.1%} of dense attention's"
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """End the logs and draw the loss curve."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file.close()
        self._draw()

    def _write(self, iteration: int, values: dict[str, float | int]) -> None:
        elapsed = time.perf_counter() - self._started
        line = {"iteration": iteration, **values, "elapsed_s": round(elapsed, 3)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, iteration)

    def _draw(self) -> None:
        if _optional("matplotlib", "loss curve") is None:
            return
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        sparse = [
            (read_log(self.jsonl, name), label)
            for name, label in (
                ("indexer_loss", "indexer loss"),
                ("indexer_overlap", "overlap with dense top-k"),
            )
        ]
        panels = [(points, label) for points, label in sparse if points]
        figure, all_axes = pyplot.subplots(
            1 + len(panels), figsize=(7, 4 + 2 * len(panels)), squeeze=False, sharex=True
        )
        axes = all_axes[0, 0]
        for name, label, style in (
            ("loss", "training", {"linewidth": 0.8}),
            ("valid_loss", "held out", {"marker": "o", "markersize": 3}),
        ):
            points = read_log(self.jsonl, name)
            axes.plot(list(points), list(points.values()), label=label, **style)
        axes.set_ylabel("loss (nats per token)")
        axes.legend()
        for panel, (points, label) in zip(all_axes[1:, 0], panels, strict=True):
            style = {"marker": "o", "markersize": 3} if len(points) < 50 else {"linewidth": 0.8}
            panel.plot(list(points), list(points.values()), **style)
            panel.set_ylabel(label)
        for panel in all_axes[:, 0]:
            panel.grid(alpha=0.3)
        all_axes[-1, 0].set_xlabel("step")
        figure.tight_layout()
        figure.savefig(self.curve, dpi=120)
        pyplot.close(figure)


def _of_indexer(values: dict[str, float | int]) -> str:
    return f"indexer {values['indexer_loss']:.1e} " if "indexer_loss" in values else ""


def read_log(path: Path, name: str) -> dict[int, float]:
    """Values of one name by iteration, in order."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {line["iteration"]: line[name] for line in lines if name in line}


def _forget_after(path: Path, iteration: int) -> None:
    """Drop lines of steps that a resumed run does again, and a last line cut short by a kill."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["iteration"] <= iteration:
            kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")
