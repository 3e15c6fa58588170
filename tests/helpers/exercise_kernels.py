"""Every kernel on ragged shapes, held against its twin; a program to run under a sanitizer:

compute-sanitizer --tool memcheck python -m tests.helpers.exercise_kernels
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_mla.kernels.absorb import absorb_query
from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.concat_ref import rope_concat_ref
from megatron_mla.kernels.dsa_selfcheck import dsa_fault
from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope import rope, rope_
from megatron_mla.kernels.rope_ref import rope_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, BATCH = 19, 2
# Heads, unrotated, rotated, value and latent widths: a model's, and nothing that fills a block.
SHAPES = [(16, 128, 64, 128, 512), (37, 24, 12, 20, 40), (1, 512, 64, 0, 8), (130, 6, 2, 1, 3)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def answers(run, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Outputs and gradients, which come in for both paths from one seed."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = run(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    torch.manual_seed(1)
    grads = [torch.randn_like(t) for t in outputs]
    return (*outputs, *torch.autograd.grad(outputs, leaves, grads))


def exercise(shape: tuple[int, ...], dtype: torch.dtype, table_dtype: torch.dtype) -> list[str]:
    """Names of operators that are off their twins."""
    heads, nope, rotated, value, latent = shape
    torch.manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=dtype)

    angle = torch.rand(TOKENS, rotated // 2, device=DEVICE) * 6
    positions = torch.randint(TOKENS, (TOKENS,), device=DEVICE)
    tables = angle.cos().to(table_dtype), angle.sin().to(table_dtype), positions
    rows = TOKENS, BATCH, heads
    q, kv = normal(*rows, nope + rotated), normal(*rows, nope + value)
    k_pe = normal(TOKENS, BATCH, 1, rotated)
    pack = {"k_dim": nope, "pack_value": True}
    pairs = {"nope_dim": nope, "inverse": True, "remove_interleaving": True}
    cases = {
        "rope": (lambda t: rope(t, *tables, **pairs), lambda t: rope_ref(t, *tables, **pairs), [q]),
        "rope_": (
            lambda t: rope_(t * 1, *tables, nope_dim=nope),
            lambda t: rope_ref(t, *tables, nope_dim=nope),
            [q],
        ),
        "rope_concat": (
            lambda a, b: rope_concat(a, b, *tables),
            lambda a, b: rope_concat_ref(a, b, *tables),
            [normal(*rows, latent), normal(*rows, rotated)],
        ),
        "rope_kv_split": (
            lambda a, b: rope_kv_split(a, b, *tables, **pack),
            lambda a, b: rope_kv_split_ref(a, b, *tables, **pack),
            [kv, k_pe],
        ),
        "rope_kv_split, value viewed": (
            lambda a, b: rope_kv_split(a, b, *tables, k_dim=nope),
            lambda a, b: rope_kv_split_ref(a, b, *tables, k_dim=nope),
            [kv, k_pe],
        ),
    }
    wrong = [
        name
        for name, (run, twin, inputs) in cases.items()
        if not all(map(torch.equal, answers(run, inputs), answers(twin, inputs)))
    ]
    # Of matrix products only what is rotated has promised bits.
    out, *_ = answers(
        lambda a, b: absorb_query(a, b, *tables, nope_dim=nope), [q, normal(heads, nope, latent)]
    )
    if not torch.equal(out[..., latent:], rope_ref(q, *tables, nope_dim=nope)[..., nope:]):
        wrong.append("absorb_query")
    return wrong


# Heads, latent and positional channels, heads and channels of the indexer, slots.
SPARSE = [
    (64, (512, 64), (32, 128), 200),
    (37, (40, 12), (5, 24), 70),
    (8, (512, 64), (64, 128), 64),
]


def main() -> None:
    faults = []
    device = "cuda:0" if DEVICE == "cuda" else "cpu"
    for problem, dtype in itertools.product(SPARSE, DTYPES):
        for strict in (False, True):
            torch.use_deterministic_algorithms(strict)
            dsa_fault.cache_clear()
            fault = dsa_fault(device, dtype, *problem)
            if fault is not None:
                faults.append(f"sparse attention {problem} {dtype}: {fault}")
    torch.use_deterministic_algorithms(False)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        for table_dtype in {dtype, torch.float32}:
            for name in exercise(shape, dtype, table_dtype):
                faults.append(f"{name} {shape} {dtype} with {table_dtype} tables")
    if faults:
        raise SystemExit("\n".join(faults))
    print(
        f"{len(SHAPES) * (2 * len(DTYPES) - 1)} problems, every bit as in the twins, and "
        f"{2 * len(SPARSE) * len(DTYPES)} of sparse attention, close to fp64, on {DEVICE}"
    )


if __name__ == "__main__":
    main()
