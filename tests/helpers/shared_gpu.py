"""Ranks that share a GPU: gloo where NCCL refuses."""

from __future__ import annotations

import contextlib


def share_gpus() -> None:
    """Let Megatron-Core's collectives of CUDA tensors run on gloo. Call it before a group is made.

    Gloo copies through the host: nothing here says how fast anything is.
    """
    import torch
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_mla.cpu_shim import patch_gloo_collectives

    patch_gloo_collectives()

    @contextlib.contextmanager
    def one_by_one(group=None, device=None, async_ops=False):
        # Gloo coalesces no CUDA tensors.
        if async_ops:
            raise NotImplementedError("overlapped reductions on ranks that share a GPU")
        yield None

    for module in (torch.distributed, torch.distributed.distributed_c10d, param_and_grad_buffer):
        module._coalescing_manager = one_by_one
