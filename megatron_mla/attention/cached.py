"""Forward passes over a cache of latents: prompts, pieces of prompts and new tokens.

A pass without anything in front of it is the layer's own attention over its new rows, which are
kept besides. Every other pass is the absorbed form over the cached rows, for all forms of the
layer: they cache the same rows and have the same results up to rounding.

Legend: s rows of a pass, B sequences, H heads of this rank, E = C + d channels of a cached row.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from megatron_mla.attention.absorption import Absorption
from megatron_mla.inference.attention import attend_to_rows
from megatron_mla.inference.context import LatentInferenceContext, Step, latent_context
from megatron_mla.inference.rows import latent_memory, write_rows
from megatron_mla.kernels.absorb_ref import absorb_nope_ref
from megatron_mla.parallel.microbatch import Rows, rows_of_microbatch


def attend_cached(
    context: LatentInferenceContext,
    step: Step,
    query: Tensor,
    memory: Tensor,
    *,
    scale: float,
    v_dim: int,
) -> Tensor:
    """Dense attention of new rows over the cached rows of one layer, on all ranks that share them.

    Args:
        query: [B, s, H, E]. memory: [max_batch_size, T, E], new rows among the others.
    Returns:
        [B, s, H, C]; 0 in rows of padding.
    """
    keys = step.key_positions(context.dcp)
    if context.dcp is not None:
        query = context.dcp.gather_queries(query)
    out, level = attend_to_rows(
        query,
        memory[: len(step.ends), : keys.shape[1]],
        step.positions.t(),
        keys,
        scale=scale,
        v_dim=v_dim,
    )
    return out if context.dcp is None else context.dcp.merge(out, level)[0]


class CachedAttention(Absorption):
    """What a latent-attention layer does with an inference context."""

    starts_dense = True
    """Whether a pass with nothing in front of it takes :meth:`_first_pass`."""

    # Nothing is learnt from a cache, and gradients would keep all passes alive.
    @torch.no_grad()
    def _cached(
        self, hidden_states: Tensor, inference_context, packed_seq_params
    ) -> tuple[Tensor, Tensor | None]:
        """The layer over a cache: [s, B, hidden] -> the same, and the bias of ``linear_proj``.

        Raises:
            ValueError: a context, a mode or a layout of ranks that has no cache of latents.
        """
        self._check_cached(hidden_states, packed_seq_params)
        context = latent_context(inference_context)
        step = context.step(*hidden_states.shape[:2], hidden_states.device)
        # A narrower cache is read from the first pass on, so that pieces of any size agree.
        whole = context.cache_dtype in (None, hidden_states.dtype)
        if self.starts_dense and step.is_first and whole:
            rows = rows_of_microbatch(
                hidden_states.shape[0],
                cp_rank=0,
                cp_size=1,
                tp_chunks=1,
                device=hidden_states.device,
            )
            row, out = self._first_pass(hidden_states, rows)
            self._keep(context, step, row.flatten(0, 1))
        else:
            out = self._over_cache(hidden_states, context, step, packed_seq_params)
        return self.linear_proj(out)

    @abstractmethod
    def _first_pass(self, hidden_states: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The layer without a cache: rows to keep [s, B, E], and [s, B, H * V].

        Padding is behind a sequence's own rows, from which the causal mask keeps it.
        """

    def _over_cache(
        self, hidden_states: Tensor, context: LatentInferenceContext, step: Step, packed_seq_params
    ) -> Tensor:
        """[s, B, H * V] over all rows that the cache has then."""
        # Rows differ in position from sequence to sequence, so they are rows of a batch of one.
        x = hidden_states.flatten(0, 1).unsqueeze(1)
        q_latent = self._query_latent(x)
        wk, wv = self._up_weights()
        query, key = self._absorb(q_latent, self._shared_latent(x, step.rows), wk, step.rows)
        memory = self._keep(context, step, key.squeeze(1))
        query = query.squeeze(1).unflatten(0, hidden_states.shape[:2]).transpose(0, 1)
        inputs = {"x": x, "q_latent": q_latent, "packed_seq_params": packed_seq_params}
        latent = self._attend_cached(context, step, query, memory, **inputs)
        out = absorb_nope_ref(latent, wv.transpose(1, 2))  # [B, s, H, V]
        return out.transpose(0, 1).flatten(-2)

    def _keep(self, context: LatentInferenceContext, step: Step, rows: Tensor) -> Tensor:
        """Write [s * B, E] into the memory of this layer, which is returned."""
        memory = latent_memory(context, self.layer_number, rows.shape[-1], rows)
        write_rows(memory, rows, step, context.dcp)
        return memory

    def _attend_cached(
        self,
        context: LatentInferenceContext,
        step: Step,
        query: Tensor,
        memory: Tensor,
        *,
        x: Tensor,
        q_latent: Tensor,
        packed_seq_params,
    ) -> Tensor:
        """Weighted latents [B, s, H, C].

        Args:
            x, q_latent: [s * B, 1, ...], what an indexer reads.
        """
        return attend_cached(
            context,
            step,
            query,
            memory,
            scale=self.softmax_scale,
            v_dim=self.config.kv_lora_rank,
        )

    def _check_cached(self, hidden_states: Tensor, packed_seq_params) -> None:
        if self.training:
            raise ValueError(
                "inference_context must come to a layer in evaluation mode, got one in training "
                "mode; call model.eval() first"
            )
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            raise ValueError(
                "packed_seq_params must not be thd with inference_context, got a packed batch; pad "
                "the sequences to [rows, batch, hidden] and say their lengths in "
                "LatentInferenceContext.begin()"
            )
        if self.sequence_parallel:
            raise ValueError(
                "sequence_parallel must be off with inference_context, got True: one new token "
                "cannot be cut; build the model with sequence_parallel=False, its weights are the "
                "same"
            )
        if self.groups.cp_size > 1:
            raise ValueError(
                f"context_parallel_size must be 1 with inference_context, got {self.groups.cp_size}"
                "; build the model without it, and let tensor-parallel ranks share the cache by "
                "LatentInferenceContext(dcp=...)"
            )
        if hidden_states.dim() != 3:
            raise ValueError(
                "hidden_states must be [rows, batch, hidden], got shape "
                f"{tuple(hidden_states.shape)}"
            )
