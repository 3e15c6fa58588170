"""What a run is: sections of named values, read strictly from a YAML file.

Every section is a frozen dataclass and the file is the same tree::

    model:     any field of MLATransformerConfig, by its name
    parallel:  how the ranks are used
    data, training, optimizer, checkpoint, logging

An unknown key is an error that names the nearest known one. :mod:`.flags` makes a command-line
flag of every field, under Megatron-LM's name for it.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


def _field(default: Any, help: str) -> Any:
    """A dataclass field with its help text. Its name is that of Megatron-LM's flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Ranks of the run: world size = tensor x context x data parallel."""

    tensor_model_parallel_size: int = _field(1, "ranks that share every layer's heads and widths")
    context_parallel_size: int = _field(1, "ranks that share every sequence")
    expert_model_parallel_size: int = _field(1, "ranks that share the experts of a MoE layer")
    sequence_parallel: bool = _field(
        False, "cut activations between the layers over the tensor ranks; no effect on one"
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text to train on."""

    data_path: str | None = _field(
        None,
        "a text file, a folder of text files, or the prefix of a Megatron indexed dataset "
        "(PREFIX.bin and PREFIX.idx); left out, Python's own language reference",
    )
    seq_length: int = _field(256, "tokens of a training sample, over all context-parallel ranks")
    vocab_size: int = _field(256, "rows of the embedding; text is read as bytes and needs 256")
    packing: bool = _field(
        False,
        "keep documents apart: a sample holds several, packed (thd), and none sees another",
    )
    packing_multiple: int = _field(
        8,
        "padded length of a packed document is a multiple of this and of what the ranks need; a "
        "multiple of both gives runs on different ranks the same samples",
    )
    valid_fraction: float = _field(0.05, "share of the tokens, at the end, that is held out")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Steps, batches and numbers."""

    train_iters: int = _field(100, "optimiser steps of the whole run")
    micro_batch_size: int = _field(1, "samples of one forward pass on one rank")
    global_batch_size: int = _field(8, "samples of one optimiser step, over all ranks")
    eval_interval: int = _field(50, "steps between held-out losses; 0: only at the end")
    eval_iters: int = _field(4, "global batches of a held-out loss, the same ones every time")
    exit_interval: int | None = _field(
        None, "save and stop after a step that this divides; the next start goes on from there"
    )
    seed: int = _field(1234, "of the weights, dropout and the order of samples")
    bf16: bool = _field(False, "bfloat16 weights and activations, fp32 gradients and optimiser")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW: Megatron-Core's distributed optimiser on GPUs, torch's on a CPU."""

    lr: float = _field(1e-3, "learning rate after the warm-up")
    min_lr: float = _field(1e-4, "learning rate at the end of the decay")
    lr_warmup_iters: int = _field(10, "steps of linear warm-up from 0")
    lr_decay_iters: int | None = _field(None, "steps until min-lr; left out, train-iters")
    lr_decay_style: Literal["cosine", "linear", "constant"] = _field("cosine", "shape of the decay")
    weight_decay: float = _field(0.1, "on matrices; never on norms and biases")
    adam_beta1: float = _field(0.9, "decay of the first moment")
    adam_beta2: float = _field(0.95, "decay of the second moment")
    adam_eps: float = _field(1e-8, "added to the root of the second moment")
    clip_grad: float = _field(1.0, "largest norm of the whole gradient; 0: no clipping")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoints: each whole or not there; a restart goes on from the latest in --save."""

    save: str | None = _field(None, "folder to save to, and to resume from when it holds one")
    load: str | None = _field(None, "folder to start from while --save holds no checkpoint yet")
    save_interval: int | None = _field(None, "steps between saves; left out, only at the end")
    keep_last: int = _field(2, "checkpoints kept in --save; 0: all")
    load_optim: bool = _field(
        True, "with --load: go on with its step, optimiser and data; off: its weights only"
    )


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What a run tells, on rank 0."""

    log_dir: str = _field("runs/latest", "folder for log.jsonl, loss.png, TensorBoard and traces")
    log_interval: int = _field(1, "steps between lines of the log")
    progress: bool = _field(True, "show a progress bar")
    tensorboard: bool = _field(True, "write TensorBoard events")
    profile: bool = _field(False, "write a torch profiler trace of rank 0")
    profile_step_start: int = _field(4, "first step of the trace")
    profile_step_end: int = _field(6, "first step after the trace")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run. ``model`` holds fields of MLATransformerConfig by name."""

    model: dict[str, Any]
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)


SECTIONS: dict[str, type] = {
    "parallel": Parallel,
    "data": Data,
    "training": Training,
    "optimizer": Optimizer,
    "checkpoint": Checkpoint,
    "logging": Logging,
}

# The recipe sets these from other sections; two places for one number would disagree one day.
SET_ELSEWHERE = {
    "bf16": "training.bf16",
    "fp16": "training.bf16 (fp16 is not supported)",
    "params_dtype": "training.bf16",
    "pipeline_dtype": "training.bf16",
    "autocast_dtype": "training.bf16",
    "calculate_per_token_loss": "nothing: the recipe always averages over tokens",
    **{f.name: f"parallel.{f.name}" for f in dataclasses.fields(Parallel)},
}


def unknown(kind: str, name: str, known: typing.Iterable[str]) -> ValueError:
    """The error for a name that does not exist; it names the nearest one that does."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    way_out = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return ValueError(f"unknown {kind} {name!r}; {way_out}")


def model_fields() -> dict[str, Any]:
    """Fields of MLATransformerConfig that a run may set, with their types."""
    from megatron_mla import MLATransformerConfig

    try:
        hints = typing.get_type_hints(MLATransformerConfig)
    except NameError:  # a type that Megatron-Core imports for type checkers only
        hints = {}
    return {
        f.name: hints.get(f.name, Any)
        for f in dataclasses.fields(MLATransformerConfig)
        if f.init and f.name not in SET_ELSEWHERE
    }


def coerce(name: str, value: Any, hint: Any) -> Any:
    """Check a value against a type hint; read numbers that YAML leaves as text (``1e-3``).

    Raises:
        ValueError: the value is not of that type.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        for option in options:
            try:
                return coerce(name, value, option)
            except ValueError:
                continue
        raise ValueError(f"{name} must be one of {hint}, got {value!r}")
    if origin is Literal:
        if value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        return value
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, got {value!r}") from None
    if hint is int and isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if hint in (bool, int, float, str) and not isinstance(value, hint):
        raise ValueError(f"{name} must be of type {hint.__name__}, got {value!r}")
    if hint is type(None) and value is not None:
        raise ValueError(f"{name} must be empty, got {value!r}")
    return value


def check_model_key(key: str, known: typing.Iterable[str]) -> None:
    """Refuse a key of ``model:`` that MLATransformerConfig lacks or another section owns."""
    if key in SET_ELSEWHERE:
        raise ValueError(f"model.{key} is not set here; set {SET_ELSEWHERE[key]} instead")
    if key not in known:
        raise unknown("key in model:", key, known)


def build_run(tree: dict[str, Any]) -> Run:
    """Make a :class:`Run` of nested dictionaries, strictly.

    Raises:
        ValueError: an unknown section or key, a value of the wrong type, no ``model`` section.
    """
    if not isinstance(tree, dict):
        raise ValueError(f"a run must be a mapping of sections, got {type(tree).__name__}")
    for section, values in tree.items():
        if section != "model" and section not in SECTIONS:
            raise unknown("section", section, [*SECTIONS, "model"])
        if not isinstance(values, dict):
            raise ValueError(f"section {section} must be a mapping of keys, got {values!r}")
    if not tree.get("model"):
        raise ValueError("a run needs a model: section with at least num_layers and hidden_size")
    built: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        values = tree.get(section, {})
        for key in values:
            if key not in hints:
                raise unknown(f"key in {section}:", key, hints)
        built[section] = cls(
            **{key: coerce(f"{section}.{key}", v, hints[key]) for key, v in values.items()}
        )
    known = model_fields()
    model = {}
    for key, value in tree["model"].items():
        check_model_key(key, known)
        # Megatron-Core annotates some fields as int that None is a value of, q_lora_rank for one.
        model[key] = None if value is None else coerce(f"model.{key}", value, known[key])
    return Run(model=model, **built)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a run file as nested dictionaries.

    Raises:
        ValueError: no such file, or not a YAML mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--config {path}: no such file; see configs/ for whole examples")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"--config {path} must hold a mapping of sections")
    return tree
