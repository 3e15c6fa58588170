"""Whole MLA layers, forward and backward, beside stock Megatron-Core's in one run.

    python scripts/bench/layer.py                     # all cases
    python scripts/bench/layer.py --only deepseek-v3  # one
    python scripts/bench/layer.py --quick             # about a minute
    python scripts/bench/layer.py --split             # and the kernels that take most of the time

Stock layers are timed where Transformer Engine is installed, sparse ones (dsa) where TileLang is
too. All layers of a case hold the same weights; the run stops if one of ours does not compute what
the first one does. Rows go to benchmarks/layer.csv.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import (  # noqa: E402
    LEAD_CYCLES,
    append_rows,
    held_mib,
    kernel_times,
    machine,
    peak_mib,
    times_us,
)

DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
GLM_5 = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_head_dim": 192,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 256,
}
DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
GLM_5_DSA = {
    **GLM_5,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
    "dsa_indexer_rope_interleaved": True,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_use_sparse_loss": True,
}
# name: (widths, tokens, packed sequence lengths or None)
CASES = {
    "deepseek-v3-4096": (DEEPSEEK_V3, 4096, None),
    "glm-5-expanded-4096": (GLM_5, 4096, None),
    "deepseek-v2-lite-16384": (DEEPSEEK_V2_LITE, 16384, None),
    "deepseek-v2-lite-16384-packed-8": (DEEPSEEK_V2_LITE, 16384, [2048] * 8),
    "deepseek-v2-lite-16384-packed-128": (DEEPSEEK_V2_LITE, 16384, [128] * 128),
    # Peak memory beside that of twice as many tokens says whether it grows linearly.
    "glm-5-dsa-8192": (GLM_5_DSA, 8192, None),
    "glm-5-dsa-16384": (GLM_5_DSA, 16384, None),
    "glm-5-dsa-32768": (GLM_5_DSA, 32768, None),
    "glm-5-dsa-131072": (GLM_5_DSA, 131072, None),
}
# Plain PyTorch works the rows of sparse attention one small chunk after the other.
MOST_EAGER_TOKENS = 32768
# Steps that take longer (seconds) are timed once, and their kernels are not counted.
SLOW = 0.5
SHOWN_KERNELS = 12

RECOMPUTED = (["mla_up_proj"], ["core_attn"], ["mla_up_proj", "core_attn"])


def common_fields(widths: dict) -> dict:
    return {
        **widths,
        "num_layers": 1,
        "rope_type": "yarn",
        "mscale_all_dim": 1.0,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-6,
        "params_dtype": torch.bfloat16,
        "bf16": True,
    }


def build_layers(widths: dict, tokens: int) -> dict[str, torch.nn.Module]:
    """Our layer, and where Transformer Engine is there, ours on its modules and stock's two."""
    from megatron.core.transformer.spec_utils import build_module

    from megatron_mla import MLATransformerConfig
    from megatron_mla.selection import te_missing_reason
    from megatron_mla.specs import mla_attention_spec

    fields = common_fields(widths)
    layers = {}

    def ours(name: str, **changes) -> None:
        config = MLATransformerConfig(**{**fields, **changes})
        layers[name] = build_module(mla_attention_spec(config), config=config, layer_number=1)

    if "experimental_attention_variant" in widths:
        add_sparse_layers(fields, tokens, ours, layers)
        return {name: layer.cuda() for name, layer in layers.items()}
    ours("ours", apply_rope_fusion=True)
    ours("ours unfused", apply_rope_fusion=False)
    for modules in RECOMPUTED:
        ours(
            f"ours recompute {'+'.join(modules)}",
            recompute_granularity="selective",
            recompute_modules=modules,
        )
    reason = te_missing_reason()
    if reason is not None:
        print(f"Stock layers are left out: {reason}")
        return {name: layer.cuda() for name, layer in layers.items()}
    ours("ours on TE", transformer_impl="transformer_engine", apply_rope_fusion=True)
    if widths["q_lora_rank"] is None:
        print("stock layers are left out: they normalise the input of linear_q_proj, no model does")
        return {name: layer.cuda() for name, layer in layers.items()}
    for name, fused in (("stock unfused", False), ("stock fused", True)):
        layers[name] = stock_layer({**fields, "apply_rope_fusion": fused})
    return {name: layer.cuda() for name, layer in layers.items()}


def stock_layer(fields: dict) -> torch.nn.Module:
    """Megatron-Core's own layer on Transformer Engine's modules."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(**fields)
    if "experimental_attention_variant" in fields:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_dsa_module_spec_for_backend,
        )

        spec = get_dsa_module_spec_for_backend(config, TESpecProvider())
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(
            multi_latent_attention=True, qk_layernorm=True
        ).submodules.self_attention
    return build_module(spec, config=config, layer_number=1)


def add_sparse_layers(fields: dict, tokens: int, ours, layers: dict) -> None:
    """Ours with Triton's operators and with plain PyTorch's, and stock's with TileLang's."""
    from megatron_mla.selection import missing_reason, te_missing_reason

    fast = importlib.util.find_spec("megatron_mla.kernels.sparse_attention") is not None
    if fast:
        how = {"apply_rope_fusion": True, "dsa_kernel_backend": "triton"}
        ours("ours", **how)
        ours("ours without indexer loss", **how, dsa_indexer_loss_coeff=None)
    else:
        print("ours: the Triton operators of sparse attention are not there")
    if tokens <= MOST_EAGER_TOKENS:
        ours("ours eager", apply_rope_fusion=True, dsa_kernel_backend="none")
    else:
        print(f"ours eager: left out above {MOST_EAGER_TOKENS} tokens")
    reason = te_missing_reason() or missing_reason("tilelang")
    if reason is not None:
        print(f"stock tilelang: left out, {reason}")
        return
    try:
        layers["stock tilelang"] = stock_layer({**fields, "dsa_kernel_backend": "tilelang"})
    except Exception as error:  # a stock layer that cannot be made is a finding, not an end
        print(f"stock tilelang: cannot be made ({type(error).__name__}: {str(error)[:200]})")


def share_weights(layers: dict[str, torch.nn.Module]) -> None:
    """Copy the first layer's weights into the others, whatever they call their norms."""
    source = dict(next(iter(layers.values())).named_parameters())
    fused = {
        "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
    }
    with torch.no_grad():
        for layer in layers.values():
            for name, parameter in layer.named_parameters():
                parameter.copy_(source[fused.get(name, name)])


def bench(case: str, quick: bool, split: bool = False, skip: str = "") -> list[dict]:
    from megatron.core.packed_seq_params import PackedSeqParams

    widths, tokens, lengths = CASES[case]
    torch.manual_seed(0)
    layers = build_layers(widths, tokens)
    layers = {name: layer for name, layer in layers.items() if not (skip and skip in name)}
    if not layers:
        return []
    share_weights(layers)
    x = torch.randn(tokens, 1, widths["hidden_size"], device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)

    def params():
        if lengths is None:
            return None
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        cu = cu.cuda()
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )  # fmt: skip

    def step(layer):
        leaf = x.detach().requires_grad_()
        layer.zero_grad(set_to_none=True)
        # New every step, as in training: what a micro-batch costs once is in the time.
        out, _ = layer(leaf, None, packed_seq_params=params())
        out.backward(grad)
        return out.detach(), leaf.grad

    calls = {name: (lambda layer=layer: step(layer)) for name, layer in layers.items()}
    reference = None
    for name, call in list(calls.items()):
        try:
            answer = call()
        except Exception as error:  # a stock layer that cannot run is a finding, not an end
            print(f"{case} {name}: cannot run ({type(error).__name__}: {str(error)[:200]})")
            if name == "ours":
                raise
            del calls[name]
            continue
        if reference is None:
            reference = answer
        for what, got, want in zip(("output", "input gradient"), answer, reference, strict=True):
            off = ((got - want).float().norm() / want.float().norm()).item()
            # Stock's sparse layer may choose other keys than ours where scores are nearly equal.
            if not off < (2e-2 if name != "stock tilelang" else 2e-1):
                if name.startswith("ours"):
                    raise SystemExit(f"{case}: {what} of {name} is off by {off:.1e}; not timed")
                print(f"{case} {name}: {what} is off by {off:.1e}; not timed")
                calls.pop(name, None)
        del answer
    for name, layer in layers.items():
        if name in calls and name.startswith("ours"):
            # What a layer adds to the memory of a step until its backward.
            out, saved = held_mib(lambda layer=layer: layer(x, None, packed_seq_params=params()))
            print(f"{case:36s} {name:36s} {saved:8.0f} MiB held until the backward")
            out[0].backward(grad)
            del out
    once = {name: timed_once(call) for name, call in calls.items()}
    quick_calls = {name: call for name, call in calls.items() if once[name][0] < SLOW * 1e6}
    rounds, repeats = (2, 5) if quick else (5, 20)
    medians = {name: microseconds for name, (microseconds, _) in once.items()}
    if quick_calls:
        # No implementation is run for longer than half a minute.
        slowest = max(medians[name] for name in quick_calls) / 1e6
        repeats = max(1, min(repeats, int(30 / rounds / slowest)))
        medians |= times_us(quick_calls, rounds=rounds, repeats=repeats, lead_cycles=LEAD_CYCLES)
    first = next(iter(medians))
    rows = []
    for name, call in calls.items():
        # The profiler takes minutes for the many kernels of eager sparse attention.
        kernels = kernel_times(call) if name in quick_calls else []
        row = {
            "op": "mla layer",
            "case": case,
            "direction": "forward+backward",
            "impl": name,
            "median_us": f"{medians[name]:.0f}",
            "share": f"{medians[name] / medians[first]:.3f}",
            "peak_mib": f"{once[name][1]:.0f}",
            "kernels": len(kernels) or "",
            **machine(),
        }
        print(
            f"{case:36s} {name:36s} {medians[name] / 1000:8.2f} ms  {row['peak_mib']:>6s} MiB  "
            f"{row['kernels']!s:>5s} kernels  {row['share']} x {first}",
            flush=True,
        )
        if split:
            print_split(kernels)
        rows.append(row)
    return rows


def print_split(kernels: list[tuple[str, float]]) -> None:
    """The kernels that take most of a step, by name."""
    totals: dict[str, list[float]] = {}
    for kernel, microseconds in kernels:
        totals.setdefault(kernel, []).append(microseconds)
    whole = sum(microseconds for _, microseconds in kernels)
    largest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:SHOWN_KERNELS]
    for kernel, times in largest:
        spent = sum(times)
        print(f"    {spent / 1000:8.2f} ms {spent / whole:6.1%} {len(times):5d} x {kernel[:70]}")


def timed_once(call) -> tuple[float, float]:
    """Microseconds and peak MiB of one call."""
    took = []

    def timed() -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)

    peak = peak_mib(timed)
    return took[0] * 1e6, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--skip", default="", help="implementations whose name has this text")
    parser.add_argument("--split", action="store_true", help="list the largest kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and this machine has none.")
    warnings.simplefilter("ignore")
    os.environ.setdefault("NVTE_FUSED_ATTN", "1")
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for case in CASES:
        if options.only in case:
            rows = bench(case, options.quick, options.split, options.skip)
            print("rows in", append_rows("layer", rows))
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
