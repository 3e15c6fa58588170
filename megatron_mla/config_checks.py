"""What the configuration refuses, and why: tables of fields, and the checks of sparse attention."""

from __future__ import annotations

import math
from typing import Any

DSA_BACKENDS = ("none", "triton")
DSA_STAGES = ("joint", "warmup", "frozen")
KDA_OUTPUT_GATES = ("low_rank", "full")

# Values of Megatron-Core fields that these layers implement; anything else is refused, because
# ignoring it would train another model than the one asked for. field: (allowed values, way out).
SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_output_gate": ((False,), "drop the flag; MLA has no output gate"),
    "apply_query_key_layer_scaling": ((False,), "drop the flag"),
    "qk_l2_norm": ((False,), "use qk_layernorm=True, the norm of the latents"),
    "qk_clip": ((False,), "drop the flag; the core attention does not report its largest logit"),
    "log_max_attention_logit": ((False,), "drop the flag"),
    "softmax_type": (("vanilla",), "use softmax_type='vanilla'"),
    "window_size": ((None,), "drop it; MLA attends to all earlier tokens"),
    "add_qkv_bias": ((False,), "drop the flag; MLA projections have no bias"),
    "use_mup": ((False,), "set softmax_scale and the init stds directly"),
    "cache_mla_latents": ((False,), "drop the flag; a LatentInferenceContext caches latents"),
    "mla_down_proj_fusion": (
        (False,),
        "drop the flag; a checkpoint with linear_qkv_down_proj still loads",
    ),
    "flash_decode": ((False,), "drop the flag; decode with a LatentInferenceContext"),
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
NEEDS_TE = ("fp8", "fp4", "tp_comm_overlap", "layernorm_zero_centered_gamma")


def refuse(field: str, value: object, condition: str, way_out: str) -> None:
    raise ValueError(f"{field} {condition}, got {value!r}; {way_out}")


def check_positive_int(config, field: str, note: str = "") -> None:
    """Refuse a field that is no positive integer."""
    value = getattr(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        refuse(field, value, f"must be a positive integer {note}".rstrip(), f"set {field}")


def check_dsa(config) -> None:
    """Refuse what DeepSeek sparse attention cannot be made of."""
    backend = config.dsa_kernel_backend
    if backend in ("tilelang", "cudnn"):
        refuse(
            "dsa_kernel_backend",
            backend,
            f"must be one of {DSA_BACKENDS}",
            "those operators of Megatron-Core's own layer take fixed widths and head counts; use "
            "'none'",
        )
    if backend is not None and backend not in DSA_BACKENDS:
        refuse("dsa_kernel_backend", backend, f"must be one of {DSA_BACKENDS}", "use 'none'")
    if config.dsa_indexer_stage not in DSA_STAGES:
        refuse(
            "dsa_indexer_stage",
            config.dsa_indexer_stage,
            f"must be one of {DSA_STAGES}",
            "use 'joint'",
        )
    if config.experimental_attention_variant != "dsa":
        return
    for field in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        check_positive_int(config, field, "for experimental_attention_variant='dsa'")
    check_positive_int(config, "dsa_indexer_topk_freq")
    offset = config.dsa_indexer_skip_topk_offset
    if not isinstance(offset, int) or offset < 0:
        refuse("dsa_indexer_skip_topk_offset", offset, "must be an integer >= 0", "use 0")
    if config.q_lora_rank is None:
        refuse("q_lora_rank", None, "must be set for DSA", "its indexer reads the q latent")
    width = config.dsa_indexer_head_dim
    if width < config.qk_pos_emb_head_dim:
        refuse(
            "dsa_indexer_head_dim",
            width,
            f"must be at least qk_pos_emb_head_dim = {config.qk_pos_emb_head_dim}",
            "the indexer rotates that many leading channels",
        )
    if config.dsa_indexer_rotate_activation and width & (width - 1):
        refuse(
            "dsa_indexer_head_dim",
            width,
            "must be a power of two for the Hadamard rotation",
            "set dsa_indexer_rotate_activation=False",
        )
    if config.attention_dropout:
        refuse(
            "attention_dropout",
            config.attention_dropout,
            "must be 0 for DSA",
            "sparse attention drops keys by choosing them",
        )
    if config.dsa_indexer_stage == "warmup" and not config.dsa_indexer_loss_coeff:
        refuse(
            "dsa_indexer_loss_coeff",
            config.dsa_indexer_loss_coeff,
            "must be positive with dsa_indexer_stage='warmup', where nothing else trains",
            "use 1.0",
        )
    for field in ("dsa_indexer_loss_coeff", "dsa_indexer_k_norm_epsilon"):
        value = getattr(config, field)
        if value is not None and not (math.isfinite(value) and value >= 0):
            refuse(field, value, "must be finite and >= 0", "use None")


def check_kda(config) -> None:
    """Refuse what layers of Kimi Delta Attention cannot be made of, where there are any."""
    layers = config.mla_full_attn_layers
    if layers is None:
        return
    numbers = isinstance(layers, list | tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= config.num_layers
        for n in layers
    )
    if not numbers or list(layers) != sorted(set(layers)):
        refuse(
            "mla_full_attn_layers",
            layers,
            f"must be a rising list of layers from 1 to num_layers = {config.num_layers}",
            "layers count from 1, as full_attn_layers in checkpoints; None is MLA everywhere",
        )
    if len(layers) == config.num_layers:
        return
    for field in ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"):
        check_positive_int(config, field, "for Kimi Delta Attention")
    heads, tp = config.linear_num_key_heads, config.tensor_model_parallel_size
    check_positive_int(config, "linear_num_key_heads", "for Kimi Delta Attention")
    if config.linear_num_value_heads != heads:
        refuse(
            "linear_num_value_heads",
            config.linear_num_value_heads,
            f"must equal linear_num_key_heads = {heads} in Kimi Delta Attention",
            "set both to its heads (num_heads of linear_attn_config)",
        )
    if heads % tp:
        refuse(
            "linear_num_key_heads",
            heads,
            f"must be a multiple of tensor_model_parallel_size = {tp}",
            "lower tensor_model_parallel_size",
        )
    if config.kda_gate_rank is not None:
        check_positive_int(config, "kda_gate_rank", "or None for linear_value_head_dim")
    bound = config.kda_gate_lower_bound
    if bound is not None and not (math.isfinite(bound) and bound < 0):
        refuse(
            "kda_gate_lower_bound",
            bound,
            "must be finite and negative",
            "it bounds the logarithm of a decay: use -5, or None for no bound",
        )
    if config.kda_output_gate not in KDA_OUTPUT_GATES:
        refuse(
            "kda_output_gate",
            config.kda_output_gate,
            f"must be one of {KDA_OUTPUT_GATES}",
            "use 'low_rank'",
        )
    if config.context_parallel_size > 1:
        refuse(
            "context_parallel_size",
            config.context_parallel_size,
            "must be 1 with layers of Kimi Delta Attention, whose state runs through a sequence",
            "use tensor parallelism, over heads, or mla_full_attn_layers=None",
        )
    if config.fp8 or config.fp4:
        refuse(
            "fp8 or fp4",
            config.fp8 or config.fp4,
            "must be off with layers of Kimi Delta Attention, whose narrow projections (one "
            "channel a head) they do not take",
            "train in bf16",
        )
    if config.experimental_attention_variant == "dsa" and config.dsa_indexer_topk_freq > 1:
        refuse(
            "dsa_indexer_topk_freq",
            config.dsa_indexer_topk_freq,
            "must be 1 with layers of Kimi Delta Attention, which choose no keys to share",
            "use 1",
        )
