"""Chosen keys that travel with a forward pass: shared between layers, recorded, and replayed.

Every forward has an :class:`IndexBook` of its own, which is kept on the ``PackedSeqParams`` that
Megatron-Core hands to every layer and to every recomputation of it. Never on a config or a module:
those outlive the batch, and pipeline schedules have several batches in flight.

Legend: L rows of this context-parallel rank, B batch (absent when packed), K keys per row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

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


def index_book_of(packed_seq_params: PackedSeqParams | None) -> IndexBook | None:
    """The book of a forward pass; packed batches without one get it here."""
    if packed_seq_params is None:
        return None
    book = getattr(packed_seq_params, _ATTRIBUTE, None)
    if book is None:
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


def shares_indices(layer_number: int, offset: int, freq: int) -> bool:
    """Whether layer ``layer_number`` uses the indices of an earlier one."""
    return max(layer_number - max(offset, 1), 0) % freq != 0


def source_layer(layer_number: int, offset: int, freq: int) -> int:
    """Layer that chooses the keys of layer ``layer_number``: itself, or an earlier one."""
    if not shares_indices(layer_number, offset, freq):
        return layer_number
    return layer_number - (layer_number - max(offset, 1)) % freq
