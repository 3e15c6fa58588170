"""DeepSeek sparse attention (DSA): absorbed attention over the keys that an indexer chooses.

Source: DeepSeek-V3.2-Exp; GLM-5 shares indices between layers. Legend: L rows of this
context-parallel rank, l rows of this rank with sequence parallelism (L / tp), keys rows of all
context-parallel ranks, B batch, H heads of this rank, C latent, d positional channels, K chosen
keys per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_mla.attention.absorbed import AbsorbedMLASelfAttention
from megatron_mla.attention.cached_dsa import attend_to_chosen
from megatron_mla.attention.core import SDPACoreAttention, attend_to_latents
from megatron_mla.attention.dsa_operators import dsa_operators, join_samples
from megatron_mla.attention.index_sharing import (
    IndexBook,
    check_given,
    index_book_of,
    shares_indices,
    source_layer,
)
from megatron_mla.attention.indexer_loss import indexer_loss, join_loss, overlap_with_dense
from megatron_mla.config import MLATransformerConfig
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.parallel.microbatch import KeyBounds, Rows
from megatron_mla.selection import determinism_is_asked


@dataclass
class DSACoreAttentionSubmodules:
    """Parts of the core attention; named as in Megatron-Core's ``DSAttentionSubmodules``."""

    indexer: ModuleSpec | type


class DSACoreAttention(MegatronModule):
    """Chooses keys and attends to them.

    Layers that share indices have no indexer. An indexer without a loss gets no gradient and is
    frozen, so that overlapped gradient reductions do not wait for it.

    Args:
        layer_number: 1-based, over all pipeline stages.
        softmax_scale: dimensionless factor on query-key products.
        v_channels: C.
    """

    needs_gathered_keys = True

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: DSACoreAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        *,
        softmax_scale: float,
        v_channels: int,
        pg_collection: ProcessGroupCollection | None = None,
        **unused,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale, self.v_channels = softmax_scale, v_channels
        self.groups = ParallelGroups.from_collection(pg_collection)
        offset, freq = config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
        self.source = source_layer(layer_number, offset, freq)
        # An IndexerLossLog, set by its ``attach``.
        self.indexer_loss_log = None
        # Attention stays dense while the indexer learns what it looks like.
        self.dense = None
        if config.dsa_indexer_stage == "warmup":
            self.dense = SDPACoreAttention(
                config,
                layer_number,
                attn_mask_type,
                softmax_scale=softmax_scale,
                k_channels=v_channels + config.qk_pos_emb_head_dim,
                v_channels=v_channels,
            )
        self.operators = dsa_operators(config, self.groups)
        self.indexer = None
        if shares_indices(layer_number, offset, freq):
            return
        self.indexer = build_module(
            submodules.indexer,
            config=config,
            groups=self.groups,
            has_rope=config.layer_has_rope(layer_number),
        )
        if not config.dsa_indexer_loss_coeff or config.dsa_indexer_stage == "frozen":
            self.indexer.requires_grad_(False)

    def forward(
        self, query: Tensor, key: Tensor, x: Tensor, qr: Tensor, rows: Rows, book: IndexBook | None
    ) -> Tensor:
        """Attend.

        Args:
            query: [L, B, H, C + d]. key: [keys, B, C + d], in global order.
            x: [l, B, hidden] and qr: [l, B, Q], what the indexer reads; detached.
            book: indices of this forward pass.
        Returns:
            Weighted latents [L, B, H, C]; rows that see no key are zero.
        """
        determinism_is_asked(self.config, query.is_cuda)  # what is asked has to be kept here too
        bounds = rows.key_bounds()
        batch = query.shape[1]
        given = book is not None and self.source in book.given
        trains = self._trains_indexer()
        scored = None
        if self.indexer is not None and (trains or not given):
            with torch.set_grad_enabled(trains):
                scored = self.indexer(x, qr, rows)
        log = self.indexer_loss_log
        measured = log is not None and log.measures_overlap and self.indexer is not None
        indices, levels = None, None
        if self.dense is None or measured:
            indices = self._indices(scored, bounds, rows, batch, book)
        if self.dense is None:
            out, levels = self._sparse(query, key, indices)
        else:
            out = attend_to_latents(self.dense, query, key, rows, self.v_channels)
        if measured:
            found = overlap_with_dense(self.groups, query, key, bounds, indices, self.softmax_scale)
            log.add_overlap(self.layer_number, *found)
        if not trains:
            return out
        loss = indexer_loss(
            self.config, self.groups, self.operators, scored, query, key, bounds, indices, levels,
            self.softmax_scale,
        )  # fmt: skip
        if log is not None:
            # The rows of a micro-batch are shared evenly.
            log.add(self.layer_number, loss, bounds.num_rows // rows.cp_size * batch)
        if not self.config.calculate_per_token_loss:
            # The mean over the rows of all context-parallel ranks; Megatron-Core sums over them.
            loss = loss / max(1, bounds.num_rows * batch)
        return join_loss(out, loss)

    def _sparse(
        self, query: Tensor, key: Tensor, indices: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Output, and the log-sum-exp [L, H] of every sample where the operator gives it."""
        how = {"scale": self.softmax_scale, "v_dim": self.v_channels}
        found = [
            self.operators.attention(query[:, b], key[:, b], indices[:, b], **how)
            for b in range(query.shape[1])
        ]
        outs, levels = zip(*found, strict=True)
        return join_samples(outs), list(levels)

    def _trains_indexer(self) -> bool:
        """Whether this call makes an indexer loss: not in evaluation, nor a pass to recompute."""
        return bool(
            self.training
            and torch.is_grad_enabled()
            and self.config.dsa_indexer_loss_coeff
            and self.indexer is not None
            and any(parameter.requires_grad for parameter in self.indexer.parameters())
        )

    def _indices(
        self,
        scored: tuple[Tensor, Tensor, Tensor] | None,
        bounds: KeyBounds,
        rows: Rows,
        batch: int,
        book: IndexBook | None,
    ) -> Tensor:
        """[L, B, K] of this layer: given, its own choice, or the choice of the layer it shares."""
        if book is not None and self.source in book.given:
            indices = check_given(book.given[self.source], self.source, rows.num_local, batch)
            indices = indices.to(bounds.starts.device)
            seen = (indices >= bounds.starts[:, None, None]) & (
                indices < bounds.ends[:, None, None]
            )
            indices = indices.masked_fill(~seen, -1)
        elif self.indexer is not None:
            q, k, w = (t.detach() for t in scored)
            how = {
                "topk": self.config.dsa_indexer_topk,
                "relu": self.config.dsa_indexer_scoring_relu,
            }
            indices = join_samples(
                [
                    self.operators.topk(q[:, b], k[:, b], w[:, b], bounds, **how)
                    for b in range(batch)
                ]
            )
        elif book is None or self.source not in book.chosen:
            raise ValueError(
                f"layer {self.layer_number} must find the indices of layer {self.source} in the "
                "index book of its forward pass, got none; call "
                "megatron_mla.attention.index_sharing.install_index_books(model) once, or pass "
                "packed_seq_params=with_index_book(...)"
            )
        else:
            return book.chosen[self.source]
        if book is not None and self.layer_number == self.source:
            book.chosen[self.layer_number] = indices
        return indices


class DSASelfAttention(AbsorbedMLASelfAttention):
    """Absorbed multi-latent self-attention whose core is sparse.

    Built by :func:`megatron_mla.specs.mla_attention_spec` with
    ``experimental_attention_variant="dsa"``. Parameters are those of the absorbed layer and
    ``core_attention.indexer.*``.
    """

    starts_dense = False

    def _attend_cached(self, context, step, query, memory, *, x, q_latent, packed_seq_params):
        core = self.core_attention
        determinism_is_asked(self.config, query.is_cuda)
        if core.dense is not None:
            inputs = {"x": x, "q_latent": q_latent, "packed_seq_params": packed_seq_params}
            return super()._attend_cached(context, step, query, memory, **inputs)
        book = index_book_of(packed_seq_params, create=False)
        return attend_to_chosen(core, context, step, query, memory, x, q_latent, book)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        rows: Rows,
        hidden_states: Tensor,
        q_latent: Tensor,
        packed_seq_params,
    ) -> Tensor:
        book = index_book_of(packed_seq_params, create=self.config.dsa_indexer_topk_freq > 1)

        # Tensors go in as arguments: what a closure holds is no input of a recomputation.
        def run(query: Tensor, key: Tensor, x: Tensor, qr: Tensor) -> Tensor:
            return self.core_attention(query, key, x, qr, rows, book)

        inputs = query, key, hidden_states.detach(), q_latent.detach()
        if self.recompute_core and self.training:
            return tensor_parallel.checkpoint(run, False, *inputs)
        return run(*inputs)
