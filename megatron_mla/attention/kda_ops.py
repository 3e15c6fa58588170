"""The operators of Kimi Delta Attention: short convolution, decay and gated delta rule.

On CUDA they are fla-core's Triton kernels, on a CPU plain torch and fla-core's naive recurrence.
(Its naive chunk form is not used: it exponentiates sums of decays before it masks them, which
overflows for strong decays, and gives NaN gradients.)

Source: Kimi Linear, arXiv:2510.26692. Per head and step, with state S [K, V]::

    S <- diag(exp g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)

Legend: L rows, B batch (1 when packed), H heads, K key and V value channels, D channels of a
convolution, W its width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_mla.parallel.microbatch import Rows

_L2_EPSILON = 1e-6


def log_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Logarithm of the decay of every key channel, at most 0, in fp32.

    Args:
        f: [..., H, K] of the projection. a_log: [H]. dt_bias: [H * K].
        lower_bound: None: ``-exp(a_log) * softplus(f + dt_bias)``; else
            ``lower_bound * sigmoid(exp(a_log) * (f + dt_bias))``.
    """
    f = f.float() + dt_bias.float().view(f.shape[-2:])
    rate = a_log.float().exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(f)
    return lower_bound * torch.sigmoid(rate * f)


def short_conv(x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    """SiLU of a causal convolution of every channel by itself, inside every sequence.

    Args:
        x: [L, B, D]. weight: [D, W], the last tap meets the row itself.
    Returns:
        [L, B, D] in ``x``'s dtype. Rows past the last sequence are anything finite.
    """
    if x.is_cuda:
        return _fused_conv(x, weight, rows)
    # How far a row may look back; without sequences of their own it is zeros that rows run into.
    reach = rows.positions[:, None, None] if rows.packed else None
    return _conv(torch.nn.functional.pad(x, (0, 0, 0, 0, weight.shape[1] - 1, 0)), weight, reach)


def short_conv_from(history: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`short_conv`, behind the rows ``history`` [W - 1, B, D]."""
    return _conv(torch.cat((history, x)), weight, None)


def _conv(x: Tensor, weight: Tensor, reach: Tensor | None) -> Tensor:
    """[W - 1 + L, B, D] -> [L, B, D]; sums in fp32, rounded in front of the SiLU."""
    width = weight.shape[1]
    num_rows = len(x) - width + 1
    total = 0
    for tap in range(width):
        term = x[tap : tap + num_rows].float() * weight[:, tap].float()
        if reach is not None and tap < width - 1:
            term = term.masked_fill(reach < width - 1 - tap, 0)
        total = total + term
    return torch.nn.functional.silu(total.to(x.dtype))


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _lengths(rows: Rows) -> tuple[Tensor, Tensor]:
    """Cumulative lengths of the sequences of a packed batch, empty ones left out: device, host."""
    ends = [block.q_end for block in rows.causal_blocks()]
    host = torch.tensor([0, *ends], dtype=torch.int64)
    return host.to(rows.positions.device), host


def _fused_conv(x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    x = x.transpose(0, 1)  # [B, L, D]
    if not rows.packed:
        return causal_conv1d(x.contiguous(), weight, activation="silu")[0].transpose(0, 1)
    cu, host = _lengths(rows)
    used = int(host[-1])
    if used == 0:
        return _no_rows(x, weight).transpose(0, 1)
    out, _ = causal_conv1d(
        x[:, :used].contiguous(), weight, activation="silu", cu_seqlens=cu, cu_seqlens_cpu=host
    )
    return _pad_rows(out, x.shape[1]).transpose(0, 1)


def _pad_rows(t: Tensor, num_rows: int) -> Tensor:
    """[1, rows, ...] -> [1, num_rows, ...], zeros behind."""
    missing = num_rows - t.shape[1]
    return torch.cat((t, t.new_zeros(1, missing, *t.shape[2:])), 1) if missing else t


def _no_rows(like: Tensor, *others: Tensor) -> Tensor:
    """Zeros that hang on all arguments: every weight has a gradient, as data parallelism awaits."""
    return like * 0 + sum(t.sum() * 0 for t in others).to(like.dtype)


def _normalise(t: Tensor) -> Tensor:
    """Unit length in the last dimension, fp32."""
    t = t.float()
    return t / (t.square().sum(-1, keepdim=True) + _L2_EPSILON).sqrt()


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    rows: Rows,
    *,
    lower_bound: float | None,
) -> Tensor:
    """The gated delta rule over every sequence, from a state of zeros.

    Args:
        q, k: [B, L, H, K], not yet normalised. v: [B, L, H, V]. f: [B, L, H, K], what
            :func:`log_decay` takes. beta: [B, L, H], in (0, 1).
    Returns:
        [B, L, H, V] in ``v``'s dtype; 0 past the last sequence, from where no gradient comes.
    """
    if rows.packed and not rows.causal_blocks():
        return _no_rows(v, q, k, f, beta, a_log, dt_bias)
    if q.is_cuda:
        return _fused_rule(q, k, v, f, beta, a_log, dt_bias, rows, lower_bound)
    from fla.ops.kda.naive import naive_recurrent_kda

    parts = (_normalise(q), _normalise(k), v, log_decay(f, a_log, dt_bias, lower_bound), beta)
    if not rows.packed:
        return naive_recurrent_kda(*parts)[0]
    outs = [
        naive_recurrent_kda(*(t[:, block.q_start : block.q_end] for t in parts))[0]
        for block in rows.causal_blocks()
    ]
    return _pad_rows(torch.cat(outs, 1), v.shape[1])


def _fused_rule(q, k, v, f, beta, a_log, dt_bias, rows, lower_bound) -> Tensor:
    from fla.ops.kda import chunk_kda

    how = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": lower_bound}
    # The faster kernels for gates that are bounded; -5 is as far as they go.
    how["safe_gate"] = lower_bound is not None and lower_bound >= -5
    num_rows = v.shape[1]
    if rows.packed:
        cu, host = _lengths(rows)
        how |= {"cu_seqlens": cu, "cu_seqlens_cpu": host}
        q, k, v, f, beta = (t[:, : int(host[-1])] for t in (q, k, v, f, beta))
    q, k, v, f, beta = (t.contiguous() for t in (q, k, v, f, beta))
    out, _ = chunk_kda(q, k, v, f, beta, A_log=a_log.float(), dt_bias=dt_bias.float(), **how)
    return _pad_rows(out, num_rows) if rows.packed else out


def delta_rule_from(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    real: Tensor,
    *,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule from a state, without gradients.

    Args:
        state: [B, H, K, V] fp32. real: [B, L] bool; other rows change no state.
    Returns:
        As :func:`delta_rule`, and the state behind the last row.
    """
    real = real[..., None]
    beta = beta.masked_fill(~real, 0)
    g = log_decay(f, a_log, dt_bias, lower_bound).masked_fill(~real[..., None], 0)
    how = {"initial_state": state, "output_final_state": True}
    if not q.is_cuda:
        from fla.ops.kda.naive import naive_recurrent_kda

        return naive_recurrent_kda(_normalise(q), _normalise(k), v, g, beta, **how)
    if q.shape[1] == 1:
        from fla.ops.kda import fused_recurrent_kda as rule
    else:
        from fla.ops.kda import chunk_kda as rule
    parts = (t.contiguous() for t in (q, k, v, g, beta))
    return rule(*parts, use_qk_l2norm_in_kernel=True, **how)
