"""Transformer Engine's modules and core attention give what torch's give, on a GPU that has it."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.selection import te_missing_reason
from tests.helpers.close import rel_error
from tests.helpers.layers import gradients, packed, small_layer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_rank")]

WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}


@pytest.mark.parametrize("down", ["duplicated", "column"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize(
    ("impl", "core"),
    [("transformer_engine", "auto"), ("transformer_engine", "sdpa"), ("local", "te")],
)
def test_te_layer_equals_torch_layer(impl, core, is_packed, down) -> None:
    reason = te_missing_reason()
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(512, 1, 256, generator=generator).bfloat16().cuda() for _ in range(2))
    common = {**WIDE, "mla_down_proj_parallelism": down}
    torch_layer = small_layer(**common)
    te_layer = small_layer(**common, transformer_impl=impl, mla_core_attention=core)
    te_layer.load_state_dict(torch_layer.state_dict())
    truth = small_layer(**{**common, "params_dtype": torch.float32, "bf16": False})
    truth.load_state_dict(torch_layer.state_dict())

    def answer(layer, dtype=torch.bfloat16):
        kwargs = {"packed_seq_params": packed([200, 312])} if is_packed else {}
        out, gx, weights = gradients(layer, x.to(dtype), grad.to(dtype), **kwargs)
        return {"output": out, "input gradient": gx, **weights}

    want = answer(truth, torch.float32)
    ours, theirs = answer(torch_layer), answer(te_layer)
    for name, value in want.items():
        own = rel_error(ours[name], value)
        assert own < 3e-2, name
        assert rel_error(theirs[name], value) < 2 * own + 5e-3, name
