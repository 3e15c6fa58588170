"""The training loop: Megatron-Core's schedule forward and backward, one optimiser step, the log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_mla.attention.indexer_loss import IndexerLossLog

from . import checkpoint
from .batches import Batch, Batches
from .log import Log, peak_memory, say
from .model import forward, indexer_values, mean_over_ranks, token_loss
from .optim import RunOptimizer
from .schema import Run


@dataclass(kw_only=True)
class Trainer:
    """A run under way."""

    run: Run
    model: DistributedDataParallel
    optimizer: RunOptimizer
    scheduler: OptimizerParamScheduler
    training: Batches
    held_out: Batches
    log: Log
    layout: checkpoint.Layout
    progress: checkpoint.Progress
    data_parallel_size: int
    indexer_log: IndexerLossLog | None = None

    def __post_init__(self) -> None:
        config = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = self.model.no_sync
        self.scheduler.step(self.progress.consumed_samples)

    def train(self) -> None:
        """Run until ``train_iters``, or until ``exit_interval`` divides the step."""
        numbers = self.run.training
        if self.progress.iteration == 0:
            self.evaluate()
        batches = self.training.from_sample(self.progress.consumed_samples)
        # Open before the loop: a step must not pay for the profiler's start.
        with _profiler(self.run, self.log.folder, self.progress.iteration) as profiler:
            while self.progress.iteration < numbers.train_iters:
                self._step(batches)
                profiler.step()
                iteration = self.progress.iteration
                last = iteration == numbers.train_iters
                leave = bool(numbers.exit_interval) and iteration % numbers.exit_interval == 0
                if last or (numbers.eval_interval and iteration % numbers.eval_interval == 0):
                    self.evaluate()
                save_interval = self.run.checkpoint.save_interval
                if last or leave or (save_interval and iteration % save_interval == 0):
                    self.save()
                if leave and not last:
                    say(f"stopped at step {iteration} (exit_interval); the next start goes on")
                    break

    def evaluate(self) -> float:
        """Held-out loss in nats per token, over the same samples every time."""
        self.model.eval()
        if self.indexer_log is not None:
            self.indexer_log.measures_overlap = True
        reports: list[Tensor] = []
        batches = self.held_out.from_sample(0)
        with torch.no_grad():
            for _ in range(self.run.training.eval_iters):
                reports += self._forward_backward(batches, forward_only=True)
        self.model.train()
        loss, _ = mean_over_ranks(reports)
        overlap = {}
        if self.indexer_log is not None:
            self.indexer_log.measures_overlap = False
            overlap = indexer_values("indexer_overlap", self.indexer_log.read_overlap(_all_rows()))
        self.log.held_out(self.progress.iteration, loss, overlap)
        return loss

    def save(self) -> None:
        """Write a checkpoint, where the run asks for them."""
        options = self.run.checkpoint
        if options.save is not None:
            checkpoint.save(
                options.save,
                bare(self.model),
                self.optimizer,
                self.progress,
                self.layout,
                keep_last=options.keep_last,
            )

    def _step(self, batches: Iterator[Batch]) -> None:
        started = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._forward_backward(batches, forward_only=False)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        loss, tokens = mean_over_ranks(reports)
        done = self.progress.iteration + 1
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {done} is {loss}; the last checkpoint is from before it, lower "
                "--lr or look at the samples of this step"
            )
        _, norm, _ = self.optimizer.step()
        samples = self.run.training.global_batch_size
        self.scheduler.step(samples)
        self.progress = checkpoint.Progress(
            iteration=done, consumed_samples=self.progress.consumed_samples + samples
        )
        values = {
            "loss": loss,
            "grad_norm": float(norm),
            "lr": float(learning_rate),
            "tokens_per_s": round(tokens / (time.perf_counter() - started), 1),
            "memory_bytes": peak_memory(),
            "consumed_samples": self.progress.consumed_samples,
        }
        if self.indexer_log is not None:
            values |= indexer_values("indexer_loss", self.indexer_log.read(_all_rows()))
        self.log.step(done, values, write=done % self.run.logging.log_interval == 0)

    def _forward_backward(self, batches: Iterator[Batch], *, forward_only: bool) -> list[Tensor]:
        numbers = self.run.training
        per_forward = numbers.micro_batch_size * self.data_parallel_size
        return get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=numbers.global_batch_size // per_forward,
            seq_length=self.run.data.seq_length,
            micro_batch_size=numbers.micro_batch_size,
            forward_only=forward_only,
        )


def _all_rows() -> torch.distributed.ProcessGroup:
    """The ranks that share the rows of a step."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    return forward(model, batch), partial(token_loss, batch)


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


class _NoProfiler:
    def step(self) -> None: ...


@contextlib.contextmanager
def _profiler(run: Run, folder: Path, done: int) -> Iterator[Any]:
    """A torch profiler over the steps that the run names, on rank 0; else something idle."""
    options = run.logging
    first = options.profile_step_start - done - 1
    if not options.profile or torch.distributed.get_rank() != 0 or first < 0:
        yield _NoProfiler()
        return
    from torch.profiler import ProfilerActivity, profile, schedule

    path = folder / f"trace_steps_{options.profile_step_start}_{options.profile_step_end - 1}.json"

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))
        say(f"trace: {path} (open it in chrome://tracing or ui.perfetto.dev)")

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    active = options.profile_step_end - options.profile_step_start
    plan = schedule(wait=first, warmup=0, active=active, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler:
        yield profiler
