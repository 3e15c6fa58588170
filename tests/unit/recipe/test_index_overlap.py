"""Recordings of chosen keys: written, read, compared, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.attention.index_sharing import index_overlap, load_indices, save_indices
from megatron_mla.recipe.index_overlap import main


@pytest.mark.parametrize("batch", [None, 3])
def test_overlap_is_that_of_sets(batch) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (40,) if batch is None else (40, batch)
    picks = [torch.rand(*shape, 20, generator=generator).argsort(-1)[..., :k] for k in (6, 9)]
    for t in picks:
        t[torch.rand(t.shape, generator=generator) < 0.3] = -1
    common = most = same = 0
    for a, b in zip(*(t.flatten(0, -2).tolist() for t in picks), strict=True):
        a, b = ({i for i in row if i >= 0} for row in (a, b))
        common, most = common + len(a & b), most + max(len(a), len(b))
        same += a == b
    rows = picks[0][..., 0].numel()
    assert index_overlap(*picks) == (common / most, same / rows)
    assert index_overlap(picks[0], picks[0].flip(-1)) == (1.0, 1.0)


def test_rows_without_keys_agree() -> None:
    nothing = torch.full((4, 3), -1)
    assert index_overlap(nothing, nothing) == (1.0, 1.0)
    assert index_overlap(nothing, torch.tensor([[0, 1, 2]] * 4)) == (0.0, 0.0)
    with pytest.raises(ValueError, match="same rows"):
        index_overlap(nothing, nothing[:3])


def test_tool_tells_layers_apart_and_fails_below_a_bound(tmp_path, capsys) -> None:
    one = {1: torch.tensor([[0, 1], [1, 2]]), 3: torch.tensor([[5, 6], [7, 8]])}
    other = {1: one[1].flip(-1), 3: torch.tensor([[5, 6], [9, 8]])}
    paths = [str(tmp_path / name) for name in ("one.pt", "other.pt")]
    save_indices(paths[0], one)
    save_indices(paths[1], other)
    assert all(torch.equal(load_indices(paths[0])[n], one[n].int()) for n in one)
    assert main(paths) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "100.0000%", "100.00%"]
    assert lines[2].split() == ["3", "75.0000%", "50.00%"]
    assert main([*paths, "--at-least", "0.75"]) == 0
    assert main([*paths, "--at-least", "0.8"]) == 1


def test_files_that_are_no_recordings_are_refused(tmp_path, capsys) -> None:
    good, text, other = (tmp_path / name for name in ("good.pt", "text.pt", "other.pt"))
    save_indices(good, {1: torch.tensor([[0]])})
    text.write_text("no tensors")
    torch.save({"weight": torch.ones(2)}, other)
    for path in (text, other, tmp_path / "none.pt"):
        assert main([str(good), str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    save_indices(other, {2: torch.tensor([[0]])})
    assert main([str(good), str(other)]) == 2
    assert "same layers" in capsys.readouterr().err
