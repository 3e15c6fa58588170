"""The indexer of DeepSeek sparse attention: queries, keys and weights that score keys.

Source: DeepSeek-V3.2-Exp; numerics of kernels/README.md (8). Legend: L rows of this
context-parallel rank, l rows of this rank with sequence parallelism (L / tp), keys rows of all
context-parallel ranks, B batch, n indexer heads, D channels of one, d positional channels, Q query
latent. Heads are ``[d | rest]``, positional channels first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_mla.attention.rotary import make_rotary
from megatron_mla.config import MLATransformerConfig
from megatron_mla.kernels.hadamard import hadamard
from megatron_mla.parallel.collectives import gather_over_cp, gather_rows_over_tp, permute_rows
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.parallel.microbatch import Rows
from megatron_mla.rope.frequencies import RopeParams
from megatron_mla.rope.tables import shared_tables


@dataclass
class DSAIndexerSubmodules:
    """Parts of the indexer; names as in Megatron-Core's dataclass of that name."""

    linear_wq_b: ModuleSpec | type
    linear_wk: ModuleSpec | type
    k_norm: ModuleSpec | type
    linear_weights_proj: ModuleSpec | type


class DSAIndexer(MegatronModule):
    """Projections, norm, rotation and Hadamard transform of the indexer.

    Every tensor-parallel rank holds the whole indexer and scores alike.

    Parameters: ``linear_wq_b`` [n * D, Q], ``linear_wk`` [D, hidden], ``k_norm`` (a LayerNorm with
    bias) and ``linear_weights_proj`` [n, hidden].
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: DSAIndexerSubmodules,
        groups: ParallelGroups,
        has_rope: bool = True,
    ) -> None:
        super().__init__(config=config)
        self.groups = groups
        self.num_heads, self.width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.sequence_parallel = config.latent_sequence_parallel
        params = RopeParams.from_config(config)
        self.rope_tables = shared_tables(params, config.mla_rope_numerics)
        self.has_rope = has_rope
        self.rotary = make_rotary(config, has_rope)

        def linear(spec, inputs: int, outputs: int):
            return build_module(
                spec,
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
                parallel_mode="duplicated",
                tp_group=None,
            )

        query_width = self.num_heads * self.width
        self.linear_wq_b = linear(submodules.linear_wq_b, config.q_lora_rank, query_width)
        self.linear_wk = linear(submodules.linear_wk, config.hidden_size, self.width)
        norm_config = copy.copy(config)
        norm_config.normalization = "LayerNorm"
        epsilon = config.dsa_indexer_k_norm_epsilon
        self.k_norm = build_module(
            submodules.k_norm,
            config=norm_config,
            hidden_size=self.width,
            eps=config.layernorm_epsilon if epsilon is None else epsilon,
        )
        self.linear_weights_proj = linear(
            submodules.linear_weights_proj, config.hidden_size, self.num_heads
        )
        self._mark_gradients()

    def _mark_gradients(self) -> None:
        """Say how gradients of weights that are whole on every tp rank become one gradient.

        All ranks see the same loss. With sequence parallelism the weights that read hidden states
        meet only this rank's rows, so their gradients are summed; all others are the same
        everywhere, and averaging keeps them so.
        """
        for name, parameter in self.named_parameters():
            by_rows = self.sequence_parallel and not name.startswith("linear_wq_b")
            parameter.sequence_parallel = by_rows
            if self.groups.tp_size > 1 and not by_rows:
                parameter.average_gradients_across_tp_domain = True

    def forward(self, x: Tensor, qr: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """What scores are made of.

        Args:
            x: [l, B, hidden] and qr: [l, B, Q], the normalised query latent; both detached.
        Returns:
            Queries [L, B, n, D], keys [keys, B, D] in global order, weights [L, B, n], which hold
            both scales.
        """
        k, _ = self.linear_wk(x)
        k = self._norm(k)
        weights = self._weights(x)
        if self.sequence_parallel:
            k, weights, qr = (gather_rows_over_tp(t, self.groups) for t in (k, weights, qr))
        q, _ = self.linear_wq_b(qr)
        cos, sin = None, None
        if self.has_rope:
            cos, sin = self.rope_tables.get(rows.num_global, q.dtype, q.device)
        how = {"interleaved": self.config.dsa_indexer_rope_interleaved}
        q = self.rotary.lead(q, self.num_heads, cos, sin, rows.positions, **how)
        k = self.rotary.lead(k, 1, cos, sin, rows.positions, **how).squeeze(-2)
        if self.config.dsa_indexer_rotate_activation:
            q, k = hadamard(q), hadamard(k)
        if self.groups.cp_size > 1:
            k = permute_rows(gather_over_cp(k, self.groups), *rows.key_order(tp_chunks=1))
        return q, k, weights

    def _norm(self, k: Tensor) -> Tensor:
        if not self.config.dsa_indexer_k_norm_fp32:
            return self.k_norm(k)
        norm = self.k_norm
        wide = torch.nn.functional.layer_norm(
            k.float(), (self.width,), norm.weight.float(), norm.bias.float(), norm.eps
        )
        return wide.to(k.dtype)

    def _weights(self, x: Tensor) -> Tensor:
        """[l, B, n]; the two scales are two roundings."""
        if self.config.dsa_indexer_weights_fp32:
            weights = torch.nn.functional.linear(x.float(), self.linear_weights_proj.weight.float())
        else:
            weights, _ = self.linear_weights_proj(x)
        return weights * self.num_heads**-0.5 * self.width**-0.5
