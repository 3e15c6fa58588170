"""Inverse frequencies and scales of plain RoPE and YaRN.

Source: RoPE, arXiv:2104.09864; YaRN, arXiv:2309.00071 sections 3.2 to 3.4, with the rounded
correction range and the two ``mscale`` factors of DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeParams:
    """Everything that cos and sin depend on besides length, dtype and device.

    Attributes:
        dim: rotated channels, even; 0 in a model that rotates nothing.
        base: theta.
        rope_type: "rope" or "yarn"; the fields below are read for "yarn" only.
        factor: context extension, new over original length.
        original_max_position: context length before extension, tokens.
        beta_fast, beta_slow: full rotations over the original context above which a channel is
            left alone, and below which it is interpolated.
        mscale, mscale_all_dim: see :func:`concentration` and :func:`softmax_scale`.
    """

    dim: int
    base: float = 10000.0
    rope_type: str = "rope"
    factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.dim < 0 or self.dim % 2:
            raise ValueError(
                f"dim of a rotary table must be even and not negative, got {self.dim}; it is the "
                "number of rotated channels, qk_pos_emb_head_dim * rotary_percent"
            )
        if self.rope_type not in ("rope", "yarn"):
            raise ValueError(f"rope_type must be 'rope' or 'yarn', got {self.rope_type!r}")

    @classmethod
    def from_config(cls, config) -> RopeParams:
        """Parameters of an :class:`~megatron_mla.config.MLATransformerConfig`."""
        return cls(
            dim=config.rotated_width,
            base=float(config.rotary_base),
            rope_type=config.rope_type,
            factor=float(config.rotary_scaling_factor),
            original_max_position=config.original_max_position_embeddings,
            beta_fast=float(config.beta_fast),
            beta_slow=float(config.beta_slow),
            mscale=float(config.mscale),
            mscale_all_dim=float(config.mscale_all_dim),
        )


def yarn_mscale(factor: float, weight: float) -> float:
    """``0.1 * weight * ln(factor) + 1`` above factor 1, else 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def concentration(params: RopeParams) -> float:
    """Factor on cos and sin: ``m(factor, mscale) / m(factor, mscale_all_dim)``, 1 without YaRN."""
    if params.rope_type != "yarn":
        return 1.0
    return yarn_mscale(params.factor, params.mscale) / yarn_mscale(
        params.factor, params.mscale_all_dim
    )


def softmax_scale(params: RopeParams, qk_width: int) -> float:
    """``m(factor, mscale_all_dim)**2 / sqrt(qk_width)``; the square is 1 without YaRN.

    Args:
        qk_width: qk_head_dim + qk_pos_emb_head_dim, for absorbed MLA too.
    """
    scale = qk_width**-0.5
    if params.rope_type == "yarn":
        scale *= yarn_mscale(params.factor, params.mscale_all_dim) ** 2
    return scale


def inv_freq(params: RopeParams, device: torch.device | str | None = None) -> Tensor:
    """Inverse frequencies, [dim / 2] fp32, radians per position."""
    exponent = torch.arange(0, params.dim, 2, dtype=torch.float32, device=device) / params.dim
    period = params.base**exponent
    if params.rope_type != "yarn":
        return 1.0 / period
    low, high = _correction_range(params)
    channel = torch.arange(params.dim // 2, dtype=torch.float32, device=device)
    extrapolated = 1.0 - ((channel - low) / (high - low)).clamp(0, 1)
    return (1.0 / (params.factor * period)) * (1 - extrapolated) + (1.0 / period) * extrapolated


def _correction_range(params: RopeParams) -> tuple[float, float]:
    """Channel pairs between which YaRN blends from extrapolation to interpolation."""

    def channel_of(rotations: float) -> float:
        length = params.original_max_position / (rotations * 2 * math.pi)
        return params.dim * math.log(length) / (2 * math.log(params.base))

    low = max(math.floor(channel_of(params.beta_fast)), 0)
    high = min(math.ceil(channel_of(params.beta_slow)), params.dim - 1)
    return low, high if high != low else high + 0.001  # equal ends would divide by zero
