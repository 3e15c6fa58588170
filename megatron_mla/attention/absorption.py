"""From hidden states to what absorbed attention reads: one key for all heads, queries that meet it.

Legend: L rows of this context-parallel rank, B batch, H heads of this rank, N unrotated, V value,
C latent, d positional channels; keys are rows that keys are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mla.attention.projections import weight_of
from megatron_mla.parallel.collectives import gather_over_cp, permute_rows, shared_over_tp
from megatron_mla.parallel.microbatch import Rows


class Absorption:
    """Methods of a layer with the projections of latent attention."""

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Key and value halves of the up projection of this rank's heads: [H, N, C], [H, V, C]."""
        weight = weight_of(self.linear_kv_up_proj)
        n, v = self.kv_head_split
        return weight.view(self.num_heads, n + v, -1).split([n, v], dim=1)

    def _shared_latent(self, hidden_states: Tensor, rows: Rows) -> Tensor:
        """[normalised latent | unrotated positional key] of every key row, [keys, B, C + d].

        Whole on every tp rank, whose heads all read it; its gradient is summed over tp here.
        """
        config = self.config
        combined = self._down(self.linear_kv_down_proj, hidden_states)
        if self.kv_layernorm is not None:
            widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
            latent, k_pe = combined.split(widths, dim=-1)
            combined = torch.cat((self.kv_layernorm(latent), k_pe), dim=-1)
        groups, parallel_rows = self.groups, self.sequence_parallel
        # What is least goes over cp, which may cross machines: a tp rank's own rows, and gradients
        # of this rank's rows before they are summed over tp.
        if not parallel_rows:
            combined = shared_over_tp(combined, groups, parallel_rows)
        if self._gathers(rows):
            combined = gather_over_cp(combined, groups)
        if parallel_rows:
            combined = shared_over_tp(combined, groups, parallel_rows)
        return permute_rows(combined, *rows.key_order()) if self._gathers(rows) else combined

    def _absorb(
        self, q_latent: Tensor, shared: Tensor, wk: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Query [L, B, H, C + d] and key [keys, B, C + d], rotated."""
        up = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query, _ = up(q_latent)
        cos, sin = self._tables(rows, query)
        query = self.rotary.absorb(query, self.num_heads, wk, cos, sin, rows.positions)
        # Outputs that are discarded must not take with them what they are made of again.
        in_place = not self.recompute_up_proj
        key = self.rotary.latent_key(shared, cos, sin, rows.key_positions, in_place=in_place)
        return query, key
