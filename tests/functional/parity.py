"""Parallel MLA against one rank: the cases, and the program that every rank runs.

Each rank builds the whole toy problem from one seed, keeps its share, runs the layer (or a GPT)
under stock Megatron-Core DDP and ``finalize_model_grads``, and compares output, input gradient and
every weight gradient with the same problem solved by itself alone and without fused kernels. Under
torchrun this file is that program: ``torchrun --nproc-per-node=4 tests/functional/parity.py``; the
answers of all cases go to the JSON file named by ``--report``.

In bf16 (``--dtype bf16``) all solutions of a sparse case attend to the keys that one rank chose in
fp32: a score next to the last chosen one falls on either side by rounding alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.functional.parity_cases import CASES, Case  # noqa: E402

HIDDEN, BATCH, VOCAB = 48, 2, 64
TAIL = 8  # rows past cu_seqlens[-1]
SEQ = 32


def runs_kernels(case: Case) -> bool:
    return case.kernels or torch.cuda.is_available()


def config_of(case: Case, dtype: torch.dtype, *, tp: int, cp: int, sp: bool, fused: bool):
    """The toy model of a case, split ``tp`` x ``cp``, with or without the fused kernels."""
    from megatron_mla import MLATransformerConfig

    extra = {}
    if case.recompute:
        extra["recompute_granularity"] = case.recompute
    if case.recompute == "selective":
        extra["recompute_modules"] = ["mla_up_proj", "core_attn"]
    elif case.recompute == "full":
        extra |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if case.experts:
        extra |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 24,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    if case.nope:
        extra["no_rope_freq"] = 1
    if case.form == "absorbed":
        extra["mla_form"] = "absorbed"
    elif case.form == "kda":
        extra |= {
            "mla_full_attn_layers": [2] if case.gpt else [],
            "linear_num_key_heads": case.heads,
            "linear_num_value_heads": case.heads,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "kda_gate_rank": 12,
            "kda_gate_lower_bound": -5.0 if case.packed else None,
            "kda_output_gate": "full" if case.packed else "low_rank",
        }
    elif case.form != "expanded":
        extra |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": 3,
            "dsa_indexer_head_dim": 16,
            "dsa_indexer_topk": 6,
            "dsa_indexer_loss_coeff": 0.5,
            "dsa_indexer_use_sparse_loss": case.form == "dsa_sparse_loss",
            # Layers of a GPT share.
            "dsa_indexer_topk_freq": 2 if case.gpt else 1,
            "dsa_indexer_rope_interleaved": case.packed,
            # One rank on the eager operators is what all are compared with.
            "dsa_kernel_backend": "triton" if fused and runs_kernels(case) else "none",
        }
    return MLATransformerConfig(
        num_layers=2 if case.gpt else 1,
        hidden_size=HIDDEN,
        num_attention_heads=case.heads,
        q_lora_rank=case.q_lora_rank,
        kv_lora_rank=20,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        rope_type=case.rope_type,
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=16,
        mscale_all_dim=1.0,
        qk_layernorm=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        ffn_hidden_size=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        mla_down_proj_parallelism=case.down,
        apply_rope_fusion=fused,
        calculate_per_token_loss=case.gpt,
        **extra,
    )


def packed_seq_params(case: Case, device):
    """PackedSeqParams of the case with real lengths a little shorter than the padded ones."""
    from tests.helpers.layers import packed

    return packed([max(n - 3, 0) for n in case.lengths], padded=list(case.lengths), device=device)


def problem_size(case: Case) -> tuple[int, int]:
    """Rows of all ranks and batch size."""
    return (sum(case.lengths) + TAIL, 1) if case.packed else (SEQ, BATCH)


def local_rows(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """This tp rank's part of the rows of its cp rank, under sequence parallelism."""
    from megatron.core import parallel_state as ps

    if not case.sp:
        return rows
    return rows.chunk(case.tp)[ps.get_tensor_model_parallel_rank()]


def cp_rows(case: Case, device) -> torch.Tensor:
    """Global rows of this context-parallel rank."""
    from megatron.core import parallel_state as ps

    from megatron_mla.parallel.layout import rows_of_rank

    total, _ = problem_size(case)
    cu = packed_seq_params(case, device).cu_seqlens_q_padded if case.packed else None
    return rows_of_rank(total, ps.get_context_parallel_rank(), case.cp, cu, device=device)


def shard(name: str, full: torch.Tensor, case: Case) -> torch.Tensor:
    """This tp rank's part of a weight (or of its gradient)."""
    from megatron.core import parallel_state as ps

    if "layernorm" in name or "router" in name or "indexer" in name or "o_norm" in name:
        return full
    if "down_proj" in name and case.down == "duplicated":
        return full
    rank = ps.get_tensor_model_parallel_rank()
    if "linear_proj" in name or "linear_fc2" in name:
        return full.chunk(case.tp, dim=1)[rank]
    if "linear_fc1" in name:  # gate rows, then up rows
        return torch.cat([part.chunk(case.tp)[rank] for part in full.chunk(2)])
    return full.chunk(case.tp)[rank]


def lonely_groups():
    """A collection in which every group is this rank alone."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not hasattr(lonely_groups, "group"):
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        lonely_groups.group = groups[dist.get_rank()]
    names = [field.name for field in dataclasses.fields(ProcessGroupCollection)]
    collection = ProcessGroupCollection()
    for name in names:
        setattr(collection, name, lonely_groups.group)
    return collection


def build(case: Case, config, collection):
    """The layer, or a GPT around two of them."""
    from megatron.core.transformer.spec_utils import build_module

    from megatron_mla.attention.index_sharing import install_index_books
    from megatron_mla.specs import kda_attention_spec, mla_attention_spec, mla_block_spec

    if not case.gpt:
        spec = kda_attention_spec if case.form == "kda" else mla_attention_spec
        return build_module(
            spec(config), config=config, layer_number=1, pg_collection=collection
        ).to(torch.cuda.current_device())
    from megatron.core.models.gpt import GPTModel

    model = GPTModel(
        config,
        transformer_layer_spec=mla_block_spec(config, pp_rank=0),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        pg_collection=collection,
    ).to(torch.cuda.current_device())
    install_index_books(model)
    return model


def fill(module, dtype, device) -> dict[str, torch.Tensor]:
    """Random weights that do not depend on the machine; norm weights near but not at one."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, parameter in sorted(module.named_parameters()):
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = "norm" in name and name.endswith("weight")
        value = 1 + 0.3 * value if is_norm else value * parameter.shape[-1] ** -0.5
        weights[name] = value.to(device, dtype)
    return weights


def load(module, weights) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.shape != weights[name].shape:
                raise AssertionError(f"{name}: {parameter.shape} and {weights[name].shape}")
            parameter.copy_(weights[name])


def run(case: Case, module, data, params, per_rank: bool):
    """Forward and backward; returns what a rank knows: output or loss, and the input gradient."""
    device = torch.cuda.current_device()
    rows = slice(None)
    if per_rank:
        rows = cp_rows(case, device)
    if case.gpt:
        tokens, labels, mask = (t[:, rows] for t in (data["tokens"], data["labels"], data["mask"]))
        losses = module(tokens, None, None, labels=labels, packed_seq_params=params)
        loss = (losses.float() * mask).sum()
        loss.backward()
        return loss.detach(), None
    if per_rank:
        rows = local_rows(case, rows)
    x = data["x"][rows].clone().requires_grad_()
    out, _ = module(x, None, packed_seq_params=params)
    out.backward(data["grad"][rows])
    return out.detach(), x.grad


def make_data(case: Case, dtype, device) -> dict[str, torch.Tensor]:
    total, batch = problem_size(case)
    generator = torch.Generator().manual_seed(11)
    if case.gpt:
        tokens = torch.randint(VOCAB, (batch, total), generator=generator)
        labels = torch.randint(VOCAB, (batch, total), generator=generator)
        mask = torch.ones(batch, total)
        if case.packed:
            mask[:, sum(case.lengths) :] = 0
        data = {"tokens": tokens, "labels": labels, "mask": mask}
        return {name: t.to(device) for name, t in data.items()}
    x, grad = (torch.randn(total, batch, HIDDEN, generator=generator) for _ in range(2))
    return {"x": x.to(device, dtype), "grad": grad.to(device, dtype)}


class Judge:
    """Collects the comparisons of one case.

    fp32: within 1e-5 of the largest value of the one-rank answer. bf16: within twice the distance
    that one bf16 rank has from the fp32 answer (plus 2e-3: both are roundings of the same sums in
    another order).

    Args:
        tf32: the case runs kernels that multiply in TF32: what falls on the other side of a
            rounding is off by 2**-11.
    """

    def __init__(self, dtype: torch.dtype, tf32: bool = False) -> None:
        self.dtype = dtype
        self.fp32_bound = 1e-3 if tf32 else 1e-5
        self.worst: dict[str, float] = {}
        self.faults: list[str] = []

    def compare(self, name: str, got, alone, truth) -> None:
        if got.shape != truth.shape:
            self.faults.append(f"{name}: shape {tuple(got.shape)}, not {tuple(truth.shape)}")
            return
        scale = truth.float().abs().max().item() or 1.0
        error = (got.float() - truth.float()).abs().max().item() / scale
        bound = self.fp32_bound
        if self.dtype != torch.float32:
            own = (alone.float() - truth.float()).abs().max().item() / scale
            bound = 2 * own + 2e-3
        self.worst[name] = error
        if not error <= bound:  # NaN too
            self.faults.append(
                f"{name}: off by {error:.2e} of the largest value, {bound:.2e} allowed"
            )


def params_with_book(case: Case, device, chosen: dict[int, torch.Tensor]):
    """PackedSeqParams (or the empty ones of an unpacked batch) with a book, and that book.

    Args:
        chosen: rows of this rank, that are to be replayed; empty to let the layers choose.
    """
    from megatron_mla.attention.index_sharing import IndexBook, with_index_book

    book = IndexBook(given=chosen)
    return with_index_book(packed_seq_params(case, device) if case.packed else None, book), book


def solve_alone(case: Case, dtype, device, chosen=None):
    """Answer of one rank without fused kernels.

    Args:
        chosen: indices of all rows by layer, that sparse attention replays; None to choose.
    Returns:
        Output or loss, input gradient, weights by name, their gradients by name, and the chosen
        indices by layer.
    """
    config = config_of(case, dtype, tp=1, cp=1, sp=False, fused=False)
    module = build(case, config, lonely_groups())
    weights = fill(module, torch.float32, device)
    load(module, weights)
    data = make_data(case, dtype, device)
    params, book = params_with_book(case, device, chosen or {})
    out, grad_input = run(case, module, data, params, per_rank=False)
    grads = {n: p.grad for n, p in module.named_parameters()}
    return out, grad_input, weights, grads, dict(book.chosen)


def _check_path(case: Case, module) -> None:
    """Fused cases run the kernels wherever there is Triton."""
    from megatron_mla.attention.rotary import FusedRotary
    from megatron_mla.selection import missing_reason

    fused = case.fused and not case.nope and missing_reason("triton") is None
    found = {isinstance(m.rotary, FusedRotary) for m in module.modules() if hasattr(m, "rotary")}
    lone_kda = case.form == "kda" and not case.gpt
    assert found == (set() if lone_kda else {fused}), found


def run_case(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Compare one case; raises AssertionError on every rank when any rank is off."""
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_mla.parallel.groups import split_ranks
    from tests.helpers.untuned import use_first_configurations

    device = torch.device(torch.cuda.current_device())
    split_ranks(case.tp, case.cp)
    if case.form == "kda" and torch.cuda.is_available():
        use_first_configurations()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    truth = alone = solve_alone(case, torch.float32, device)
    given = {}
    if dtype != torch.float32:
        alone = solve_alone(case, dtype, device, truth[4])
        given = {n: chosen[cp_rows(case, device)] for n, chosen in truth[4].items()}

    config = config_of(case, dtype, tp=case.tp, cp=case.cp, sp=case.sp, fused=case.fused)
    module = build(case, config, ProcessGroupCollection.use_mpu_process_groups())
    _check_path(case, module)
    load(module, {n: shard(n, w, case) for n, w in alone[2].items()})
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    params, book = params_with_book(case, device, given)
    out, grad_input = run(case, ddp, make_data(case, dtype, device), params, per_rank=True)
    finalize_model_grads([ddp])
    for number, chosen in given.items():
        assert book.chosen[number].equal(chosen), f"layer {number} did not replay its keys"

    # fla-core's kernels, on a GPU alone.
    judge = Judge(dtype, tf32=case.form == "kda" and torch.cuda.is_available())
    if case.gpt:
        dist.all_reduce(out, group=ps.get_context_parallel_group())
        judge.compare("loss", out, alone[0], truth[0])
    else:
        rows = local_rows(case, cp_rows(case, device))
        judge.compare("output", out, alone[0][rows], truth[0][rows])
        judge.compare("input gradient", grad_input, alone[1][rows], truth[1][rows])
    # DDP averages over data- and context-parallel ranks unless the loss is per token.
    factor = 1 if config.calculate_per_token_loss else case.cp
    for name, parameter in module.named_parameters():
        want = (shard(name, answer[3][name], case) for answer in (alone, truth))
        judge.compare(f"{name} gradient", parameter.main_grad * factor, *want)
    _agree(judge.faults, device)
    return judge.worst


def _agree(faults: list[str], device) -> None:
    """Raise on every rank if any rank has a fault, so that none waits for another."""
    flag = torch.tensor([len(faults)], device=device)
    dist.all_reduce(flag)
    if flag.item():
        lines = "; ".join(faults) or "see the other ranks"
        raise AssertionError(f"rank {dist.get_rank()}: {lines}")


def setup_ranks() -> None:
    """Process group of torchrun's environment.

    NCCL with a GPU per rank. Gloo where ranks share GPUs, which NCCL refuses, and on a CPU.
    """
    from megatron_mla.cpu_shim import install_cpu_shim
    from tests.helpers.shared_gpu import share_gpus

    install_cpu_shim()
    if dist.is_initialized():
        return
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local % gpus)
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
        share_gpus()
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=torch.device(torch.cuda.current_device()))


def leave_ranks() -> None:
    """End the groups that :func:`setup_ranks` and the cases made, all ranks together."""
    from megatron.core import parallel_state as ps

    dist.barrier()
    ps.destroy_model_parallel()
    vars(lonely_groups).pop("group", None)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write the answers as JSON")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", default="", help="run cases whose id has this text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # Megatron-Core's router multiplies through Transformer Engine, which asks for TF32 by itself.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    setup_ranks()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.backends.cuda.matmul.allow_tf32 = False
    answers: dict[str, dict] = {}
    for case in CASES:
        if case.world != dist.get_world_size() or options.only not in case.id:
            continue
        if case.experts and dtype != torch.float32:
            if dist.get_rank() == 0:
                print("left", case.id, "nearly equal experts change places by rounding", flush=True)
            continue
        try:
            worst = run_case(case, dtype)
            answers[case.id] = {"ok": True, "worst": worst}
        except Exception:
            answers[case.id] = {"ok": False, "error": traceback.format_exc(limit=6)}
        if dist.get_rank() == 0:
            answer = answers[case.id]
            text = f"worst {max(answer['worst'].values()):.1e}" if answer["ok"] else answer["error"]
            print("ok  " if answer["ok"] else "FAIL", case.id, text, flush=True)
    if dist.get_rank() == 0 and options.report:
        options.report.write_text(json.dumps(answers))
    leave_ranks()
    return 0 if all(answer["ok"] for answer in answers.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
