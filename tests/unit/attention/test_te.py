"""Transformer Engine's modules and core attention give what torch's give, on a GPU that has it."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention.index_sharing import IndexBook, with_index_book
from megatron_mla.selection import te_missing_reason
from tests.helpers.close import rel_error
from tests.helpers.layers import INDEXER, gradients, packed, small_layer

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
SPARSE = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 64,
    "dsa_indexer_topk": 100,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_use_sparse_loss": True,
}
FORMS = {"expanded": {}, "absorbed": {"mla_form": "absorbed"}, "dsa": SPARSE}


@pytest.mark.parametrize("down", ["duplicated", "column"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize(
    ("form", "impl", "core"),
    [
        ("expanded", "transformer_engine", "auto"),
        ("expanded", "transformer_engine", "sdpa"),
        ("expanded", "local", "te"),
        ("absorbed", "transformer_engine", "sdpa"),
        ("dsa", "transformer_engine", "auto"),
    ],
)
def test_te_layer_equals_torch_layer(form, impl, core, is_packed, down) -> None:
    reason = te_missing_reason()
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(512, 1, 256, generator=generator).bfloat16().cuda() for _ in range(2))
    common = {**WIDE, **FORMS[form], "mla_down_proj_parallelism": down}
    torch_layer = small_layer(**common)
    te_layer = small_layer(**common, transformer_impl=impl, mla_core_attention=core)
    te_layer.load_state_dict(torch_layer.state_dict())
    truth = small_layer(**{**common, "params_dtype": torch.float32, "bf16": False})
    truth.load_state_dict(torch_layer.state_dict())
    chosen = {}

    def answer(layer, dtype=torch.bfloat16):
        book = IndexBook(given=chosen)
        params = packed([200, 312]) if is_packed else None
        if form == "dsa":
            params = with_index_book(params, book)
        kwargs = {} if params is None else {"packed_seq_params": params}
        out, gx, weights = gradients(layer, x.to(dtype), grad.to(dtype), **kwargs)
        # A key that rounding alone chooses is no fault: all attend to what the first one chose.
        chosen.update(book.chosen)
        return {"output": out, "input gradient": gx, **weights}

    want = answer(truth, torch.float32)
    ours, theirs = answer(torch_layer), answer(te_layer)
    assert len(chosen) == (form == "dsa")
    for name, value in want.items():
        own = rel_error(ours[name], value)
        # The loss's gradient is a difference of two nearly equal distributions: 5e-2 with torch.
        assert own < (1e-1 if name.startswith(INDEXER) else 3e-2), name
        assert rel_error(theirs[name], value) < 2 * own + 5e-3, name
