"""Sparse attention over a cache: indexer keys are cached too, and every new row chooses among them.

Legend: s rows of a pass, B sequences, T rows of a sequence's memory, H heads of this rank, C
latent, d positional and E = C + d channels of a cached row, K chosen keys of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_mla.attention.index_sharing import IndexBook, check_given
from megatron_mla.inference.attention import attend_to_rows
from megatron_mla.inference.context import LatentInferenceContext, Step
from megatron_mla.inference.rows import indexer_memory, read_flat, write_rows

if TYPE_CHECKING:
    from megatron_mla.attention.dsa import DSACoreAttention

# Chosen rows that are gathered at once where an operator gives no log-sum-exp.
_GATHERED_ELEMENTS = 1 << 25


def attend_to_chosen(
    core: DSACoreAttention,
    context: LatentInferenceContext,
    step: Step,
    query: Tensor,
    memory: Tensor,
    x: Tensor,
    qr: Tensor,
    book: IndexBook | None,
) -> Tensor:
    """Choose keys and attend to them, on all ranks that share the rows.

    Args:
        query: [B, s, H, E]. memory: [max_batch_size, T, E], new rows among the others.
        x: [s * B, 1, hidden] and qr: [s * B, 1, Q], what the indexer reads.
        book: indices of this forward pass; None: those of ``step``.
    Returns:
        Weighted latents [B, s, H, C]; 0 in rows of padding.
    """
    chosen = _choose(core, context, step, x, qr, book).transpose(0, 1)  # [B, s, K]
    dcp = context.dcp
    used = step.longest
    if dcp is not None:
        query, used = dcp.gather_queries(query), dcp.rows_needed(used)
        chosen, _ = dcp.owned_indices(chosen)
    keys, stride = read_flat(memory, step, used, query.dtype)
    first = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device) * stride
    indices = torch.where(chosen < 0, -1, chosen + first[:, None, None]).flatten(0, 1)
    how = {"scale": core.softmax_scale, "v_dim": core.v_channels}
    flat = query.flatten(0, 1)
    out, level = core.operators.attention(flat, keys, indices, **how)
    out = out.unflatten(0, query.shape[:2])
    if dcp is None:
        return out
    if level is None:
        level = _levels(flat, keys, indices, **how)
    return dcp.merge(out, level.unflatten(0, query.shape[:2]))[0]


def _choose(
    core: DSACoreAttention,
    context: LatentInferenceContext,
    step: Step,
    x: Tensor,
    qr: Tensor,
    book: IndexBook | None,
) -> Tensor:
    """[s, B, K] int32 positions in each row's sequence, -1 for none."""
    rows, batch = step.positions.shape
    kept = step.chosen if book is None else book.chosen
    given = book is not None and core.source in book.given
    if core.indexer is not None:
        # Its keys are cached though this pass may not need them: a later one will.
        q, k, w = (t.squeeze(1) for t in core.indexer(x, qr, step.rows))
        memory = indexer_memory(context, core.layer_number, k.shape[-1], k)
        write_rows(memory, k, step)
    if given:
        chosen = check_given(book.given[core.source], core.source, rows, batch)
        chosen = chosen.to(step.positions.device)
        seen = (chosen >= 0) & (chosen <= step.positions.unsqueeze(-1))
        chosen = chosen.masked_fill(~seen, -1)
    elif core.indexer is not None:
        keys, stride = read_flat(memory, step, step.longest, q.dtype)
        # Sequence by sequence: rows that are neighbours see the same keys.
        q, w = (t.unflatten(0, (rows, batch)).transpose(0, 1).flatten(0, 1) for t in (q, w))
        bounds = step.key_bounds(stride)
        how = {"topk": core.config.dsa_indexer_topk, "relu": core.config.dsa_indexer_scoring_relu}
        chosen = core.operators.topk(q, keys, w, bounds, **how)[:, : max(1, step.longest)]
        chosen = torch.where(chosen < 0, -1, chosen - bounds.starts[:, None])
        chosen = chosen.unflatten(0, (batch, rows)).transpose(0, 1)
    elif core.source in kept:
        return kept[core.source]
    else:
        raise ValueError(
            f"layer {core.layer_number} must find the indices of layer {core.source} in this pass "
            "over the cache, got none; run the layers in order, all with one inference_context"
        )
    if core.layer_number == core.source:
        kept[core.layer_number] = chosen
    return chosen


def _levels(query: Tensor, keys: Tensor, indices: Tensor, *, scale: float, v_dim: int) -> Tensor:
    """Log-sum-exp [rows, H] of :func:`attend_to_rows` over the chosen keys of every row."""
    step = max(1, _GATHERED_ELEMENTS // max(1, indices.shape[1] * keys.shape[1]))
    levels = []
    for start in range(0, len(query), step):
        part = indices[start : start + step]
        rows = keys[part.clamp(min=0)]  # [rows, K, E], each row a sequence of its own
        position = query.new_zeros(len(part), 1, dtype=torch.int32)
        there = torch.where(part < 0, -1, 0)
        one = query[start : start + step].unsqueeze(1)
        _, level = attend_to_rows(one, rows, position, there, scale=scale, v_dim=v_dim)
        levels.append(level.squeeze(1))
    return torch.cat(levels)
