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

from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig as _MegatronMLATransformerConfig,
)

from megatron_mla.config_checks import (
    NEEDS_TE,
    SUPPORTED,
    check_dsa,
    check_kda,
    check_positive_int,
    refuse,
)

ROPE_TYPES = ("rope", "yarn")
ROPE_NUMERICS = ("megatron", "fp32")
DOWN_PROJ_PARALLELISMS = ("duplicated", "column")
CORE_ATTENTIONS = ("auto", "sdpa", "te")
MLA_FORMS = ("expanded", "absorbed")


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
    * ``qk_pos_emb_head_dim`` may be 0: no layer rotates, and keys are the latent alone.
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

    mla_form: str = "expanded"
    """"expanded": keys and values of every head are made from the latent; the fast form for
    training. "absorbed": queries meet the latent itself, as in DSA, which is always absorbed. Same
    parameters, same results up to rounding."""

    dsa_indexer_weights_fp32: bool = False
    """Project the indexer's head weights in fp32 and keep them so; the parameter stays as it is."""

    dsa_kernel_backend: str | None = None
    """"triton": operators of sparse attention on tensor cores, or the eager ones where these cannot
    run, with the reason. "none": eager operators. None: "triton" on CUDA, "none" elsewhere."""

    dsa_indexer_stage: str = "joint"
    """"joint": model and indexer train together. "warmup": attention is dense and nothing but the
    indexer trains, on the dense loss. "frozen": nothing of the indexer trains."""

    mla_full_attn_layers: list[int] | None = None
    """Layers with MLA, counted from 1; all others are Kimi Delta Attention, whose widths are
    Megatron-Core's linear_* fields. None: MLA everywhere. Checkpoints: full_attn_layers."""

    kda_gate_lower_bound: float | None = None
    """Smallest log-decay of a step, by a sigmoid (Kimi K3, GLM-5.3: -5); None: by a softplus,
    without bound (Kimi Linear)."""

    kda_gate_rank: int | None = None
    """Rank of the decay's projection, and of a low-rank output gate's; None: width of a value
    head."""

    kda_output_gate: str = "low_rank"
    """"low_rank": two projections of kda_gate_rank. "full": one (Kimi K3)."""

    mla_core_attention: str = "auto"
    """"sdpa": torch's scaled_dot_product_attention. "te": Transformer Engine's. "auto": "te" with
    transformer_impl="transformer_engine", else "sdpa"."""

    def __post_init__(self) -> None:
        self._validate_widths()
        self._validate_supported()
        self._validate_rope()
        self._validate_parallel()
        check_dsa(self)
        check_kda(self)
        fusion, backend = self.apply_rope_fusion, self.dsa_kernel_backend
        # Stock validation refuses fused RoPE for plain RoPE and DSA and knows no "triton"; those
        # limits are of its kernels, not of ours.
        self.apply_rope_fusion = False
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

    def layer_has_mla(self, layer_number: int) -> bool:
        """Whether decoder layer ``layer_number`` (1-based) is MLA, not Kimi Delta Attention."""
        return self.mla_full_attn_layers is None or layer_number in self.mla_full_attn_layers

    def layer_has_rope(self, layer_number: int) -> bool:
        """Whether decoder layer ``layer_number`` (1-based) rotates (``no_rope_freq``)."""
        if not self.qk_pos_emb_head_dim:
            return False
        if not self.no_rope_freq:
            return True
        if layer_number > len(self.no_rope_freq):  # multi-token prediction, behind the decoder
            return not all(self.no_rope_freq)
        return not self.no_rope_freq[layer_number - 1]

    def _validate_widths(self) -> None:
        for field in ("hidden_size", "num_layers", "num_attention_heads", "kv_lora_rank"):
            check_positive_int(self, field)
        for field in ("qk_head_dim", "v_head_dim"):
            check_positive_int(self, field)
        if self.qk_pos_emb_head_dim != 0:
            check_positive_int(self, "qk_pos_emb_head_dim", "or 0 for a model without rotation")
        if self.q_lora_rank is not None:
            check_positive_int(self, "q_lora_rank", "or None for a plain q projection")
        if self.qk_pos_emb_head_dim % 2:
            refuse(
                "qk_pos_emb_head_dim",
                self.qk_pos_emb_head_dim,
                "must be even, because RoPE rotates channels in pairs",
                f"use {self.qk_pos_emb_head_dim + 1}",
            )
        if not self.multi_latent_attention:
            refuse(
                "multi_latent_attention",
                False,
                "must be True for MLATransformerConfig",
                "use Megatron-Core's TransformerConfig for other attention",
            )
        groups = self.num_query_groups
        if groups is not None and groups != self.num_attention_heads:
            refuse(
                "num_query_groups",
                groups,
                f"must be None or num_attention_heads = {self.num_attention_heads}",
                "MLA shares one latent between all heads and has no query groups",
            )

    def _validate_supported(self) -> None:
        for field, (allowed, way_out) in SUPPORTED.items():
            value = getattr(self, field)
            if value not in allowed:
                wanted = " or ".join(map(repr, allowed))
                refuse(field, value, f"is not supported by MLA layers other than {wanted}", way_out)
        if self.transformer_impl not in ("local", "transformer_engine"):
            refuse(
                "transformer_impl",
                self.transformer_impl,
                "must be 'local' or 'transformer_engine'",
                "use 'local', which needs no further package",
            )
        if self.transformer_impl == "local":
            for field in NEEDS_TE:
                value = getattr(self, field)
                if value:
                    refuse(
                        field,
                        value,
                        "needs transformer_impl='transformer_engine'",
                        "install megatron-mla[te] and set it, or drop the flag",
                    )
        if self.experimental_attention_variant not in (None, "dsa"):
            refuse(
                "experimental_attention_variant",
                self.experimental_attention_variant,
                "must be None or 'dsa'",
                "use Megatron-Core's own layer for other variants",
            )
        offloaded = set(self.offload_modules or ()) & {"qkv_linear", "core_attn", "attn_proj"}
        if self.fine_grained_activation_offloading and offloaded:
            refuse(
                "offload_modules",
                sorted(offloaded),
                "must not name parts of the attention",
                "recompute them instead: recompute_modules=['mla_up_proj', 'core_attn']",
            )
        if self.mla_core_attention not in CORE_ATTENTIONS:
            refuse(
                "mla_core_attention",
                self.mla_core_attention,
                f"must be one of {CORE_ATTENTIONS}",
                "use 'auto'",
            )
        if self.mla_form not in MLA_FORMS:
            refuse("mla_form", self.mla_form, f"must be one of {MLA_FORMS}", "use 'expanded'")
        if self.is_absorbed and self.mla_core_attention == "te":
            refuse(
                "mla_core_attention",
                "te",
                "must be 'auto' or 'sdpa' for absorbed attention",
                "Transformer Engine's core takes heads of 256 channels at most",
            )
        if not 0.0 <= self.attention_dropout < 1.0:
            refuse(
                "attention_dropout", self.attention_dropout, "must be in [0, 1)", "MLA models use 0"
            )
        if not self.uses_te_core_attention and self.attention_backend is AttnBackend.flash:
            refuse(
                "attention_backend",
                "flash",
                "is Transformer Engine's; torch's FlashAttention refuses unequal K and V widths",
                "use 'auto', 'fused' (cuDNN) or 'unfused'",
            )

    @property
    def is_absorbed(self) -> bool:
        """Whether attention runs over the latent itself."""
        return self.mla_form == "absorbed" or self.experimental_attention_variant == "dsa"

    @property
    def uses_te_core_attention(self) -> bool:
        """Whether the core attention is Transformer Engine's (``mla_core_attention``)."""
        if self.is_absorbed:
            return False
        if self.mla_core_attention == "auto":
            return self.transformer_impl == "transformer_engine"
        return self.mla_core_attention == "te"

    def _validate_rope(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            refuse("rope_type", self.rope_type, f"must be one of {ROPE_TYPES}", "use 'rope'")
        if self.mla_rope_numerics not in ROPE_NUMERICS:
            refuse(
                "mla_rope_numerics",
                self.mla_rope_numerics,
                f"must be one of {ROPE_NUMERICS}",
                "use 'megatron'",
            )
        if not 0.0 < self.rotary_percent <= 1.0:
            refuse(
                "rotary_percent",
                self.rotary_percent,
                "must be in (0, 1]",
                "it is the rotated share of qk_pos_emb_head_dim, not of the whole head",
            )
        if self.qk_pos_emb_head_dim and (self.rotated_width < 2 or self.rotated_width % 2):
            refuse(
                "rotary_percent",
                self.rotary_percent,
                f"leaves {self.rotated_width} of qk_pos_emb_head_dim = {self.qk_pos_emb_head_dim} "
                "channels to rotate, which must be an even number of at least 2",
                "use 1.0",
            )
        if not (math.isfinite(self.rotary_base) and self.rotary_base > 1):
            refuse("rotary_base", self.rotary_base, "must be finite and above 1", "use 10000")
        scale = self.softmax_scale
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            refuse(
                "softmax_scale",
                scale,
                "must be finite and positive",
                "None computes it from widths",
            )
        for field in ("layernorm_epsilon", "mla_latent_norm_epsilon"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                refuse(field, value, "must be finite and positive", "use 1e-6")
        if self.rope_type == "yarn":
            if self.rotary_scaling_factor < 1:
                refuse(
                    "rotary_scaling_factor",
                    self.rotary_scaling_factor,
                    "must be at least 1 for YaRN",
                    "use rope_type='rope' for a model without context extension",
                )
            if self.original_max_position_embeddings < 1:
                refuse(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                    "must be positive",
                    "it is the context length before extension, e.g. 4096",
                )
            if not self.beta_fast >= self.beta_slow > 0:
                refuse(
                    "beta_fast, beta_slow",
                    (self.beta_fast, self.beta_slow),
                    "must satisfy beta_fast >= beta_slow > 0",
                    "use 32 and 1",
                )

    def _validate_parallel(self) -> None:
        tp = self.tensor_model_parallel_size
        if self.num_attention_heads % tp:
            refuse(
                "num_attention_heads",
                self.num_attention_heads,
                f"must be a multiple of tensor_model_parallel_size = {tp}",
                "lower tensor_model_parallel_size",
            )
        if self.mla_down_proj_parallelism not in DOWN_PROJ_PARALLELISMS:
            refuse(
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
                    refuse(
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
                    refuse(
                        "cp_comm_type",
                        self.cp_comm_type,
                        "must be 'all_gather': the latents are gathered, not expanded keys",
                        "pass --cp-comm-type all_gather or use mla_core_attention='te'",
                    )
