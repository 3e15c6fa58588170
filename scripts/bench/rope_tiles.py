"""Sweep of tile sizes and warps of the rotary kernels; all have to write the same bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from scripts.bench.common import LEAD_CYCLES, distance, reason, times_us
from scripts.bench.rope_cases import CASES, Case, build, moved_bytes

SWEEP_BUDGET_S = 60
SWEPT = (
    ("rope_concat pack-q-4096x64", "forward"),
    ("rope_kv_split kv-4096x128-packed-v", "forward"),
    ("rope_kv_split kv-4096x128-packed-v", "backward"),
    ("rope_ rotate-q-4096x128", "forward"),
    ("rope_kv_split kv-32768x16-packed-v", "backward"),
    ("rope_kv_split kv-glm-4096x64-packed-v", "backward"),
    ("rope_kv_split kv-glm-4096x64-packed-v", "forward"),
)


def launcher(c: Case, direction: str, x: SimpleNamespace) -> tuple[Callable, list[Tensor]]:
    """A launch that takes tile options, and what it writes."""
    from megatron_mla.kernels.kv_split import launch_kv_split
    from megatron_mla.kernels.kv_split_backward import launch_kv_split_backward
    from megatron_mla.kernels.rope import launch_rope

    first = x.leaves[0]
    if c.op == "rope_":
        pe = first[..., c.n :]
        return functools.partial(launch_rope, pe, pe, *x.tables), [pe]
    out = first.new_empty(c.tokens, c.heads, c.n + c.d)
    if c.op == "rope_concat":
        nope = {"nope": first, "nope_out": out[..., : c.n]}
        launch = functools.partial(launch_rope, x.leaves[1], out[..., c.n :], *x.tables, **nope)
        return launch, [out]
    value = first.new_empty(c.tokens, c.heads, c.c)
    if direction == "forward":
        tensors, written, launch = (*x.leaves, out, value), [out, value], launch_kv_split
    else:
        torch.manual_seed(0)
        tensors, written = (out.normal_(), value.normal_(), *x.leaves), list(x.leaves)
        launch = launch_kv_split_backward
    return functools.partial(launch, *tensors, *x.tables, k_dim=c.n), written


def tile_options(c: Case, direction: str) -> list[dict]:
    """The default and about a dozen others, most of 1024 to 16384 elements."""
    if direction == "backward":
        return [{}, *({"block_t": t, "num_warps": w} for t in (1, 2, 4) for w in (2, 4, 8, 16))]
    width = {"rope_": c.d, "rope_concat": c.n + c.d, "rope_kv_split": c.n + c.d + c.c}[c.op]
    width, heads = (1 << (size - 1).bit_length() for size in (width, min(c.heads, 64)))
    found = [{}]
    for elements, warps in (
        (1024, (2,)), (2048, (2, 4)), (4096, (2, 4, 8)), (8192, (4, 8)), (16384, (8,))
    ):  # fmt: skip
        rows = max(1, elements // width)
        block_h = min(heads, rows)
        found += [{"tile": (rows // block_h, block_h), "num_warps": w} for w in warps]
        if elements in (4096, 8192):  # more tokens and fewer heads
            more = min(block_h, elements // 2048)
            tile = (more * rows // block_h, block_h // more)
            found.append({"tile": tile, "num_warps": 4})
    return found


def sweep(c: Case, direction: str, ceiling_tbps: float, clock: Callable = times_us,
          device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
    """Print the time of every tile, fastest first; all have to write the same bits."""
    calls, reference = {}, None
    for options in tile_options(c, direction):
        name = " ".join(f"{key} {value}" for key, value in options.items()) or "default"
        try:
            inputs = [build(c, device, dtype, seed, grad=False) for seed in (0, 1)]
            launches = [launcher(c, direction, x) for x in inputs]
            launches[0][0](**options)
            written = [t.clone() for t in launches[0][1]]
            if distance(written, reference or written):
                raise ValueError("its bits differ from the default's")
        except Exception as error:
            print(f"{c.op} {c.name} {direction}: {name} is left out ({reason(error)})", flush=True)
            continue
        reference = reference or written
        calls[name] = [functools.partial(launch, **options) for launch, _ in launches]
    medians = clock(calls, rounds=3, repeats=10, lead_cycles=LEAD_CYCLES)
    for name, us in sorted(medians.items(), key=lambda item: item[1]):
        share = moved_bytes(c, direction) / us / 1e6 / ceiling_tbps
        print(f"{c.op:13s} {c.name:24s} {direction:8s} {name:28s} {us:7.1f} us {share:6.1%}",
              flush=True)  # fmt: skip


def sweep_all(only: str, ceiling_tbps: float) -> None:
    cases, start = {f"{c.op} {c.name}": c for c in CASES}, time.monotonic()
    for name, direction in SWEPT:
        if only not in f"{name} {direction}":
            continue
        if time.monotonic() - start > SWEEP_BUDGET_S:
            print(f"{name} {direction} is left out: {SWEEP_BUDGET_S} s are over; use --only")
            continue
        sweep(cases[name], direction, ceiling_tbps)
        torch.cuda.empty_cache()
