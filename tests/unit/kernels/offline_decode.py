"""Compile attention over cached rows for a GPU that is not here, as offline.py does.

    python offline_decode.py 90

Prints per launch: whether it fits into shared memory, kinds of tensor-core products, and how many
asynchronous copies there are.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from triton.runtime import driver

from megatron_mla.kernels.decode_attention_kernel import decode_tile, launch_decode, product_dtype
from megatron_mla.kernels.sparse_forward import HEADS
from tests.unit.kernels.offline import AbsentGPU, compile_only
from tests.unit.kernels.offline_sparse import SHARED

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROWS = 4096
# Heads, latent and positional channels, dtypes of queries and keys.
PROBLEMS = {
    "few-heads": (8, 512, 64, BF16, BF16),
    "few-heads-fp8": (8, 512, 64, BF16, E4M3),
    "some-heads": (32, 512, 64, BF16, BF16),
    "many-heads": (128, 512, 64, BF16, BF16),
    "many-heads-fp8": (128, 512, 64, BF16, E4M3),
    "no-pe": (16, 512, 0, BF16, BF16),
    "ragged": (6, 20, 8, BF16, BF16),
    "fp32": (6, 20, 8, FP32, FP32),
}


def launch(problem: tuple, capability: int, splits: int) -> None:
    heads, c, d, dtype, key_dtype = problem
    query = torch.empty(2, 1, heads, c + d, dtype=dtype)
    keys = torch.empty(2, ROWS, c + d, dtype=key_dtype)
    positions = (torch.zeros(2, n, dtype=torch.int32) for n in (1, ROWS))
    out, lse = torch.empty(2, 1, heads, c, dtype=dtype), torch.empty(2, 1, heads)
    items = product_dtype(dtype, key_dtype).itemsize, key_dtype.itemsize
    limits = SHARED[capability], HEADS if capability < 100 else HEADS // 2
    tile = decode_tile(heads, c, d, items, limits)
    launch_decode(query, keys, *positions, out, lse, 0.1, tile=tile, splits=splits)


def main() -> None:
    capability = int(sys.argv[1])
    found: list = []
    driver.set_active(AbsentGPU(capability))
    compile_only(found)
    report = []
    for name, problem in PROBLEMS.items():
        if capability < 89 and problem[-1] == E4M3:
            continue  # no such conversion
        for splits in (1, 4) if name in ("few-heads", "ragged") else (4,):
            found.clear()
            launch(problem, capability, splits)
            for kernel in found:
                ptx = kernel.asm["ptx"]
                kinds = re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)
                entry = {"launch": name, "kernel": kernel.name, "splits": splits}
                entry["fits"] = kernel.metadata.shared <= SHARED[capability]
                entry["copies"] = len(re.findall(r"cp\.async\.c[ag]", ptx))
                report.append(entry | {"products": sorted(set(kinds))})
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
