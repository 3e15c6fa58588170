"""Compile the kernels for a GPU that is not here: a program that prints a JSON report of the PTX.

    python offline.py 90

It runs in a process of its own because Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_mla.kernels import rotation
from megatron_mla.kernels.kv_split import launch_kv_split
from megatron_mla.kernels.kv_split_backward import launch_kv_split_backward
from megatron_mla.kernels.rope import launch_rope, parts

ROWS, BATCH, HEADS = 64, 1, 16
WIDTHS = [(128, 64, 128), (192, 64, 256), (512, 64, 0), (24, 24, 20)]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32), (FP64, FP64)]
PROBLEMS = [(WIDTHS[0], dtypes) for dtypes in DTYPES]
PROBLEMS += [(widths, DTYPES[0]) for widths in WIDTHS[1:]]


class AbsentGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(found: list) -> None:
    """From now on a launch compiles its kernel into ``found`` and does not run it."""

    def launch(kernel, grid):
        return lambda *args, **how: found.append(kernel.run(*args, grid=grid, warmup=True, **how))

    JITFunction.__getitem__ = launch
    # Tensors lie on the CPU here.
    rotation._CPU_TILE = rotation._GPU_TILE


def launches(widths: tuple[int, int, int], dtype: torch.dtype, table_dtype: torch.dtype):
    """Names of launches and functions that do them."""
    n, d, v = widths

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    q, out = (empty(ROWS, BATCH, HEADS, n + d) for _ in range(2))
    (nope, pe), (nope_out, pe_out) = (parts(t, n, False) for t in (q, out))
    shared = empty(ROWS, BATCH, 1, d)
    kv, key = empty(ROWS, BATCH, HEADS, n + v), empty(ROWS, BATCH, HEADS, n + d)
    value = empty(ROWS, BATCH, HEADS, v)
    table = torch.empty(4096, d // 2, dtype=table_dtype)
    where = (table, table, torch.empty(ROWS, dtype=torch.int32))
    copied = {"nope": nope, "nope_out": nope_out}
    back = {"pairs_in": False, "pairs_out": True, "inverse": True, "backward": True}
    head_of_all = shared.expand(ROWS, BATCH, HEADS, d)
    return {
        "rope": lambda: launch_rope(pe, pe_out, *where, **copied),
        "rope-backward": lambda: launch_rope(pe, pe_out, *where, **copied, **back),
        "rope-in-place": lambda: launch_rope(pe, pe, *where),
        # Nothing else needs a barrier here.
        "rope-in-place-halves": lambda: launch_rope(pe, pe, *where, pairs_in=False, num_warps=8),
        "concat": lambda: launch_rope(head_of_all, pe_out, *where, **copied),
        "kv-split": lambda: launch_kv_split(kv, shared, key, None, *where, k_dim=n),
        "kv-split-packed": lambda: launch_kv_split(kv, shared, key, value, *where, k_dim=n),
        "kv-split-backward": lambda: launch_kv_split_backward(
            key, value, kv, shared, *where, k_dim=n
        ),
    }


def accesses(ptx: str) -> list[str]:
    """Accesses of global memory and barriers, in order."""
    opcode = r"^\s*(?:@!?%p\d+\s+)?((?:ld|st)\.global\S*|bar\.\S+|barrier\.\S+)"
    return re.findall(opcode, ptx, re.MULTILINE)


def contractions(ptx: str) -> list[str]:
    """Float arithmetic that rounds once where the kernels round twice, or may be made to.

    GPUs without products or sums of bf16 do them as fused multiply-adds of a neutral constant, and
    those are exact. The assembler fuses what does not say how it rounds.
    """
    constant = dict(re.findall(r"^\s*mov\.b(?:16|32)\s+(%\w+), (-?\w+);", ptx, re.MULTILINE))

    def halves(register: str) -> set[int]:
        value = int(constant.get(register, "0"), 0)
        return {value & 0xFFFF, value >> 16 & 0xFFFF} - {0}

    found = []
    for line in re.findall(r"^\s*((?:fma|mul|add|sub)\.\S*b?f(?:16|32|64).*);", ptx, re.MULTILINE):
        opcode, *operands = re.split(r",?\s+", line)
        if opcode.startswith("fma"):
            _, x, y, addend = operands
            by_one = any(halves(r) in ({0x3F80}, {0xBF80}, {0x3C00}, {0xBC00}) for r in (x, y))
            plus_nothing = halves(addend) == {0x8000}  # -0
            if not by_one and not plus_nothing:
                found.append(line)
        elif ".rn" not in opcode:
            found.append(line)
    return found


def main() -> None:
    found: list = []
    driver.set_active(AbsentGPU(int(sys.argv[1])))
    compile_only(found)
    report = []
    for widths, dtypes in PROBLEMS:
        for name, launch in launches(widths, *dtypes).items():
            entry = {"launch": name, "widths": widths, "dtypes": [str(t)[6:] for t in dtypes]}
            launch()
            ptx = found[-1].asm["ptx"]
            report.append(entry | {"accesses": accesses(ptx), "contractions": contractions(ptx)})
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
