"""Compile the packing of FP8 for a GPU that is not here, as offline.py does.

    python offline_fp8.py 90

Prints per launch: accesses of global memory, products fused into sums, casts to FP8.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from triton.runtime import driver

from megatron_mla.kernels.fp8_pack_kernel import launch_fp8_pack
from megatron_mla.kernels.fp8_pack_ref import checked
from tests.unit.kernels.offline import AbsentGPU, accesses, compile_only, contractions

TOKENS = 64
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Heads, unrotated channels of queries and of keys, positional channels, dtypes.
PROBLEMS = {
    "heads": (16, 128, 128, 64, BF16, E4M3),
    "glm": (64, 192, 192, 64, BF16, E4M3),
    "latent": (1, 512, 512, 64, BF16, E4M3),
    "no-pe": (16, 192, 192, 0, BF16, E4M3),
    "ragged": (5, 24, 20, 12, BF16, E4M3),
    "fp16": (16, 128, 128, 64, FP16, E4M3),
    "fp32": (16, 128, 128, 64, FP32, E4M3),
    "e5m2": (16, 128, 128, 64, BF16, E5M2),
}
MODES = {"nope": None, "neox": True, "adjacent": False}


def launch(problem: tuple, neox: bool | None, tensor_scales: bool) -> None:
    heads, n_q, n_k, d, dtype, fp8 = problem

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    q, kv = empty(TOKENS, heads, n_q + d), empty(TOKENS, heads, n_k + 128)
    latent = empty(TOKENS, 1, 512 + d)
    table = None if neox is None else torch.empty(4096, d)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    scale = torch.ones(1) if tensor_scales else 1.0
    arguments = checked(
        q[..., :n_q], q[..., n_q:], kv[..., :n_k], latent[..., 512:], table, positions, bool(neox),
        quantize_dtype=fp8, quant_scale_q=scale, quant_scale_kv=scale,
    )  # fmt: skip
    launch_fp8_pack(*arguments)


def main() -> None:
    found: list = []
    driver.set_active(AbsentGPU(int(sys.argv[1])))
    compile_only(found)
    report = []
    for name, problem in PROBLEMS.items():
        for mode, neox in MODES.items():
            launch(problem, neox, tensor_scales=name == "fp32")
            ptx = found[-1].asm["ptx"]
            report.append({
                "launch": name, "mode": mode, "accesses": accesses(ptx),
                "contractions": contractions(ptx),
                "casts": sorted(set(re.findall(r"cvt\.\S*e[45]m[23]x2\S*", ptx))),
            })  # fmt: skip
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
