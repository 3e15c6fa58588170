"""Two recordings of the keys that sparse attention chose, held side by side, layer by layer.

A recording is what :func:`megatron_mla.attention.index_sharing.save_indices` wrote of an
``IndexBook``: of a rollout and of the training that follows it, of two precisions, of two engines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_mla.attention.index_sharing import index_overlap, load_indices


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, 1 when a layer is below ``--at-least``, or 2 after a user error."""
    parser = argparse.ArgumentParser(
        prog="index_overlap.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, help="a recording")
    parser.add_argument("second", type=Path, help="another one of the same tokens and layers")
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="X",
        help="end with 1 if a layer shares less than this part of its keys, in [0, 1]",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        first, second = load_indices(options.first), load_indices(options.second)
        if first.keys() != second.keys():
            raise ValueError(
                f"both recordings must hold the same layers, got {sorted(first)} and "
                f"{sorted(second)}; record the same model twice"
            )
        found = {number: index_overlap(first[number], second[number]) for number in sorted(first)}
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("layer   keys in common   rows with the same keys")
    for number, (keys, rows) in found.items():
        print(f"{number:5d} {keys:16.4%} {rows:25.2%}")
    return int(any(keys < options.at_least for keys, _ in found.values()))
