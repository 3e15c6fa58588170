"""`MLATransformerConfig`: Megatron-Core's configuration of that name, without its restrictions.

Stock Megatron-Core refuses fused RoPE for plain RoPE and for DSA, and quietly ignores several
fields in its MLA layers. Here fused RoPE is allowed with every rope type (and on by default, as in
Megatron's command line), the fields that the stock class lacks are added, every field that this
package reads is validated, and every field that Megatron-Core accepts but these layers do not
support is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig as _MegatronMLATransformerConfig,
)

ROPE_TYPES = ("rope", "yarn")
ROPE_NUMERICS = ("megatron", "fp32")
DOWN_PROJ_PARALLELISMS = ("duplicated", "column")
CORE_ATTENTIONS = ("auto", "sdpa", "te")
DSA_BACKENDS = ("none", "triton")

# Values of Megatron-Core fields that these layers implement; anything else is refused, because
# ignoring it would train another model than the one asked for. field: (allowed values, way out).
_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_output_gate": ((False,), "drop the flag; MLA has no output gate"),
    "apply_query_key_layer_scaling": ((False,), "drop the flag"),
    "qk_l2_norm": ((False,), "use qk_layernorm=True, the norm of the latents"),
    "qk_clip": ((False,), "drop the flag; the core attention does not report its largest logit"),
    "log_max_attention_logit": ((False,), "drop the flag"),
    "softmax_type": (("vanilla",), "use softmax_type='vanilla'"),
    "window_size": ((None,), "drop it; MLA attends to all earlier tokens"),
    "add_qkv_bias": ((False,), "drop the flag; MLA projections have no bias"),
    "use_mup": ((False,), "set softmax_scale and the init stds directly"),
    "cache_mla_latents": ((False,), "export the checkpoint to an inference engine"),
    "mla_down_proj_fusion": (
        (False,),
        "drop the flag; a checkpoint with linear_qkv_down_proj still loads",
    ),
    "flash_decode": ((False,), "export the checkpoint to an inference engine"),
    "fused_single_qkv_rope": ((False,), "drop the flag; it is not for MLA"),
    "mrope_section": ((None,), "drop it; multimodal RoPE is not for MLA"),
    "batch_invariant_mode": ((False,), "drop the flag"),
    "hybrid_context_parallel": ((False,), "use context_parallel_size alone"),
    "hierarchical_context_parallel_sizes": ((None,), "use context_parallel_size alone"),
    "delay_wgrad_compute": ((False,), "drop the flag"),
    "overlap_moe_expert_parallel_comm": ((False,), "drop the flag"),
    "use_kitchen": ((False,), "drop the flag"),
    "use_kitchen_attention": ((False,), "drop the flag"),
    "heterogeneous_block_specs": ((False,), "use one attention form for all layers"),
    "cuda_graph_impl": (("none",), "use cuda_graph_impl='none'"),
}
# Only the modules of Transformer Engine implement these.
_NEEDS_TE = ("fp8", "fp4", "tp_comm_overlap", "layernorm_zero_centered_gamma")


def _refuse(field: str, value: object, condition: str, way_out: str) -> None:
    raise ValueError(f"{field} {condition}, got {value!r}; {way_out}")


@dataclass
class MLATransformerConfig(_MegatronMLATransformerConfig):
    """Megatron-Core's MLA configuration plus what these layers need.

    Every field of Megatron-Core's class keeps its name and meaning, except:

    * ``apply_rope_fusion`` is True by default and allowed with ``rope_type`` ``"rope"`` and
      ``"yarn"`` and with DSA. Which path runs is decided by
      :func:`megatron_mla.should_use_fused_mla_rope`.
    * ``softmax_scale`` is honoured (stock MLA ignores it).
    * ``mscale_all_dim`` enters the softmax scale only for ``rope_type="yarn"``.
    * ``rotary_percent < 1`` shrinks the rotated channels for both rope types.
    * ``cp_comm_type``: None or ``"all_gather"`` unless the core attention is Transformer Engine's.
    * ``transformer_impl`` is ``"local"`` by default: no Transformer Engine needed.
    """

    apply_rope_fusion: bool = True
    """Rotate and pack with the fused kernels where they can run; --no-rope-fusion opts out."""

    transformer_impl: str = "local"
    """"local" (torch modules) or "transformer_engine"."""

    mla_rope_numerics: str = "megatron"
    """"megatron": cos, sin and every product rounded to the activation dtype, as Megatron's unfused
    path. "fp32": computed in fp32 and rounded once, as rollout engines do. Both hold for the eager
    and the fused path alike, which agree bit for bit."""

    mla_latent_norm_epsilon: float | None = None
    """Epsilon of q_layernorm and kv_layernorm; None takes layernorm_epsilon. GLM-5 has 1e-5 in its
    blocks and 1e-6 here."""

    mla_down_proj_parallelism: str = "duplicated"
    """"duplicated": every tensor-parallel rank holds the whole q and kv down projections (no
    communication). "column": they are split over tp by output channel (less memory)."""

    mla_core_attention: str = "auto"
    """"sdpa": torch's scaled_dot_product_attention. "te": Transformer Engine's. "auto": "te" with
    transformer_impl="transformer_engine", else "sdpa"."""

    def __post_init__(self) -> None:
        self._validate_widths()
        self._validate_supported()
        self._validate_rope()
        self._validate_parallel()
        self._validate_dsa()
        fusion, backend = self.apply_rope_fusion, self.dsa_kernel_backend
        if backend not in (*DSA_BACKENDS, "tilelang", "cudnn"):
            _refuse("dsa_kernel_backend", backend, f"must be one of {DSA_BACKENDS}", "use 'none'")
        # Stock validation refuses fused RoPE for plain RoPE and DSA and knows no "triton"; those
        # limits are of its kernels, not of ours.
        self.apply_rope_fusion = False
        if backend == "triton":
            self.dsa_kernel_backend = "none"
        comm_type = self.cp_comm_type
        if self.experimental_attention_variant == "dsa" and comm_type is None:
            self.cp_comm_type = "allgather"  # the only one there is, so it need not be asked for
        try:
            super().__post_init__()
        finally:
            self.apply_rope_fusion, self.dsa_kernel_backend = fusion, backend
            self.cp_comm_type = comm_type

    @property
    def qk_width(self) -> int:
        """Width of a query or key head: qk_head_dim + qk_pos_emb_head_dim."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def rotated_width(self) -> int:
        """Positional channels that are rotated: all of them unless rotary_percent < 1."""
        return int(self.qk_pos_emb_head_dim * self.rotary_percent)

    @property
    def latent_norm_epsilon(self) -> float:
        """Epsilon of the q and kv latent norms."""
        if self.mla_latent_norm_epsilon is None:
            return self.layernorm_epsilon
        return self.mla_latent_norm_epsilon

    @property
    def latent_sequence_parallel(self) -> bool:
        """Sequence parallelism that has an effect: Megatron-Core drops it without tp."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    def layer_has_rope(self, layer_number: int) -> bool:
        """Whether decoder layer ``layer_number`` (1-based) rotates (``no_rope_freq``)."""
        if not self.no_rope_freq or layer_number > len(self.no_rope_freq):
            return True
        return not self.no_rope_freq[layer_number - 1]

    def _validate_widths(self) -> None:
        for field in ("hidden_size", "num_layers", "num_attention_heads", "kv_lora_rank"):
            self._check_positive_int(field)
        for field in ("qk_head_dim", "v_head_dim", "qk_pos_emb_head_dim"):
            self._check_positive_int(field)
        if self.q_lora_rank is not None:
            self._check_positive_int("q_lora_rank", "or None for a plain q projection")
        if self.qk_pos_emb_head_dim % 2:
            _refuse(
                "qk_pos_emb_head_dim",
                self.qk_pos_emb_head_dim,
                "must be even, because RoPE rotates channels in pairs",
                f"use {self.qk_pos_emb_head_dim + 1}",
            )
        if not self.multi_latent_attention:
            _refuse(
                "multi_latent_attention",
                False,
                "must be True for MLATransformerConfig",
                "use Megatron-Core's TransformerConfig for other attention",
            )
        groups = self.num_query_groups
        if groups is not None and groups != self.num_attention_heads:
            _refuse(
                "num_query_groups",
                groups,
                f"must be None or num_attention_heads = {self.num_attention_heads}",
                "MLA shares one latent between all heads and has no query groups",
            )

    def _check_positive_int(self, field: str, note: str = "") -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            _refuse(field, value, f"must be a positive integer {note}".rstrip(), f"set {field}")

    def _validate_supported(self) -> None:
        for field, (allowed, way_out) in _SUPPORTED.items():
            value = getattr(self, field)
            if value not in allowed:
                wanted = " or ".join(map(repr, allowed))
                _refuse(
                    field, value, f"is not supported by MLA layers other than {wanted}", way_out
                )
        if self.transformer_impl not in ("local", "transformer_engine"):
            _refuse(
                "transformer_impl",
                self.transformer_impl,
                "must be 'local' or 'transformer_engine'",
                "use 'local', which needs no further package",
            )
        if self.transformer_impl == "local":
            for field in _NEEDS_TE:
                value = getattr(self, field)
                if value:
                    _refuse(
                        field,
                        value,
                        "needs transformer_impl='transformer_engine'",
                        "install megatron-mla[te] and set it, or drop the flag",
                    )
        if self.experimental_attention_variant not in (None, "dsa"):
            _refuse(
                "experimental_attention_variant",
                self.experimental_attention_variant,
                "must be None or 'dsa'",
                "use Megatron-Core's own layer for other variants",
            )
        offloaded = set(self.offload_modules or ()) & {"qkv_linear", "core_attn", "attn_proj"}
        if self.fine_grained_activation_offloading and offloaded:
            _refuse(
                "offload_modules",
                sorted(offloaded),
                "must not name parts of the attention",
                "recompute them instead: recompute_modules=['mla_up_proj', 'core_attn']",
            )
        if self.mla_core_attention not in CORE_ATTENTIONS:
            _refuse(
                "mla_core_attention",
                self.mla_core_attention,
                f"must be one of {CORE_ATTENTIONS}",
                "use 'auto'",
            )
        if not 0.0 <= self.attention_dropout < 1.0:
            _refuse(
                "attention_dropout", self.attention_dropout, "must be in [0, 1)", "MLA models use 0"
            )
        if not self.uses_te_core_attention and self.attention_backend is AttnBackend.flash:
            _refuse(
                "attention_backend",
                "flash",
                "is Transformer Engine's; torch's FlashAttention refuses unequal K and V widths",
                "use 'auto', 'fused' (cuDNN) or 'unfused'",
            )

    @property
    def uses_te_core_attention(self) -> bool:
        """Whether the core attention is Transformer Engine's (``mla_core_attention``)."""
        if self.mla_core_attention == "auto":
            return self.transformer_impl == "transformer_engine"
        return self.mla_core_attention == "te"

    def _validate_rope(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            _refuse("rope_type", self.rope_type, f"must be one of {ROPE_TYPES}", "use 'rope'")
        if self.mla_rope_numerics not in ROPE_NUMERICS:
            _refuse(
                "mla_rope_numerics",
                self.mla_rope_numerics,
                f"must be one of {ROPE_NUMERICS}",
                "use 'megatron'",
            )
        if not 0.0 < self.rotary_percent <= 1.0:
            _refuse(
                "rotary_percent",
                self.rotary_percent,
                "must be in (0, 1]",
                "it is the rotated share of qk_pos_emb_head_dim, not of the whole head",
            )
        if self.rotated_width < 2 or self.rotated_width % 2:
            _refuse(
                "rotary_percent",
                self.rotary_percent,
                f"leaves {self.rotated_width} of qk_pos_emb_head_dim = {self.qk_pos_emb_head_dim} "
                "channels to rotate, which must be an even number of at least 2",
                "use 1.0",
            )
        if not (math.isfinite(self.rotary_base) and self.rotary_base > 1):
            _refuse("rotary_base", self.rotary_base, "must be finite and above 1", "use 10000")
        scale = self.softmax_scale
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            _refuse(
                "softmax_scale",
                scale,
                "must be finite and positive",
                "None computes it from widths",
            )
        for field in ("layernorm_epsilon", "mla_latent_norm_epsilon"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                _refuse(field, value, "must be finite and positive", "use 1e-6")
        if self.rope_type == "yarn":
            if self.rotary_scaling_factor < 1:
                _refuse(
                    "rotary_scaling_factor",
                    self.rotary_scaling_factor,
                    "must be at least 1 for YaRN",
                    "use rope_type='rope' for a model without context extension",
                )
            if self.original_max_position_embeddings < 1:
                _refuse(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                    "must be positive",
                    "it is the context length before extension, e.g. 4096",
                )
            if not self.beta_fast >= self.beta_slow > 0:
                _refuse(
                    "beta_fast, beta_slow",
                    (self.beta_fast, self.beta_slow),
                    "must satisfy beta_fast >= beta_slow > 0",
                    "use 32 and 1",
                )

    def _validate_parallel(self) -> None:
        tp = self.tensor_model_parallel_size
        if self.num_attention_heads % tp:
            _refuse(
                "num_attention_heads",
                self.num_attention_heads,
                f"must be a multiple of tensor_model_parallel_size = {tp}",
                "lower tensor_model_parallel_size",
            )
        if self.mla_down_proj_parallelism not in DOWN_PROJ_PARALLELISMS:
            _refuse(
                "mla_down_proj_parallelism",
                self.mla_down_proj_parallelism,
                f"must be one of {DOWN_PROJ_PARALLELISMS}",
                "use 'duplicated'",
            )
        if self.mla_down_proj_parallelism == "column":
            kv_width = self.kv_lora_rank + self.qk_pos_emb_head_dim
            widths = {"kv_lora_rank + qk_pos_emb_head_dim": kv_width}
            if self.q_lora_rank is not None:
                widths["q_lora_rank"] = self.q_lora_rank
            for field, value in widths.items():
                if value % tp:
                    _refuse(
                        field,
                        value,
                        f"must be a multiple of tensor_model_parallel_size = {tp} with column-"
                        "parallel down projections",
                        "use mla_down_proj_parallelism='duplicated'",
                    )
        if self.context_parallel_size > 1 and not self.uses_te_core_attention:
            kinds = self.cp_comm_type
            for kind in kinds if isinstance(kinds, list) else [kinds]:
                if kind is not None and kind.replace("_", "").lower() != "allgather":
                    _refuse(
                        "cp_comm_type",
                        self.cp_comm_type,
                        "must be 'all_gather': the latents are gathered, not expanded keys",
                        "pass --cp-comm-type all_gather or use mla_core_attention='te'",
                    )

    def _validate_dsa(self) -> None:
        if self.experimental_attention_variant != "dsa":
            return
        for field in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
            self._check_positive_int(field, "for experimental_attention_variant='dsa'")
        if self.q_lora_rank is None:
            _refuse("q_lora_rank", None, "must be set for DSA", "its indexer reads the q latent")
        if self.dsa_indexer_head_dim < self.qk_pos_emb_head_dim:
            _refuse(
                "dsa_indexer_head_dim",
                self.dsa_indexer_head_dim,
                f"must be at least qk_pos_emb_head_dim = {self.qk_pos_emb_head_dim}",
                "the indexer rotates that many leading channels",
            )
        if self.dsa_indexer_rotate_activation and (
            self.dsa_indexer_head_dim & (self.dsa_indexer_head_dim - 1)
        ):
            _refuse(
                "dsa_indexer_head_dim",
                self.dsa_indexer_head_dim,
                "must be a power of two for the Hadamard rotation",
                "set dsa_indexer_rotate_activation=False",
            )
        coeff = self.dsa_indexer_loss_coeff
        if coeff is not None and not (math.isfinite(coeff) and coeff >= 0):
            _refuse("dsa_indexer_loss_coeff", coeff, "must be finite and >= 0", "use None or 0")
