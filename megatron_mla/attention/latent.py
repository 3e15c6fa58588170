"""What every form of multi-latent attention shares: parameters, latents, rows of a micro-batch.

Parameter names are Megatron-Core's, so its checkpoints load.

Legend: S rows of all ranks, L rows of this context-parallel rank, l rows of this rank with
sequence parallelism (L / tp), B batch (1 when packed), C key-value latent, Q query latent,
d positional channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_mla.attention.cached import CachedAttention
from megatron_mla.attention.projections import mark_latent_norm
from megatron_mla.attention.rotary import make_rotary
from megatron_mla.attention.state_names import register_reader
from megatron_mla.config import MLATransformerConfig
from megatron_mla.parallel.collectives import (
    gather_over_cp,
    permute_rows,
    rejoin_columns,
    shared_over_tp,
)
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.parallel.microbatch import Rows, rows_of_microbatch
from megatron_mla.rope.frequencies import RopeParams, softmax_scale
from megatron_mla.rope.tables import shared_tables

# Arguments of Megatron-Core's attention that mean nothing here, and what to do instead.
_MEANINGLESS = {
    "key_value_states": "MLA is self-attention",
    "rotary_pos_emb": "set position_embedding_type='none' in GPTModel",
    "rotary_pos_cos": "MLA makes its own tables",
    "rotary_pos_sin": "MLA makes its own tables",
    "rotary_pos_cos_sin": "MLA makes its own tables",
    "attention_bias": "MLA takes none",
    "sequence_len_offset": "positions are those of inference_context",
}


@dataclass
class MLASelfAttentionSubmodules:
    """Parts of the layer; names as in Megatron-Core's dataclass of that name."""

    linear_proj: ModuleSpec | type
    linear_kv_down_proj: ModuleSpec | type
    linear_kv_up_proj: ModuleSpec | type
    core_attention: ModuleSpec | type
    linear_q_proj: ModuleSpec | type | None = None
    linear_q_down_proj: ModuleSpec | type | None = None
    linear_q_up_proj: ModuleSpec | type | None = None
    q_layernorm: ModuleSpec | type | None = None
    kv_layernorm: ModuleSpec | type | None = None


class LatentAttention(CachedAttention, MegatronModule, ABC):
    """Projections, norms, process groups and rope tables of a multi-latent attention layer.

    Parameters: ``linear_q_proj`` or ``linear_q_down_proj`` + ``q_layernorm`` +
    ``linear_q_up_proj``; ``linear_kv_down_proj``, ``kv_layernorm``, ``linear_kv_up_proj``;
    ``linear_proj``. Norms exist with ``qk_layernorm``.

    Args:
        config: an :class:`~megatron_mla.config.MLATransformerConfig`.
        layer_number: 1-based, over all pipeline stages; chooses ``no_rope_freq``'s entry.
        layer_offset: layers in front of layer 1, for Megatron-Core numbers MTP layers from 1 again:
            those of the decoder.
        attn_mask_type: causal; a mask tensor handed to ``forward`` is not read.
        pg_collection: process groups; Megatron-Core's global ones when None.
    """

    absorbed = False
    """Attention runs over the latent itself."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        layer_offset: int = 0,
    ) -> None:
        super().__init__(config=config)
        if not isinstance(config, MLATransformerConfig):
            raise ValueError(
                f"config must be a megatron_mla.MLATransformerConfig, got {type(config).__name__}; "
                "it has the fields that Megatron-Core's class of that name lacks"
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = layer_number = layer_number + layer_offset
        self.groups = ParallelGroups.from_collection(pg_collection)
        self.tp_group = self.groups.tp
        self._check_groups()
        self.num_heads = config.num_attention_heads // self.groups.tp_size
        self.sequence_parallel = config.latent_sequence_parallel

        params = RopeParams.from_config(config)
        self.rope_tables = shared_tables(params, config.mla_rope_numerics)
        self.has_rope = config.layer_has_rope(layer_number)
        self.rotary = make_rotary(config, self.has_rope)
        self.softmax_scale = config.softmax_scale or softmax_scale(params, config.qk_width)

        selective = config.recompute_granularity == "selective"
        self.recompute_up_proj = selective and "mla_up_proj" in config.recompute_modules
        self.recompute_core = selective and "core_attn" in config.recompute_modules

        self._build_projections(submodules, name)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=self.softmax_scale,
            k_channels=self.k_channels,
            v_channels=config.kv_lora_rank if self.absorbed else config.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.attn_mask_type = attn_mask_type
        self.gathers_keys = getattr(self.core_attention, "needs_gathered_keys", False)
        register_reader(self, config)

    def _check_groups(self) -> None:
        for field, size in (
            ("tensor_model_parallel_size", self.groups.tp_size),
            ("context_parallel_size", self.groups.cp_size),
        ):
            if getattr(self.config, field) != size:
                raise ValueError(
                    f"{field} must equal the size of its process group, {size}, got "
                    f"{getattr(self.config, field)}; initialise model parallelism with the "
                    "config's sizes"
                )

    def _build_projections(self, submodules: MLASelfAttentionSubmodules, name: str | None) -> None:
        config, groups = self.config, self.groups

        def linear(field: str, inputs: int, outputs: int, *, down: bool = False):
            spec = getattr(submodules, field)
            kwargs = {"gather_output": False, "tp_group": groups.tp}
            if down and config.mla_down_proj_parallelism == "duplicated":
                kwargs = {"parallel_mode": "duplicated", "tp_group": None}
            module = build_module(
                spec,
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name=field.removeprefix("linear_"),
                skip_weight_param_allocation=False,
                name=f"{name}.{field}" if name is not None else None,
                **kwargs,
            )
            if "parallel_mode" in kwargs:
                # Whole on every rank: with sequence parallelism each gradient covers own rows.
                for parameter in module.parameters():
                    parameter.sequence_parallel = self.sequence_parallel
            setattr(self, field, module)

        def norm(field: str, width: int) -> None:
            spec = getattr(submodules, field)
            if not config.qk_layernorm:
                setattr(self, field, None)
                return
            if spec is None:
                raise ValueError(
                    f"{field} must be given in the layer spec with qk_layernorm=True, got None; "
                    "build the spec with megatron_mla.specs.mla_attention_spec(config)"
                )
            module = build_module(
                spec, config=config, hidden_size=width, eps=config.latent_norm_epsilon
            )
            mark_latent_norm(module, self.sequence_parallel, groups.tp_size)
            setattr(self, field, module)

        query_width = config.num_attention_heads * config.qk_width
        if config.q_lora_rank is None:
            linear("linear_q_proj", config.hidden_size, query_width)
        else:
            linear("linear_q_down_proj", config.hidden_size, config.q_lora_rank, down=True)
            linear("linear_q_up_proj", config.q_lora_rank, query_width)
            norm("q_layernorm", config.q_lora_rank)
        kv_width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        linear("linear_kv_down_proj", config.hidden_size, kv_width, down=True)
        up_width = config.num_attention_heads * sum(self.kv_head_split)
        linear("linear_kv_up_proj", config.kv_lora_rank, up_width)
        norm("kv_layernorm", config.kv_lora_rank)
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=groups.tp,
            name=f"{name}.linear_proj" if name is not None else None,
        )

    @property
    def k_channels(self) -> int:
        """Width of what the core attention calls a key."""
        config = self.config
        nope = config.kv_lora_rank if self.absorbed else config.qk_head_dim
        return nope + config.qk_pos_emb_head_dim

    @property
    def q_head_split(self) -> tuple[int, int]:
        """Rows of one head in the query (up) projection: (unrotated, positional)."""
        return self.config.qk_head_dim, self.config.qk_pos_emb_head_dim

    @property
    def kv_head_split(self) -> tuple[int, int]:
        """Rows of one head in ``linear_kv_up_proj``: (key, value)."""
        return self.config.qk_head_dim, self.config.v_head_dim

    @staticmethod
    def _refuse_arguments(**arguments) -> None:
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(f"{name} must be None for MLA, got a value; {_MEANINGLESS[name]}")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context=None,
        rotary_pos_emb=None,
        rotary_pos_cos=None,
        rotary_pos_sin=None,
        rotary_pos_cos_sin=None,
        attention_bias=None,
        packed_seq_params=None,
        sequence_len_offset=None,
        *,
        inference_params=None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [l, B, hidden], or [l, 1, hidden] packed.
            attention_mask: not read; the mask is causal inside each sequence.
            inference_context, inference_params: a
                :class:`~megatron_mla.inference.context.LatentInferenceContext` or Megatron-Core's
                ``StaticInferenceContext``: rows go on from what it caches, without gradients.
            packed_seq_params: Megatron-Core's ``PackedSeqParams``. With ``qkv_format="thd"`` its
                (padded) cumulative lengths say where sequences lie; other formats are unpacked.
        Returns:
            Output [l, B, hidden] and the bias of ``linear_proj`` (None without one).
        Raises:
            ValueError: an argument that MLA has no use for, or lengths that do not fit the ranks.
        """
        self._refuse_arguments(
            key_value_states=key_value_states,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
            sequence_len_offset=sequence_len_offset,
        )
        context = inference_params if inference_context is None else inference_context
        if context is not None:
            return self._cached(hidden_states, context, packed_seq_params)
        rows = self._rows(hidden_states, packed_seq_params)
        return self._layer(hidden_states, rows, packed_seq_params)

    @abstractmethod
    def _layer(
        self, hidden_states: Tensor, rows: Rows, packed_seq_params
    ) -> tuple[Tensor, Tensor | None]:
        """What :meth:`forward` returns, in the form of this class."""

    def _rows(self, hidden_states: Tensor, packed_seq_params) -> Rows:
        if hidden_states.dim() != 3:
            raise ValueError(
                "hidden_states must be [rows, batch, hidden], got shape "
                f"{tuple(hidden_states.shape)}; a packed batch has batch 1"
            )
        tp_chunks = self.groups.tp_size if self.sequence_parallel else 1
        rows = rows_of_microbatch(
            hidden_states.shape[0] * tp_chunks,
            cp_rank=self.groups.cp_rank,
            cp_size=self.groups.cp_size,
            tp_chunks=tp_chunks,
            device=hidden_states.device,
            packed_seq_params=packed_seq_params,
        )
        if rows.packed and hidden_states.shape[1] != 1:
            raise ValueError(
                "hidden_states of a packed batch must have batch size 1, got "
                f"{hidden_states.shape[1]}; pack the samples into one row"
            )
        return rows

    def _down(self, projection, hidden_states: Tensor) -> Tensor:
        """[l, B, hidden] -> [l, B, width], however the projection is split over tp."""
        out, _ = projection(hidden_states)
        if self.config.mla_down_proj_parallelism == "column" and self.groups.tp_size > 1:
            out = rejoin_columns(out, self.groups, self.sequence_parallel)
        return out

    def _query_latent(self, hidden_states: Tensor) -> Tensor:
        """Normalised query latent [l, B, Q]; without q LoRA the hidden states themselves."""
        if self.config.q_lora_rank is None:
            return hidden_states
        q_latent = self._down(self.linear_q_down_proj, hidden_states)
        return q_latent if self.q_layernorm is None else self.q_layernorm(q_latent)

    def _key_value_latent(self, hidden_states: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Normalised latent and unrotated positional key of every row that keys are made of.

        Returns:
            [keys (/ tp with sequence parallelism), B, C] and [keys, B, d]: keys are L, or S in
            cp-gathered order where the core attention needs them all. Without sequence parallelism
            they are in global order already.
        """
        config, groups = self.config, self.groups
        combined = self._down(self.linear_kv_down_proj, hidden_states)
        latent, k_pe = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        if self._gathers(rows):
            combined = gather_over_cp(torch.cat((latent, k_pe), dim=-1), groups)
            if not self.sequence_parallel:
                combined = permute_rows(combined, *rows.key_order())
            latent, k_pe = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        return latent, shared_over_tp(k_pe, groups, self.sequence_parallel)

    def _tables(self, rows: Rows, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin of every position of the micro-batch; None in a layer without rotation."""
        if not self.has_rope:
            return None, None
        return self.rope_tables.get(rows.num_global, like.dtype, like.device)

    def _quantization(self):
        return self.config.fp8 or self.config.fp4

    def _gathers(self, rows: Rows) -> bool:
        return self.gathers_keys and rows.cp_size > 1

    def set_for_recompute_input_layernorm(self) -> None:
        """For FP8, called by Megatron-Core: keep the recomputed input, not its FP8 copy."""
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            module = getattr(self, name, None)
            if hasattr(module, "save_original_input"):
                module.save_original_input = True
