"""A start-up check that the operators of sparse attention are right on this machine, once.

A new GPU, driver or Triton can turn right source into wrong code. The problem has the widths that
will run, so that what is compiled here is not compiled again, and few rows; the truth is that of
the twins in fp64.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_mla.kernels.index import index_topk
from megatron_mla.kernels.index_ref import index_scores_ref
from megatron_mla.kernels.indexer_loss import indexer_loss
from megatron_mla.kernels.indexer_loss_ref import indexer_loss_ref
from megatron_mla.kernels.sparse_attention import (
    leave_hopper,
    runs_on_hopper,
    sparse_attention_with_lse,
)
from megatron_mla.kernels.sparse_attention_ref import sparse_attention_ref

_ROWS, _KEYS = 3, 150
# Of the largest value; wrong code is off by far more.
_ALLOWED = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 5e-2}


@functools.cache
def dsa_fault(
    device: str,
    dtype: torch.dtype,
    num_heads: int,
    widths: tuple[int, int],
    indexer: tuple[int, int],
    topk: int,
) -> str | None:
    """What is wrong with the operators on ``device``, a sentence, or None.

    Args:
        device: "cuda:0", or "cpu" with Triton's interpreter.
        num_heads: of the attention.
        widths: latent and positional channels.
        indexer: heads and channels of one.
        topk: slots of a row.
    """
    problem = torch.device(device), dtype, num_heads, widths, indexer, topk
    fault = _fault(*problem)
    probe = torch.empty(0, num_heads, sum(widths), dtype=dtype, device=device)
    if fault is not None and runs_on_hopper(probe, widths[0]):
        # It may be that kernel's alone; the portable one takes its place.
        leave_hopper(fault)
        fault = _fault(*problem)
    return fault


def _fault(device, dtype, *problem) -> str | None:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            off = _compare(device, dtype, *problem)
    except Exception as error:  # noqa: BLE001  whatever a compiler or driver raises
        return f"the kernels do not run on {device} ({type(error).__name__}: {error})"
    wrong = [name for name, error in off.items() if not error <= _ALLOWED[dtype]]
    if wrong:
        return f"the kernels give a wrong {', '.join(wrong)} on {device} in {dtype}"
    return None


def _compare(device, dtype, num_heads, widths, indexer, topk) -> dict[str, float]:
    """Largest errors, over the largest true value."""
    # The CPU by name: a layer may be built on the meta device.
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device="cpu")
        return values.to(device, dtype).requires_grad_()

    latent, width = widths[0], sum(widths)
    query, key = normal(_ROWS, num_heads, width), normal(_KEYS, width)
    q, k, w = normal(_ROWS, *indexer), normal(_KEYS, indexer[1]), normal(_ROWS, indexer[0])
    grad = normal(_ROWS, num_heads, latent).detach()
    # A row that sees all, one that sees some from the middle on, one that sees none.
    host = torch.tensor([[0, 40, 9], [_KEYS, 140, 9]], dtype=torch.int32, device="cpu")
    bounds = SimpleNamespace(starts=host[0].to(device), ends=host[1].to(device), host=host)
    slots = torch.full((_ROWS, topk), -1, dtype=torch.int32, device="cpu")
    chosen = torch.randperm(_KEYS, generator=generator, device="cpu")[:topk]
    slots[0, : len(chosen)], slots[1, -1] = chosen.to(torch.int32), 5
    slots = slots.to(device)
    how = {"scale": width**-0.5, "v_dim": latent}

    def run(attend, loss, *leaves: Tensor) -> dict[str, Tensor]:
        query, key, q, k, w = leaves
        out, lse = attend(query, key, slots, **how)
        known = {} if lse is None else {"lse": lse}
        divergence = loss(
            q,
            k,
            w,
            query.detach(),
            key.detach(),
            bounds,
            scale=how["scale"],
            indices=slots,
            **known,
        )
        grads = torch.autograd.grad((out, divergence), leaves, (grad.to(out.dtype), None))
        names = [f"gradient of {name}" for name in "query key q k w".split()]
        return {"output": out, "loss": divergence, **dict(zip(names, grads, strict=True))}

    leaves = query, key, q, k, w
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = run(lambda *a, **how: (sparse_attention_ref(*a, **how), None), indexer_loss_ref, *wide)
    got = run(sparse_attention_with_lse, indexer_loss, *leaves)
    off = {name: _error(got[name], want[name]) for name in want}
    off["choice of keys"] = _choice(q.detach(), k.detach(), w.detach(), bounds, topk)
    return off


def _error(got: Tensor, want: Tensor) -> float:
    error = (got.detach().double() - want.detach()).abs().max()
    return (error / want.detach().abs().max().clamp(min=1e-9)).item()


def _choice(q: Tensor, k: Tensor, w: Tensor, bounds, topk: int) -> float:
    """How much lower than the true ones the scores of the chosen keys are; infinite for others."""
    few = min(topk, 20)  # fewer than a row sees
    chosen = index_topk(q, k, w, bounds, topk=few).long().cpu()
    scores = index_scores_ref(q.double(), k.double(), w.double()).cpu()
    worst = 0.0
    for row, (start, end) in enumerate(bounds.host.t().tolist()):
        kept = chosen[row][chosen[row] >= 0]
        best = scores[row, start:end].sort(descending=True).values[:few]
        if len(kept.unique()) != len(best) or not ((kept >= start) & (kept < end)).all():
            return torch.inf
        if len(best):
            mine = scores[row, kept].sort(descending=True).values
            worst = max(worst, ((best - mine).abs().max() / best.abs().max()).item())
    return worst
