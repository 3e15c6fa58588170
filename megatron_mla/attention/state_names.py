"""Weights stored under other names or in other pieces, read as this package's parameters.

Megatron-Core and its relatives store MLA weights in several ways; the numbers are the same. The
hook below rewrites a (local) state dict before it is loaded, so that strict loading works:

* norms fused into the next projection: ``linear_q_up_proj.layer_norm_weight`` -> ``q_layernorm``;
* split key and value up-projections: ``linear_k_up_proj`` + ``linear_v_up_proj``;
* one fused down-projection: ``linear_qkv_down_proj``;
* ``_extra_state`` entries, which are empty for modules without FP8, may be there or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FUSED_NORMS = {
    "linear_q_up_proj": "q_layernorm",
    "linear_kv_up_proj": "kv_layernorm",
}


def _move_fused_norms(state: dict, prefix: str) -> None:
    for projection, norm in _FUSED_NORMS.items():
        for kind in ("weight", "bias"):
            source = f"{prefix}{projection}.layer_norm_{kind}"
            if source in state:
                state.setdefault(f"{prefix}{norm}.{kind}", state.pop(source))


def _join_split_up_projection(state: dict, prefix: str, k_dim: int, v_dim: int) -> None:
    keys = [f"{prefix}linear_{part}_up_proj.weight" for part in "kv"]
    if not all(key in state for key in keys):
        return
    k, v = (state.pop(key) for key in keys)
    for part in "kv":
        state.pop(f"{prefix}linear_{part}_up_proj._extra_state", None)
    # Rows are heads; the combined weight has each head's K rows, then its V rows.
    k, v = k.view(-1, k_dim, k.shape[-1]), v.view(-1, v_dim, v.shape[-1])
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{keys[0]} must hold as many heads as {keys[1]}, got {k.shape[0]} and {v.shape[0]} "
            f"with qk_head_dim = {k_dim} and v_head_dim = {v_dim}; check the widths in the config"
        )
    state[f"{prefix}linear_kv_up_proj.weight"] = torch.cat((k, v), dim=1).flatten(0, 1)


def _split_fused_down_projection(state: dict, prefix: str, q_rows: int, kv_rows: int) -> None:
    source = f"{prefix}linear_qkv_down_proj.weight"
    if source not in state:
        return
    weight: Tensor = state.pop(source)
    state.pop(f"{prefix}linear_qkv_down_proj._extra_state", None)
    if weight.shape[0] != q_rows + kv_rows:
        raise ValueError(
            f"{source} must have q_lora_rank + kv_lora_rank + qk_pos_emb_head_dim = "
            f"{q_rows} + {kv_rows} rows on this rank, got {weight.shape[0]}; check the ranks in "
            "the config and mla_down_proj_parallelism"
        )
    q, kv = weight.split([q_rows, kv_rows])
    state[f"{prefix}linear_q_down_proj.weight"] = q
    state[f"{prefix}linear_kv_down_proj.weight"] = kv


def _settle_extra_states(module: torch.nn.Module, state: dict, prefix: str) -> None:
    own = {
        f"{prefix}{name}._extra_state"
        for name, child in module.named_modules()
        if name and type(child).get_extra_state is not torch.nn.Module.get_extra_state
    }
    for key in [k for k in state if k.startswith(prefix) and k.endswith("_extra_state")]:
        if key not in own:
            del state[key]
    for key in own:
        state.setdefault(key, None)


def register_extra_state_reader(module: torch.nn.Module) -> None:
    """Let ``module`` load state dicts with and without the empty ``_extra_state`` entries."""

    def hook(module, state, prefix, *_):
        _settle_extra_states(module, state, prefix)

    module.register_load_state_dict_pre_hook(hook)


def register_reader(module: torch.nn.Module, config) -> None:
    """Let ``module`` (an MLA layer) load the layouts listed at the head of this file."""

    def rows(name: str) -> int:
        return getattr(module, name).weight.shape[0]

    def hook(module, state, prefix, *_):
        if config.q_lora_rank is not None:
            _split_fused_down_projection(
                state, prefix, rows("linear_q_down_proj"), rows("linear_kv_down_proj")
            )
        _join_split_up_projection(state, prefix, config.qk_head_dim, config.v_head_dim)
        _move_fused_norms(state, prefix)
        _settle_extra_states(module, state, prefix)

    module.register_load_state_dict_pre_hook(hook)
