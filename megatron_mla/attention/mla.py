"""Expanded multi-latent attention: keys and values of every head are built from the latent.

Source: DeepSeek-V2, arXiv:2405.04434 section 2.1.

Legend: L rows of this context-parallel rank, l rows of this rank with sequence parallelism
(L / tp), B batch (1 when packed), H heads of this rank, N unrotated, d positional, V value
channels; keys are rows that keys are made of (L, or those of all ranks). Heads are ``[N | d]``.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_mla.attention.latent import LatentAttention
from megatron_mla.parallel.collectives import permute_rows
from megatron_mla.parallel.microbatch import Rows


class MLASelfAttention(LatentAttention):
    """Multi-latent self-attention in its expanded form.

    Built by :func:`megatron_mla.specs.mla_attention_spec`; arguments and parameters are those of
    :class:`~megatron_mla.attention.latent.LatentAttention`.
    """

    def _layer(
        self, hidden_states: Tensor, rows: Rows, packed_seq_params
    ) -> tuple[Tensor, Tensor | None]:
        q_latent = self._query_latent(hidden_states)
        kv_latent, k_pe = self._key_value_latent(hidden_states, rows)
        if self.recompute_up_proj:
            checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self._quantization())
            expand = lambda *latents: self._expand(*latents, rows)  # noqa: E731
            query, key, value = checkpoint.checkpoint(expand, q_latent, kv_latent, k_pe)
        else:
            query, key, value = self._expand(q_latent, kv_latent, k_pe, rows)

        out = self._attend(query, key, value, rows, packed_seq_params)
        if rows.packed:
            out = out.unsqueeze(1)  # [L, 1, H * V]
        if self.recompute_up_proj:
            checkpoint.discard_output_and_register_recompute(out)
        return self.linear_proj(out)

    def _first_pass(self, hidden_states: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        q_latent = self._query_latent(hidden_states)
        kv_latent, k_pe = self._key_value_latent(hidden_states, rows)
        query, key, value = self._expand(q_latent, kv_latent, k_pe, rows)
        # Rotated as the attention has it, the same on every head.
        row = torch.cat((kv_latent, key[..., 0, self.config.qk_head_dim :]), dim=-1)
        return row, self._attend(query, key, value, rows, None)

    def _expand(
        self, q_latent: Tensor, kv_latent: Tensor, k_pe: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Up projections and RoPE: query [L, (B,) H, N + d], key and value [keys, (B,) H, ...]."""
        up = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query, _ = up(q_latent)
        kv, _ = self.linear_kv_up_proj(kv_latent)
        kv = kv.unflatten(-1, (self.num_heads, sum(self.kv_head_split)))  # [keys, B, H, N + V]
        k_pe = k_pe.unsqueeze(-2)  # [keys, B, 1, d]
        if self._gathers(rows) and self.sequence_parallel:
            # The up projection gathered over tp what was gathered over cp; only now is every row
            # here to be put into global order.
            kv, k_pe = (permute_rows(t, *rows.key_order()) for t in (kv, k_pe))
        cos, sin = self._tables(rows, query)
        key_positions = rows.key_positions if self._gathers(rows) else rows.positions
        query = self.rotary.query(query, self.num_heads, cos, sin, rows.positions)
        key, value = self.rotary.key_value(
            kv, k_pe, cos, sin, key_positions, pack_value=not self.gathers_keys
        )
        if rows.packed:
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        return query, key, value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, packed_seq_params
    ) -> Tensor:
        """[L, (B,) H * V]."""

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.gathers_keys:
                return self.core_attention(query, key, value, rows)
            return self.core_attention(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                None,
                attn_mask_type=self.attn_mask_type,
                packed_seq_params=packed_seq_params if rows.packed else None,
            )

        if self.recompute_core and self.training:
            return tensor_parallel.checkpoint(run, False, query, key, value)
        return run(query, key, value)
