"""The operators that a layer of sparse attention runs on: kernels or plain PyTorch.

Legend: L rows of this context-parallel rank, H heads of this rank, K chosen keys per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mla.config import MLATransformerConfig
from megatron_mla.kernels.index_ref import index_topk_ref
from megatron_mla.kernels.indexer_loss_ref import indexer_loss_ref
from megatron_mla.kernels.sparse_attention_ref import sparse_attention_ref
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.selection import say_once, should_use_dsa_kernels


class DSAOperators(NamedTuple):
    """Functions of one sample, with the arguments of their twins in ``kernels``.

    Attributes:
        topk: the chosen keys [L, K].
        attention: the output and its log-sum-exp [L, H], or None where that is not at hand.
        loss: the indexer loss, which may be handed the log-sum-exp as ``lse``.
    """

    topk: Callable
    attention: Callable
    loss: Callable


def dsa_operators(config: MLATransformerConfig, groups: ParallelGroups) -> DSAOperators:
    """Operators for ``config`` on this machine; all tensor-parallel ranks have to call."""
    if not _all_ranks_use_kernels(config, groups):
        return DSAOperators(index_topk_ref, _attention_ref, _loss_ref)
    # Not above: they need Triton.
    from megatron_mla.kernels.index import index_topk
    from megatron_mla.kernels.indexer_loss import indexer_loss
    from megatron_mla.kernels.sparse_attention import sparse_attention_with_lse

    return DSAOperators(index_topk, sparse_attention_with_lse, indexer_loss)


def _all_ranks_use_kernels(config: MLATransformerConfig, groups: ParallelGroups) -> bool:
    """Whether no rank has to fall back: the loss sums over heads of all, in chunks of one size."""
    mine = should_use_dsa_kernels(config, config.num_attention_heads // groups.tp_size)
    if groups.tp_size == 1:
        return mine
    # The device by name: a layer may be built on the meta device.
    agreed = torch.tensor(int(mine), device=torch.cuda.current_device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=groups.tp)
    if mine and not agreed.item():
        say_once(
            "dsa-kernels-elsewhere",
            "Falling back to the eager operators of sparse attention: another tensor-parallel rank "
            "cannot run the others, its log says why.",
            warn=True,
        )
    return bool(agreed.item())


def _attention_ref(query, key, indices, *, scale: float, v_dim: int) -> tuple[Tensor, None]:
    return sparse_attention_ref(query, key, indices, scale=scale, v_dim=v_dim), None


def _loss_ref(*inputs, lse: None = None, **how) -> Tensor:
    return indexer_loss_ref(*inputs, **how)


def join_samples(samples: Sequence[Tensor]) -> Tensor:
    """[L, ...] of every sample -> [L, B, ...]; a view where there is one."""
    return samples[0].unsqueeze(1) if len(samples) == 1 else torch.stack(tuple(samples), dim=1)
