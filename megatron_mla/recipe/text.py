"""Where tokens come from: one long stream of tokens with the starts of its documents.

Three sources give the same thing: Python's language reference (every Python carries it, so a run
needs no download), text files, and a Megatron indexed dataset. Text is read as bytes: token = byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

BYTE_VOCABULARY = 256
DEFAULT_TEXT = "the Python language reference (pydoc_data.topics)"


class Stream(Protocol):
    """A stream of tokens."""

    name: str
    starts: np.ndarray  # [documents] int64, first token of every document, ascending, starts[0] = 0
    num_tokens: int

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [length] int64 from ``start`` on, fewer where the stream ends."""
        ...


class ByteStream:
    """Text as bytes. A document is a paragraph: text up to and with its blank line."""

    def __init__(self, name: str, texts: list[bytes]) -> None:
        self.name = name
        pieces = [piece for text in texts for piece in _paragraphs(text)]
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        self._bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.num_tokens = int(self._bytes.size)

    def read(self, start: int, length: int) -> np.ndarray:
        return self._bytes[start : start + length].astype(np.int64)


class IndexedStream:
    """A Megatron indexed dataset, read through Megatron-Core's memory map."""

    def __init__(self, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.name = f"indexed dataset {prefix}"
        self._items = IndexedDataset(prefix)
        lengths = np.asarray(self._items.sequence_lengths, dtype=np.int64)
        self._ends = np.cumsum(lengths)
        item_starts = np.concatenate([[0], self._ends])
        first_items = np.asarray(self._items.document_indices[:-1], dtype=np.int64)
        self.starts = item_starts[first_items]
        self.num_tokens = int(self._ends[-1]) if lengths.size else 0

    def read(self, start: int, length: int) -> np.ndarray:
        parts = []
        length = min(length, self.num_tokens - start)
        item = int(np.searchsorted(self._ends, start, side="right"))
        while length > 0:
            end = int(self._ends[item])
            item_start = end - int(self._items.sequence_lengths[item])
            take = min(length, end - start)
            if take:
                parts.append(self._items.get(item, offset=start - item_start, length=take))
            start, length, item = start + take, length - take, item + 1
        return np.concatenate(parts).astype(np.int64)


def _paragraphs(text: bytes) -> list[bytes]:
    pieces = [piece + b"\n\n" for piece in text.split(b"\n\n") if piece.strip()]
    return pieces or [text]


def open_stream(data_path: str | None, vocab_size: int) -> Stream:
    """Open the source that ``--data-path`` names.

    Args:
        data_path: text file, folder of text files, prefix of an indexed dataset; None: the default.
        vocab_size: rows of the embedding.
    Raises:
        ValueError: the path names nothing readable, or text meets a vocabulary below 256.
    """
    if data_path is not None and Path(data_path + ".idx").is_file():
        if not Path(data_path + ".bin").is_file():
            raise ValueError(f"--data-path {data_path}: found .idx but no {data_path}.bin")
        return IndexedStream(data_path)
    if vocab_size < BYTE_VOCABULARY:
        raise ValueError(
            f"data.vocab_size must be at least {BYTE_VOCABULARY} for text, which is read as bytes, "
            f"got {vocab_size}; raise it or give an indexed dataset by --data-path"
        )
    if data_path is None:
        return ByteStream(DEFAULT_TEXT, _language_reference())
    path = Path(data_path)
    if path.suffix in (".bin", ".idx"):
        raise ValueError(
            f"--data-path {data_path}: give the prefix of an indexed dataset, without .bin or .idx"
        )
    if path.is_file():
        texts = [path.read_bytes()]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        texts = [text for file in files if b"\0" not in (text := file.read_bytes())]
    else:
        raise ValueError(
            f"--data-path {data_path}: no such file or folder, and no {data_path}.bin with .idx; "
            "leave the flag out to train on Python's language reference"
        )
    if not any(text.strip() for text in texts):
        raise ValueError(f"--data-path {data_path} holds no text")
    return ByteStream(str(path), texts)


def _language_reference() -> list[bytes]:
    try:
        from pydoc_data import topics
    except ImportError:
        raise ValueError(
            "this Python carries no pydoc_data.topics (the default text); give a text file or "
            "folder by --data-path"
        ) from None
    return [topics.topics[name].encode() for name in sorted(topics.topics)]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens ``[start, end)`` of a stream: what is trained on, or what is held out."""

    stream: Stream
    start: int
    end: int


def split(stream: Stream, valid_fraction: float, seq_length: int) -> tuple[Part, Part]:
    """Training and held-out part. The held-out part is the end, from a document's start on.

    Raises:
        ValueError: a part holds less than one sample of ``seq_length + 1`` tokens.
    """
    cut = int(stream.num_tokens * (1 - valid_fraction))
    # Where no document starts near the end, one is cut; its tokens are still in one part only.
    later = stream.starts[stream.starts >= cut]
    if later.size and stream.num_tokens - later[0] > seq_length:
        cut = int(later[0])
    train = Part(stream=stream, start=0, end=cut)
    held_out = Part(stream=stream, start=cut, end=stream.num_tokens)
    for name, part in (("training", train), ("held-out", held_out)):
        tokens = part.end - part.start
        if tokens < seq_length + 1:
            raise ValueError(
                f"the {name} part of {stream.name} has {tokens} tokens, fewer than one sample of "
                f"data.seq_length + 1 = {seq_length + 1}; give more text, lower --seq-length or "
                f"change --valid-fraction = {valid_fraction}"
            )
    return train, held_out
