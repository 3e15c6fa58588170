"""Half-width cos and sin tables that grow on demand.

A table depends on the rope parameters, the dtype and the device, and a row of it on its position
alone. Nothing here is a parameter or a buffer, so no table enters a state dict.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_mla.rope.frequencies import RopeParams, concentration, inv_freq

# Row counts are powers of two from here on: a longer table then repeats the rows of a shorter one
# bit for bit, because no vectorised cos or sin ever meets a ragged tail.
_MIN_ROWS = 1024


class RopeTables:
    """cos and sin of one set of rope parameters, shared by all layers.

    Args:
        params: rope parameters.
        numerics: "megatron" rounds the tables once to the activation dtype; "fp32" keeps fp32.
    """

    def __init__(self, params: RopeParams, numerics: str = "megatron") -> None:
        self.params = params
        self.numerics = numerics
        self._cached: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def get(
        self, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """cos and sin for positions below ``length``.

        Args:
            length: rows needed, tokens.
            dtype: activation dtype.
        Returns:
            Two [P, dim / 2] tensors with P >= length, in ``dtype`` ("megatron") or fp32.
        """
        if self.numerics == "fp32":
            dtype = torch.float32
        device = torch.device(device)
        table = self._cached.get((dtype, device))
        if table is None or table[0].shape[0] < length:
            rows = max(_MIN_ROWS, 1 << max(length - 1, 0).bit_length())
            table = self._cached[dtype, device] = self._make(rows, dtype, device)
        return table

    def _make(self, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        # Not as inference tensors, which a later training step could not save for its backward.
        with torch.inference_mode(False), torch.no_grad():
            position = torch.arange(rows, dtype=torch.float32, device=device)
            angle = torch.outer(position, inv_freq(self.params, device))  # [P, dim/2]
            factor = concentration(self.params)
            return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


@functools.cache
def shared_tables(params: RopeParams, numerics: str) -> RopeTables:
    """The one :class:`RopeTables` of these parameters in this process."""
    return RopeTables(params, numerics)


def half_width(table: Tensor, dim: int, name: str = "cos") -> Tensor:
    """Halve a full-width table of Megatron-Core, [P, 1, 1, d] or [P, d], whose halves are equal.

    Raises:
        ValueError: the table's width is not ``dim``.
    """
    if table.shape[-1] != dim:
        raise ValueError(
            f"{name} must be as wide as the rotated channels, {dim}, got {table.shape[-1]}; a "
            "narrower table (rotary_percent < 1) has to take the unfused path"
        )
    return table.reshape(-1, dim)[:, : dim // 2]
