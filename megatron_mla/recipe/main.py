"""The program behind ``scripts/pretrain.py``: check everything, then train."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_mla.cpu_shim import install_cpu_shim
from megatron_mla.parallel.groups import split_ranks

from . import checkpoint
from .batches import Batches, Samples, Share
from .flags import parse_run
from .log import Log, read_log, say
from .loop import Trainer, bare
from .model import (
    check_run,
    count_parameters,
    make_config,
    make_indexer_log,
    make_model,
    pad_multiple,
)
from .optim import RunOptimizer, make_optimizer, make_scheduler
from .schema import Checkpoint, Run
from .text import Part, open_stream, split


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says.

    Returns:
        Exit code: 0, or 2 after a user error, which rank 0 prints without a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        run = parse_run(arguments)
        trainer = prepare(run)
    except (ValueError, ImportError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if trainer is not None:
        _train(trainer)
    torch.distributed.destroy_process_group()
    return 0


def prepare(run: Run, *, joined: bool = False) -> Trainer | None:
    """Check the run against the machine, start the ranks, build everything.

    Args:
        joined: the ranks have a process group already, which is kept.
    Returns:
        None when the run is already complete.
    Raises:
        ValueError, ImportError: what could not run.
    """
    on_gpu = not install_cpu_shim()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if on_gpu:
        _check_gpus(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    check_run(run, world_size, on_gpu=on_gpu)
    config = make_config(run, on_gpu=on_gpu)
    if config.deterministic_mode:
        _make_deterministic()
    stream = open_stream(run.data.data_path, run.data.vocab_size)
    train_part, held_out_part = split(stream, run.data.valid_fraction, run.data.seq_length)
    start = _find_start(run.checkpoint)
    _check_folders(run)

    device = _start_ranks(run, on_gpu, joined=joined)
    share = Share(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        pad_multiple=pad_multiple(run),
    )
    layout = checkpoint.Layout(
        world_size=world_size,
        tensor_model_parallel_size=run.parallel.tensor_model_parallel_size,
        context_parallel_size=run.parallel.context_parallel_size,
        expert_model_parallel_size=run.parallel.expert_model_parallel_size,
        device=device.type,
    )
    model = make_model(config, run, on_gpu=on_gpu)
    optimizer = make_optimizer(model, run, on_gpu=on_gpu)
    scheduler = make_scheduler(optimizer, run)
    say(
        f"{count_parameters(model) / 1e6:.2f} M parameters on {world_size} {device.type} rank(s): "
        f"tp {layout.tensor_model_parallel_size}, cp {share.cp_size}, dp {share.dp_size}; "
        f"text: {stream.name}, {stream.num_tokens} tokens"
    )
    progress = checkpoint.Progress()
    if start is not None:
        progress = _load(start, run.checkpoint, model, optimizer, layout)
    if progress.iteration >= run.training.train_iters:
        say(
            f"nothing to do: {start} is at step {progress.iteration} of "
            f"{run.training.train_iters}; raise --train-iters, or --save to another folder"
        )
        return None
    return Trainer(
        run=run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        training=_batches(run, train_part, share, device, shuffle=True),
        held_out=_batches(run, held_out_part, share, device, shuffle=False),
        log=Log(
            run.logging,
            train_iters=run.training.train_iters,
            done=progress.iteration,
            active=torch.distributed.get_rank() == 0,
        ),
        layout=layout,
        progress=progress,
        data_parallel_size=share.dp_size,
        indexer_log=make_indexer_log(bare(model), device),
    )


def _make_deterministic() -> None:
    """Same bits from the same run: before the libraries read their variables.

    Raises:
        ValueError: an environment variable that is set asks for the contrary.
    """
    from megatron.training.determinism import apply_determinism_env

    try:
        apply_determinism_env(os.environ)
    except AssertionError as error:
        raise ValueError(f"deterministic_mode cannot be kept: {error} Unset it") from error
    torch.use_deterministic_algorithms(True)
    # It would fill every new tensor; ours are written before they are read (the tests fill them).
    torch.utils.deterministic.fill_uninitialized_memory = False


def _batches(run: Run, part: Part, share: Share, device: torch.device, *, shuffle: bool) -> Batches:
    return Batches(
        Samples(part, run.data.seq_length, seed=run.training.seed, shuffle=shuffle),
        share,
        micro_batch_size=run.training.micro_batch_size,
        vocab_size=run.data.vocab_size,
        packing=run.data.packing,
        device=device,
    )


def _train(trainer: Trainer) -> None:
    started = time.perf_counter()
    trainer.train()
    trainer.log.close()
    if torch.distributed.get_rank() != 0:
        return
    held_out = list(read_log(trainer.log.jsonl, "valid_loss").values())
    minutes = (time.perf_counter() - started) / 60
    line = f"done: step {trainer.progress.iteration} in {minutes:.1f} min"
    if len(held_out) > 1:
        first, final = held_out[0], held_out[-1]
        change = f"{100 * abs(1 - final / first):.0f} % {'lower' if final <= first else 'higher'}"
        line += f", held-out loss {first:.3f} -> {final:.3f} ({change})"
    say(line)
    say(f"  log        {trainer.log.jsonl}")
    if trainer.log.curve.exists():
        say(f"  curve      {trainer.log.curve}")
    save = trainer.run.checkpoint.save
    saved = checkpoint.whole_checkpoints(save) if save is not None else []
    say(f"  checkpoint {saved[-1] if saved else 'none (no --save)'}")


def _check_gpus(gpus: int, ranks: int) -> None:
    if ranks > gpus:
        raise ValueError(
            f"the ranks of this machine must not outnumber its GPUs, {gpus}, got {ranks}; start "
            f"torchrun --nproc-per-node={gpus}, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def _find_start(options: Checkpoint) -> Path | None:
    """Checkpoint to start from: the latest of --save, else the one that --load names."""
    if options.save is not None and (saved := checkpoint.whole_checkpoints(options.save)):
        return saved[-1]
    if options.load is None:
        return None
    load = Path(options.load)
    # A folder of checkpoints, or one checkpoint of it.
    own = [load] if (load / "run.json").is_file() else checkpoint.whole_checkpoints(load)
    if not own:
        raise ValueError(
            f"checkpoint.load {load} holds no whole checkpoint (a folder iter_*/ with run.json); "
            "give the folder that --save wrote, or leave --load out to start anew"
        )
    return own[-1]


def _load(
    start: Path,
    options: Checkpoint,
    model: torch.nn.Module,
    optimizer: RunOptimizer,
    layout: checkpoint.Layout,
) -> checkpoint.Progress:
    """Load a checkpoint as the run asks: with its step and optimiser, or its weights alone."""
    own = options.save is not None and start.parent == Path(options.save)
    with_optimizer = own or options.load_optim
    progress, exact = checkpoint.load(
        start, bare(model), optimizer if with_optimizer else None, layout
    )
    if with_optimizer:
        how = "bit for bit" if exact else "random states start anew: other ranks saved it"
        say(f"resumed from {start} at step {progress.iteration} ({how})")
    else:
        optimizer.reload_model_params()
        say(f"weights from {start}; the run starts at step 0")
    return progress


def _check_folders(run: Run) -> None:
    """Make the folders that the run writes to, so that a refusal comes now and not after it."""
    folders = {"logging.log_dir": run.logging.log_dir, "checkpoint.save": run.checkpoint.save}
    for name, folder in folders.items():
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{name} {folder} cannot be made: {error}; choose another") from None
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{name} {folder} cannot be written to; choose another folder")


def _start_ranks(run: Run, on_gpu: bool, *, joined: bool = False) -> torch.device:
    """Join the ranks that torchrun started, or be the only one; group and seed them."""
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if joined:
        pass
    elif "RANK" in os.environ:
        torch.distributed.init_process_group(backend)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if not joined:  # groups of a world that has ended would be of no use
        parallel_state.destroy_model_parallel()
    sizes = run.parallel
    split_ranks(
        sizes.tensor_model_parallel_size,
        sizes.context_parallel_size,
        sizes.expert_model_parallel_size,
    )
    torch.manual_seed(run.training.seed)
    model_parallel_cuda_manual_seed(run.training.seed)
    return device
