"""Absorbed multi-latent attention: queries meet the latent itself, which all heads share.

The key half of the up projection is applied to the queries and the value half after the attention,
so that keys and values of heads are never made. Same parameters and, up to rounding, same results
as :mod:`megatron_mla.attention.mla`.

Source: DeepSeek-V2, arXiv:2405.04434 section 2.1.3. Legend: as there, and C latent channels; the
key is ``[C | d]``, its first C channels are the value.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_mla.attention.core import attend_to_latents
from megatron_mla.attention.latent import LatentAttention
from megatron_mla.attention.projections import weight_of
from megatron_mla.kernels.absorb_ref import absorb_nope_ref
from megatron_mla.parallel.collectives import gather_over_cp, permute_rows, shared_over_tp
from megatron_mla.parallel.microbatch import Rows


class AbsorbedMLASelfAttention(LatentAttention):
    """Multi-latent self-attention in its absorbed form.

    Built by :func:`megatron_mla.specs.mla_attention_spec`; arguments and parameters are those of
    :class:`~megatron_mla.attention.latent.LatentAttention`.
    """

    absorbed = True

    def _layer(
        self, hidden_states: Tensor, rows: Rows, packed_seq_params
    ) -> tuple[Tensor, Tensor | None]:
        q_latent = self._query_latent(hidden_states)
        shared = self._shared_latent(hidden_states, rows)
        wk, wv = self._up_weights()
        if self.recompute_up_proj:
            checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self._quantization())
            absorb = lambda *tensors: self._absorb(*tensors, rows)  # noqa: E731
            query, key = checkpoint.checkpoint(absorb, q_latent, shared, wk)
        else:
            query, key = self._absorb(q_latent, shared, wk, rows)

        latent = self._attend(query, key, rows, hidden_states, q_latent, packed_seq_params)
        if self.recompute_up_proj:
            checkpoint.discard_output_and_register_recompute(latent)
        out = absorb_nope_ref(latent, wv.transpose(1, 2)).flatten(-2)  # [L, B, H * V]
        return self.linear_proj(out)

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

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        rows: Rows,
        hidden_states: Tensor,
        q_latent: Tensor,
        packed_seq_params,
    ) -> Tensor:
        """Weighted latents [L, B, H, C]."""

        def run(query: Tensor, key: Tensor) -> Tensor:
            width = self.config.kv_lora_rank
            return attend_to_latents(self.core_attention, query, key, rows, width)

        if self.recompute_core and self.training:
            return tensor_parallel.checkpoint(run, False, query, key)
        return run(query, key)
