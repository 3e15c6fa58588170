"""Kimi Delta Attention: linear attention whose state decays channel by channel.

Source: Kimi Linear, arXiv:2510.26692 section 3; docs/kimi.md maps checkpoints to the names here.

Legend: L rows, l rows of this rank with sequence parallelism (L / tp), B batch (1 when packed), H
heads of this rank, K key and V value channels of one, R rank of the gates, W width of the
convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_mla.attention.kda_ops import (
    delta_rule,
    delta_rule_from,
    short_conv,
    short_conv_from,
)
from megatron_mla.attention.kda_parameters import (
    GatedHeadNorm,
    ShortConvWeight,
    fill_a_log,
    fill_dt_bias,
    head_parameter,
    sharded_by_heads,
)
from megatron_mla.attention.state_names import register_extra_state_reader
from megatron_mla.config import MLATransformerConfig
from megatron_mla.inference.context import LatentInferenceContext, Step, latent_context
from megatron_mla.parallel.groups import ParallelGroups
from megatron_mla.parallel.microbatch import rows_of_microbatch
from megatron_mla.selection import check_kda_can_run


@dataclass
class KimiDeltaAttentionSubmodules:
    """Parts of the layer: linear layers whose heads are cut over tp, and those that are whole."""

    column: ModuleSpec | type
    whole: ModuleSpec | type
    linear_proj: ModuleSpec | type


class KimiDeltaAttention(MegatronModule):
    """A layer of Kimi Delta Attention, in the place of a ``TransformerLayer``'s self-attention.

    Parameters, heads cut over tp: ``linear_{q,k}_proj`` [H * K, hidden], ``linear_v_proj``
    [H * V, hidden], ``{q,k,v}_conv1d.weight`` [channels, 1, W], ``linear_b_proj`` [H, hidden],
    ``linear_f_up_proj`` [H * K, R], ``A_log`` [H], ``dt_bias`` [H * K], ``linear_proj``
    [hidden, H * V]; with ``kda_output_gate="low_rank"`` ``linear_g_up_proj`` [H * V, R], else
    ``linear_g_proj`` [H * V, hidden]. Whole on every rank: ``linear_{f,g}_down_proj`` [R, hidden]
    and ``o_norm.weight`` [V].

    Args:
        config: an :class:`~megatron_mla.config.MLATransformerConfig`.
        layer_number: 1-based, over all pipeline stages.
        layer_offset: layers in front of layer 1: those of the decoder, for MTP layers.
        pg_collection: process groups; Megatron-Core's global ones when None.
    Raises:
        ImportError: fla-core cannot be imported, with the reason.
        ValueError: ``deterministic_mode`` on a GPU, or sizes other than the process groups'.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: KimiDeltaAttentionSubmodules,
        layer_number: int,
        attn_mask_type=None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        layer_offset: int = 0,
    ) -> None:
        super().__init__(config=config)
        check_kda_can_run(config)
        self.layer_number = layer_number + layer_offset
        self.groups = groups = ParallelGroups.from_collection(pg_collection)
        self.tp_group = groups.tp
        for field, size in (
            ("tensor_model_parallel_size", groups.tp_size),
            ("context_parallel_size", groups.cp_size),
        ):
            if getattr(config, field) != size:
                raise ValueError(
                    f"{field} must equal the size of its process group, {size}, got "
                    f"{getattr(config, field)}; initialise model parallelism with the config's "
                    "sizes"
                )
        self.sequence_parallel = config.latent_sequence_parallel
        self.num_heads = config.linear_num_key_heads // groups.tp_size
        self.k_dim, self.v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self._build(submodules, name)
        register_extra_state_reader(self)

    def _build(self, submodules: KimiDeltaAttentionSubmodules, name: str | None) -> None:
        config, groups = self.config, self.groups
        heads, hidden = config.linear_num_key_heads, config.hidden_size
        key_width, value_width = heads * self.k_dim, heads * self.v_dim
        rank = config.kda_gate_rank or self.v_dim

        def linear(field: str, inputs: int, outputs: int, *, whole: bool = False) -> None:
            kwargs = {"gather_output": False, "tp_group": groups.tp}
            if whole:
                kwargs = {"parallel_mode": "duplicated", "tp_group": None}
            module = build_module(
                submodules.whole if whole else submodules.column,
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
            if whole:
                # With sequence parallelism each gradient covers own rows, else it is whole: the
                # projection behind it sums over heads.
                for parameter in module.parameters():
                    parameter.sequence_parallel = self.sequence_parallel
            setattr(self, field, module)

        linear("linear_q_proj", hidden, key_width)
        linear("linear_k_proj", hidden, key_width)
        linear("linear_v_proj", hidden, value_width)
        for part, width in (("q", key_width), ("k", key_width), ("v", value_width)):
            conv = ShortConvWeight(config, groups, width, config.linear_conv_kernel_dim)
            setattr(self, f"{part}_conv1d", conv)
        linear("linear_b_proj", hidden, heads)
        linear("linear_f_down_proj", hidden, rank, whole=True)
        linear("linear_f_up_proj", rank, key_width)
        self.A_log = head_parameter(config, groups, (heads,), fill_a_log)
        self.dt_bias = head_parameter(config, groups, (key_width,), fill_dt_bias)
        if config.kda_output_gate == "low_rank":
            linear("linear_g_down_proj", hidden, rank, whole=True)
            linear("linear_g_up_proj", rank, value_width)
        else:
            linear("linear_g_proj", hidden, value_width)
        self.o_norm = GatedHeadNorm(config, groups, self.v_dim)
        self.linear_proj = build_module(
            submodules.linear_proj,
            value_width,
            hidden,
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
            attention_mask: not read; the layer is causal inside each sequence.
            inference_context, inference_params: a
                :class:`~megatron_mla.inference.context.LatentInferenceContext` or Megatron-Core's
                ``StaticInferenceContext``: rows go on from the state that it keeps, without
                gradients. Unlike a cache the state goes forward only: a pass is run once.
            packed_seq_params: Megatron-Core's ``PackedSeqParams``. With ``qkv_format="thd"`` the
                state and the convolutions begin anew in every sequence.
        Returns:
            Output [l, B, hidden] and the bias of ``linear_proj`` (None without one).
        Raises:
            ValueError: an argument that the layer has no use for, or lengths that do not fit.
        """
        for name, value in (
            ("key_value_states", key_value_states),
            ("rotary_pos_emb", rotary_pos_emb),
            ("rotary_pos_cos", rotary_pos_cos),
            ("rotary_pos_sin", rotary_pos_sin),
            ("rotary_pos_cos_sin", rotary_pos_cos_sin),
            ("attention_bias", attention_bias),
            ("sequence_len_offset", sequence_len_offset),
        ):
            if value is not None:
                raise ValueError(
                    f"{name} must be None for Kimi Delta Attention, got a value; it is causal "
                    "self-attention without positions (position_embedding_type='none' in GPTModel)"
                )
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if hidden_states.dim() != 3 or (packed and hidden_states.shape[1] != 1):
            raise ValueError(
                "hidden_states must be [rows, batch, hidden], of batch 1 when packed, got shape "
                f"{tuple(hidden_states.shape)}; pack the samples into one row"
            )
        context = inference_params if inference_context is None else inference_context
        if context is not None:
            if packed:
                raise ValueError(
                    "packed_seq_params must be None with an inference context, got thd; pad the "
                    "batch and give begin() the lengths"
                )
            return self._go_on(hidden_states, latent_context(context))
        tp_chunks = self.groups.tp_size if self.sequence_parallel else 1
        rows = rows_of_microbatch(
            hidden_states.shape[0] * tp_chunks,
            cp_rank=0,
            cp_size=1,
            tp_chunks=tp_chunks,
            device=hidden_states.device,
            packed_seq_params=packed_seq_params,
        )
        mixed = short_conv(self._inputs(hidden_states), self._conv_weight(), rows)
        parts = *self._heads(mixed), *self._gates(hidden_states), self.A_log, self.dt_bias
        out = delta_rule(*parts, rows, lower_bound=self.config.kda_gate_lower_bound)
        return self._output(out, hidden_states)

    def _inputs(self, hidden_states: Tensor) -> Tensor:
        """[l, B, hidden] -> [L, B, H * (K + K + V)], what the convolutions read."""
        projections = (self.linear_q_proj, self.linear_k_proj, self.linear_v_proj)
        return torch.cat([projection(hidden_states)[0] for projection in projections], dim=-1)

    def _conv_weight(self) -> Tensor:
        """[H * (K + K + V), W]."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([conv.weight.squeeze(1) for conv in convs])

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[L, B, H * (K + K + V)] -> queries and keys [B, L, H, K], values [B, L, H, V]."""
        widths = [self.num_heads * dim for dim in (self.k_dim, self.k_dim, self.v_dim)]
        parts = mixed.transpose(0, 1).split(widths, dim=-1)
        return tuple(part.unflatten(-1, (self.num_heads, -1)) for part in parts)

    def _gates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """What the decay is made of, [B, L, H, K], and the step size [B, L, H] in (0, 1)."""
        f, _ = self.linear_f_up_proj(self.linear_f_down_proj(hidden_states)[0])
        beta, _ = self.linear_b_proj(hidden_states)
        f = f.transpose(0, 1).unflatten(-1, (self.num_heads, self.k_dim))
        return f, beta.transpose(0, 1).sigmoid()

    def _output(self, out: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, L, H, V] -> output [l, B, hidden] and bias."""
        if self.config.kda_output_gate == "low_rank":
            gate, _ = self.linear_g_up_proj(self.linear_g_down_proj(hidden_states)[0])
        else:
            gate, _ = self.linear_g_proj(hidden_states)
        gate = gate.unflatten(-1, (self.num_heads, self.v_dim))
        return self.linear_proj(self.o_norm(out.transpose(0, 1), gate).flatten(-2))

    @torch.no_grad()
    def _go_on(
        self, hidden_states: Tensor, context: LatentInferenceContext
    ) -> tuple[Tensor, Tensor | None]:
        """The layer behind what ``context`` has seen."""
        inputs = self._inputs(hidden_states)
        num_rows, batch = inputs.shape[:2]
        step = context.step(num_rows, batch, inputs.device)
        begun = torch.tensor([start > 0 for start in step.starts]).to(inputs.device)
        history, state = self._memory(context, inputs)
        # Memory of sequences that begin now may be another's.
        before = history[:, :batch].masked_fill(~begun[:, None], 0)
        mixed = short_conv_from(before, inputs, self._conv_weight())
        out, after = delta_rule_from(
            state[:batch].masked_fill(~begun[:, None, None, None], 0),
            *self._heads(mixed),
            *self._gates(hidden_states),
            self.A_log,
            self.dt_bias,
            step.positions.t() >= 0,
            lower_bound=self.config.kda_gate_lower_bound,
        )
        state[:batch] = after
        history[:, :batch] = _last_rows(before, inputs, step)
        return self._output(out, hidden_states)

    def _memory(self, context: LatentInferenceContext, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [W - 1, max_batch_size, H * (K + K + V)] and states [max_batch_size, H, K, V]."""
        batch, width = context.max_batch_size, self.config.linear_conv_kernel_dim
        number, like = self.layer_number, inputs
        history = context.memory(
            number, "kda_inputs", (width - 1, batch, inputs.shape[-1]), like, like.dtype
        )
        shape = (batch, self.num_heads, self.k_dim, self.v_dim)
        return history, context.memory(number, "kda_states", shape, like, torch.float32)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """For Megatron-Core's distributed checkpoints: heads are cut over tp."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = ("A_log", "dt_bias")
        return state | sharded_by_heads(self, own, prefix, sharded_offsets, metadata)


def _last_rows(before: Tensor, inputs: Tensor, step: Step) -> Tensor:
    """[W - 1, B, D], the last inputs of every sequence, of ``before`` where it has few new ones."""
    new = torch.tensor(step.ends) - torch.tensor(step.starts)  # [B]
    index = torch.arange(len(before))[:, None] + new  # of both, one below the other
    sequence = torch.arange(len(new), device=inputs.device)
    return torch.cat((before, inputs))[index.to(inputs.device), sequence]
