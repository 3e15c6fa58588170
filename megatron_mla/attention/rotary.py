"""Rotation and packing of one layer: fused, eager (both give the same bits), or none.

Legend: S rows, B batch, H heads of this rank, N unrotated, d positional, V value, C latent
channels, P rows of a rope table.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_mla.config import MLATransformerConfig
from megatron_mla.kernels.absorb_ref import absorb_nope_ref, absorb_query_ref
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

    def absorb(
        self,
        query: Tensor,
        num_heads: int,
        wk: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Rotate queries and bring their other channels to the latent.

        Args:
            query: [S, B, H * (N + d)] of the up projection. wk: [H, N, C].
        Returns:
            [S, B, H, C + d].
        """

    def lead(
        self,
        t: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        interleaved: bool,
    ) -> Tensor:
        """Rotate the leading channels of the indexer's heads.

        Args:
            t: [S, B, H * width]; may be overwritten.
            interleaved: channels come in as pairs, else as halves. They leave as halves.
        Returns:
            [S, B, H, width].
        """

    def latent_key(
        self, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, in_place: bool
    ) -> Tensor:
        """Rotate the trailing d channels of the one key of absorbed attention.

        Args:
            key: [S, B, C + d].
            in_place: it may be overwritten.
        Returns:
            [S, B, C + d].
        """


def make_rotary(config: MLATransformerConfig, has_rope: bool) -> Rotary:
    """The fused kernels where ``should_use_fused_mla_rope`` says so, for a layer with rotation."""
    if not has_rope:
        return NoRotary(config.qk_head_dim)
    if should_use_fused_mla_rope(config):
        return FusedRotary(config.qk_head_dim, config.qk_pos_emb_head_dim)
    partial = config.rotated_width < config.qk_pos_emb_head_dim
    return EagerRotary(config.qk_head_dim, config.qk_pos_emb_head_dim, partial)


class EagerRotary:
    """Plain PyTorch, on any device.

    Args:
        nope_dim: N of queries and keys.
        rotated: d.
        partial: tables are narrower than the positional channels (``rotary_percent < 1``).
    """

    def __init__(self, nope_dim: int, rotated: int, partial: bool = False) -> None:
        self.how = {"partial": partial}
        self.nope_dim, self.rotated = nope_dim, rotated

    def query(self, query, num_heads, cos, sin, positions):
        query = query.unflatten(-1, (num_heads, -1))
        return rope_ref(query, cos, sin, positions, nope_dim=self.nope_dim, **self.how)

    def key_value(self, kv, k_pe, cos, sin, positions, *, pack_value):
        how = {"k_dim": self.nope_dim, "pack_value": pack_value, **self.how}
        return rope_kv_split_ref(kv, k_pe, cos, sin, positions, **how)

    def absorb(self, query, num_heads, wk, cos, sin, positions):
        query = query.unflatten(-1, (num_heads, -1))
        return absorb_query_ref(query, wk, cos, sin, positions, nope_dim=self.nope_dim, **self.how)

    def lead(self, t, num_heads, cos, sin, positions, *, interleaved):
        t = t.unflatten(-1, (num_heads, -1))
        how = {"nope_dim": t.shape[-1] - self.rotated, "rope_first": True, **self.how}
        return rope_ref(t, cos, sin, positions, interleaved=interleaved, **how)

    def latent_key(self, key, cos, sin, positions, *, in_place):
        how = {"nope_dim": key.shape[-1] - self.rotated, **self.how}
        return rope_ref(key.unsqueeze(-2), cos, sin, positions, **how).squeeze(-2)


class FusedRotary:
    """The Triton kernels."""

    def __init__(self, nope_dim: int, rotated: int) -> None:
        # Triton is optional: imported where it is known to be there.
        from megatron_mla.kernels.absorb import absorb_query
        from megatron_mla.kernels.kv_split import rope_kv_split
        from megatron_mla.kernels.rope import rope, rope_

        self.nope_dim, self.rotated = nope_dim, rotated
        self._rope, self._rope_ = rope, rope_
        self._kv_split, self._absorb = rope_kv_split, absorb_query

    def query(self, query, num_heads, cos, sin, positions):
        # In place, and flat: in-place changes of a view would cost copies of its gradient.
        how = {"nope_dim": self.nope_dim, "num_heads": num_heads}
        return self._rope_(query, cos, sin, positions, **how).unflatten(-1, (num_heads, -1))

    def key_value(self, kv, k_pe, cos, sin, positions, *, pack_value):
        how = {"k_dim": self.nope_dim, "pack_value": pack_value}
        return self._kv_split(kv, k_pe, cos, sin, positions, **how)

    def absorb(self, query, num_heads, wk, cos, sin, positions):
        query = query.unflatten(-1, (num_heads, -1))
        return self._absorb(query, wk, cos, sin, positions, nope_dim=self.nope_dim)

    def lead(self, t, num_heads, cos, sin, positions, *, interleaved):
        how = {"num_heads": num_heads, "rope_first": True, "interleaved": interleaved}
        how["nope_dim"] = t.shape[-1] // num_heads - self.rotated
        return self._rope_(t, cos, sin, positions, **how).unflatten(-1, (num_heads, -1))

    def latent_key(self, key, cos, sin, positions, *, in_place):
        how = {"nope_dim": key.shape[-1] - self.rotated}
        if in_place:
            return self._rope_(key, cos, sin, positions, num_heads=1, **how)
        return self._rope(key.unsqueeze(-2), cos, sin, positions, **how).squeeze(-2)


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

    def absorb(self, query, num_heads, wk, cos, sin, positions):
        query = query.unflatten(-1, (num_heads, -1))
        latent = absorb_nope_ref(query[..., : self.nope_dim], wk)
        return torch.cat((latent, query[..., self.nope_dim :]), dim=-1)

    def lead(self, t, num_heads, cos, sin, positions, *, interleaved):
        return t.unflatten(-1, (num_heads, -1))

    def latent_key(self, key, cos, sin, positions, *, in_place):
        return key if in_place else key.clone()
