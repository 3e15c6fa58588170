"""Prefill for FP8 attention: what a serving engine asks of a layer, with and without rotation.

Legend: T tokens, H heads of this rank, N unrotated and d positional channels of queries and keys,
V value channels, C latent channels, P rows of a rope table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mla.kernels.fp8_pack import fp8_cast, fused_rope_fp8_quantize
from megatron_mla.rope.tables import shared_tables


class PrefillHook:
    """Queries, keys, values and cache rows in FP8 e4m3fn, without scales.

    Args:
        max_positions: positions that tables are made for. None reads the greatest position of every
            batch on the host, and waits for the GPU to do so.
    """

    def __init__(self, max_positions: int | None = None) -> None:
        if max_positions is not None and max_positions < 1:
            raise ValueError(
                f"max_positions must be positive, got {max_positions}; it is the longest sequence "
                "that is served, or None"
            )
        self.max_positions = max_positions
        self._tables: dict[tuple, Tensor] = {}

    @torch.no_grad()
    def prepare_prefill_qkv(
        self,
        q: Tensor,
        q_pe: Tensor,
        kv_a: Tensor,
        k_pe: Tensor,
        positions: Tensor | None,
        layer,
        cache: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Expand the latents, rotate, pack and round.

        Whether the layer rotates is ``layer.has_rope`` and nothing else. Without rotation no table
        is made and ``positions`` are not read; the positional channels take part as they are. Pairs
        stay in place, (2i, 2i + 1), where the layer itself writes halves: products of queries and
        keys are the same.

        Args:
            q: [T, H, N + d] of the up projection, any strides.
            q_pe: [T, H, d] not rotated yet, the trailing channels of ``q`` or a tensor of its own.
            kv_a: [T, C] latents behind their norm.
            k_pe: [T, 1, d] not rotated yet.
            positions: [T] int32 | int64, or None for a layer without rotation.
            layer: a :class:`~megatron_mla.attention.latent.LatentAttention` or what has its
                ``linear_kv_up_proj``, ``num_heads``, ``q_head_split``, ``kv_head_split``,
                ``has_rope`` and, with rotation, ``rope_tables``.
            cache: called with the rows for the cache of latents.
        Returns:
            Query and key [T, H, N + d], value [T, H, V], and the rows for the cache
            [T, 1, C + d]: latent and the positional part of the packed key, the bytes that
            attention sees. All contiguous; with d = 0 a row is the latent alone.
        Raises:
            ValueError: a shape is not that of the layer, or :func:`fused_rope_fp8_quantize` cannot
                take an argument.
        """
        nope, rotated = layer.q_head_split
        heads = layer.num_heads
        self._check(q, q_pe, kv_a, k_pe, (heads, nope, rotated))
        kv, _ = layer.linear_kv_up_proj(kv_a)
        kv = kv.unflatten(-1, (heads, sum(layer.kv_head_split)))  # [T, H, N + V]

        table = self._table(layer, positions, q.device) if layer.has_rope else None
        query, key = fused_rope_fp8_quantize(
            q[..., :nope], q_pe, kv[..., :nope], k_pe, table, positions, is_neox_style=False
        )
        value = fp8_cast(kv[..., nope:])
        row = fp8_cast(kv_a).unsqueeze(1)
        if rotated:
            row = torch.cat((row, key[:, :1, nope:]), dim=-1)
        if cache is not None:
            cache(row)
        return query, key, value, row

    @staticmethod
    def _check(q, q_pe, kv_a, k_pe, widths: tuple[int, int, int]) -> None:
        heads, nope, rotated = widths
        tokens = q.shape[0]
        for name, t, shape in (
            ("q", q, (tokens, heads, nope + rotated)),
            ("q_pe", q_pe, (tokens, heads, rotated)),
            ("kv_a", kv_a, (tokens, *kv_a.shape[-1:])),
            ("k_pe", k_pe, (tokens, 1, rotated)),
        ):
            if tuple(t.shape) != shape:
                raise ValueError(
                    f"{name} must be {list(shape)} for this layer, got {list(t.shape)}; give the "
                    f"tokens of one batch in one dimension and the {heads} heads of this rank"
                )

    def _table(self, layer, positions: Tensor | None, device: torch.device) -> Tensor:
        """[P, d] fp32, cosines and then sines, whatever numerics the layer itself has."""
        if positions is None:
            raise ValueError(
                "positions must be given for a layer with rotation, got None; layer.has_rope says "
                "which layers rotate"
            )
        length = self.max_positions
        if length is None:
            length = int(positions.max()) + 1 if positions.numel() else 1
        params = layer.rope_tables.params
        table = self._tables.get((params, device))
        if table is None or table.shape[0] < length:
            halves = shared_tables(params, "fp32").get(length, torch.float32, device)
            table = self._tables[params, device] = torch.cat(halves, dim=-1)
        return table


def resolve_prefill_hook(backend, forward_mode=None):
    """The attention backend inside of wrappers that has ``prepare_prefill_qkv``.

    Wrappers are known by their attributes, and looked through for as long as there are any:

    * ``full_attn_backend``: linear and full attention in one model; the latter's backend,
    * ``prefill_backend``, ``decode_backend`` and ``_select_backend``: the one that
      ``_select_backend(forward_mode)`` chooses,
    * ``primary`` with a true ``is_two_batch_overlap``: the backend of both batches.

    Returns:
        That backend, or None: its caller then takes its bf16 path.
    Raises:
        ValueError: wrappers contain each other.
    """
    seen = []
    while backend is not None:
        if callable(getattr(backend, "prepare_prefill_qkv", None)):
            return backend
        if any(backend is one for one in seen):
            names = " -> ".join(type(one).__name__ for one in (*seen, backend))
            raise ValueError(
                f"backend must not contain itself, got {names}; a wrapper is to be given the "
                "backend that it wraps"
            )
        seen.append(backend)
        backend = _inner(backend, forward_mode)
    return None


def _inner(backend, forward_mode):
    """What a wrapper hands prefill to, None of a backend that wraps nothing."""
    if getattr(backend, "is_two_batch_overlap", False):
        return getattr(backend, "primary", None)
    full = getattr(backend, "full_attn_backend", None)
    if full is not None:
        return full
    parts = ("prefill_backend", "decode_backend", "_select_backend")
    if all(hasattr(backend, part) for part in parts):
        return backend._select_backend(forward_mode)
    return None
