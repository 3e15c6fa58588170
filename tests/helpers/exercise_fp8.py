"""The packing of FP8 on ragged shapes, held against its twin; a program to run under a sanitizer:

compute-sanitizer --tool memcheck python -m tests.helpers.exercise_fp8
"""

from __future__ import annotations

import itertools

import torch

from megatron_mla.kernels.fp8_pack import fp8_cast, fused_rope_fp8_quantize, writer_for
from megatron_mla.kernels.fp8_pack_ref import fp8_cast_ref, fused_rope_fp8_quantize_ref
from tests.helpers.fp8 import assert_same_fp8, joint_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Tokens of queries and of keys, heads of both, unrotated channels of both, positional ones.
SHAPES = [
    (19, 19, 16, 16, 128, 128, 64),
    (19, 7, 37, 5, 24, 20, 12),
    (130, 33, 1, 1, 512, 512, 64),
    (65, 3, 24, 1, 13, 512, 2),
    (9, 40, 130, 130, 192, 192, 0),
    (0, 21, 4, 4, 0, 6, 10),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = 50


def exercise(shape: tuple[int, ...], dtype: torch.dtype, fp8: torch.dtype, mode: str) -> list[str]:
    """What is off its twin."""
    tokens, tokens_k, heads, heads_k, n, n_k, d = shape
    torch.manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=dtype)

    q, kv = normal(tokens, heads, n + d), normal(tokens_k, heads_k, n_k + 20)
    latent = normal(tokens_k, 1, 40 + d)
    parts = q[..., :n], q[..., n:], kv[..., :n_k], latent[..., 40:]
    table, where = None, [None, None]
    if mode != "nope":
        table = joint_table(ROWS, d, DEVICE)
        where = [torch.randint(ROWS, (count,), device=DEVICE) for count in (tokens, tokens_k)]
    arguments = (*parts, table, where[0], mode == "neox")
    scale = torch.full((1,), 0.7, device=DEVICE)
    how = {"positions_k": where[1], "quantize_dtype": fp8, "quant_scale_q": scale}
    got = *fused_rope_fp8_quantize(*arguments, **how), fp8_cast(kv[..., n_k:], fp8)
    want = *fused_rope_fp8_quantize_ref(*arguments, **how), fp8_cast_ref(kv[..., n_k:], fp8)
    wrong = []
    for name, one, other in zip(("query", "key", "value"), got, want, strict=True):
        try:
            assert_same_fp8(name, one, other)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


def exercise_fp8() -> list[str]:
    """Every problem; returns what is wrong."""
    kinds = torch.float8_e4m3fn, torch.float8_e5m2
    problems = itertools.product(SHAPES, DTYPES, kinds, ("nope", "neox", "adjacent"))
    return [f"{problem}: {fault}" for problem in problems for fault in exercise(*problem)]


def main() -> None:
    faults = exercise_fp8()
    if faults:
        raise SystemExit("\n".join(faults))
    writer = writer_for(torch.zeros(0, device=DEVICE).device).__name__
    print(f"{len(SHAPES) * 18} problems, every byte as in the twin, by {writer} on {DEVICE}")


if __name__ == "__main__":
    main()
