"""Layers over caches that tensor-parallel ranks share; the program of test_generate.py.

``torchrun --nproc-per-node=4 tests/functional/cached.py`` prints a line of JSON: the largest error
of each case on any rank, of the largest value. In fp32 it is that of a forward pass without a
cache; in FP8 that of a cache which is not shared. Any number of ranks that divides 8 will do; ways
to share among more than there are left out.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 4
FORMS = {
    "expanded": {},
    "absorbed-nope": {"mla_form": "absorbed", "no_rope_freq": 1},
    "dsa": {},
    "dsa-width-0": {"no_rope_freq": 1, "qk_pos_emb_head_dim": 0},
}
SHARED = ((1, 1), (2, 1), (4, 3))  # ranks, interleave
# By sequence, new tokens of every pass.
PASSES = [[5, 1, 3, 1, 14], [0, 2, 1, 1, 4], [9, 1, 0, 2, 0]]


def answers(layer, x, dcp, cache_dtype):
    """[24, 3, hidden] of the layer over a cache; 0 where no token comes."""
    from megatron_mla.inference.context import LatentInferenceContext

    context = LatentInferenceContext(3, 24, cache_dtype=cache_dtype, dcp=dcp)
    got = torch.zeros_like(x)
    for new in zip(*PASSES, strict=True):
        starts = list(context.lengths)
        piece = torch.full((max(new), *x.shape[1:]), 1e3, device=x.device)
        for b, (start, n) in enumerate(zip(starts, new, strict=True)):
            piece[:n, b] = x[start : start + n, b]
        out, _ = layer(piece, None, inference_context=context.begin(new))
        context.advance()
        for b, (start, n) in enumerate(zip(starts, new, strict=True)):
            got[start : start + n, b] = out[:n, b]
    return got


@torch.no_grad()
def errors() -> dict[str, float]:
    from megatron_mla.inference.dcp import DecodeContextParallel
    from tests.helpers.layers import DSA, hidden, small_layer

    ranks = dist.get_world_size()
    groups = {size: dist.new_subgroups(size)[0] for size, _ in SHARED if size <= ranks}
    report = {}
    for form, changes in FORMS.items():
        changes = {**(DSA if form.startswith("dsa") else {}), **changes}
        layer = small_layer(
            num_attention_heads=8, tensor_model_parallel_size=ranks, **changes
        ).eval()
        for name, weight in layer.named_parameters():
            if "up_proj" in name:  # else the heads of all ranks would be the same
                weight.mul_(1 + 0.3 * dist.get_rank())
        x = hidden(24, 3)
        truth, _ = layer(x, None)
        for b, new in enumerate(PASSES):
            truth[sum(new) :, b] = 0
        narrow = answers(layer, x, None, torch.float8_e4m3fn)
        for size, interleave in SHARED:
            if size not in groups:
                continue
            for comm, dtype, want in (
                ("ag_rs", None, truth),
                ("a2a", torch.float8_e4m3fn, narrow),
            ):
                dcp = DecodeContextParallel(groups[size], interleave=interleave, comm=comm)
                error = (answers(layer, x, dcp, dtype) - want).abs().max() / want.abs().max()
                dist.all_reduce(error, op=dist.ReduceOp.MAX)
                name = "fp8" if dtype is not None else "fp32"
                report[f"{form}-w{size}-i{interleave}-{name}"] = error.item()
    return report


def main() -> None:
    warnings.simplefilter("ignore")
    from tests.functional.parity import leave_ranks, setup_ranks

    setup_ranks()
    torch.backends.cuda.matmul.allow_tf32 = False
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    report = errors()
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    leave_ranks()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
