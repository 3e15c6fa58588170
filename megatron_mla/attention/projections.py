"""Linear layers and norms that MLA needs without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class DuplicatedLinear(MegatronModule):
    """A linear layer whose whole weight is on every tensor-parallel rank.

    The counterpart of Transformer Engine's ``TELinear(parallel_mode="duplicated")``: no
    communication, rows in, rows out.

    Args:
        input_size, output_size: channels.
        bias: add a bias, returned separately with ``skip_bias_add``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method,
        bias: bool = False,
        skip_bias_add: bool = False,
        **unused_of_te,
    ) -> None:
        super().__init__(config=config)
        self.skip_bias_add = skip_bias_add
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        factory = {"device": device, "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **factory))
        if config.perform_initialization:
            # The default generator is the same on all tp ranks, the tracker's states are not.
            init_method(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(output_size, **factory)) if bias else None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., input_size] -> ([..., output_size], bias if it was skipped)."""
        bias = None if self.skip_bias_add else self.bias
        return torch.nn.functional.linear(input_, self.weight, bias), (
            self.bias if self.skip_bias_add else None
        )

    # Megatron-Core's linear layers have an empty extra state, so its checkpoints hold the key.
    def get_extra_state(self) -> None:
        """Nothing to keep."""

    def set_extra_state(self, state) -> None:
        """Nothing to restore."""


def weight_of(linear: torch.nn.Module) -> torch.nn.Parameter:
    """The weight of a linear layer that is used without calling the layer.

    What waits in front of its forward happens: Megatron-Core's DDP hooks in there to finish the
    gathering of parameters that it overlaps.
    """
    for key, hook in list(linear._forward_pre_hooks.items()):
        if key in linear._forward_pre_hooks_with_kwargs:
            hook(linear, (), {})
        else:
            hook(linear, ())
    return linear.weight


class LocalNorm(torch.nn.Module):
    """torch's RMSNorm or LayerNorm (``config.normalization``) for Megatron-Core's layers.

    Unlike Megatron-Core's wrapper it works under sequence parallelism: the weight is marked, so
    that its gradient, which covers this rank's rows only, is summed over tp.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **hints):
        # **hints: persist_layer_norm and the like choose a kernel, never a result.
        makers = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in makers:
            raise ValueError(
                f"normalization must be one of {tuple(makers)} without Transformer Engine, got "
                f"{config.normalization!r}"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm = makers[config.normalization](
            hidden_size, eps=eps, device=device, dtype=config.params_dtype
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def mark_latent_norm(norm: torch.nn.Module, sequence_parallel: bool, tp_size: int) -> None:
    """Say how the gradients of a latent norm, whole on every tp rank, become one gradient.

    With sequence parallelism a rank's gradient covers its rows only and Megatron-Core sums them.
    Without, all ranks hold the same gradient; stock Megatron-Core sums those of ``q_layernorm``
    even so (tp times too large), which averaging prevents.
    """
    for parameter in norm.parameters():
        parameter.sequence_parallel = sequence_parallel
        if tp_size > 1 and not sequence_parallel:
            parameter.average_gradients_across_tp_domain = True
