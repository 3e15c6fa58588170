"""Attention over cached rows on ragged shapes, held against its twin; to run under a sanitizer:

compute-sanitizer --tool memcheck python -m tests.helpers.exercise_decode
"""

from __future__ import annotations

import itertools

import torch

from megatron_mla.kernels.decode_attention_kernel import launch_decode
from megatron_mla.kernels.decode_attention_ref import decode_attention_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, new tokens, heads, cached rows, latent and positional channels, splits.
SHAPES = [
    (2, 1, 16, 300, 512, 64, 3),
    (1, 1, 128, 130, 512, 64, 2),
    (2, 4, 8, 100, 512, 64, 1),
    (3, 3, 6, 77, 20, 8, 2),
    (2, 1, 3, 65, 40, 0, 5),
    (1, 50, 2, 90, 33, 1, 1),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (BF16, torch.float8_e4m3fn), (FP16, torch.float8_e5m2), (FP32, FP32)]
# Scores reach 20, so an exponential has 20 times the error of a sum of 576 products: 1.4e-5 seen.
ALLOWED = {BF16: 2e-2, FP16: 4e-3, FP32: 5e-5}


def exercise(shape: tuple[int, ...], dtype: torch.dtype, key_dtype: torch.dtype) -> list[str]:
    """What is off its twin."""
    batch, s, heads, rows, c, d, splits = shape
    torch.manual_seed(0)
    query = torch.randn(s, batch, heads, c + d, device=DEVICE).to(dtype).transpose(0, 1)
    positions = torch.stack([torch.randperm(rows + 5)[:rows] for _ in range(batch)]).to(DEVICE)
    positions[0] = positions[0].sort().values
    positions[-1, rows // 2 :] = -1
    mine = torch.arange(rows - s, rows, device=DEVICE).repeat(batch, 1)
    mine[0, 0] = -1 if s > 1 else mine[0, 0]
    # The end of the memory is the end of an allocation: what reads past it is seen.
    keys = torch.randn(batch, rows, c + d, device=DEVICE)
    keys = keys.masked_fill((positions < 0).unsqueeze(-1), torch.nan).to(key_dtype)
    out = torch.full((batch, s, heads, c), torch.nan, dtype=dtype, device=DEVICE)
    lse = torch.full((batch, s, heads), torch.nan, device=DEVICE)
    launch_decode(query, keys, mine, positions, out, lse, 0.2, splits=splits)
    want = decode_attention_ref(query.double(), keys, mine, positions, scale=0.2, v_dim=c)
    wrong = []
    for name, got, true, allowed in (
        ("out", out, want[0], ALLOWED[dtype]), ("log-sum-exp", lse, want[1], 1e-4)
    ):  # fmt: skip
        same = got.isinf() == true.isinf()
        error = torch.where(true.isinf(), 0.0, (got.double() - true).abs()).max().item()
        if not (same.all() and error <= allowed):
            wrong.append(f"{name} by {error:.1e}")
    return wrong


def main() -> None:
    problems = list(itertools.product(SHAPES, DTYPES))
    faults = [
        f"{shape} {dtypes}: {fault}"
        for shape, dtypes in problems
        for fault in exercise(shape, *dtypes)
    ]
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"{len(problems)} problems of attention over a cache, close to fp64, on {DEVICE}")


if __name__ == "__main__":
    main()
