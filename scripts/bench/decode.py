"""Attention of new tokens over a cache of latents, beside the same in plain PyTorch.

    python scripts/bench/decode.py                   # tests of the kernel, then all cases
    python scripts/bench/decode.py --only 1x32768    # cases whose "op case direction" has this text
    python scripts/bench/decode.py --quick --no-tests  # the fastest look
    python scripts/bench/decode.py --list            # the cases; needs no GPU
    python scripts/bench/decode.py --tiles --only h16  # tiles and splits of the kernel, no rows
    python scripts/bench/decode.py --chart           # draw the newest rows again; needs no GPU

128 heads are DeepSeek-V3's, 16 those of one of 8 tensor-parallel ranks, 64 GLM-5's; 512 + 64
channels, bf16 queries. Before a case is timed, ours is held against its PyTorch twin, "eager", and
the run stops if they differ. Rows go to benchmarks/decode.csv, the chart to docs/decode_bench.svg.

``tbps`` is the cache, read once, over the time; ``share`` is of a 512 MiB copy on the device in the
same run, half of whose bytes are written: what only reads can pass it. "copy" copies as many bytes
as the cache has, half of them read. Many heads do more arithmetic than a copy has time for:
``tflops`` are 2 * tokens * heads * keys * (576 + 512) over the time.
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
    distance,
    forward_rows,
    kernels_or_blank,
    machine,
    opened,
    parser_of,
    peak_mib,
    reason,
    times_us,
)
from scripts.bench.rope import copy_row  # noqa: E402

LATENT, WIDTH, SCALE = 512, 576, 0.1
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# Relative norms: probabilities are rounded to bf16 before they are summed, the log-sum-exp is not.
LIMIT, LEVEL_LIMIT = 1e-2, 1e-5
# Microseconds, from which on few repeats will do.
SLOW = 3000


@dataclass(frozen=True, kw_only=True)
class Case:
    """New tokens of sequences that all have the same length.

    Attributes:
        heads: of this rank. batch: sequences. length: cached rows of each, new ones included.
        tokens: new ones of each. cache: a name of :data:`CACHES`.
    """

    heads: int
    batch: int
    length: int
    cache: str
    tokens: int = 1
    op: str = "decode"
    directions: tuple[str, ...] = ("forward",)

    @property
    def name(self) -> str:
        several = f"-s{self.tokens}" if self.tokens > 1 else ""
        return f"{self.cache}-h{self.heads}-{self.batch}x{self.length}{several}"

    def scaled(self, batch: int, length: int) -> Case:
        """The same case with few and short sequences."""
        return replace(self, batch=min(batch, self.batch), length=min(length, self.length))


SIZES = ((1, 4096), (1, 32768), (1, 131072), (32, 4096), (32, 32768))
CASES = (
    *(Case(heads=heads, batch=batch, length=length, cache=cache)
      for cache in CACHES for heads in (128, 16, 64) for batch, length in SIZES),
    *(Case(heads=16, batch=32, length=4096, cache=cache, tokens=4) for cache in CACHES),
)  # fmt: skip


def moved_bytes(c: Case) -> int:
    """Bytes of the cache, read once; queries and results are few."""
    return c.batch * c.length * WIDTH * CACHES[c.cache].itemsize


def flops(c: Case) -> int:
    return 2 * c.batch * c.tokens * c.heads * c.length * (WIDTH + LATENT)


def build(c: Case, device: str, dtype: torch.dtype, seed: int) -> SimpleNamespace:
    """Queries, a cache and positions; the same numbers for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    query = random(c.batch, c.tokens, c.heads, WIDTH)
    keys = random(c.batch, c.length, WIDTH).to(CACHES[c.cache])
    row = torch.arange(c.length, dtype=torch.int32, device=device).repeat(c.batch, 1)
    half = torch.empty(moved_bytes(c) // 2, dtype=torch.uint8, device=device)
    arguments = query, keys, row[:, c.length - c.tokens :], row
    return SimpleNamespace(arguments=arguments, source=half.fill_(seed))


def implementations() -> dict[str, Callable[[SimpleNamespace], tuple[Tensor, ...]]]:
    """By name, functions of the inputs."""
    from megatron_mla.kernels.decode_attention import decode_attention
    from megatron_mla.kernels.decode_attention_ref import decode_attention_ref

    def call(function: Callable) -> Callable:
        return lambda x: function(*x.arguments, scale=SCALE, v_dim=LATENT)

    return {
        "ours": call(decode_attention),
        "eager": call(decode_attention_ref),
        "copy": lambda x: (x.source.clone(),),
    }


def off(answer: tuple[Tensor, ...], x: SimpleNamespace) -> float:
    """Relative distance of results from the twin's; infinite for a wrong log-sum-exp."""
    from megatron_mla.kernels.decode_attention_ref import decode_attention_ref

    out, level = decode_attention_ref(*x.arguments, scale=SCALE, v_dim=LATENT)
    return distance(answer[0], out) if distance(answer[1], level) <= LEVEL_LIMIT else math.inf


def checked_calls(
    c: Case, device: str, dtype: torch.dtype, sets: int
) -> tuple[dict[str, list[Callable]], list[SimpleNamespace]]:
    """Calls of every implementation on ``sets`` inputs, and these.

    Raises:
        SystemExit: ours does not run, or is not what its twin is.
    """
    inputs = [build(c, device, dtype, seed) for seed in range(sets)]
    calls = {
        name: [torch.no_grad()(functools.partial(run, x)) for x in inputs]
        for name, run in implementations().items()
    }
    what = f"{c.op} {c.name}: ours"
    try:
        distant = off(calls["ours"][0](), inputs[0])
    except Exception as error:
        raise SystemExit(f"{what} cannot run ({reason(error)}); not timed") from error
    if not distant <= LIMIT:
        raise SystemExit(f"{what} is off its twin by {distant:.1e}; not timed")
    return calls, inputs


def measure(calls: dict[str, list[Callable]], quick: bool) -> dict[str, dict]:
    """Median microseconds, peak MiB and, unless ``quick``, kernels of every implementation."""
    first = {name: turn[:1] for name, turn in calls.items()}
    medians = times_us(first, rounds=1, repeats=2)
    fast = {name: turn for name, turn in calls.items() if medians[name] < SLOW}
    rounds, repeats = (2, 5) if quick else (5, 20)
    medians |= times_us(fast, rounds=rounds, repeats=repeats, lead_cycles=LEAD_CYCLES)
    figures = {}
    for name, turn in calls.items():
        figures[name] = {"median_us": medians[name], "peak_mib": f"{peak_mib(turn[0]):.0f}"}
        figures[name]["kernels"] = "" if quick else kernels_or_blank(turn[0])
    return figures


def bench(c: Case, *, measured: Callable, ceiling_tbps: float, about: dict, sets: int = 2,
          device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> list[dict]:  # fmt: skip
    """Rows of a case.

    Args:
        measured: from calls by implementation to columns by implementation.
        ceiling_tbps: TB/s of a copy on the device.
        about: columns of the machine.
        sets: inputs that the calls rotate over.
    """
    calls, _ = checked_calls(c, device, dtype, sets)
    how = {"moved": moved_bytes(c), "flops": flops(c)}
    return forward_rows(c, measured(calls), ceiling_tbps=ceiling_tbps, about=about, **how)


def sets_for(c: Case, l2_bytes: int) -> int:
    """Inputs that are together far more than the L2 holds."""
    return min(32, max(2, math.ceil(4 * l2_bytes / moved_bytes(c))))


def run_cases(chosen: list[tuple[Case, str]], l2_bytes: int, **how) -> None:
    """Append the rows of every case as it ends; ``how`` goes to bench."""
    for c, _ in chosen:
        append_rows("decode", bench(c, sets=sets_for(c, l2_bytes), **how))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# Rows and keys of a block, warps, stages.
FEW = ((16, 32, 4, 2), (16, 32, 4, 4), (16, 64, 4, 3), (16, 64, 8, 2), (16, 64, 8, 3))
MANY = ((16, 64, 8, 3), (32, 32, 8, 3), (32, 64, 8, 3), (64, 32, 8, 2), (64, 32, 8, 3),
        (64, 32, 8, 4), (64, 64, 8, 2))  # fmt: skip


def tile_options(c: Case) -> list[dict]:
    """The default, other tiles, and other numbers of splits."""
    tiles = FEW if c.heads * c.tokens <= 16 else MANY
    splits = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    return [{}, *({"tile": tile} for tile in tiles), *({"splits": n} for n in splits)]


def sweep(c: Case, clock: Callable, *, sets: int = 2, device: str = "cuda",
          dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
    """Print the microseconds of every tile and number of splits that fits and is right."""
    from megatron_mla.kernels.decode_attention_kernel import launch_decode

    inputs = [build(c, device, dtype, seed) for seed in range(sets)]
    calls = {}
    for option in tile_options(c):
        outs = [torch.empty(c.batch, c.tokens, c.heads, n, device=device) for n in (LATENT, 1)]
        answer = outs[0].to(dtype), outs[1].squeeze(-1)
        name = str(option or "default")
        turn = [
            functools.partial(launch_decode, *x.arguments, *answer, SCALE, **option) for x in inputs
        ]
        try:
            turn[0]()
            if off(answer, inputs[0]) > LIMIT:
                print(f"{c.name} {name}: off its twin", flush=True)
            calls[name] = turn
        except Exception as error:  # more shared memory than there is
            print(f"{c.name} {name}: {reason(error)}", flush=True)
    for name, us in clock(calls).items():
        print(f"{c.name:24s} {name:28s} {us:9.1f} us {moved_bytes(c) / us / 1e6:6.2f} TB/s")


def draw_chart() -> None:
    from scripts.bench.chart import draw

    what = "Bytes of the cache over the time, as share of a device-to-device copy in the same run"
    target = draw(ROOT / "benchmarks/decode.csv", ROOT / "docs/decode_bench.svg", what=what)
    print("chart in", target)


def main() -> None:
    parser: argparse.ArgumentParser = parser_of(__doc__)
    parser.add_argument("--tiles", action="store_true", help="sweep tiles and splits instead")
    options = parser.parse_args()
    chosen = opened(options, CASES, draw_chart, ["tests/unit/kernels/test_decode_attention.py"])
    if chosen is None:
        return
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    if options.tiles:
        clock = functools.partial(times_us, rounds=2, repeats=10, lead_cycles=LEAD_CYCLES)
        for c, _ in chosen:
            sweep(c, clock, sets=sets_for(c, l2))
        return
    about = machine()
    ceiling = copy_row(about)
    ceiling_tbps = float(ceiling["tbps"])
    print(f"{about['gpu']}: copy {ceiling_tbps:.2f} TB/s, L2 {l2 / 1e6:.0f} MB", flush=True)
    append_rows("decode", [ceiling])
    measured = functools.partial(measure, quick=options.quick)
    run_cases(chosen, l2, measured=measured, ceiling_tbps=ceiling_tbps, about=about)
    closed(options, draw_chart, [])


if __name__ == "__main__":
    main()
