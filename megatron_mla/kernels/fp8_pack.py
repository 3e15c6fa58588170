"""Queries and keys for FP8 attention: rotated, packed and rounded in one launch, or in the twin.

Kernel: fp8_pack_kernel.py. Twin: fp8_pack_ref.py, which also runs where Triton cannot. Equations:
kernels/README.md (12) to (14). Legend: Tq and Tk tokens, H and Hk heads of queries and of keys, N
unrotated channels of a head (queries and keys have their own), d positional ones, P rows of the
rope table.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mla.kernels.fp8_pack_ref import (
    check_dtype,
    check_input,
    check_scale,
    checked,
    fp8_cast_ref,
    pack_ref,
)
from megatron_mla.kernels.registry import note_change, register

# GPUs before have no such cast, or one of fp16 only: two roundings.
_CAPABILITY = (9, 0)
# One program of a cast holds whole rows.
_WIDEST_CAST = 4096


@functools.cache
def _kernels():
    """The module of the kernel, or None without Triton, whatever its import raises."""
    try:
        return importlib.import_module("megatron_mla.kernels.fp8_pack_kernel")
    except Exception:  # noqa: BLE001  a half-broken package may raise anything
        return None


@functools.cache
def writer_for(device: torch.device) -> Callable[..., None]:
    """What writes the outputs on ``device``: the kernel's launcher, or the twin."""
    kernels = _kernels()
    if kernels is None:
        return pack_ref
    if device.type == "cuda":
        able = torch.cuda.get_device_capability(device) >= _CAPABILITY
    else:
        able = kernels.INTERPRETED
    return kernels.launch_fp8_pack if able else pack_ref


def _fp8_pack(
    q_nope, q_pe, k_nope, k_pe, table, positions, positions_k, is_neox_style,
    scale_q, scale_kv, scale_q_tensor, scale_kv_tensor, q_out, k_out,
) -> None:  # fmt: skip
    note_change(q_out)
    note_change(k_out)
    scale_q = scale_q if scale_q_tensor is None else scale_q_tensor
    scale_kv = scale_kv if scale_kv_tensor is None else scale_kv_tensor
    writer_for(q_out.device)(
        q_nope, q_pe, k_nope, k_pe, table, positions, positions_k, is_neox_style,
        scale_q, scale_kv, q_out, k_out,
    )  # fmt: skip


def _nothing(*arguments) -> None: ...


register(
    "fp8_pack",
    "(Tensor q_nope, Tensor q_pe, Tensor k_nope, Tensor k_pe, Tensor? table, Tensor? positions, "
    "Tensor? positions_k, bool is_neox_style, float scale_q, float scale_kv, "
    "Tensor? scale_q_tensor, Tensor? scale_kv_tensor, Tensor(a!) q_out, Tensor(b!) k_out) -> ()",
    _fp8_pack,
    _nothing,
)


def _run(*arguments) -> None:
    """The operator with scales as the public functions take them."""
    *tensors, scale_q, scale_kv, q_out, k_out = arguments
    scales = scale_q, scale_kv
    numbers = [1.0 if isinstance(scale, Tensor) else float(scale) for scale in scales]
    given = [scale if isinstance(scale, Tensor) else None for scale in scales]
    torch.ops.megatron_mla.fp8_pack(*tensors, *numbers, *given, q_out, k_out)


def fused_rope_fp8_quantize(
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
) -> tuple[Tensor, Tensor]:
    """Rotate positional channels, multiply by a scale, round once to FP8 and pack ``[nope | pe]``.

    One launch for queries and keys. Rotation and scale are fp32 arithmetic; the cast rounds to
    nearest even, numbers and infinities beyond the dtype's range become its greatest finite number
    (448 in e4m3fn, 57344 in e5m2), NaN stays NaN, of either sign.

    Args:
        q_nope: [Tq, H, N] bf16 | fp16 | fp32, any strides, like all four.
        q_pe: [Tq, H, d]; d may be 0.
        k_nope: [Tk, Hk, N], or [Tk, N] for the one head of a latent. N may differ from that of
            q_nope.
        k_pe: [Tk, d], [Tk, 1, d] or [Tk, Hk, d]; one head is broadcast to Hk.
        cos_sin_cache: [P, d] fp32, last stride 1: cos in the first d / 2 columns, sin in the
            others. None, and nothing else, means a layer without rotation (NoPE): positions are not
            read and the positional channels are packed as they are.
        positions: [Tq] int32 | int64, contiguous, below P. On a GPU they are not checked, and one
            outside of the table takes its nearest row.
        is_neox_style: pairs are (i, i + d / 2), else (2i, 2i + 1); they stay in place.
        quant_scale_q, quant_scale_kv: positive numbers, or fp32 tensors of one element on the
            device, which are read there.
        quantize_dtype: torch.float8_e4m3fn | torch.float8_e5m2.
        positions_k: [Tk], ``positions`` when None.
        q_out, k_out: written and returned when given; contiguous.
    Returns:
        Query [Tq, H, N + d] and key [Tk, Hk, N + d] (Hk = 1 for [Tk, N]), contiguous.
    Raises:
        ValueError: an argument does not fit, or an input requires grad while gradients are
            recorded; its name, value, the condition and a way out.
    Gradients: none.
    Where the kernel cannot run (no Triton, a CPU without its interpreter, a GPU before compute
    capability 9.0) the twin does, with the same results.
    """
    arguments = checked(
        q_nope,
        q_pe,
        k_nope,
        k_pe,
        cos_sin_cache,
        positions,
        is_neox_style,
        quant_scale_q=quant_scale_q,
        quant_scale_kv=quant_scale_kv,
        quantize_dtype=quantize_dtype,
        positions_k=positions_k,
        q_out=q_out,
        k_out=k_out,
    )
    _run(*arguments)
    return arguments[-2:]


def fp8_cast(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: float | Tensor = 1.0
) -> Tensor:
    """``x * scale`` in FP8 by the cast of :func:`fused_rope_fp8_quantize`.

    Args:
        x: bf16 | fp16 | fp32, any shape and strides.
        dtype: torch.float8_e4m3fn | torch.float8_e5m2.
        scale: a positive number, or an fp32 tensor of one element on the device.
    Returns:
        Shape of ``x``, contiguous. One launch for up to three dimensions of at most 4096 channels,
        else plain PyTorch.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: none.
    """
    if x.dim() not in (2, 3) or x.shape[-1] > _WIDEST_CAST:
        return fp8_cast_ref(x, dtype, scale)
    check_input("x", x)
    check_dtype("dtype", dtype)
    check_scale("scale", scale, x)
    rows = x.unsqueeze(1) if x.dim() == 2 else x
    # Queries without positional channels, and no keys.
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    none = rows[:0]
    no_key = torch.empty(none.shape, dtype=dtype, device=x.device)
    _run(rows, rows[..., :0], none, none[..., :0], None, None, None, True, scale, 1.0, out, no_key)
    return out.view(x.shape)
