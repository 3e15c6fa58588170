"""Training steps and sparse layers on several GPUs.

    python scripts/bench/parallel.py                                       # one GPU
    torchrun --standalone --nproc-per-node=8 scripts/bench/parallel.py     # eight

``step``: the GLM-5 proxy (configs/glm5_dsa_proxy_h200.yaml), packed, with and without the fused
rotary kernels, the two taking turns: time of a step, of its attention layers (forward and
backward), and peak memory. A sample is five sequences, from a half to a sixteenth of 4096 tokens,
with every rank on samples of its own, or of 32,768 tokens shared by all ranks.

``layer``: one sparse layer of GLM-5 over 32,768 and 131,072 tokens shared by all ranks, forward and
backward: time, the part of it in which NCCL's kernels run, and what one rank takes over N times
that (``efficiency``, where benchmarks/parallel.csv has one rank of the same commit).

Rows go to benchmarks/parallel.csv. Times are medians of rank 0, between barriers of all ranks.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, append_rows, kernel_times, machine, peak_mib  # noqa: E402
from scripts.bench.layer import GLM_5_DSA, common_fields  # noqa: E402

COLUMNS = (
    "op case impl ranks tp cp dp median_us attention_us comm_us comm_share efficiency peak_mib "
    "gpu torch triton commit date"
).split()
WARM_UP, MEASURED = 8, 20
# tokens of a sample, and whether all ranks share it.
STEPS = {"glm-5-packed-4k": (4096, False), "glm-5-packed-32k": (32768, True)}
LAYERS = {"glm-5-dsa-32k": 32768, "glm-5-dsa-128k": 131072}
# Where its sequences end, in sixteenths.
ENDS = (8, 12, 14, 15, 16)
PATHS = {"fused": (), "unfused": ("--no-rope-fusion",)}
# --smoke: whether this program works, on a CPU.
SMOKE_FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "32"),
    *("--num-attention-heads", "4", "--q-lora-rank", "16", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16"),
    *("--dsa-indexer-n-heads", "2", "--dsa-indexer-head-dim", "16", "--dsa-indexer-topk", "8"),
    *("--no-bf16", "--init-method-std", "0.1"),
)
SMOKE_WIDTHS = {
    **GLM_5_DSA,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
}
SMOKE_SHORTER = 512


class Clock:
    """Places in time: events of the current stream, or the host's clock where there is no GPU."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()

    def now(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, start, end) -> float:
        """Microseconds; waits for the end."""
        if not self._on_gpu:
            return 1e6 * (end - start)
        end.synchronize()
        return 1000 * start.elapsed_time(end)


class _Mark(torch.autograd.Function):
    """The identity; its backward notes the time."""

    @staticmethod
    def forward(ctx, x: Tensor, note) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.note()
        return grad, None


class AttentionTimes:
    """Time that the attention layers of a model take, forward and backward, projections included.

    The backward of a layer is over when its input has a gradient.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._clock, self._spans = Clock(), []
        self.layers = [m.self_attention for m in model.modules() if hasattr(m, "self_attention")]
        for layer in self.layers:
            layer.forward = self._timed(layer.forward)

    def _timed(self, stock):
        def forward(hidden_states: Tensor, *args, **kwargs):
            started: list = []

            def backward_begins() -> None:
                started.append(self._clock.now())

            def backward_ends() -> None:
                self._spans.append((started.pop(), self._clock.now()))

            begin = self._clock.now()
            out, bias = stock(_Mark.apply(hidden_states, backward_ends), *args, **kwargs)
            out = _Mark.apply(out, backward_begins)
            self._spans.append((begin, self._clock.now()))
            return out, bias

        return forward

    def take_us(self) -> float:
        """Microseconds since the last call."""
        total = sum(self._clock.between_us(*span) for span in self._spans)
        self._spans.clear()
        return total


def sync() -> None:
    """All ranks here, and their GPUs done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def allocated(peak: bool = False) -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def place(tp: int, cp: int) -> dict[str, int]:
    ranks = dist.get_world_size()
    return {"ranks": ranks, "tp": tp, "cp": cp, "dp": ranks // (tp * cp)}


def bench_step(case: str, tp: int, smoke: bool) -> list[dict]:
    """Rows of a training step, one for each path."""
    from megatron_mla.recipe.flags import parse_run
    from megatron_mla.recipe.loop import bare
    from megatron_mla.recipe.main import prepare

    tokens, shared = STEPS[case]
    cp = dist.get_world_size() // tp if shared else 1
    where = place(tp, cp)
    tokens //= SMOKE_SHORTER // 4 if smoke else 1
    warm_up, measured = (1, 2) if smoke else (WARM_UP, MEASURED)
    trainers, attention, peaks = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in PATHS.items():
            before = allocated()
            reset_peak()
            run = parse_run(
                [
                    *("--config", str(ROOT / "configs" / "glm5_dsa_proxy_h200.yaml"), *flags),
                    *("--packing", "--seq-length", str(tokens), "--micro-batch-size", "1"),
                    *("--global-batch-size", str(where["dp"]), "--valid-fraction", "0.2"),
                    *("--tensor-model-parallel-size", str(tp)),
                    *("--context-parallel-size", str(cp), "--log-dir", folder),
                    *("--train-iters", str(warm_up + measured), "--no-progress"),
                    *("--lr-warmup-iters", "1", "--no-tensorboard", "--log-interval", "1000000"),
                    *(SMOKE_FLAGS if smoke else ()),
                ]
            )
            trainer = prepare(run, joined=True)
            edges = np.array(ENDS) * tokens // 16
            trainer.training.samples.boundaries = lambda index, edges=edges: edges
            attention[name] = AttentionTimes(bare(trainer.model))
            trainers[name] = trainer, trainer.training.from_sample(0)
            for _ in range(warm_up):
                trainer._step(trainers[name][1])
            sync()
            attention[name].take_us()
            peaks[name] = (allocated(peak=True) - before) / 2**20
        times = {name: [] for name in PATHS}
        for _ in range(measured):
            for name, (trainer, batches) in trainers.items():
                sync()
                start = time.perf_counter()
                trainer._step(batches)
                sync()
                whole = 1e6 * (time.perf_counter() - start)
                times[name].append((whole, attention[name].take_us()))
        for trainer, _ in trainers.values():
            trainer.log.close()
    rows = []
    for name, samples in times.items():
        whole, inside = (statistics.median(values) for values in zip(*samples, strict=True))
        rows.append(
            {
                **{"op": "step", "case": case, "impl": name, **where},
                "median_us": f"{whole:.0f}",
                "attention_us": f"{inside:.0f}",
                "peak_mib": f"{peaks[name]:.0f}" if peaks[name] else "",
            }
        )
    return rows


def bench_layer(case: str, tp: int, smoke: bool) -> list[dict]:
    """The row of one sparse layer, all ranks on one sequence."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.spec_utils import build_module

    from megatron_mla import MLATransformerConfig
    from megatron_mla.parallel.groups import split_ranks
    from megatron_mla.specs import mla_attention_spec

    cp = dist.get_world_size() // tp
    tokens = LAYERS[case] // (SMOKE_SHORTER if smoke else 1)
    split_ranks(tp, cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    fields = common_fields(SMOKE_WIDTHS if smoke else GLM_5_DSA)
    dtype = torch.float32 if smoke else torch.bfloat16
    fields |= {"params_dtype": dtype, "bf16": not smoke}
    config = MLATransformerConfig(
        **fields,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1,
        apply_rope_fusion=not smoke,
        dsa_kernel_backend="none" if smoke else "triton",
    )
    layer = build_module(mla_attention_spec(config), config=config, layer_number=1)
    device = torch.device(torch.cuda.current_device())
    layer = layer.to(device)
    shape = (tokens // cp // tp, 1, config.hidden_size)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        out, _ = layer(x, None)
        out.backward(grad)
        x.grad = None
        layer.zero_grad(set_to_none=True)

    warm_up, measured = (1, 2) if smoke else (3, 10)
    for _ in range(warm_up):
        step()
    peak = peak_mib(step) if torch.cuda.is_available() else 0
    clock, times = Clock(), []
    for _ in range(measured):
        sync()
        start = clock.now()
        step()
        times.append(clock.between_us(start, clock.now()))
    median = statistics.median(times)
    comm = communication_us(step)
    row = {
        **{"op": "layer", "case": case, "impl": "ours", **place(tp, cp)},
        "median_us": f"{median:.0f}",
        "comm_us": "" if comm is None else f"{comm:.0f}",
        "comm_share": "" if comm is None else f"{comm / median:.3f}",
        "peak_mib": f"{peak:.0f}" if peak else "",
    }
    return [row]


def communication_us(call) -> float | None:
    """Time in which NCCL's kernels run during one call, waiting for other ranks included.

    None where there is no GPU: gloo has no kernels.
    """
    if not torch.cuda.is_available():
        return None
    sync()
    spans = kernel_times(call)
    sync()
    return sum(us for name, us in spans if "nccl" in name.lower())


def add_efficiency(rows: list[dict], folder: Path) -> None:
    """What one rank took over N times what N take, where the same commit has that row."""
    path = folder / "parallel.csv"
    known = list(csv.DictReader(path.open())) if path.exists() else []
    for row in rows:
        one = [
            old
            for old in (*known, *rows)
            if str(old["ranks"]) == "1"
            and all(old[key] == row[key] for key in ("op", "case", "impl", "commit", "gpu"))
        ]
        if row["op"] == "layer" and one:
            ratio = float(one[-1]["median_us"]) / (row["ranks"] * float(row["median_us"]))
            row["efficiency"] = f"{ratio:.3f}"


def join() -> None:
    """torchrun's ranks, or a single one."""
    from megatron_mla.cpu_shim import install_cpu_shim

    on_gpu = not install_cpu_shim()
    options = {}
    if on_gpu:
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            raise SystemExit(
                f"A rank needs a GPU of its own, this machine has {torch.cuda.device_count()}."
            )
        # Without device_id: that makes every group at once, and each takes memory.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help='cases whose "op case" has this text')
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, metavar="N", dest="tp",
        help="ranks that share heads; the others share sequences",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of the rows")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, also on a CPU: does it work?"
    )
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks % options.tp:
        raise SystemExit(
            f"--tensor-model-parallel-size must divide the {ranks} ranks, got {options.tp}."
        )
    if not (options.smoke or torch.cuda.is_available()):
        raise SystemExit(
            "This benchmark needs a CUDA device, and this machine has none; --smoke runs without."
        )
    warnings.simplefilter("ignore")
    join()
    first = dist.get_rank() == 0
    for op, cases, bench in (("step", STEPS, bench_step), ("layer", LAYERS, bench_layer)):
        for case in cases:
            if options.only not in f"{op} {case}":
                continue
            rows = [{**row, **machine()} for row in bench(case, options.tp, options.smoke)]
            gc.collect()  # models are held by their own hooks
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if not first:
                continue
            add_efficiency(rows, options.out)
            for row in rows:
                shown = " ".join(f"{k}={row[k]}" for k in COLUMNS[:13] if row.get(k, "") != "")
                print(shown, flush=True)
            append_rows("parallel", rows, COLUMNS, options.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
