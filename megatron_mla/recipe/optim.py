"""The optimiser of a run.

On GPUs it is Megatron-Core's distributed optimiser. Megatron-Core's optimisers refuse CPU tensors,
so on a CPU it is torch's AdamW over the gradients that DDP has reduced (``main_grad``), behind the
same few methods. Both follow Megatron-Core's ``OptimizerParamScheduler``, whose unit is samples;
its state is a function of the number of samples consumed, so none of it is stored.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from .schema import Run

_MOMENTS = ("exp_avg", "exp_avg_sq")


class RunOptimizer(Protocol):
    """What the loop and the checkpoints need."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, Any]:
        """Clip and update; returns (updated, gradient norm before clipping, unused)."""
        ...

    def scale_loss(self, loss: Tensor) -> Tensor: ...

    def sharded_state_dict(
        self, model_sharded_state_dict: dict, is_loading: bool = False, metadata: Any = None
    ) -> dict: ...

    def load_state_dict(self, state_dict: dict) -> None: ...

    def reload_model_params(self) -> None:
        """Take over weights that were loaded into the model without the optimiser's state."""
        ...


def make_optimizer(model: torch.nn.Module, run: Run, *, on_gpu: bool) -> RunOptimizer:
    """Optimiser of ``model`` (a DDP-wrapped GPTModel)."""
    numbers = run.optimizer
    if not on_gpu:
        return CpuAdamW(model, run)
    config = OptimizerConfig(
        optimizer="adam",
        lr=numbers.lr,
        min_lr=numbers.min_lr,
        weight_decay=numbers.weight_decay,
        adam_beta1=numbers.adam_beta1,
        adam_beta2=numbers.adam_beta2,
        adam_eps=numbers.adam_eps,
        clip_grad=numbers.clip_grad,
        bf16=run.training.bf16,
        params_dtype=torch.bfloat16 if run.training.bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def make_scheduler(optimizer: RunOptimizer, run: Run) -> OptimizerParamScheduler:
    """Warm-up and decay of the learning rate; ``step(samples)`` after every optimiser step."""
    numbers, batch = run.optimizer, run.training.global_batch_size
    decay_iters = numbers.lr_decay_iters or run.training.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=numbers.lr,
        min_lr=numbers.min_lr,
        lr_warmup_steps=numbers.lr_warmup_iters * batch,
        lr_decay_steps=decay_iters * batch,
        lr_decay_style=numbers.lr_decay_style,
        start_wd=numbers.weight_decay,
        end_wd=numbers.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


class CpuAdamW:
    """torch's AdamW over the fp32 gradients of Megatron-Core's DDP.

    A parameter is whole on its rank (no sharding over data-parallel ranks), so the update needs no
    communication; only the gradient norm does.
    """

    def __init__(self, model: torch.nn.Module, run: Run) -> None:
        numbers = run.optimizer
        self._model, self._clip_grad = model, numbers.clip_grad
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # Megatron's rule: biases and every other vector, norms above all, do not decay.
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "wd_mult": 1.0}, {"params": vectors, "wd_mult": 0.0}],
            lr=numbers.lr,
            betas=(numbers.adam_beta1, numbers.adam_beta2),
            eps=numbers.adam_eps,
            weight_decay=numbers.weight_decay,
            foreach=True,
        )
        # AdamW makes its state in its first step; a checkpoint needs it before that.
        for param in self.parameters:
            state = self._adamw.state[param]
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = torch.zeros_like(param)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._adamw.param_groups

    def zero_grad(self) -> None:
        for param in self.parameters:
            param.grad = None

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def reload_model_params(self) -> None: ...  # it updates the model's own weights

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        norm = gradient_norm(self._model)
        if self._clip_grad > 0 and norm > self._clip_grad:
            for param in self.parameters:
                param.main_grad.mul_(self._clip_grad / (norm + 1e-6))
        for param in self.parameters:
            param.grad = param.main_grad
        self._adamw.step()
        self.zero_grad()
        return True, norm, None

    def sharded_state_dict(
        self, model_sharded_state_dict: dict, is_loading: bool = False, metadata: Any = None
    ) -> dict:
        """Both moments, cut over ranks as their parameters are, and the number of steps."""
        from megatron.core.dist_checkpointing.optimizer import (
            get_param_id_to_sharded_param_map,
            make_sharded_optimizer_tensor,
        )

        sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, self.parameters)
        state = {
            index: {
                name: make_sharded_optimizer_tensor(
                    sharded[index], self._adamw.state[param][name], f"optimizer.state.{name}"
                )
                for name in _MOMENTS
            }
            for index, param in enumerate(self.parameters)
        }
        return {"state": state, "steps": self._steps()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        for index, param in enumerate(self.parameters):
            state = self._adamw.state[param]
            state["step"].fill_(state_dict["steps"])
            for name in _MOMENTS:
                state[name].copy_(state_dict["state"][index][name])

    def _steps(self) -> int:
        return int(self._adamw.state[self.parameters[0]]["step"].item())


def parameters_counted_once(model: torch.nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that this rank answers for: dense ones and experts'.

    A parameter cut over tensor-parallel ranks counts on each; a replicated one (norms, down
    projections that are not cut, the router) on the first rank only.
    """
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    tp_group = parallel_state.get_tensor_model_parallel_group()
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    for param in model.parameters():
        if not param.requires_grad or not param_is_not_shared(param):
            continue
        if param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group):
            # DDP marks experts' parameters allreduce=False: they differ over expert-parallel ranks.
            (dense if getattr(param, "allreduce", True) else expert).append(param)
    return dense, expert


def sum_over_model_ranks(dense: float, expert: float) -> float:
    """Add up numbers of :func:`parameters_counted_once` over the ranks that hold one model."""
    both = torch.tensor([dense, expert], dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(both[:1], group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(
        both[1:], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    )
    return float(both.sum())


def gradient_norm(model: torch.nn.Module) -> float:
    """2-norm of the whole model's gradient, every parameter counted exactly once."""
    squares = [
        sum(float(param.main_grad.double().square().sum()) for param in group)
        for group in parameters_counted_once(model)
    ]
    return sum_over_model_ranks(*squares) ** 0.5
