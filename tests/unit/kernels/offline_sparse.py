"""Compile the operators of sparse attention for a GPU that is not here, as offline.py does.

    python offline_sparse.py 90

Prints per launch: shared memory in bytes, and the kinds of tensor-core products in the PTX.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver

from megatron_mla.kernels import indexer_dense, indexer_dense_grads, indexer_grads, indexer_target
from megatron_mla.kernels.index import launch_scores, tile_of
from megatron_mla.kernels.ordered_sum import add_rows_in_order_
from megatron_mla.kernels.sparse_backward import launch_grads, launch_mean, launch_slopes
from megatron_mla.kernels.sparse_forward import HEADS, forward_tile, launch_forward
from megatron_mla.kernels.sparse_forward_hopper import launch_forward_hopper
from megatron_mla.kernels.topk import launch_select
from tests.unit.kernels.offline import AbsentGPU, compile_only

ROWS, KEYS, SLOTS, LATENT, WIDTH = 64, 4096, 2048, 512, 576
# Shared memory of a program by compute capability, bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BF16, GPU = torch.bfloat16, torch.device("cuda")


def launches(heads: int, dtype: torch.dtype, capability: int) -> dict:
    """Names of launches and functions that do them."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype)

    wide = {"dtype": torch.float32}
    query, key = empty(ROWS, heads, WIDTH), empty(KEYS, WIDTH)
    indices = torch.empty(ROWS, SLOTS, dtype=torch.int32)
    out, lse = empty(ROWS, heads, LATENT), empty(ROWS, heads, **wide)
    buffer = empty(ROWS, 2, heads, SLOTS)
    per_key, per_slot = empty(KEYS, WIDTH, **wide), empty(ROWS, SLOTS, WIDTH, **wide)
    q, k, w = empty(ROWS, 32, 128), empty(KEYS, 128), empty(ROWS, 32)
    starts, ends = (torch.empty(ROWS, dtype=torch.int32) for _ in range(2))
    scores = empty(ROWS, KEYS, **wide)
    chosen = empty(ROWS, SLOTS, **wide)
    dq, dk, dw, loss = (empty(*s, **wide) for s in (q.shape, k.shape, w.shape, (ROWS,)))
    attention = query, key, indices
    limits = SHARED[capability], HEADS if capability < 100 else HEADS // 2
    forward = forward_tile(heads, LATENT, WIDTH - LATENT, 2, limits)
    target = indexer_target.target_tile(heads, WIDTH, dtype, GPU)
    dense = indexer_dense.target_tile(WIDTH, dtype, GPU)
    tiles = indexer_dense_grads.dense_tile(128, dtype, GPU)
    of_index = {"relu": True, "way": indexer_grads.ATOMICS.value}
    few = indexer_grads.grads_tile(32, 128, indexer_grads.ATOMICS.value, dtype, GPU)
    found = {
        "forward": lambda: launch_forward(*attention, out, lse, 0.1, tile=forward),
        "mean": lambda: launch_mean(out, out, lse),
        "slopes": lambda: launch_slopes(*attention, out, lse, lse, buffer, 0.1),
        "grads": lambda: launch_grads(*attention, out, buffer, query, per_key),
        "grads-ordered": lambda: launch_grads(*attention, out, buffer, query, per_slot),
        "ordered-sum": lambda: add_rows_in_order_(
            per_key, torch.zeros(ROWS * SLOTS, dtype=torch.int32), per_slot.flatten(0, 1)
        ),
        "scores": lambda: launch_scores(q, k, w, starts, ends, scores, tile=tile_of(128, dtype)),
        "select": lambda: launch_select(scores, starts, ends, indices, emit_tile=1024, block=KEYS),
        "select-long": lambda: launch_select(
            empty(ROWS, 1 << 17, **wide), starts, ends, indices, emit_tile=1024
        ),
        "log-sum-exp": lambda: indexer_target.launch_log_sum_exp(*attention, 0.1, tile=target),
        "target": lambda: indexer_target.launch_target(*attention, lse, 0.1, tile=target),
        "index-grads": lambda: indexer_grads.launch_grads(
            q, k, w, indices, chosen, loss, dq, dw, dk, **of_index, tile=few
        ),
        "dense-log-sum-exp": lambda: indexer_dense.launch_dense_log_sum_exp(
            query, key, starts, ends, 0.1, tile=dense
        ),
        "dense-target": lambda: indexer_dense.launch_tiles(
            query, key, lse, starts, ends, scale=0.1, tile=dense
        ),
        "dense-key-grad": lambda: indexer_dense_grads.launch_key_grad(
            q, k, w, scores, dk, relu=True, tile=tiles
        ),
        "dense-query-grad": lambda: indexer_dense_grads.launch_query_grad(
            q, k, w, scores, starts, ends, dq, dw, relu=True, tile=tiles
        ),
    }
    if capability == 90 and heads > 32:
        found["forward-hopper"] = lambda: launch_forward_hopper(*attention, out, lse, 0.1)
    return found


def main() -> None:
    capability = int(sys.argv[1])
    found: list = []
    driver.set_active(AbsentGPU(capability))
    compile_only(found)
    GluonJITFunction.__getitem__ = lambda kernel, grid: (
        lambda *args, **how: found.append(kernel.run(*args, grid=grid, warmup=True, **how))
    )
    report = []
    for heads in (64, 8):
        for name, launch in launches(heads, BF16, capability).items():
            found.clear()
            launch()
            for kernel in found:
                kinds = re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", kernel.asm["ptx"])
                entry = {"launch": name, "heads": heads, "shared": kernel.metadata.shared}
                entry["fits"] = kernel.metadata.shared <= SHARED[capability]
                report.append(entry | {"products": sorted(set(kinds))})
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
