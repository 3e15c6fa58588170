"""Rotation and packing of one layer: fused, eager (both give the same bits), or none.

Legend: S rows, B batch, H heads of this rank, N unrotated, d positional, V value channels, P rows
of a rope table.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_mla.config import MLATransformerConfig
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope_ref import rope_ref
from megatron_mla.selection import should_use_fused_mla_rope


class Rotary(Protocol):
    """What a layer does to its queries, keys and values between up projection and attention."""

    def query(
        self, query: Tensor, num_heads: int, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> Tensor:
        """Rotate queries.

        Args:
            query: [S, B, H * (N + d)] of the up projection; may be overwritten.
            cos, sin: [P, d / 2] (narrower with a partial rotation), None without rotation.
            positions: [S] int32, below P.
        Returns:
            [S, B, H, N + d].
        """

    def key_value(
        self,
        kv: Tensor,
        k_pe: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        pack_value: bool,
    ) -> tuple[Tensor, Tensor]:
        """Make keys and values.

        Args:
            kv: [S, B, H, N + V]. k_pe: [S, B, 1, d].
            pack_value: values are contiguous, else a view of ``kv``.
        Returns:
            Key [S, B, H, N + d] and value [S, B, H, V].
        """


def make_rotary(config: MLATransformerConfig, has_rope: bool) -> Rotary:
    """The fused kernels where ``should_use_fused_mla_rope`` says so, for a layer with rotation."""
    if not has_rope:
        return NoRotary(config.qk_head_dim)
    if should_use_fused_mla_rope(config):
        return FusedRotary(config.qk_head_dim)
    partial = config.rotated_width < config.qk_pos_emb_head_dim
    return EagerRotary(config.qk_head_dim, partial)


class EagerRotary:
    """Plain PyTorch, on any device.

    Args:
        nope_dim: N of queries and keys.
        partial: tables are narrower than the positional channels (``rotary_percent < 1``).
    """

    def __init__(self, nope_dim: int, partial: bool = False) -> None:
        self.how = {"partial": partial}
        self.nope_dim = nope_dim

    def query(self, query, num_heads, cos, sin, positions):
        query = query.unflatten(-1, (num_heads, -1))
        return rope_ref(query, cos, sin, positions, nope_dim=self.nope_dim, **self.how)

    def key_value(self, kv, k_pe, cos, sin, positions, *, pack_value):
        how = {"k_dim": self.nope_dim, "pack_value": pack_value, **self.how}
        return rope_kv_split_ref(kv, k_pe, cos, sin, positions, **how)


class FusedRotary:
    """The Triton kernels."""

    def __init__(self, nope_dim: int) -> None:
        # Triton is optional: imported where it is known to be there.
        from megatron_mla.kernels.kv_split import rope_kv_split
        from megatron_mla.kernels.rope import rope_

        self.nope_dim = nope_dim
        self._rope_, self._kv_split = rope_, rope_kv_split

    def query(self, query, num_heads, cos, sin, positions):
        # In place, and flat: in-place changes of a view would cost copies of its gradient.
        how = {"nope_dim": self.nope_dim, "num_heads": num_heads}
        return self._rope_(query, cos, sin, positions, **how).unflatten(-1, (num_heads, -1))

    def key_value(self, kv, k_pe, cos, sin, positions, *, pack_value):
        how = {"k_dim": self.nope_dim, "pack_value": pack_value}
        return self._kv_split(kv, k_pe, cos, sin, positions, **how)


class NoRotary:
    """Layers without positions (NoPE): the positional channels stay where they are, unrotated."""

    def __init__(self, nope_dim: int) -> None:
        self.nope_dim = nope_dim

    def query(self, query, num_heads, cos, sin, positions):
        return query.unflatten(-1, (num_heads, -1))

    def key_value(self, kv, k_pe, cos, sin, positions, *, pack_value):
        k_nope, value = kv[..., : self.nope_dim], kv[..., self.nope_dim :]
        shared = k_pe.expand(*k_nope.shape[:-1], k_pe.shape[-1])
        return torch.cat((k_nope, shared), dim=-1), value.contiguous() if pack_value else value
