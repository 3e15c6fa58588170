"""Training of the indexer: its loss, how it joins the backward, and a log that the caller owns.

Source: DeepSeek-V3.2-Exp; kernels/README.md (11). Legend: L rows of this context-parallel rank,
B batch, n indexer heads, D channels of one, H heads of this rank, E channels of an absorbed head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from torch import Tensor

from megatron_mla.config import MLATransformerConfig
from megatron_mla.kernels.indexer_loss_ref import indexer_loss_ref
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.parallel.microbatch import KeyBounds


class IndexerLossLog:
    """Indexer losses by layer, between two calls of :meth:`read`.

    Make one, :meth:`attach` it to the model of this rank, and read it after a step. Layers are
    1-based over all pipeline stages, MTP layers are counted after the decoder.

    Args:
        num_layers: decoder layers of all stages, plus MTP layers.
    """

    def __init__(self, num_layers: int, device: torch.device | str) -> None:
        # Sum of the loss over rows, and rows.
        self._sums = torch.zeros(2, num_layers, dtype=torch.float64, device=device)

    def attach(self, model: torch.nn.Module) -> None:
        """Have every layer of ``model`` with an indexer report here."""
        for module in model.modules():
            if hasattr(module, "indexer_loss_log"):
                module.indexer_loss_log = self

    def add(self, layer_number: int, loss_sum: Tensor, num_rows: int) -> None:
        """Called by layers: their loss, coefficient included, summed over ``num_rows`` rows."""
        self._sums[0, layer_number - 1] += loss_sum.detach().to(self._sums)
        self._sums[1, layer_number - 1] += num_rows

    def read(self, *groups: dist.ProcessGroup) -> dict[int, float]:
        """Mean loss per row by layer number, of layers that reported; then starts anew.

        Args:
            groups: those over which micro-batches, rows and layers are spread: data- and
                context-parallel, and pipeline. Every rank of them has to call, with indexers or
                without: a stage that has none still takes part.
        """
        sums = self._sums.clone()
        self._sums.zero_()
        for group in groups:
            dist.all_reduce(sums, group=group)
        return {
            number: float(total / rows)
            for number, (total, rows) in enumerate(sums.t().tolist(), start=1)
            if rows
        }


def indexer_loss(
    config: MLATransformerConfig,
    groups: ParallelGroups,
    scored: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    bounds: KeyBounds,
    indices: Tensor,
    scale: float,
) -> Tensor:
    """Divergence of the indexer from the attention, summed over the rows of this rank.

    Args:
        scored: the indexer's queries [L, B, n, D], keys [keys, B, D] and weights [L, B, n].
        query: [L, B, H, E]. key: [keys, B, E]. indices: [L, B, K].
    Returns:
        Scalar in fp32, coefficient included.
    """
    sparse = config.dsa_indexer_use_sparse_loss

    def sum_heads(target: Tensor) -> None:
        dist.all_reduce(target, group=groups.tp)

    losses = [
        indexer_loss_ref(
            *(t[:, b] for t in scored),
            query[:, b].detach(),
            key[:, b].detach(),
            bounds,
            scale=scale,
            relu=config.dsa_indexer_scoring_relu,
            indices=indices[:, b] if sparse else None,
            sum_heads=sum_heads if groups.tp_size > 1 else None,
        )
        for b in range(query.shape[1])
    ]
    return torch.stack(losses).sum() * config.dsa_indexer_loss_coeff


def join_loss(out: Tensor, loss: Tensor) -> Tensor:
    """``out``, whose backward starts that of ``loss`` too.

    Megatron-Core's pipeline schedules tell its scaler what the loss counts: one over the number of
    micro-batches, times what mixed precision scales by.
    """
    return DSAIndexerLossAutoScaler.apply(out, loss)
