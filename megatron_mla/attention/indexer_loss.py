"""Training of the indexer: its loss, what trains when, and a log that the caller owns.

Source: DeepSeek-V3.2-Exp; kernels/README.md (11). Legend: L rows of this context-parallel rank,
B batch, n indexer heads, D channels of one, H heads of this rank, E channels of an absorbed head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mla.attention.dsa_operators import DSAOperators
from megatron_mla.config import MLATransformerConfig
from megatron_mla.kernels.index_overlap_ref import index_overlap_ref
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.parallel.microbatch import KeyBounds


class IndexerLossLog:
    """Indexer losses by layer, between two calls of :meth:`read`.

    Make one, :meth:`attach` it to the model of this rank, and read it after a step. Layers are
    1-based over all pipeline stages, MTP layers are counted after the decoder.

    Args:
        num_layers: decoder layers of all stages, plus MTP layers.

    Attributes:
        measures_overlap: layers also report which share of the keys that dense attention weighs
            most they have chosen. It costs a dense pass: for evaluations.
    """

    def __init__(self, num_layers: int, device: torch.device | str) -> None:
        # Sum of the loss over rows, rows; keys in common, keys.
        self._sums = torch.zeros(4, num_layers, dtype=torch.float64, device=device)
        self.measures_overlap = False

    def attach(self, model: torch.nn.Module) -> None:
        """Have every layer of ``model`` with an indexer report here."""
        for module in model.modules():
            if hasattr(module, "indexer_loss_log"):
                module.indexer_loss_log = self

    def add(self, layer_number: int, loss_sum: Tensor, num_rows: int) -> None:
        """Called by layers: their loss, coefficient included, summed over ``num_rows`` rows."""
        self._sums[0, layer_number - 1] += loss_sum.detach().to(self._sums)
        self._sums[1, layer_number - 1] += num_rows

    def add_overlap(self, layer_number: int, common: Tensor, keys: Tensor) -> None:
        """Called by layers: keys that both have chosen, and keys."""
        self._sums[2:, layer_number - 1] += torch.stack((common, keys)).to(self._sums)

    def read(self, *groups: dist.ProcessGroup) -> dict[int, float]:
        """Mean loss per row by layer number, of layers that reported; then starts anew.

        Args:
            groups: those over which micro-batches, rows and layers are spread: data- and
                context-parallel, and pipeline. Every rank of them has to call, with indexers or
                without: a stage that has none still takes part.
        """
        return self._ratio(slice(0, 2), groups)

    def read_overlap(self, *groups: dist.ProcessGroup) -> dict[int, float]:
        """Overlap in [0, 1] by layer number, of rows that see more keys than they choose.

        Args:
            groups: as for :meth:`read`.
        """
        return self._ratio(slice(2, 4), groups)

    def _ratio(self, which: slice, groups) -> dict[int, float]:
        sums = self._sums[which].clone()
        self._sums[which].zero_()
        for group in groups:
            dist.all_reduce(sums, group=group)
        return {
            number: total / count
            for number, (total, count) in enumerate(sums.t().tolist(), start=1)
            if count
        }


def indexer_loss(
    config: MLATransformerConfig,
    groups: ParallelGroups,
    operators: DSAOperators,
    scored: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    bounds: KeyBounds,
    indices: Tensor | None,
    levels: list[Tensor | None] | None,
    scale: float,
) -> Tensor:
    """Divergence of the indexer from the attention, summed over the rows of this rank.

    Args:
        operators: of :func:`~megatron_mla.attention.dsa_operators.dsa_operators`.
        scored: the indexer's queries [L, B, n, D], keys [keys, B, D] and weights [L, B, n].
        query: [L, B, H, E]. key: [keys, B, E].
        indices: [L, B, K], for the sparse loss.
        levels: log-sum-exp [L, H] of the attention over ``indices`` for every sample, if known.
    Returns:
        Scalar in fp32, coefficient included.
    """
    sparse = config.dsa_indexer_use_sparse_loss and config.dsa_indexer_stage != "warmup"
    losses = [
        operators.loss(
            *(t[:, b] for t in scored),
            query[:, b].detach(),
            key[:, b].detach(),
            bounds,
            scale=scale,
            relu=config.dsa_indexer_scoring_relu,
            indices=indices[:, b] if sparse else None,
            lse=levels[b] if sparse and levels is not None else None,
            sum_heads=_sum_over_tp(groups),
        )
        for b in range(query.shape[1])
    ]
    return torch.stack(losses).sum() * config.dsa_indexer_loss_coeff


@torch.no_grad()
def overlap_with_dense(
    groups: ParallelGroups,
    query: Tensor,
    key: Tensor,
    bounds: KeyBounds,
    indices: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Of the keys with the most attention, summed over all heads, how many were chosen.

    Args:
        query: [L, B, H, E]. key: [keys, B, E]. indices: [L, B, K].
    Returns:
        Keys in common and keys, over the rows of this rank that see more than K.
    """
    found = [
        index_overlap_ref(
            query[:, b],
            key[:, b],
            bounds,
            indices[:, b],
            scale=scale,
            sum_heads=_sum_over_tp(groups),
        )
        for b in range(query.shape[1])
    ]
    common, keys = (torch.stack(t).sum() for t in zip(*found, strict=True))
    return common, keys


def _sum_over_tp(groups: ParallelGroups) -> Callable[[Tensor], None] | None:
    if groups.tp_size == 1:
        return None
    return lambda target: dist.all_reduce(target, group=groups.tp)


def freeze_for_stage(model: torch.nn.Module, config: MLATransformerConfig) -> None:
    """Freeze what ``config.dsa_indexer_stage`` does not train; call it before DDP and optimiser.

    In the warm-up the input of the layers gets a gradient although the embedding has none: a
    recomputed part is part of the backward only if one of its inputs is.
    """
    if config.experimental_attention_variant != "dsa" or config.dsa_indexer_stage == "joint":
        return
    warmup = config.dsa_indexer_stage == "warmup"
    for name, parameter in model.named_parameters():
        is_indexer = ".indexer." in f".{name}"
        if is_indexer != warmup:
            parameter.requires_grad_(False)
    if warmup and getattr(model, "embedding", None) is not None:
        model.embedding.register_forward_hook(
            lambda module, args, out: out.requires_grad_() if torch.is_grad_enabled() else out
        )


def join_loss(out: Tensor, loss: Tensor) -> Tensor:
    """``out``, whose backward starts that of ``loss`` too.

    Megatron-Core's pipeline schedules tell its scaler what the loss counts: one over the number of
    micro-batches, times what mixed precision scales by.
    """
    # Not above: that file looks for optional kernel packages, which no other layer needs.
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossAutoScaler,
    )

    return DSAIndexerLossAutoScaler.apply(out, loss)
