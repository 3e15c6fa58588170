"""For operators that work rows in chunks: bounds of keys, and the largest tensor that is made."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.rotations import DEVICE


def bounds_of(spans) -> SimpleNamespace:
    """KeyBounds of (start, end) of every row, on :data:`DEVICE`."""
    host = torch.tensor(list(spans), dtype=torch.int32).reshape(-1, 2).t().contiguous()
    starts, ends = host.to(DEVICE)
    return SimpleNamespace(starts=starts, ends=ends, host=host)


def causal(*lengths: int) -> SimpleNamespace:
    """Rows of packed sequences, each of which sees its own past and itself."""
    firsts = [end - n for end, n in zip(accumulate(lengths), lengths, strict=True)]
    pairs = zip(firsts, lengths, strict=True)
    return bounds_of((first, first + i + 1) for first, n in pairs for i in range(n))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes; views make none."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, Tensor)]
            self.elements = max([self.elements, *sizes])
        return made
