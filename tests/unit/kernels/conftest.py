"""Fresh memory holds NaN, and the interpreter runs several programs per launch."""

from __future__ import annotations

import pytest
import torch


def _filled(empty):
    def with_nan(*args, **kwargs):
        t = empty(*args, **kwargs)
        if t.is_floating_point():
            with torch.no_grad():  # torch 2.11 makes leaves with it
                t.fill_(torch.nan)
        return t

    return with_nan


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """An output that a kernel does not write cannot pass."""
    # Not the fixture ``monkeypatch``: Hypothesis refuses what is made anew for every test.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _filled(torch.empty))
        patch.setattr(torch, "empty_like", _filled(torch.empty_like))
        yield


@pytest.fixture(autouse=True)
def several_programs():
    """Its own tiles on a CPU hold most of the problems here whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_mla.kernels.rotation._CPU_TILE", 1 << 14)
        yield
