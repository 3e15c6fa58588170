"""From a run's numbers to a GPTModel inside Megatron-Core's DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_mla import MLATransformerConfig
from megatron_mla.parallel.layout import check_divisible, padding_multiple

from .batches import Batch
from .schema import Run

if TYPE_CHECKING:
    from megatron_mla.attention.indexer_loss import IndexerLossLog

# What the DeepSeek family has and Megatron-Core's defaults have not; a run file may override it.
_FAMILY_DEFAULTS: dict[str, Any] = {
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "qk_layernorm": True,
}
_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
}


def make_config(run: Run, *, on_gpu: bool) -> MLATransformerConfig:
    """Configuration of the model.

    The loss is always an average over tokens (``calculate_per_token_loss``): gradients are summed
    over data- and context-parallel ranks and micro-batches and divided once by the number of
    tokens, so the same samples give the same step however many ranks share them.

    Raises:
        ValueError: Megatron-Core or this package refuses the combination.
    """
    model = {**_FAMILY_DEFAULTS, **run.model}
    activation = model.pop("activation_func", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"model.activation_func must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )
    dtype = torch.bfloat16 if run.training.bf16 else torch.float32
    # On a CPU every rank draws the whole of each weight and keeps its part, so that a seed means
    # the same model for every tensor-parallel size. On GPUs that would take minutes.
    model.setdefault("use_cpu_initialization", not on_gpu)
    parallel = run.parallel
    # As in Megatron-LM: without tensor parallelism there is nothing to cut.
    sequence_parallel = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    try:
        return MLATransformerConfig(
            **model,
            activation_func=_ACTIVATIONS[activation],
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=run.training.bf16,
            calculate_per_token_loss=True,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            sequence_parallel=sequence_parallel,
        )
    except (AssertionError, TypeError) as error:
        raise ValueError(f"Megatron-Core refuses this model: {error}") from error


def pad_multiple(run: Run) -> int:
    """Rows that a sequence of this run is a multiple of; packed documents are padded to it."""
    parallel = run.parallel
    return padding_multiple(
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.sequence_parallel,
        tile=run.data.packing_multiple if run.data.packing else 1,
    )


def check_run(run: Run, world_size: int, *, on_gpu: bool) -> None:
    """Refuse what could not run, before anything is started.

    Raises:
        ValueError: name, value, condition and way out.
    """
    parallel, data, training, optimizer = run.parallel, run.data, run.training, run.optimizer
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    positive = {
        "parallel.tensor_model_parallel_size": tp,
        "parallel.context_parallel_size": cp,
        "parallel.expert_model_parallel_size": parallel.expert_model_parallel_size,
        "data.seq_length": data.seq_length,
        "data.vocab_size": data.vocab_size,
        "data.packing_multiple": data.packing_multiple,
        "training.train_iters": training.train_iters,
        "training.micro_batch_size": training.micro_batch_size,
        "training.global_batch_size": training.global_batch_size,
        "training.eval_iters": training.eval_iters,
        "training.exit_interval": training.exit_interval,
        "checkpoint.save_interval": run.checkpoint.save_interval,
        "logging.log_interval": run.logging.log_interval,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    stages = run.model.get("pipeline_model_parallel_size", 1)
    if stages != 1:
        raise ValueError(
            f"pipeline_model_parallel_size must be 1 in this recipe, got {stages}; use tensor and "
            "context parallelism, or the layer specs in a training loop with pipeline stages"
        )
    if world_size % (tp * cp):
        raise ValueError(
            f"the number of ranks must be a multiple of tensor_model_parallel_size * "
            f"context_parallel_size = {tp} * {cp}, got {world_size}; start "
            f"torchrun --nproc-per-node={tp * cp} or lower the sizes"
        )
    dp = world_size // (tp * cp)
    per_forward = training.micro_batch_size * dp
    if training.global_batch_size % per_forward:
        raise ValueError(
            "training.global_batch_size must be a multiple of micro_batch_size * data-parallel "
            f"ranks = {training.micro_batch_size} * {dp}, got {training.global_batch_size}"
        )
    if not data.packing:
        check_divisible(data.seq_length, cp, name="data.seq_length")
    multiple = pad_multiple(run)
    if data.seq_length % multiple:
        packed = f", packing_multiple = {data.packing_multiple}" if data.packing else ""
        raise ValueError(
            f"data.seq_length must be a multiple of {multiple} for tensor_model_parallel_size = "
            f"{tp}, context_parallel_size = {cp}{packed}; got {data.seq_length}"
        )
    if data.vocab_size % tp:
        raise ValueError(
            f"data.vocab_size must be a multiple of tensor_model_parallel_size = {tp}, got "
            f"{data.vocab_size}; round it up, the extra rows are never read"
        )
    if not 0 < data.valid_fraction < 1:
        raise ValueError(f"data.valid_fraction must lie between 0 and 1, got {data.valid_fraction}")
    if not 0 <= optimizer.min_lr <= optimizer.lr:
        raise ValueError(
            f"optimizer.min_lr must lie between 0 and lr = {optimizer.lr}, got {optimizer.min_lr}"
        )
    decay = optimizer.lr_decay_iters or training.train_iters
    if not 0 <= optimizer.lr_warmup_iters < decay:
        raise ValueError(
            "optimizer.lr_warmup_iters must be at least 0 and below the steps of the decay = "
            f"{decay}, got {optimizer.lr_warmup_iters}"
        )
    if training.bf16 and not on_gpu:
        raise ValueError(
            "training.bf16 needs a GPU: Megatron-Core's mixed-precision optimiser refuses CPU "
            "tensors; pass --no-bf16"
        )
    if run.logging.profile:
        first, last = run.logging.profile_step_start, run.logging.profile_step_end
        if not 0 < first < last <= training.train_iters:
            raise ValueError(
                "logging.profile_step_start must be at least 1 and below profile_step_end, which "
                f"is at most train_iters = {training.train_iters}; got {first} and {last}"
            )


def make_model(config: MLATransformerConfig, run: Run, *, on_gpu: bool) -> DistributedDataParallel:
    """:func:`make_gpt` inside Megatron-Core's DDP (fp32 gradient buffers)."""
    model = make_gpt(config, run, on_gpu=on_gpu)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=on_gpu, overlap_grad_reduce=on_gpu
    )
    return DistributedDataParallel(config, ddp, model)


def make_gpt(config: MLATransformerConfig, run: Run, *, on_gpu: bool) -> torch.nn.Module:
    """GPTModel with our layers, in a Float16Module with bf16."""
    from megatron_mla.attention.index_sharing import install_index_books
    from megatron_mla.attention.indexer_loss import freeze_for_stage
    from megatron_mla.specs import mla_block_spec

    model: torch.nn.Module = GPTModel(
        config,
        transformer_layer_spec=mla_block_spec(config),
        vocab_size=run.data.vocab_size,
        max_sequence_length=run.data.seq_length,
        position_embedding_type="none",  # MLA rotates its own positional channels
        share_embeddings_and_output_weights=False,
    )
    if config.experimental_attention_variant == "dsa":
        if config.dsa_indexer_topk_freq > 1:
            install_index_books(model)
        freeze_for_stage(model, config)
    if on_gpu:
        model.cuda()
    if config.bf16:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    return model


def make_indexer_log(model: torch.nn.Module, device: torch.device) -> IndexerLossLog | None:
    """Log of the indexers of a sparse-attention model; None for others."""
    from megatron_mla.attention.indexer_loss import IndexerLossLog

    config = model.config
    if config.experimental_attention_variant != "dsa":
        return None
    log = IndexerLossLog(config.num_layers + (config.mtp_num_layers or 0), device)
    log.attach(model)
    return log


def indexer_values(name: str, by_layer: dict[int, float]) -> dict[str, float]:
    """Entries of a run's log: the mean over layers, and every layer."""
    if not by_layer:
        return {}
    mean = sum(by_layer.values()) / len(by_layer)
    return {name: mean, **{f"{name}_layer_{n}": value for n, value in by_layer.items()}}


def count_parameters(model: torch.nn.Module) -> int:
    """Parameters of the whole model, over its tensor- and expert-parallel ranks."""
    from .optim import parameters_counted_once, sum_over_model_ranks

    dense, expert = parameters_counted_once(model)
    local = [float(sum(p.numel() for p in group)) for group in (dense, expert)]
    return int(sum_over_model_ranks(*local))


def forward(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Loss of every token of this rank, [b, s / cp] fp32 (padding included)."""
    return model(
        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed
    )


def token_loss(batch: Batch, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron-Core's schedules ask of a loss function under per-token loss.

    Returns:
        Summed loss of this rank's tokens, their number (int32), and both as [2] fp64 for the log.
    """
    total = (losses.float() * batch.loss_mask).sum()
    tokens = batch.loss_mask.sum().to(torch.int32)
    return total, tokens, torch.stack([total.detach().double(), tokens.double()])


def mean_over_ranks(reports: list[Tensor]) -> tuple[float, int]:
    """Mean loss in nats per token, and tokens, of all micro-batches of all ranks."""
    both = torch.stack(reports).sum(0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(both, group=group)
    total, tokens = both.tolist()
    return total / max(tokens, 1.0), int(tokens)
