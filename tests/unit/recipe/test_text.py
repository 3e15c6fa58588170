"""Three sources give the same thing: a stream of tokens with the starts of its documents."""

import numpy as np
import pytest
import torch

from megatron_mla.recipe.text import DEFAULT_TEXT, open_stream, split


def write_indexed(prefix, documents):
    """A Megatron indexed dataset; a document is a list of sequences of token ids."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for sequences in documents:
        flat = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(flat), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")


def test_default_is_real_text():
    stream = open_stream(None, 256)
    assert stream.name == DEFAULT_TEXT
    assert stream.num_tokens > 300_000
    assert len(stream.starts) > 1000
    text = bytes(stream.read(0, stream.num_tokens).astype(np.uint8))
    assert b"assert" in text and b"lambda" in text


def test_file_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\nline\n\ntwo\n\n\n\nthree\n")
    stream = open_stream(str(path), 256)
    assert bytes(stream.read(0, 99).astype(np.uint8)) == b"one\nline\n\ntwo\n\nthree\n\n\n"
    assert stream.starts.tolist() == [0, 10, 15]


def test_folder_is_read_in_order_without_binary_and_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    stream = open_stream(str(tmp_path), 256)
    assert bytes(stream.read(0, 99).astype(np.uint8)) == b"first\n\nsecond\n\n"


@pytest.mark.parametrize("start", [0, 2, 3, 5, 9])
@pytest.mark.parametrize("length", [1, 4, 8])
def test_indexed_dataset_reads_across_items(tmp_path, start, length):
    write_indexed(tmp_path / "d", [[[0, 1, 2], [3, 4]], [[5, 6, 7, 8, 9, 10]], [[11, 12, 13, 300]]])
    stream = open_stream(str(tmp_path / "d"), 512)
    everything = [*range(14), 300]
    assert stream.num_tokens == 15
    assert stream.starts.tolist() == [0, 5, 11]
    assert stream.read(start, length).tolist() == everything[start : start + length]


@pytest.mark.parametrize(
    ("make", "vocab", "message"),
    [
        pytest.param(lambda p: p / "none", 256, "no such file or folder", id="missing"),
        pytest.param(lambda p: p / "x.idx", 256, "give the prefix", id="suffix"),
        pytest.param(lambda p: p, 256, "holds no text", id="empty-folder"),
        pytest.param(lambda p: None, 128, "vocab_size must be at least 256", id="vocabulary"),
    ],
)
def test_bad_path_is_refused(tmp_path, make, vocab, message):
    path = make(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_stream(None if path is None else str(path), vocab)


def test_half_an_indexed_dataset_is_refused(tmp_path):
    write_indexed(tmp_path / "d", [[[1, 2]]])
    (tmp_path / "d.bin").unlink()
    with pytest.raises(ValueError, match=r"found \.idx but no"):
        open_stream(str(tmp_path / "d"), 512)


def test_parts_share_no_token_and_held_out_starts_a_document():
    stream = open_stream(None, 256)
    train, held_out = split(stream, 0.05, 256)
    assert train.start == 0 and train.end == held_out.start and held_out.end == stream.num_tokens
    assert held_out.start in stream.starts
    assert 0.04 < (held_out.end - held_out.start) / stream.num_tokens <= 0.05


def test_too_little_text_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    with pytest.raises(ValueError, match="held-out part .* has 13 tokens, fewer than .* = 33"):
        split(open_stream(str(path), 256), 0.12, 32)
