"""Which tokens a rank sees at which step.

The position in the data is ``(seed, sample index)`` and nothing else: a run that resumes at sample
n reads what an uninterrupted one would, and the samples of a global batch do not depend on how
many ranks share it.

Legend: S seq_length, B samples of a micro-batch, T = B * S tokens of a packed micro-batch,
N sequences in it. Rows of a context-parallel rank come from :mod:`megatron_mla.parallel.layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_mla.parallel.layout import rows_of_rank, thd_positions

from .text import Part


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's place among those that share a batch."""

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    pad_multiple: int = 1  # of every packed sequence: parallel.layout.padding_multiple


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of this rank; [B, S / cp], or [1, T / cp] when packed."""

    tokens: Tensor  # int64
    labels: Tensor  # int64, the next token
    loss_mask: Tensor  # fp32, 0 on padding and on the last token of a packed document
    position_ids: Tensor  # int64, inside the token's own sequence
    packed: PackedSeqParams | None


class Samples:
    """Samples of a part in their order.

    Training (``shuffle``) walks windows of ``seq_length`` tokens in a fresh order and with a fresh
    offset every epoch; held-out samples are the same windows in the same order every time.
    """

    def __init__(self, part: Part, seq_length: int, *, seed: int, shuffle: bool) -> None:
        self.part, self.seq_length, self.seed, self.shuffle = part, seq_length, seed, shuffle
        tokens = part.end - part.start - 1  # the last token is a label only
        # One window fewer leaves room for the offset of an epoch.
        self.per_epoch = max(tokens // seq_length - (1 if shuffle else 0), 1)
        self._slack = min(tokens - self.per_epoch * seq_length, seq_length - 1)
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def start_of(self, index: int) -> int:
        """First token, in the stream, of sample ``index``."""
        epoch, place = divmod(index, self.per_epoch)
        if not self.shuffle:
            return self.part.start + place * self.seq_length
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            offset = int(rng.integers(self._slack + 1))
            self._epoch = epoch, offset, rng.permutation(self.per_epoch)
        _, offset, order = self._epoch
        return self.part.start + offset + int(order[place]) * self.seq_length

    def window(self, index: int) -> np.ndarray:
        """[S + 1] int64: the sample's tokens and the label of its last one."""
        return self.part.stream.read(self.start_of(index), self.seq_length + 1)

    def boundaries(self, index: int) -> np.ndarray:
        """Places inside the window, ascending in (0, S], where a document starts."""
        start = self.start_of(index)
        starts = self.part.stream.starts
        low, high = np.searchsorted(starts, [start + 1, start + self.seq_length + 1])
        return starts[low:high] - start


def packed_sample(
    window: np.ndarray, boundaries: np.ndarray, multiple: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int], list[int]]:
    """Lay the documents of one window side by side, each padded to ``multiple``.

    Padding takes room, so the end of the window may be left out; the sample is exactly S rows.

    Args:
        window: [S + 1] int64.
        boundaries: places in (0, S] where a document starts.
        multiple: divides S.
    Returns:
        tokens, labels, loss mask, each [S]; lengths and padded lengths of the N sequences.
    """
    room = window.size - 1
    tokens, labels = (np.zeros(room, dtype=np.int64) for _ in range(2))
    mask = np.zeros(room, dtype=np.float32)
    lengths, padded = [], []
    row = 0
    edges = [0, *boundaries.tolist(), room]
    for begin, end in zip(edges, edges[1:], strict=False):
        length = min(end - begin, room - row)
        if length <= 0:
            continue
        rows = slice(row, row + length)
        tokens[rows] = window[begin : begin + length]
        labels[rows] = window[begin + 1 : begin + length + 1]
        mask[rows] = 1.0
        if begin + length in boundaries:
            mask[row + length - 1] = 0.0  # its label would be the first token of the next document
        lengths.append(length)
        padded.append(-(-length // multiple) * multiple)
        row += padded[-1]
    return tokens, labels, mask, lengths, padded


class Batches:
    """Micro-batches of this rank from a sample index on."""

    def __init__(
        self,
        samples: Samples,
        share: Share,
        *,
        micro_batch_size: int,
        vocab_size: int,
        packing: bool,
        device: torch.device,
    ) -> None:
        self.samples, self.share, self.packing, self.device = samples, share, packing, device
        self.micro_batch_size, self.vocab_size = micro_batch_size, vocab_size

    def from_sample(self, index: int) -> Iterator[Batch]:
        """Micro-batches for ever; ``index`` is the first sample of a global batch."""
        per_forward = self.micro_batch_size * self.share.dp_size
        while True:
            first = index + self.share.dp_rank * self.micro_batch_size
            own = range(first, first + self.micro_batch_size)
            yield self._packed(own) if self.packing else self._plain(own)
            index += per_forward

    def _plain(self, own: range) -> Batch:
        windows = torch.from_numpy(np.stack([self.samples.window(i) for i in own]))  # [B, S + 1]
        self._check(windows)
        length = windows.shape[1] - 1
        rows = rows_of_rank(length, self.share.cp_rank, self.share.cp_size)
        tokens = windows[:, :-1][:, rows]
        return self._to_device(
            tokens=tokens,
            labels=windows[:, 1:][:, rows],
            loss_mask=torch.ones_like(tokens, dtype=torch.float32),
            position_ids=rows.expand_as(tokens),
            packed=None,
        )

    def _packed(self, own: range) -> Batch:
        parts = [
            packed_sample(
                self.samples.window(i), self.samples.boundaries(i), self.share.pad_multiple
            )
            for i in own
        ]
        tokens, labels, mask = (
            torch.from_numpy(np.concatenate([part[place] for part in parts])) for place in range(3)
        )  # [T]
        self._check(tokens)
        lengths = [length for part in parts for length in part[3]]
        padded = [length for part in parts for length in part[4]]
        cu, cu_padded = (
            torch.tensor([0, *np.cumsum(each).tolist()], dtype=torch.int32)
            for each in (lengths, padded)
        )
        cp_rank, cp_size = self.share.cp_rank, self.share.cp_size
        rows = rows_of_rank(tokens.numel(), cp_rank, cp_size, cu_padded)
        positions = thd_positions(cu_padded, rows.numel(), cp_rank, cp_size).long()
        cu, cu_padded = cu.to(self.device), cu_padded.to(self.device)
        return self._to_device(
            tokens=tokens[None, rows],
            labels=labels[None, rows],
            loss_mask=mask[None, rows],
            position_ids=positions[None],
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu,
                cu_seqlens_kv=cu,
                cu_seqlens_q_padded=cu_padded,
                cu_seqlens_kv_padded=cu_padded,
                max_seqlen_q=max(padded),
                max_seqlen_kv=max(padded),
            ),
        )

    def _to_device(self, *, packed: PackedSeqParams | None, **tensors: Tensor) -> Batch:
        moved = {name: t.contiguous().to(self.device) for name, t in tensors.items()}
        return Batch(packed=packed, **moved)

    def _check(self, tokens: Tensor) -> None:
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise ValueError(
                f"token {largest} of {self.samples.part.stream.name} is outside data.vocab_size = "
                f"{self.vocab_size}; set --vocab-size to that of the tokenizer"
            )
