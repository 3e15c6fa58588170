"""Parameters of Kimi Delta Attention that are no linear layers: drawn, cut over tp, checkpointed.

Legend: V value channels of a head, W width of the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_mla.config import MLATransformerConfig
from megatron_mla.parallel.groups import ParallelGroups


def head_parameter(
    config: MLATransformerConfig,
    groups: ParallelGroups,
    shape: tuple[int, ...],
    fill: Callable[[Tensor], None],
) -> torch.nn.Parameter:
    """This rank's part of a parameter whose first dimension, over all heads, is cut over tp.

    On a CPU every rank draws the whole and keeps its part, as Megatron-Core's linear layers do: a
    seed means the same model for every tp size.
    """
    on_cpu = config.use_cpu_initialization
    rows = shape[0] if on_cpu else shape[0] // groups.tp_size
    device = "cpu" if on_cpu else torch.cuda.current_device()
    values = torch.empty(rows, *shape[1:], device=device)
    if config.perform_initialization and on_cpu:
        fill(values)
    elif config.perform_initialization:
        with get_cuda_rng_tracker().fork():
            fill(values)
    if on_cpu:
        values = values.chunk(groups.tp_size)[groups.tp_rank]
    # A copy: a part would keep the whole alive.
    parameter = torch.nn.Parameter(values.to(config.params_dtype, copy=True))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def fill_a_log(t: Tensor) -> None:
    """Logarithms of numbers from 1 to 16."""
    t.uniform_(1, 16).log_()


def fill_dt_bias(t: Tensor) -> None:
    """Softplus of it is log-uniform from 0.001 to 0.1."""
    dt = t.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
    t.copy_(dt + torch.log(-torch.expm1(-dt)))


class ShortConvWeight(MegatronModule):
    """Weight [channels of this rank, 1, W] of a causal convolution of every channel by itself."""

    def __init__(
        self, config: MLATransformerConfig, groups: ParallelGroups, channels: int, width: int
    ) -> None:
        super().__init__(config=config)
        self.tp_group = groups.tp
        bound = width**-0.5  # torch's own for a convolution
        self.weight = head_parameter(
            config, groups, (channels, 1, width), lambda t: t.uniform_(-bound, bound)
        )

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """For Megatron-Core's distributed checkpoints: channels are cut over tp."""
        return sharded_by_heads(self, ("weight",), prefix, sharded_offsets, metadata)


def sharded_by_heads(module, names, prefix, sharded_offsets, metadata) -> dict:
    """Entries of a distributed checkpoint for parameters whose first dimension is cut over tp."""
    return make_sharded_tensors_for_checkpoint(
        {name: getattr(module, name) for name in names},
        prefix,
        dict.fromkeys(names, 0),
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )


class GatedHeadNorm(torch.nn.Module):
    """RMSNorm of every head times the sigmoid of its gate; one weight [V] for all heads.

    Computed in fp32, rounded once.
    """

    def __init__(self, config: MLATransformerConfig, groups: ParallelGroups, width: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(width, device=device, dtype=config.params_dtype)
        )
        self.epsilon, self._groups = config.layernorm_epsilon, groups

    def forward(self, t: Tensor, gate: Tensor) -> Tensor:
        """[..., V] twice -> [..., V] in ``t``'s dtype."""
        weight = self.weight
        if self._groups.tp_size > 1:
            # Its gradient here is that of this rank's heads. Summed where it arises it is whole on
            # every rank, with and without sequence parallelism, and needs no mark.
            weight = copy_to_tensor_model_parallel_region(weight, group=self._groups.tp)
        wide = t.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (weight.float() * wide * torch.sigmoid(gate.float())).to(t.dtype)
