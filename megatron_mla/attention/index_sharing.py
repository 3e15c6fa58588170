"""Chosen keys that travel with a forward pass: shared between layers, recorded, and replayed.

Every forward has an :class:`IndexBook` of its own, which is kept on the ``PackedSeqParams`` that
Megatron-Core hands to every layer and to every recomputation of it. Never on a config or a module:
those outlive the batch, and pipeline schedules have several batches in flight.

Legend: L rows of this context-parallel rank, B batch (absent when packed), K keys per row.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_ATTRIBUTE = "_megatron_mla_index_book"


@dataclass(eq=False)
class IndexBook:
    """Indices of one forward pass by layer (1-based; MTP layers are counted after the decoder).

    Attributes:
        given: indices that layers use instead of choosing, [L, (B,) K] integer rows of the sequence
            (of the packed batch, in global order), -1 for none. Layers that share take their
            source's. Keys that a row may not see are dropped.
        chosen: what layers that choose have used, int32; filled by the forward pass.
    """

    given: Mapping[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)


def with_index_book(
    packed_seq_params: PackedSeqParams | None, book: IndexBook | None = None
) -> PackedSeqParams:
    """``packed_seq_params`` (None for an unpacked batch) for one forward pass with ``book``.

    Returns:
        A copy, so that another forward with the same lengths does not meet this one's indices.
    """
    if packed_seq_params is None:
        params = PackedSeqParams(qkv_format="sbhd")
    else:
        params = copy.copy(packed_seq_params)
    setattr(params, _ATTRIBUTE, IndexBook() if book is None else book)
    return params


def index_book_of(
    packed_seq_params: PackedSeqParams | None, *, create: bool = True
) -> IndexBook | None:
    """The book of a forward pass.

    Args:
        create: give one to a packed batch that has none. It holds what layers chose for as long as
            the batch lives, so only where layers share.
    """
    if packed_seq_params is None:
        return None
    book = getattr(packed_seq_params, _ATTRIBUTE, None)
    if book is None and create:
        book = IndexBook()
        setattr(packed_seq_params, _ATTRIBUTE, book)
    return book


def install_index_books(model: torch.nn.Module) -> None:
    """Give every forward pass of the transformer blocks in ``model`` an index book of its own.

    A model whose layers share indices needs it, unless every batch comes with its own
    ``PackedSeqParams`` from :func:`with_index_book`. Books that are there are kept.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    def give(module, args, kwargs):
        params = kwargs.get("packed_seq_params")
        if params is None or not hasattr(params, _ATTRIBUTE):
            kwargs["packed_seq_params"] = with_index_book(params)
        return args, kwargs

    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.register_forward_pre_hook(give, with_kwargs=True)


def check_given(indices: Tensor, source: int, num_rows: int, batch: int) -> Tensor:
    """[L, B, K] int32 of indices from outside."""
    if indices.dim() == 2 and batch == 1:
        indices = indices.unsqueeze(1)
    whole = not indices.dtype.is_floating_point and indices.dtype != torch.bool
    if not whole or indices.dim() != 3 or indices.shape[:2] != (num_rows, batch):
        raise ValueError(
            f"given indices of layer {source} must be integers [{num_rows}, {batch}, K], rows of "
            f"this context-parallel rank and batch, got {indices.dtype} {list(indices.shape)}; cut "
            "them as the tokens are cut, or pack them as the batch is packed"
        )
    return indices.to(torch.int32)


def save_indices(path: Path | str, chosen: Mapping[int, Tensor]) -> None:
    """Write indices by layer, an ``IndexBook``'s ``chosen`` for instance."""
    tensors = {
        number: indices.detach().to("cpu", torch.int32) for number, indices in chosen.items()
    }
    torch.save(tensors, path)


def load_indices(path: Path | str) -> dict[int, Tensor]:
    """Read what :func:`save_indices` wrote; an ``IndexBook`` replays it as ``given``.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} must be a recording of indices, got {error}") from error
    if not isinstance(found, dict) or not all(
        isinstance(number, int) and isinstance(indices, Tensor) and not indices.is_floating_point()
        for number, indices in found.items()
    ):
        raise ValueError(f"{path} must be a recording of indices by layer, got something else")
    return found


def index_overlap(first: Tensor, second: Tensor) -> tuple[float, float]:
    """How far two choices for the same rows agree, whatever their order.

    Args:
        first, second: [..., K] and [..., K'] integer, negative for none.
    Returns:
        Keys in common over the keys of the row that has more, over all rows; and the share of rows
        with the same keys. Rows without a key in both count as the same.
    Raises:
        ValueError: the rows are others.
    """
    if first.shape[:-1] != second.shape[:-1]:
        raise ValueError(
            f"both choices must be for the same rows, got {list(first.shape)} and "
            f"{list(second.shape)}"
        )
    common = most = same = rows = 0
    # All pairs of a few rows at a time: 16 MiB.
    step = max(1, (1 << 24) // max(1, first.shape[-1] * second.shape[-1]))
    pieces = (t.flatten(0, -2).split(step) for t in (first, second))
    for a, b in zip(*pieces, strict=True):
        in_both = ((a.unsqueeze(-1) == b.unsqueeze(-2)) & (a >= 0).unsqueeze(-1)).any(-1).sum(-1)
        larger = torch.maximum((a >= 0).sum(-1), (b >= 0).sum(-1))
        common, most = common + int(in_both.sum()), most + int(larger.sum())
        same, rows = same + int((in_both == larger).sum()), rows + len(a)
    return (common / most if most else 1.0), (same / rows if rows else 1.0)


def shares_indices(layer_number: int, offset: int, freq: int) -> bool:
    """Whether layer ``layer_number`` uses the indices of an earlier one."""
    return max(layer_number - max(offset, 1), 0) % freq != 0


def source_layer(layer_number: int, offset: int, freq: int) -> int:
    """Layer that chooses the keys of layer ``layer_number``: itself, or an earlier one."""
    if not shares_indices(layer_number, offset, freq):
        return layer_number
    return layer_number - (layer_number - max(offset, 1)) % freq
