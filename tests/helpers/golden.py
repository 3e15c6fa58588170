"""Golden cases: reading them, and turning a case into our configuration and weights.

A case is a file of ``tests/golden`` (its README says what is in it) or of the folder named by
``MEGATRON_MLA_GOLDEN_DIR``. What a case is, is read from its contents, not from its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]

FOLDER = Path(
    os.environ.get("MEGATRON_MLA_GOLDEN_DIR") or Path(__file__).resolve().parents[1] / "golden"
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# transformers' names; the inverse of what an import from Hugging Face does.
_HF_NAMES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
    "indexer.wq_b": "core_attention.indexer.linear_wq_b",
    "indexer.wk": "core_attention.indexer.linear_wk",
    "indexer.k_norm": "core_attention.indexer.k_norm",
    "indexer.weights_proj": "core_attention.indexer.linear_weights_proj",
}

# transformers' names of Kimi Delta Attention; its convolution is one of all q, k and v channels.
_KDA_NAMES = {
    "q_proj.weight": "linear_q_proj.weight",
    "k_proj.weight": "linear_k_proj.weight",
    "v_proj.weight": "linear_v_proj.weight",
    "b_proj.weight": "linear_b_proj.weight",
    "forget_gate.f_a_proj.weight": "linear_f_down_proj.weight",
    "forget_gate.f_b_proj.weight": "linear_f_up_proj.weight",
    "forget_gate.A_log": "A_log",
    "forget_gate.dt_bias": "dt_bias",
    "g_a_proj.weight": "linear_g_down_proj.weight",
    "g_b_proj.weight": "linear_g_up_proj.weight",
    "o_norm.weight": "o_norm.weight",
    "o_proj.weight": "linear_proj.weight",
}


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.pt"))


def load(path: Path) -> Case:
    return torch.load(path, weights_only=True, map_location="cpu")


def kind_of(case: Case) -> str:
    """ "rope", "rope_qkv", "dense", "absorbed", "dsa", "kda" or "kimi_model"."""
    if "table" in case:
        return "rope_qkv" if "kv" in case else "rope"
    if any(".indexer." in f".{name}" for name in case["state_dict"]):
        return "dsa"
    return case.get("kind", "dense")


def is_hf(case: Case) -> bool:
    return case["meta"]["library"] == "transformers"


def layer_names(case: Case) -> list[str]:
    """Prefix of the weights of every layer: one empty prefix, or ``layers.0.`` and so on."""
    count = case["conventions"]["num_layers"]
    return [""] if count == 1 else [f"layers.{i}." for i in range(count)]


def config_fields(case: Case) -> dict[str, Any]:
    """Fields of ``MLATransformerConfig`` that make the layer of the case."""
    config, conventions = case["config"], case["conventions"]
    fields = _fields_of_hf(config) if is_hf(case) else dict(config)
    return {
        **fields,
        "num_layers": conventions["num_layers"],
        "mla_latent_norm_epsilon": conventions["qk_norm_eps"],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "mla_form": "absorbed" if kind_of(case) == "absorbed" else "expanded",
        **(_indexer_fields(config, conventions) if kind_of(case) == "dsa" else {}),
    }


def _indexer_fields(config: dict[str, Any], conventions: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_rope_interleaved": conventions["index_rope_layout"] == "pair",
        "dsa_indexer_k_norm_epsilon": conventions["index_k_norm_eps"],
        "dsa_indexer_scoring_relu": conventions["index_relu"],
        "dsa_indexer_rotate_activation": False,
    }
    if "index_topk" not in config:  # Megatron-Core's own names, which are ours
        return fields
    return {
        **fields,
        "dsa_indexer_topk": config["index_topk"],
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": config["index_head_dim"],
        "dsa_indexer_topk_freq": len(config.get("indexer_types", "x")),
        "dsa_indexer_weights_fp32": True,
    }


def _fields_of_hf(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise ValueError("attention_bias=True: the layer has no biases")
    if config.get("model_type") == "kimi_linear":
        return _fields_of_kimi(config)
    rope = dict(config["rope_parameters"])
    rope_type = {"default": "rope", "yarn": "yarn"}[rope.pop("rope_type")]
    fields = {
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "qk_layernorm": True,
        "rope_type": rope_type,
        "rotary_base": rope.pop("rope_theta"),
    }
    if rope_type == "yarn":
        fields["rotary_scaling_factor"] = rope.pop("factor")
        fields |= rope
    return fields


def _fields_of_kimi(config: dict[str, Any]) -> dict[str, Any]:
    heads, width = config["linear_num_heads"], config["linear_head_dim"]
    attention = {
        **_fields_of_hf({**config, "model_type": "", "rope_parameters": _NO_ROPE}),
        "no_rope_freq": 1,
        "mla_full_attn_layers": [],
        "linear_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
    }
    if "num_hidden_layers" not in config:
        return attention
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    return attention | {
        "mla_full_attn_layers": config["linear_attn_config"]["full_attn_layers"],
        "ffn_hidden_size": config["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "num_moe_experts": config["num_local_experts"],
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


_NO_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def kda_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of Kimi Delta Attention, or their gradients, under our names."""
    ours = {_KDA_NAMES[n]: t for n, t in weights.items() if n != "conv1d.weight"}
    ours["A_log"] = ours["A_log"].flatten()
    convs = zip("qkv", weights["conv1d.weight"].chunk(3), strict=True)
    return ours | {f"{part}_conv1d.weight": rows for part, rows in convs}


def kimi_model_weights(case: Case, source: str) -> dict[str, Tensor]:
    """Weights of a whole ``kimi_model`` case, or their gradients, under GPTModel's names."""
    theirs, ours = dict(case[source]), {}

    def take(name: str) -> Tensor:
        return theirs.pop(name)

    def mlp(theirs_at: str, ours_at: str) -> dict[str, Tensor]:
        gate_up = [take(f"{theirs_at}{part}_proj.weight") for part in ("gate", "up")]
        return {
            f"{ours_at}linear_fc1.weight": torch.cat(gate_up),
            f"{ours_at}linear_fc2.weight": take(f"{theirs_at}down_proj.weight"),
        }

    for index in range(case["conventions"]["num_layers"]):
        hf, mcore = f"model.layers.{index}.", f"decoder.layers.{index}."
        names = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
        }
        ours |= {f"{mcore}{o}.weight": take(f"{hf}{t}.weight") for o, t in names.items()}
        own = {n.split("self_attn.")[1]: n for n in theirs if n.startswith(f"{hf}self_attn.")}
        attention = {short: take(name) for short, name in own.items()}
        if "b_proj.weight" in attention:
            attention = kda_weights(attention)
        else:
            attention = layer_weights({**case, source: attention}, source, "")
        ours |= {f"{mcore}self_attention.{n}": t for n, t in attention.items()}

        if f"{hf}mlp.gate.weight" not in theirs:
            ours |= mlp(f"{hf}mlp.", f"{mcore}mlp.")
            continue
        ours |= mlp(f"{hf}mlp.shared_experts.", f"{mcore}mlp.shared_experts.")
        ours[f"{mcore}mlp.router.weight"] = take(f"{hf}mlp.gate.weight")
        if source == "state_dict":
            ours[f"{mcore}mlp.router.expert_bias"] = take(f"{hf}mlp.gate.e_score_correction_bias")
        for part, fc in (("gate_up", "linear_fc1"), ("down", "linear_fc2")):
            for number, weight in enumerate(take(f"{hf}mlp.experts.{part}_proj")):
                ours[f"{mcore}mlp.experts.local_experts.{number}.{fc}.weight"] = weight
    ours["decoder.final_layernorm.weight"] = take("model.norm.weight")
    ours["output_layer.weight"] = take("lm_head.weight")
    assert not theirs, theirs.keys()
    return ours


def layer_weights(case: Case, source: str, prefix: str) -> dict[str, Tensor]:
    """Weights (``source="state_dict"``) or their gradients (``"grad_params"``) under our names.

    Rows are put in the order of pairs, and LongCat's two scales go into the norms' weights.
    """
    if case.get("kind") == "kda":
        return kda_weights(case[source])
    scales = {"q_layernorm": "q_scale", "kv_layernorm": "kv_scale"}
    weights = {}
    for name, tensor in case[source].items():
        if not name.startswith(prefix):
            continue
        module, _, leaf = name.removeprefix(prefix).rpartition(".")
        module = _HF_NAMES[module] if is_hf(case) else module
        if case["conventions"]["rope_layout"] == "half":
            tensor = _halves_to_pairs(module, tensor, case["config"])
        scale = case["conventions"].get(scales.get(module), 1.0)
        # The library's gradient is that of the product times the scale.
        weights[f"{module}.{leaf}"] = tensor * scale if source == "state_dict" else tensor / scale
    return weights


def _halves_to_pairs(module: str, rows: Tensor, config: dict[str, Any]) -> Tensor:
    """Reorder the positional output rows from (i, i + d/2) to (2i, 2i + 1)."""
    d = config["qk_rope_head_dim"]
    order = torch.arange(d).view(2, d // 2).t().reshape(-1)
    if module in ("linear_q_proj", "linear_q_up_proj"):
        heads = rows.unflatten(0, (config["num_attention_heads"], -1))
        heads = torch.cat((heads[:, :-d], heads[:, -d:][:, order]), dim=1)
        return heads.flatten(0, 1)
    if module == "linear_kv_down_proj":
        return torch.cat((rows[:-d], rows[-d:][order]))
    return rows


def sequence_first(case: Case, key: str) -> Tensor:
    """A hidden-size tensor of the case as [s, b, h]."""
    return case[key].transpose(0, 1).contiguous() if is_hf(case) else case[key]
