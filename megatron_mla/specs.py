"""Layer specs: what to build, for Megatron-Core's ``GPTModel`` and ``TransformerLayer``.

``mla_block_spec(config)`` is what most people want::

    GPTModel(config, transformer_layer_spec=mla_block_spec(config),
             position_embedding_type="none", ...)

Everything that is not attention or norm (MLPs, experts, residuals, pipeline split) comes from
Megatron-Core's own specs.
"""

from __future__ import annotations

import copy

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_mla.attention.absorbed import AbsorbedMLASelfAttention
from megatron_mla.attention.core import SDPACoreAttention
from megatron_mla.attention.dsa import (
    DSACoreAttention,
    DSACoreAttentionSubmodules,
    DSASelfAttention,
)
from megatron_mla.attention.index_sharing import source_layer
from megatron_mla.attention.indexer import DSAIndexer, DSAIndexerSubmodules
from megatron_mla.attention.kda import KimiDeltaAttention, KimiDeltaAttentionSubmodules
from megatron_mla.attention.latent import MLASelfAttentionSubmodules
from megatron_mla.attention.mla import MLASelfAttention
from megatron_mla.attention.projections import DuplicatedLinear, LocalNorm
from megatron_mla.config import MLATransformerConfig
from megatron_mla.selection import te_missing_reason


def _require_te(field: str, value: str) -> None:
    reason = te_missing_reason()
    if reason is not None:
        raise ImportError(
            f"{field}={value!r} needs Transformer Engine, but {reason}; install megatron-mla[te] "
            f"or set {field} to run without it"
        )


def _parts(config: MLATransformerConfig) -> tuple[type, type, type, type]:
    """Linear layers cut by output, cut by input, and whole on every tp rank; norm."""
    if config.transformer_impl != "transformer_engine":
        return ColumnParallelLinear, RowParallelLinear, DuplicatedLinear, LocalNorm
    _require_te("transformer_impl", "transformer_engine")
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELinear,
        TENorm,
        TERowParallelLinear,
    )

    return TEColumnParallelLinear, TERowParallelLinear, TELinear, TENorm


def kda_attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """Spec of Kimi Delta Attention, which stands where a layer's self-attention does.

    Raises:
        ImportError: Transformer Engine is asked for and missing, with the reason.
    """
    column, row, whole, _ = _parts(config)
    return ModuleSpec(
        module=KimiDeltaAttention,
        params={"attn_mask_type": AttnMaskType.causal},  # MTP layers ask for it
        submodules=KimiDeltaAttentionSubmodules(column=column, whole=whole, linear_proj=row),
    )


def mla_attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """Spec of the self-attention of ``config``.

    Raises:
        ImportError: Transformer Engine is asked for and missing, with the reason.
    """
    duplicated = config.mla_down_proj_parallelism == "duplicated"
    column, row, whole, norm = _parts(config)
    down = whole if duplicated else column
    attention, core = MLASelfAttention, SDPACoreAttention
    if config.is_absorbed:
        attention = AbsorbedMLASelfAttention
    if config.experimental_attention_variant == "dsa":
        attention = DSASelfAttention
        indexer = DSAIndexerSubmodules(
            linear_wq_b=whole, linear_wk=whole, k_norm=norm, linear_weights_proj=whole
        )
        core = ModuleSpec(
            module=DSACoreAttention,
            submodules=DSACoreAttentionSubmodules(
                indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)
            ),
        )
    if config.uses_te_core_attention:
        _require_te("mla_core_attention", "te")
        from megatron.core.extensions.transformer_engine import TEDotProductAttention as core
    return ModuleSpec(
        module=attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=down,
            linear_q_up_proj=column,
            linear_kv_down_proj=down,
            linear_kv_up_proj=column,
            q_layernorm=norm,
            kv_layernorm=norm,
            core_attention=core,
            linear_proj=row,
        ),
    )


def mla_block_spec(
    config: MLATransformerConfig, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Spec of the decoder of this pipeline stage: MLA, and dense MLPs or experts as configured.

    With ``mla_full_attn_layers`` all layers but those have Kimi Delta Attention.

    Args:
        vp_stage, pp_rank: virtual and pipeline stage; None reads Megatron-Core's global state.
    """
    use_te = config.transformer_impl == "transformer_engine"
    if use_te:
        _require_te("transformer_impl", "transformer_engine")
    attention = mla_attention_spec(config)
    # Megatron-Core's function for GPT blocks asserts that there is no variant; it is ours to add.
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    block = get_gpt_decoder_block_spec(
        plain,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    if config.experimental_attention_variant == "dsa":
        _check_index_sharing(config, _layer_numbers(config, block, vp_stage, pp_rank))
    if config.mla_full_attn_layers is not None:
        # Layers of one kind are one object, of which some are to have other attention.
        block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    delta = kda_attention_spec(config)
    numbers = _layer_numbers(config, block, vp_stage, pp_rank)
    for number, layer in zip(numbers, block.layer_specs, strict=True):
        layer.submodules.self_attention = attention if config.layer_has_mla(number) else delta
        if not use_te:
            layer.submodules.input_layernorm = LocalNorm
            layer.submodules.pre_mlp_layernorm = LocalNorm
    if not use_te:
        block.layer_norm = LocalNorm
    return block


def _layer_numbers(
    config: MLATransformerConfig,
    block: TransformerBlockSubmodules,
    vp_stage: int | None,
    pp_rank: int | None,
) -> range:
    """Numbers, from 1, of the layers of a pipeline stage among those of the decoder."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        offset = layout.get_layer_offset(vp_stage=vp_stage, pp_rank=pp_rank)
    else:
        offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return range(offset + 1, offset + 1 + len(block.layer_specs))


def mla_mtp_block_spec(
    config: MLATransformerConfig,
    block: TransformerBlockSubmodules,
    *,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Spec of the multi-token-prediction layers of this stage, for GPTModel's ``mtp_block_spec``.

    Args:
        block: :func:`mla_block_spec` of the same stage; MTP layers are like its last layer.
    Returns:
        None on a stage without MTP layers.
    Raises:
        ValueError: an MTP layer would share indices with a layer of the decoder.
    """
    use_te = config.transformer_impl == "transformer_engine"
    mtp = get_gpt_mtp_block_spec(config, block, use_te, vp_stage=vp_stage, pp_rank=pp_rank)
    if mtp is None:
        return None
    first = config.num_layers + 1
    if config.experimental_attention_variant == "dsa":
        for number in range(first, first + len(mtp.layer_specs)):
            _check_index_sharing(config, range(number, number + 1))
    layers = []
    for shared in mtp.layer_specs:
        layer = copy.deepcopy(shared)
        parts = layer.submodules
        parts.mtp_model_layer.submodules.self_attention.params["layer_offset"] = config.num_layers
        if not use_te:
            parts.enorm = parts.hnorm = parts.layer_norm = LocalNorm
        layers.append(layer)
    mtp.layer_specs = layers
    return mtp


def _check_index_sharing(config: MLATransformerConfig, layers: range) -> None:
    """Refuse a pipeline stage whose layers would share indices of another stage's layer."""
    offset, freq = config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq
    for number in layers:
        source = source_layer(number, offset, freq)
        if source not in layers:
            raise ValueError(
                "dsa_indexer_topk_freq and dsa_indexer_skip_topk_offset must let every pipeline "
                f"stage begin with a layer that chooses, got {freq} and {offset}, with which layer "
                f"{number} of the stage of layers {layers.start} to {layers.stop - 1} shares the "
                f"indices of layer {source}; begin the stage with layer {source}, or a multiple of "
                f"{freq} layers behind it"
            )


def mla_layer_spec(config: MLATransformerConfig) -> ModuleSpec:
    """Spec of one dense layer without Transformer Engine, for models built layer by layer."""
    layer = get_gpt_layer_local_spec(
        multi_latent_attention=True,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.self_attention = mla_attention_spec(config)
    layer.submodules.input_layernorm = LocalNorm
    layer.submodules.pre_mlp_layernorm = LocalNorm
    return layer
