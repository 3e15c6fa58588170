"""Queries and keys for FP8 attention: one launch beside rotating, concatenating and casting.

    python scripts/bench/fp8.py                  # tests of the kernel, then all cases
    python scripts/bench/fp8.py --only adjacent  # cases whose "op case direction" has this text
    python scripts/bench/fp8.py --quick --no-tests --no-compile  # the fastest look
    python scripts/bench/fp8.py --list           # the cases; needs no GPU
    python scripts/bench/fp8.py --tiles          # tile sizes and warps of the kernel, no rows
    python scripts/bench/fp8.py --chart          # draw the newest rows again; needs no GPU

Before a case is timed, ours is held against its PyTorch twin, byte for byte, and the run stops if
they differ. "eager" is what people write without a kernel: rotation in fp32 back to bf16, cat,
cast, so two roundings. A peer that is off by more than 5e-2 is left out, and then the run ends with
status 1. "copy" copies as many bytes as the case has to move. Rows go to benchmarks/fp8.csv, the
chart to docs/fp8_bench.svg.

``tbps`` is what the operation has to move (every input read once, every output written once) over
the time, with the same bytes for every implementation of a case; ``share`` is of a 512 MiB copy on
the device in the same run.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import (  # noqa: E402
    LEAD_CYCLES,
    ROOT,
    append_rows,
    closed,
    compiled,
    distance,
    forward_rows,
    machine,
    measure,
    opened,
    parser_of,
    reason,
    times_us,
)
from scripts.bench.rope import copy_row  # noqa: E402

# Of FP8 against FP8 of something rounded to bf16 before.
PEER_LIMIT = 5e-2
VALUE = 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """Queries and keys of a number of heads.

    Attributes:
        mode: "nope", "neox" or "adjacent".
        n, d: unrotated and positional channels of a head.
        latent: keys are one head of a latent, a row of a cache; else slices of [T, H, N + V].
    """

    mode: str
    tokens: int
    heads: int
    n: int = 128
    d: int = 64
    latent: bool = False
    compiled: bool = False
    op: str = "fp8_pack"
    directions: tuple[str, ...] = ("forward",)

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.tokens}x{self.heads}{'-latent' * self.latent}"

    def scaled(self, tokens: int, heads: int) -> Case:
        """The same case with few tokens and heads."""
        return replace(self, tokens=tokens, heads=min(heads, self.heads))


SIZES = ((4096, 8), (4096, 128), (16384, 32), (65536, 8), (65536, 32))
MODES = ("nope", "neox", "adjacent")
CASES = (
    *(Case(mode=mode, tokens=tokens, heads=heads, compiled=(tokens, heads) == (4096, 128))
      for mode in MODES for tokens, heads in SIZES),
    *(Case(mode=mode, tokens=tokens, heads=heads, n=512, latent=True)
      for mode in MODES for tokens, heads in ((4096, 1), (65536, 1), (4096, 64))),
)  # fmt: skip


def moved_bytes(c: Case) -> int:
    """Bytes of all inputs and outputs once; of the table, the rows that occur."""
    heads_k = 1 if c.latent else c.heads
    read = c.tokens * (c.heads * (c.n + c.d) + heads_k * c.n + c.d)
    written = c.tokens * (c.heads + heads_k) * (c.n + c.d)
    where = 0 if c.mode == "nope" else c.tokens * (4 * c.d + 4)  # fp32 rows, int32 positions
    return 2 * read + written + where


def build(c: Case, device: str, dtype: torch.dtype, seed: int) -> SimpleNamespace:
    """Inputs as a layer has them; the same numbers for the same seed."""
    from megatron_mla.rope.frequencies import RopeParams
    from megatron_mla.rope.tables import shared_tables

    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = random(c.tokens, c.heads, c.n + c.d)
    row = random(c.tokens, 1, (c.n if c.latent else 512) + c.d)
    k_nope = row[..., : c.n] if c.latent else random(c.tokens, c.heads, c.n + VALUE)[..., : c.n]
    table = positions = None
    if c.mode != "nope":
        halves = shared_tables(RopeParams(dim=c.d), "fp32").get(c.tokens, torch.float32, device)
        table = torch.cat(halves, dim=-1)
        positions = torch.arange(c.tokens, dtype=torch.int32, device=device)
    arguments = (q[..., : c.n], q[..., c.n :], k_nope, row[..., -c.d :], table, positions)
    half = torch.empty(moved_bytes(c) // 2, dtype=torch.uint8, device=device)
    return SimpleNamespace(arguments=(*arguments, c.mode == "neox"), source=half.fill_(seed))


def eager(q_nope, q_pe, k_nope, k_pe, table, positions, neox) -> tuple[Tensor, Tensor]:
    """Rotate, concatenate, cast."""
    if table is not None:
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)

        def rotated(t: Tensor) -> Tensor:
            x, y = t.float().chunk(2, -1) if neox else t.float().unflatten(-1, (-1, 2)).unbind(-1)
            both = x * cos - y * sin, y * cos + x * sin
            out = torch.cat(both, -1) if neox else torch.stack(both, -1).flatten(-2)
            return out.to(t.dtype)

        q_pe, k_pe = rotated(q_pe), rotated(k_pe)
    k_pe = k_pe.expand(*k_nope.shape[:-1], -1)
    query, key = (torch.cat(parts, -1) for parts in ((q_nope, q_pe), (k_nope, k_pe)))
    return query.to(torch.float8_e4m3fn), key.to(torch.float8_e4m3fn)


def implementations(c: Case) -> dict[str, Callable[[SimpleNamespace], tuple[Tensor, ...]]]:
    """By name, functions of the inputs."""
    from megatron_mla.kernels.fp8_pack import fused_rope_fp8_quantize

    def call(function: Callable) -> Callable:
        return lambda x: function(*x.arguments)

    found = {"ours": call(fused_rope_fp8_quantize), "eager": call(eager)}
    if c.compiled:
        found["torch.compile"] = call(compiled(eager))
    found["copy"] = lambda x: (x.source.clone(),)
    return found


def off(name: str, c: Case, x: SimpleNamespace, answer: tuple[Tensor, ...]) -> float:
    """Distance from what is right: of ours in bytes, of others in values."""
    from megatron_mla.kernels.fp8_pack_ref import fused_rope_fp8_quantize_ref

    if name == "copy":
        return distance(answer, (x.source,))
    want = fused_rope_fp8_quantize_ref(*x.arguments)
    if name == "ours":
        answer, want = (tuple(t.view(torch.uint8) for t in both) for both in (answer, want))
    else:  # torch.equal knows no FP8 on a CPU
        answer, want = (tuple(t.to(torch.bfloat16) for t in both) for both in (answer, want))
    return distance(answer, want)


def checked_calls(
    c: Case, device: str, dtype: torch.dtype, sets: int
) -> tuple[dict[str, list[Callable]], list[str]]:
    """Calls of every implementation on ``sets`` inputs, and complaints about wrong peers.

    Raises:
        SystemExit: ours does not run, or is not what its twin is.
    """
    calls, wrong = {}, []
    inputs = [build(c, device, dtype, seed) for seed in range(sets)]
    for name, run in implementations(c).items():
        what = f"{c.op} {c.name}: {name}"
        try:
            turn = [torch.no_grad()(functools.partial(run, x)) for x in inputs]
            distant = off(name, c, inputs[0], turn[0]())
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            if name == "ours":
                raise SystemExit(f"{what} cannot run ({reason(error)}); not timed") from error
            print(f"{what} is left out ({reason(error)})", flush=True)
            continue
        if distant <= (0.0 if name in ("ours", "copy") else PEER_LIMIT):
            calls[name] = turn
        elif name == "ours":
            raise SystemExit(f"{what} is off its twin by {distant:.1e}; not timed")
        else:
            wrong.append(f"{what} is left out, off by {distant:.1e}")
            print(wrong[-1], flush=True)
    return calls, wrong


def bench(c: Case, *, measured: Callable, ceiling_tbps: float, about: dict, sets: int = 2,
          device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[dict], list[str]]:  # fmt: skip
    """Rows of a case, and complaints about wrong peers.

    Args:
        measured: from calls by implementation to columns by implementation.
        ceiling_tbps: TB/s of a copy on the device.
        about: columns of the machine.
        sets: inputs that the calls rotate over.
    """
    calls, wrong = checked_calls(c, device, dtype, sets)
    rows = forward_rows(
        c, measured(calls), moved=moved_bytes(c), ceiling_tbps=ceiling_tbps, about=about
    )
    return rows, wrong


def run_cases(chosen: list[tuple[Case, str]], l2_bytes: int, **how) -> list[str]:
    """Append the rows of every case as it ends. Returns complaints; ``how`` goes to bench."""
    complaints = []
    for c, _ in chosen:
        # Together far more than the L2 holds.
        sets = min(32, max(2, math.ceil(4 * l2_bytes / moved_bytes(c))))
        rows, wrong = bench(c, sets=sets, **how)
        append_rows("fp8", rows)
        complaints += wrong
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return complaints


def tile_options(c: Case) -> list[dict]:
    """The default, and tiles of 8 to 128 heads with 4 and 8 warps."""
    found: list[dict] = [{}]
    heads = 1 << (c.heads - 1).bit_length()
    for rows in (8, 16, 32, 64, 128):
        across = min(heads, rows)
        tile = (rows // across, across)
        tile_k = (rows, 1) if c.latent else tile
        found += [{"tiles": (tile, tile_k), "num_warps": warps} for warps in (4, 8)]
    return found


def sweep(c: Case, clock: Callable, *, device: str = "cuda", dtype=torch.bfloat16) -> None:
    """Print the microseconds of every tile; all have to write the same bytes."""
    from megatron_mla.kernels.fp8_pack_kernel import launch_fp8_pack
    from megatron_mla.kernels.fp8_pack_ref import checked

    sets = [checked(*build(c, device, dtype, seed).arguments) for seed in range(2)]
    options, calls, want = tile_options(c), {}, None
    for option in options:
        launch_fp8_pack(*sets[0], **option)
        got = [t.view(torch.uint8).clone() for t in sets[0][-2:]]
        want = want or got
        name = str(option or "default")
        if not all(map(torch.equal, got, want)):
            print(f"{c.name} {name}: bytes differ", flush=True)
        calls[name] = [functools.partial(launch_fp8_pack, *x, **option) for x in sets]
    for name, us in clock(calls).items():
        tbps = moved_bytes(c) / us / 1e6
        print(f"{c.name:24s} {name:56s} {us:8.1f} us {tbps:6.2f} TB/s", flush=True)


def draw_chart() -> None:
    from scripts.bench.chart import draw

    print("chart in", draw(ROOT / "benchmarks/fp8.csv", ROOT / "docs/fp8_bench.svg"))


def main() -> None:
    parser = parser_of(__doc__)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--tiles", action="store_true", help="sweep tile sizes instead")
    parser.add_argument("--compile", action=switch, default=True, help="time torch.compile too")
    options = parser.parse_args()
    chosen = opened(options, CASES, draw_chart, ["tests/unit/kernels/test_fp8_pack.py"])
    if chosen is None:
        return
    if options.tiles:
        clock = functools.partial(times_us, rounds=2, repeats=10, lead_cycles=LEAD_CYCLES)
        for c, _ in chosen:
            sweep(c, clock)
        return
    about = machine()
    ceiling = copy_row(about)
    ceiling_tbps = float(ceiling["tbps"])
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    print(f"{about['gpu']}: copy {ceiling_tbps:.2f} TB/s, L2 {l2 / 1e6:.0f} MB", flush=True)
    append_rows("fp8", [ceiling])
    chosen = [(replace(c, compiled=c.compiled and options.compile), way) for c, way in chosen]
    measured = functools.partial(measure, quick=options.quick)
    complaints = run_cases(chosen, l2, measured=measured, ceiling_tbps=ceiling_tbps, about=about)
    closed(options, draw_chart, complaints)


if __name__ == "__main__":
    main()
