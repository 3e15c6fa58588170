"""Checkpoints by Megatron-Core's distributed checkpointing, each whole or not there at all.

A folder of checkpoints looks like Megatron-LM's::

    latest_checkpointed_iteration.txt   the newest one, for people and other tools
    iter_0000100/                       one checkpoint
        *.distcp, .metadata, metadata.json   Megatron-Core's: weights and optimiser, reshardable
        rng_00000.pt ...                     states of the random generators of each rank, tensors
        run.json                             iteration, consumed samples, sizes

A save writes into a folder of another name, flushes it to the disk and renames it; a folder called
``iter_*`` is therefore complete, whenever the process dies. A restart takes the newest of them and
does not depend on the tracker file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from .optim import RunOptimizer

TRACKER = "latest_checkpointed_iteration.txt"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands."""

    iteration: int = 0  # optimiser steps done
    consumed_samples: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes that a random state belongs to."""

    world_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    device: str  # "cpu" | "cuda"


def whole_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first; an absent folder holds none."""
    found = []
    for path in Path(folder).glob("iter_*"):
        number = path.name.removeprefix("iter_")
        if number.isdecimal() and (path / "run.json").is_file():
            found.append((int(number), path))
    return [path for _, path in sorted(found)]


def save(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: RunOptimizer,
    progress: Progress,
    layout: Layout,
    *,
    keep_last: int = 0,
) -> Path:
    """Write a checkpoint; collective over all ranks, which share the folder.

    Args:
        model: the bare GPTModel, not its DDP wrapper.
        keep_last: older checkpoints beyond this many are removed afterwards; 0 keeps all.
    Returns:
        The checkpoint's folder.
    """
    folder = Path(folder)
    final = folder / f"iter_{progress.iteration:07d}"
    # Not a name that whole_checkpoints sees.
    unfinished = folder / f".unfinished_{final.name}"
    _on_rank_0(lambda: _fresh_folder(unfinished))
    _prepare_writer()
    dist_checkpointing.save(_sharded_state(model, optimizer, is_loading=False), str(unfinished))
    torch.save(_random_states(), unfinished / f"rng_{dist.get_rank():05d}.pt")
    dist.barrier()

    def publish() -> None:
        record = {
            "format": _FORMAT,
            **dataclasses.asdict(progress),
            "layout": dataclasses.asdict(layout),
        }
        (unfinished / "run.json").write_text(json.dumps(record, indent=1) + "\n")
        for path in unfinished.iterdir():
            _flush(path)
        _flush(unfinished)
        if final.exists():  # saved before, by a run that was then resumed from an older one
            _remove(final)
        os.rename(unfinished, final)
        _flush(folder)
        _replace_text(folder / TRACKER, f"{progress.iteration}\n")
        if keep_last:
            for old in whole_checkpoints(folder)[:-keep_last]:
                _remove(old)

    _on_rank_0(publish)
    return final


def load(
    path: Path,
    model: torch.nn.Module,
    optimizer: RunOptimizer | None,
    layout: Layout,
) -> tuple[Progress, bool]:
    """Load a checkpoint that any sizes of tensor, context and data parallelism have written.

    Args:
        optimizer: None loads the weights only and starts at step 0.
    Returns:
        The progress, and whether the random states were restored: they are when the layout is the
        one that saved them, and then the run goes on bit for bit.
    Raises:
        ValueError: the checkpoint is of another format or another model.
    """
    record = json.loads((path / "run.json").read_text())
    if record.get("format") != _FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {record.get('format')}, this version reads {_FORMAT}"
        )
    # With the optimiser everything in the file has a place; without it, its states are left over.
    strict = StrictHandling.RAISE_ALL if optimizer else StrictHandling.RAISE_UNEXPECTED
    try:
        state = dist_checkpointing.load(
            _sharded_state(model, optimizer, is_loading=True), str(path), strict=strict
        )
    except (CheckpointingException, CheckpointException) as error:
        # torch's exception holds those of the ranks and prints their tracebacks.
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        raise ValueError(
            f"checkpoint {path} does not fit this model: {causes[0]}; run the model that wrote it, "
            "or give --save and --load other folders"
        ) from error
    model.load_state_dict(state["model"], strict=True)
    if optimizer is None:
        return Progress(), False
    optimizer.load_state_dict(state["optimizer"])
    progress = Progress(iteration=record["iteration"], consumed_samples=record["consumed_samples"])
    same_layout = record["layout"] == dataclasses.asdict(layout)
    if same_layout:
        file = path / f"rng_{dist.get_rank():05d}.pt"
        _restore_random_states(torch.load(file, weights_only=True))
    return progress, same_layout


def _sharded_state(
    model: torch.nn.Module, optimizer: RunOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # The one sharding of the distributed optimiser that loads at another tp size.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        # Layers that share indices have no indexer, so layers cannot be stacked into one tensor.
        "non_homogeneous_layers": model.config.dsa_indexer_topk_freq > 1,
    }
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=metadata
        )
    return state


def _prepare_writer() -> None:
    """Spare Megatron-Core 0.19's file writer what a synchronous save does not need."""
    if filesystem_async._results_queue is None:
        # Else every rank starts a helper process for one queue, and it outlives a killed rank.
        filesystem_async._results_queue = queue.Queue()
    if not filesystem_async.HAVE_PSUTIL:
        # It is asked for this process's memory, for a debug message only.
        filesystem_async._process_memory = lambda: 0


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    tracked = get_cuda_rng_tracker().get_states()
    # A view into a larger storage would be written with all of it.
    return states | {f"tracker/{name}": state.clone() for name, state in tracked.items()}


def _restore_random_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["device"])
    prefix = "tracker/"
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(prefix): s for name, s in states.items() if name.startswith(prefix)}
    )


def _on_rank_0(action: Callable[[], None]) -> None:
    """Do something once; every rank waits for it, and fails when it fails."""
    failed = torch.zeros((), dtype=torch.int32, device=torch.cuda.current_device())
    error: OSError | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as raised:
            error = raised
            failed.fill_(1)
    dist.broadcast(failed, src=0)
    if error is not None:
        raise error
    if failed.item():
        raise OSError("rank 0 could not write the checkpoint; its message says why")


def _fresh_folder(path: Path) -> None:
    if path.exists():  # left by a process that died in the middle of a save
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _remove(path: Path) -> None:
    # Renamed first, so that no half-removed folder is ever called iter_*.
    doomed = path.with_name(f".removed_{path.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _replace_text(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    _flush(new)
    os.replace(new, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
