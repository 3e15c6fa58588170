"""Text from a GPTModel of our layers: prompts of any lengths, then one token after the other.

Legend: B prompts, s rows of a forward pass, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from megatron_mla.inference.context import LatentInferenceContext


def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    context: LatentInferenceContext | None = None,
    prefill_chunk: int | None = None,
    stop_token: int | None = None,
) -> Iterator[list[int | None]]:
    """Go on with prompts, all of them at once.

    Tensor-parallel ranks all have to call, with the same arguments; the first of them chooses.

    Args:
        model: a GPTModel in evaluation mode, or a wrapper of one.
        prompts: tokens, at least one of each.
        choose: [B, V] logits -> [B] tokens, a :class:`~megatron_mla.inference.sampling.Sampler`.
        context: emptied first; None makes one.
        prefill_chunk: tokens of a prompt in one forward pass; None: all.
        stop_token: ends the sequence that chooses it.
    Yields:
        After every pass the new token of each sequence, None for those that have ended.
    Raises:
        ValueError: no prompt, an empty one, or more tokens than ``context`` holds.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or not min(lengths):
        raise ValueError(
            f"prompts must have at least one token each, got lengths {lengths}; begin with a space "
            "or a line break"
        )
    if max_new_tokens < 1 or (prefill_chunk is not None and prefill_chunk < 1):
        raise ValueError(
            "max_new_tokens and prefill_chunk must be at least 1, got "
            f"{max_new_tokens} and {prefill_chunk}"
        )
    needed = max(lengths) + max_new_tokens
    if context is None:
        context = LatentInferenceContext(len(prompts), needed)
    if len(prompts) > context.max_batch_size or needed > context.max_sequence_length:
        raise ValueError(
            f"context must hold {len(prompts)} sequences of {needed} tokens, prompt and answer, "
            f"got max_batch_size={context.max_batch_size} and "
            f"max_sequence_length={context.max_sequence_length}"
        )
    context.reset()
    return _tokens(model, prompts, max_new_tokens, choose, context, prefill_chunk, stop_token)


@torch.no_grad()
def _tokens(model, prompts, max_new_tokens, choose, context, prefill_chunk, stop_token):
    logits = _prefill(model, prompts, context, prefill_chunk)
    running = [True] * len(prompts)
    for count in range(max_new_tokens):
        tokens = _agree(choose, logits)
        yield [token if on else None for token, on in zip(tokens, running, strict=True)]
        running = [on and token != stop_token for token, on in zip(tokens, running, strict=True)]
        if count + 1 == max_new_tokens or not any(running):
            return
        # Sequences that have ended add nothing to the cache.
        pieces = [[token] for token in tokens]
        logits = _forward(model, pieces, [int(on) for on in running], context)


def _prefill(model, prompts, context, chunk: int | None) -> Tensor:
    """[B, V] logits behind every prompt."""
    longest = max(len(prompt) for prompt in prompts)
    chunk = longest if chunk is None else chunk
    found: Tensor | None = None
    for start in range(0, longest, chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        logits = _forward(model, pieces, [len(piece) for piece in pieces], context)
        found = logits if found is None else found
        ends = [start < len(prompt) <= start + chunk for prompt in prompts]
        found = torch.where(torch.tensor(ends, device=logits.device)[:, None], logits, found)
    return found


def _forward(model, pieces, lengths: list[int], context: LatentInferenceContext) -> Tensor:
    """[B, V] logits of the last new token of every sequence."""
    rows = max(len(piece) for piece in pieces)
    padded = [[*piece, *(0,) * (rows - len(piece))] for piece in pieces]
    tokens = torch.tensor(padded, device=torch.cuda.current_device())
    # Multi-token prediction has nothing to do, and logits come from all tensor-parallel ranks.
    with nullcontext() if InferenceMode.is_active() else InferenceMode.active():
        logits = model(
            tokens,
            None,
            None,
            inference_context=context.begin(lengths),
            runtime_gather_output=True,
        )  # [B, s, V]
    context.advance()
    last = torch.tensor(lengths, device=logits.device).sub(1).clamp(min=0)
    return logits[torch.arange(len(lengths), device=logits.device), last]


def _agree(choose: Callable[[Tensor], Tensor], logits: Tensor) -> list[int]:
    """The tokens that the first tensor-parallel rank chooses."""
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        return choose(logits).tolist()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if group.rank() == 0:
        tokens.copy_(choose(logits))
    dist.broadcast(tokens, src=dist.get_process_group_ranks(group)[0], group=group)
    return tokens.tolist()
