"""Rotated, packed and rounded to FP8 in plain PyTorch: the specification of fp8_pack.py.

Equations: kernels/README.md (12) to (14). Legend: T tokens (queries and keys have their own), H
heads, N unrotated and d positional channels of a head, P rows of the rope table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_mla.kernels.checks import check_unit_stride
from megatron_mla.kernels.rope_ref import turn_ref

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The greatest finite number of each dtype, where the cast saturates."""

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def rounded_ref(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """``x * scale`` in fp32, rounded once to nearest even; beyond the limit +-limit, NaN is NaN."""
    limit = LIMITS[dtype]
    # torch's own cast overflows to NaN before 2.13, and to infinity in e5m2.
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def fp8_cast_ref(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: float | Tensor = 1.0
) -> Tensor:
    """``x * scale`` in FP8, contiguous. See :func:`megatron_mla.kernels.fp8_pack.fp8_cast`."""
    check_input("x", x)
    check_dtype("dtype", dtype)
    check_scale("scale", scale, x)
    return rounded_ref(x, dtype, scale).contiguous()


def _write(nope, pe, table, positions, is_neox_style, scale, out) -> None:
    """One of the two sides: [T, H, N], [T, 1 | H, d] -> [T, H, N + d]."""
    width = nope.shape[-1]
    pe = pe.float()
    if table is not None:
        # A position outside of the table takes its nearest row, as in the kernels.
        row = table[positions.long().clamp(0, table.shape[0] - 1)].unsqueeze(1)  # [T, 1, d]
        cos, sin = row.chunk(2, dim=-1)
        pairs = not is_neox_style
        pe = turn_ref(pe, cos, sin, pairs_in=pairs, pairs_out=pairs)
    out[..., :width] = rounded_ref(nope, out.dtype, scale)
    out[..., width:] = rounded_ref(pe, out.dtype, scale)  # one head goes to all


def pack_ref(
    q_nope, q_pe, k_nope, k_pe, table, positions, positions_k, is_neox_style,
    scale_q, scale_kv, q_out, k_out,
) -> None:  # fmt: skip
    """Write both outputs; arguments as :func:`checked` returns them."""
    _write(q_nope, q_pe, table, positions, is_neox_style, scale_q, q_out)
    _write(k_nope, k_pe, table, positions_k, is_neox_style, scale_kv, k_out)


def check_input(name: str, t: Tensor) -> None:
    if t.dtype not in _INPUTS:
        raise ValueError(
            f"{name} must be bfloat16, float16 or float32, got {t.dtype}; cast it first"
        )
    if torch.is_grad_enabled() and t.requires_grad:
        raise ValueError(
            f"{name} must not require grad, for FP8 outputs have no gradients; call this under "
            f"torch.no_grad() or pass {name}.detach()"
        )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in LIMITS:
        raise ValueError(
            f"{name} must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}; e4m3fn is what "
            "FP8 attention takes"
        )


def check_scale(name: str, scale: float | Tensor, like: Tensor) -> None:
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != like.device:
            raise ValueError(
                f"{name} must be a number or one float32 element on {like.device}, got "
                f"{scale.dtype} {list(scale.shape)} on {scale.device}; move it or pass "
                f"{name}.item()"
            )
    elif not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"{name} must be finite and positive, got {scale}; 1.0 quantises without a scale"
        )


def _check_device(name: str, t: Tensor, like: Tensor) -> None:
    if t.device != like.device:
        raise ValueError(
            f"{name} must be on the device of q_nope, {like.device}, got {t.device}; move it"
        )


def _check_parts(q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor) -> tuple[Tensor, ...]:
    """Keys of one head get their heads dimension."""
    parts = {"q_nope": q_nope, "q_pe": q_pe, "k_nope": k_nope, "k_pe": k_pe}
    for name, t in parts.items():
        check_input(name, t)
        _check_device(name, t, q_nope)
        wanted = "[tokens, heads, width]" + " or [tokens, width]" * (name[0] == "k")
        if not (t.dim() == 3 or (t.dim() == 2 and name[0] == "k")):
            raise ValueError(
                f"{name} must be {wanted}, got {list(t.shape)}; add a heads dimension of 1 where "
                "there is one head"
            )
    k_nope, k_pe = (t.unsqueeze(1) if t.dim() == 2 else t for t in (k_nope, k_pe))
    if q_pe.shape[:2] != q_nope.shape[:2]:
        raise ValueError(
            f"q_pe must be [{q_nope.shape[0]}, {q_nope.shape[1]}, d] like q_nope, got "
            f"{list(q_pe.shape)}; both are slices of one query"
        )
    tokens, heads, _ = k_nope.shape
    if k_pe.shape[0] != tokens or k_pe.shape[1] not in (1, heads) or k_pe.shape[2] != q_pe.shape[2]:
        raise ValueError(
            f"k_pe must be [{tokens}, 1 or {heads}, {q_pe.shape[2]}], the tokens and heads of "
            f"k_nope and the width of q_pe, got {list(k_pe.shape)}; one head is broadcast"
        )
    return q_nope, q_pe, k_nope, k_pe


def _check_table(table: Tensor, width: int, like: Tensor) -> None:
    if width % 2:
        raise ValueError(
            f"rotated channels of q_pe and k_pe must be even, got {width}; cos_sin_cache=None "
            "packs them unrotated"
        )
    if table.dim() != 2 or table.shape[1] != width or table.dtype != torch.float32:
        raise ValueError(
            f"cos_sin_cache must be float32 [positions, {width}], cos in the first half of a row "
            f"and sin in the last, got {table.dtype} {list(table.shape)}; None packs unrotated"
        )
    _check_device("cos_sin_cache", table, like)
    check_unit_stride("cos_sin_cache", table)


def _check_positions(name: str, positions: Tensor | None, t: Tensor, of: str, rows: int) -> None:
    tokens = t.shape[0]
    if positions is None:
        raise ValueError(
            f"{name} must be int32 or int64 [{tokens}] where cos_sin_cache is given, got None; "
            "cos_sin_cache=None packs without positions"
        )
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape != (tokens,):
        raise ValueError(
            f"{name} must be int32 or int64 [{tokens}], one for each token of {of}, got "
            f"{positions.dtype} {list(positions.shape)}; where queries and keys differ, give "
            "positions and positions_k"
        )
    _check_device(name, positions, t)
    if not positions.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {positions.stride()}; call .contiguous()"
        )
    if not tokens:
        return
    if not rows:
        raise ValueError("cos_sin_cache must have a row for every position, got an empty table")
    # On a GPU that would be a synchronisation; there the nearest row is read.
    if positions.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = positions.min().item(), positions.max().item()
        if low < 0 or high >= rows:
            raise ValueError(
                f"{name} must be in [0, {rows}), the rows of cos_sin_cache, got {low} to {high}; "
                "make a longer table"
            )


def _checked_out(name: str, out: Tensor | None, shape, dtype: torch.dtype, like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    for what, got, wanted in (
        ("shape", list(out.shape), list(shape)),
        ("dtype", out.dtype, dtype),
        ("device", out.device, like.device),
    ):
        if got != wanted:
            raise ValueError(
                f"{name} must have {what} {wanted}, got {got}; leave it out to get a new tensor"
            )
    if not out.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {out.stride()}; leave it out to get a new "
            "tensor"
        )
    return out


def checked(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    cos_sin_cache: Tensor | None,
    positions: Tensor | None,
    is_neox_style: bool,
    *,
    quant_scale_q: float | Tensor = 1.0,
    quant_scale_kv: float | Tensor = 1.0,
    quantize_dtype: torch.dtype = torch.float8_e4m3fn,
    positions_k: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple:
    """Arguments of :func:`pack_ref`: all with heads, outputs made, nothing of what is not read."""
    q_nope, q_pe, k_nope, k_pe = _check_parts(q_nope, q_pe, k_nope, k_pe)
    check_dtype("quantize_dtype", quantize_dtype)
    check_scale("quant_scale_q", quant_scale_q, q_nope)
    check_scale("quant_scale_kv", quant_scale_kv, q_nope)
    width = q_pe.shape[2]
    if cos_sin_cache is not None:
        _check_table(cos_sin_cache, width, q_nope)
        if positions_k is None:
            positions_k = positions
        rows = cos_sin_cache.shape[0]
        _check_positions("positions", positions, q_nope, "q_nope", rows)
        _check_positions("positions_k", positions_k, k_nope, "k_nope", rows)
    if cos_sin_cache is None or width == 0:
        cos_sin_cache = positions = positions_k = None
    outs = [
        _checked_out(name, out, (*nope.shape[:2], nope.shape[2] + width), quantize_dtype, q_nope)
        for name, out, nope in (("q_out", q_out, q_nope), ("k_out", k_out, k_nope))
    ]
    return (
        q_nope, q_pe, k_nope, k_pe, cos_sin_cache, positions, positions_k, bool(is_neox_style),
        quant_scale_q, quant_scale_kv, *outs,
    )  # fmt: skip


def fused_rope_fp8_quantize_ref(*tensors, **how) -> tuple[Tensor, Tensor]:
    """Signature and meaning of :func:`megatron_mla.kernels.fp8_pack.fused_rope_fp8_quantize`."""
    arguments = checked(*tensors, **how)
    pack_ref(*arguments)
    return arguments[-2:]
