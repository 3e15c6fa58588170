"""Whole models write with a cache what they write without one, token for token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode

from megatron_mla.inference.context import LatentInferenceContext
from megatron_mla.inference.generation import generate
from megatron_mla.inference.sampling import Sampler
from tests.helpers.generation import PROMPTS, VOCABULARY, assert_greedy, collected, small_gpt
from tests.helpers.layers import DSA

pytestmark = pytest.mark.usefixtures("single_rank")

MODELS = {
    "mla": {},
    "absorbed-nope": {"mla_form": "absorbed", "no_rope_freq": [1, 0, 1]},
    "dsa-shared": {**DSA, "dsa_indexer_topk_freq": 2, "dsa_indexer_loss_coeff": None},
    "moe": {
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 1],
        "moe_ffn_hidden_size": 32,
        "moe_router_topk": 2,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
    },
    "kimi-linear": {
        "no_rope_freq": 1,
        "q_lora_rank": None,
        "mla_full_attn_layers": [2],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    },
}
COUNT = 24
greedy = Sampler(temperature=0)


def text(model, prompts=PROMPTS, count=COUNT, **how):
    how = {"choose": greedy, **how}
    return collected(generate(model, prompts, max_new_tokens=count, **how))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_whole_forward_passes(name) -> None:
    model = small_gpt(**MODELS[name])
    context = LatentInferenceContext(4, 40)
    lines = text(model, context=context)
    assert all(len(line) == COUNT for line in lines)
    assert_greedy(model, PROMPTS, lines)
    assert all(len(set(line)) > 5 for line in lines), "text that hardly shows a wrong cache"
    assert text(model, prefill_chunk=3, context=context) == lines
    assert text(model, [PROMPTS[2]], prefill_chunk=1) == lines[2:]


def test_training_steps_between_texts() -> None:
    model = small_gpt()
    tokens = torch.randint(VOCABULARY, (2, 33), device=torch.cuda.current_device())
    with torch.inference_mode():
        before = text(model)
    model.train()
    loss = model(tokens[:, :-1], None, None, labels=tokens[:, 1:].contiguous()).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    model.eval()
    after = text(model)
    assert_greedy(model, PROMPTS, after)
    assert after != before


def test_narrow_caches_write_text_too() -> None:
    model = small_gpt()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        context = LatentInferenceContext(3, 40, cache_dtype=dtype)
        lines = [text(model, count=4, prefill_chunk=chunk, context=context) for chunk in (None, 2)]
        # Another rounding of one number may turn a close choice, and then all that follows.
        assert [line[0] for line in lines[0]] == [line[0] for line in lines[1]]


def test_same_seed_same_text() -> None:
    model = small_gpt()
    one, same, other = (text(model, choose=Sampler(seed=seed)) for seed in (5, 5, 6))
    assert one == same != other


def test_a_sequence_ends_with_the_stop_token_and_others_go_on() -> None:
    model = small_gpt()
    truth = text(model)
    stop = truth[0][3]
    got = text(model, stop_token=stop)
    longest = 0
    for line, whole in zip(got, truth, strict=True):
        end = whole.index(stop) + 1 if stop in whole else COUNT
        assert [token for token in line if token is not None] == whole[:end]
        longest = max(longest, end)
    assert all(len(line) == longest for line in got)


@pytest.mark.parametrize("inference_mode", [False, True], ids=["plain", "engine"])
def test_a_driver_of_megatron_core(inference_mode) -> None:
    """Its static context, counted by its own methods; in its mode the last row's logits come."""
    model, prompt = small_gpt(), PROMPTS[0]
    context, tokens = StaticInferenceContext(1, 40), []
    piece = prompt
    with torch.no_grad():
        for _ in range(COUNT):
            row = torch.tensor([piece], device=torch.cuda.current_device())
            how = {"inference_context": context, "runtime_gather_output": True}
            if inference_mode:
                with InferenceMode.active():
                    logits = model(row, None, None, **how)
                assert logits.shape[1] == 1
            else:
                logits = model(row, None, None, **how)
                assert logits.shape[1] == len(piece)
            context.increment_sequence_len_offset(len(piece))
            piece = [int(logits[0, -1].argmax())]
            tokens += piece
    assert len(tokens) == COUNT
    assert_greedy(model, [prompt], [tokens])


def test_generate_leaves_megatron_core_as_it_was() -> None:
    model = small_gpt(num_layers=1)
    text(model, count=2)
    assert not InferenceMode.is_active()
    with InferenceMode.active():
        text(model, count=2)
        assert InferenceMode.is_active()


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([], {}, "prompts must have at least one token each, got lengths"),
        ([[1], []], {}, r"prompts must have .* got lengths \[1, 0\]"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens and prefill_chunk must be at least 1"),
        ([[1]], {"prefill_chunk": 0}, "got 4 and 0"),
        ([[1], [2]], {}, "context must hold 2 sequences of 5 tokens.*max_batch_size=1"),
        ([[1, 2]], {}, "context must hold 1 sequences of 6 tokens.*max_sequence_length=5"),
    ],
)
def test_refusals(prompts, how, message) -> None:
    how = {"max_new_tokens": 4, "context": LatentInferenceContext(1, 5), **how}
    with pytest.raises(ValueError, match=message):
        generate(torch.nn.Module(), prompts, choose=greedy, **how)


def test_examples_of_the_documentation(capsys) -> None:
    text = (Path(__file__).parents[3] / "docs" / "inference.md").read_text(encoding="utf-8")
    names = {"model": small_gpt()}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        with torch.device(torch.cuda.current_device()):
            exec(example, names)
    assert names["logits"].shape == (2, 1, VOCABULARY)
    assert capsys.readouterr().out.count("[") == 24
