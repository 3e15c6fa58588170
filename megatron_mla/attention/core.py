"""Dense causal core attention without Transformer Engine.

Legend: L query rows of this rank, T key rows (all ranks' rows under context parallelism),
B batch, H heads of this rank, D query/key width, V value width.

Keys and values come in global order, queries are this rank's rows; ``Rows.plan`` says
which queries see which keys. Backends, best first: cuDNN (Hopper and later, bf16 and fp16, takes
192/128 without padding V), memory-efficient, plain math. The choice is logged once with its reason.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_mla.config import MLATransformerConfig
from megatron_mla.parallel.collectives import move_rows
from megatron_mla.parallel.microbatch import AttentionPlan, CausalBlock, Rows
from megatron_mla.selection import cudnn_attention_reason, determinism_is_asked, say_once

CAUSAL_MASK_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal)


class SDPACoreAttention(MegatronModule):
    """Causal attention by torch's ``scaled_dot_product_attention``.

    Args:
        softmax_scale: dimensionless factor on query-key products.
        k_channels, v_channels: D and V; may differ.
    """

    needs_gathered_keys = True
    """Under context parallelism the caller hands keys and values of all ranks in global order."""

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        *,
        softmax_scale: float,
        k_channels: int,
        v_channels: int,
        **unused,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in CAUSAL_MASK_TYPES or attention_type != "self":
            raise ValueError(
                "attn_mask_type must be causal self-attention for MLA, got "
                f"{attn_mask_type} {attention_type}; set params={{'attn_mask_type': "
                "AttnMaskType.causal}} in the spec"
            )
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
        """Attend.

        Args:
            query: [L, (B,) H, D]; packed batches have no B.
            key: [T, (B,) H, D]. value: [T, (B,) H, V]. Or one head, shared by all of the queries.
            rows: which rows these are.
        Returns:
            [L, (B,) H * V] in the dtype of ``query``. Rows past the last packed sequence are zero.
        """
        dropout = self.config.attention_dropout if self.training else 0.0
        query, key, value = (
            t.unsqueeze(1) if rows.packed else t
            for t in map(_RowMajorGrad.apply, (query, key, value))
        )  # [L, B, H, D]
        backends, cudnn = self._backends(query, value.shape[-1])
        plan = rows.plan()
        with sdpa_kernel(backends, set_priority=True):
            pieces = self._batched(query, key, value, plan, dropout)
            for parts in _block_parts(query, key, value, plan.blocks):
                # [L, B, H, D] -> [B, H, L, D] is a view; no copy is made.
                q, k, v = (t.permute(1, 2, 0, 3) for t in parts)
                piece = self._causal(q, k, v, dropout, cudnn=cudnn)
                pieces.append(piece.permute(2, 0, 1, 3))
        if not pieces:
            pieces.append(_NoRows.apply(query, key, value))
        out = _assemble(pieces, plan, query, value).flatten(2)  # [L, B, H * V]
        return out.squeeze(1) if rows.packed else out

    def _backends(self, query: Tensor, v_dim: int) -> tuple[list[SDPBackend], bool]:
        """Backends to try in order, and whether cuDNN leads them."""
        wish = self.config.attention_backend
        if wish in (AttnBackend.unfused, AttnBackend.local):
            return [SDPBackend.MATH], False
        reason = cudnn_attention_reason(
            query, v_dim, determinism_is_asked(self.config, query.is_cuda)
        )
        if reason is None:
            say_once("core", "Core attention: cuDNN, through scaled_dot_product_attention.")
            return [
                SDPBackend.CUDNN_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.MATH,
            ], True
        if wish is AttnBackend.fused:
            raise ValueError(
                f"attention_backend='fused' must be able to run cuDNN's attention, but {reason}; "
                "use attention_backend='auto'"
            )
        # On a GPU it costs several times the time, so nobody should have to look for this line.
        say_once(
            "core",
            f"Core attention: scaled_dot_product_attention without cuDNN: {reason}.",
            level=logging.WARNING if query.is_cuda else logging.INFO,
        )
        return [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ], False

    def _batched(
        self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout: float
    ) -> list[Tensor]:
        """Padded results [sequences * length, 1, H, V] of every batched call."""
        if not plan.batches:
            return []
        padded = [
            move_rows(t[:, 0], move)
            for t, move in ((query, plan.queries), (key, plan.keys), (value, plan.keys))
        ]
        sizes = [count * length for count, length in plan.batches]
        pieces = []
        for (count, _), *parts in zip(plan.batches, *(t.split(sizes) for t in padded), strict=True):
            # [count * length, H, D] -> [count, H, length, D]
            q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in parts)
            out = self._causal(q, k, v, dropout, cudnn=False)
            pieces.append(out.transpose(1, 2).flatten(0, 1).unsqueeze(1))
        return pieces

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *, cudnn: bool) -> Tensor:
        """[B, H, queries, V]; heads differ between tp ranks, so their dropout must too."""
        fork = get_cuda_rng_tracker().fork() if dropout else nullcontext()
        with fork:
            return _causal(q, k, v, cudnn=cudnn, dropout_p=dropout, scale=self.softmax_scale)


def attend_to_latents(
    core: SDPACoreAttention, query: Tensor, key: Tensor, rows: Rows, v_channels: int
) -> Tensor:
    """Dense absorbed attention: one key for all heads, whose leading channels are the value.

    Args:
        query: [L, B, H, C + d]. key: [T, B, C + d]; B is 1 when packed.
        v_channels: C.
    Returns:
        Weighted latents [L, B, H, C].
    """
    key = key.unsqueeze(-2)  # [T, B, 1, C + d]
    parts = query, key, key[..., :v_channels]
    if rows.packed:
        parts = (t.squeeze(1) for t in parts)
    out = core(*parts, rows).unflatten(-1, (query.shape[-2], -1))
    return out.unsqueeze(1) if rows.packed else out


def _block_parts(query: Tensor, key: Tensor, value: Tensor, blocks: list[CausalBlock]):
    """Queries, keys and values of every block."""
    keys = [(block.k_start, block.k_end) for block in blocks]
    return zip(
        _cut(query, [(block.q_start, block.q_end) for block in blocks]),
        _cut(key, keys),
        _cut(value, keys),
        strict=True,
    )


def _cut(t: Tensor, spans: list[tuple[int, int]]) -> list[Tensor]:
    """``t[start:stop]`` of every span, in order of their starts.

    The tensor is split once into what overlapping spans cover together (the keys of one sequence,
    under context parallelism), and only inside such a part sliced: the backward of a split writes
    every gradient once, where that of a slice fills and adds all it was cut from.
    """
    parts: list[list[int]] = []  # [start, stop] of each part
    home = []
    for start, stop in spans:
        if parts and start < parts[-1][1]:
            parts[-1][1] = max(parts[-1][1], stop)
        else:
            parts.append([start, stop])
        home.append(len(parts) - 1)
    sizes, kept, end = [], [], 0
    for start, stop in parts:
        if start > end:
            sizes.append(start - end)
        kept.append(len(sizes))
        sizes.append(stop - start)
        end = stop
    if end < t.shape[0]:
        sizes.append(t.shape[0] - end)
    # The backward of a split into one piece would copy the gradient all the same.
    pieces = t.split(sizes) if len(sizes) > 1 else (t,)
    cut = []
    for (start, stop), number in zip(spans, home, strict=True):
        first, last = parts[number]
        piece = pieces[kept[number]]
        whole = (start, stop) == (first, last)
        cut.append(piece if whole else piece[start - first : stop - first])
    return cut


def _assemble(pieces: list[Tensor], plan: AttentionPlan, query: Tensor, value: Tensor) -> Tensor:
    """Rows of this rank [L, B, H, V] from the results of all calls; other rows are zero."""
    num_rows = query.shape[0]
    if plan.results is None:
        done = plan.blocks[-1].q_end if plan.blocks else num_rows
        if done < num_rows:
            shape = (num_rows - done, *query.shape[1:-1], value.shape[-1])
            pieces.append(value.new_zeros(shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    worked = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return move_rows(worked, plan.results)


class _NoRows(torch.autograd.Function):
    """A rank that holds nothing but padding: zeros, and zero gradients rather than none.

    Overlapped gradient reductions wait for every parameter, so none may be left out.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return value.new_zeros(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)


class _RowMajorGrad(torch.autograd.Function):
    """Identity whose gradient is contiguous.

    Backends return gradients in strides of their own choice, a recomputed core always in those of
    its leaves; the matrix products that follow would round differently.
    """

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


def _causal(q: Tensor, k: Tensor, v: Tensor, *, cudnn: bool, dropout_p: float, scale: float):
    """Causal attention in which the last query sees the last key."""
    rows, keys = q.shape[2], k.shape[2]
    # One head for all: only here, so that neither copies nor gradients of it are made per head.
    k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    if rows in (1, keys):
        # A single query sees every key. (Split in two as below, its own key would be a square of
        # one, of which cuDNN has no backward; torch looks for that before it calls cuDNN.)
        return scaled_dot_product_attention(
            q, k, v, is_causal=rows > 1, dropout_p=dropout_p, scale=scale
        )
    if cudnn and not dropout_p:
        return _PrefixThenCausal.apply(q, k, v, scale)
    mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)


class _PrefixThenCausal(torch.autograd.Function):
    """Bottom-right causal attention as a full block and a square causal one, both by cuDNN.

    torch's ``is_causal`` aligns a rectangle to the top left, and a mask would cost queries x keys
    and the skipped half of the work. The parts are joined by their log-sum-exps l1, l2 with
    ``l = log(exp(l1) + exp(l2))``; each part's backward takes the joined output and l, which makes
    its softmax the global one (the identity behind ring attention, arXiv:2310.01889).
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        prefix = k.shape[2] - q.shape[2]
        parts = []
        for part_k, part_v, causal in _parts(k, v, prefix):
            out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, part_k, part_v, None, True, 0.0, causal, False, scale=scale
            )
            parts.append((out, lse, seed, offset))
        (out1, lse1, *rng1), (out2, lse2, *rng2) = parts
        lse = torch.logaddexp(lse1, lse2)
        weight1, weight2 = (torch.exp(part - lse) for part in (lse1, lse2))
        if weight1.dim() < out1.dim():
            weight1, weight2 = weight1.unsqueeze(-1), weight2.unsqueeze(-1)
        # out1's strides are q's, which keeps the caller's permute free of copies.
        out = out1.copy_(out1 * weight1 + out2 * weight2)
        ctx.save_for_backward(q, k, v, out, lse, *rng1, *rng2)
        ctx.prefix, ctx.scale = prefix, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, seed1, offset1, seed2, offset2 = ctx.saved_tensors
        grads = []
        for (part_k, part_v, causal), seed, offset in zip(
            _parts(k, v, ctx.prefix), (seed1, seed2), (offset1, offset2), strict=True
        ):
            grads.append(
                torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                    grad, q, part_k, part_v, out, lse, seed, offset, None, None, None,
                    q.shape[2], part_k.shape[2], 0.0, causal, scale=ctx.scale,
                )
            )  # fmt: skip
        (dq1, dk1, dv1), (dq2, dk2, dv2) = grads
        dq = dq2.copy_(dq1.float() + dq2.float())
        return dq, torch.cat((dk1, dk2), dim=2), torch.cat((dv1, dv2), dim=2), None


def _parts(k: Tensor, v: Tensor, prefix: int):
    """(keys, values, causal) of the fully visible prefix and of the square at its end."""
    yield k[:, :, :prefix], v[:, :, :prefix], False
    yield k[:, :, prefix:], v[:, :, prefix:], True
