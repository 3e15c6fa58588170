"""Absorbed multi-latent attention: queries meet the latent itself, which all heads share.

The key half of the up projection is applied to the queries and the value half after the attention,
so that keys and values of heads are never made. Same parameters and, up to rounding, same results
as :mod:`megatron_mla.attention.mla`.

Source: DeepSeek-V2, arXiv:2405.04434 section 2.1.3. Legend: as there, and C latent channels; the
key is ``[C | d]``, its first C channels are the value.
"""

from __future__ import annotations

from megatron.core import tensor_parallel
from torch import Tensor

from megatron_mla.attention.core import attend_to_latents
from megatron_mla.attention.latent import LatentAttention
from megatron_mla.kernels.absorb_ref import absorb_nope_ref
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

    def _first_pass(self, hidden_states: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        q_latent = self._query_latent(hidden_states)
        shared = self._shared_latent(hidden_states, rows)
        wk, wv = self._up_weights()
        query, key = self._absorb(q_latent, shared, wk, rows)
        latent = self._attend(query, key, rows, hidden_states, q_latent, None)
        return key, absorb_nope_ref(latent, wv.transpose(1, 2)).flatten(-2)

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
