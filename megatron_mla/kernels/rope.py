"""Rotary embedding of one end of every head, in Triton. Twin: rope_ref.py.

Equations: kernels/README.md (1) to (3). Legend: T tokens of this rank, S rows and B batch
(T = S * B, B = 1 when packed), H heads of this rank, N unrotated and d rotated channels, h = d / 2,
P rows of the rope table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mla.kernels import rotation
from megatron_mla.kernels.checks import check_flat, check_out, check_rope
from megatron_mla.kernels.registry import note_change, register
from megatron_mla.kernels.rotation import load_angle, load_two, place, store_two, turn


@triton.jit(do_not_specialize=["num_tokens", "table_rows"])
def _rope_kernel(
    nope,  # [S, B, H, N] in, any strides; not read when N is 0
    nope_out,  # [S, B, H, N] out, last stride 1
    pe,  # [S, B, H, d] in, any strides
    pe_out,  # [S, B, H, d] out, last stride 1; may be pe itself
    cos,  # [P, h], last stride 1
    sin,
    positions,  # [S] int32 | int64
    nope_strides,
    nope_out_strides,
    pe_strides,
    pe_out_strides,
    table_stride,
    num_tokens,
    num_heads,
    batch,
    table_rows,
    N: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    INVERSE: tl.constexpr,
    BACKWARD: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    R: tl.constexpr,
):
    # The head itself and not its place in the tile is held against the number of heads.
    token, head = place(num_heads, BLOCK_T, BLOCK_H)
    live = token < num_tokens
    mask = live[:, None] & (head < num_heads)  # [T, H]
    # 64 bits: real shapes pass 2**31 elements.
    row = (token // batch).to(tl.int64)
    s = row[:, None]
    b = (token % batch).to(tl.int64)[:, None]

    if N > 0:
        channel = tl.arange(0, BLOCK_N).to(tl.int64)[None, None, :]
        copied = mask[:, :, None] & (channel < N)
        offset = s * nope_strides[0] + b * nope_strides[1] + head * nope_strides[2]
        kept = tl.load(nope + offset[:, :, None] + channel * nope_strides[3], mask=copied)
        offset = s * nope_out_strides[0] + b * nope_out_strides[1] + head * nope_out_strides[2]
        tl.store(nope_out + offset[:, :, None] + channel, kept, mask=copied)

    c, sn = load_angle(cos, sin, positions, row, live, table_stride, table_rows, HALF, R)
    offset = s * pe_strides[0] + b * pe_strides[1] + head * pe_strides[2]
    x1, x2 = load_two(pe, offset, mask, pe_strides[3], HALF, R, PAIRS_IN)
    left, right = turn(x1, x2, c, sn, pe_out.dtype.element_ty, ROUND, INVERSE, BACKWARD)
    if IN_PLACE:
        # Channels change places: no warp may store before all have loaded.
        tl.debug_barrier()
    offset = s * pe_out_strides[0] + b * pe_out_strides[1] + head * pe_out_strides[2]
    store_two(pe_out, offset, mask, left, right, HALF, R, PAIRS_OUT)


def launch_rope(
    pe: Tensor,
    pe_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    nope: Tensor | None = None,
    nope_out: Tensor | None = None,
    pairs_in: bool = True,
    pairs_out: bool = False,
    inverse: bool = False,
    backward: bool = False,
    tile: tuple[int, int] | None = None,
    num_warps: int = 4,
) -> None:
    """Write rotated ``pe`` into ``pe_out`` and, with ``nope``, that into ``nope_out`` unchanged.

    Args:
        pe, pe_out, nope, nope_out: [S, (B,) H, ...] views, possibly of one storage; ``pe_out`` may
            be ``pe`` itself. Outputs have last stride 1.
        pairs_in, pairs_out: order of the rotated channels before and after.
        backward: -0 becomes +0.
        tile: tokens and heads of one program; chosen when None.
    """
    if pe.dim() == 3:
        pe, pe_out = pe.unsqueeze(1), pe_out.unsqueeze(1)
        if nope is not None:
            nope, nope_out = nope.unsqueeze(1), nope_out.unsqueeze(1)
    rows, batch, heads, rotated = pe.shape
    width = 0 if nope is None else nope.shape[-1]
    if pe_out.numel() == 0:
        return
    if width == 0:
        nope, nope_out = pe, pe_out
    tokens = rows * batch
    tile = tile or rotation.tile_of(tokens, heads, width + rotated, pe.device)
    half = rotated // 2
    with rotation.on_device_of(pe):
        _rope_kernel[rotation.grid_of(tokens, heads, tile)](
            nope,
            nope_out,
            pe,
            pe_out,
            cos,
            sin,
            positions,
            nope.stride(),
            nope_out.stride(),
            pe.stride(),
            pe_out.stride(),
            cos.stride(0),
            tokens,
            heads,
            batch,
            cos.shape[0],
            N=width,
            HALF=half,
            PAIRS_IN=pairs_in,
            PAIRS_OUT=pairs_out,
            ROUND=cos.dtype == pe.dtype,
            INVERSE=inverse,
            BACKWARD=backward,
            IN_PLACE=pe.data_ptr() == pe_out.data_ptr(),
            BLOCK_T=tile[0],
            BLOCK_H=tile[1],
            BLOCK_N=triton.next_power_of_2(max(width, 1)),
            R=triton.next_power_of_2(half),
            num_warps=num_warps,
            **rotation.EXACT,
        )


def parts(t: Tensor, nope_dim: int, rope_first: bool) -> tuple[Tensor, Tensor]:
    """Unrotated and rotated channels of ``t``, views."""
    if rope_first:
        rotated = t.shape[-1] - nope_dim
        return t[..., rotated:], t[..., :rotated]
    return t[..., :nope_dim], t[..., nope_dim:]


def _rope_out(
    t, cos, sin, positions, nope_dim, rope_first, pairs_in, pairs_out, inverse, backward, out
) -> None:
    nope, pe = parts(t, nope_dim, rope_first)
    nope_out, pe_out = parts(out, nope_dim, rope_first)
    launch_rope(
        pe,
        pe_out,
        cos,
        sin,
        positions,
        nope=nope,
        nope_out=nope_out,
        pairs_in=pairs_in,
        pairs_out=pairs_out,
        inverse=inverse,
        backward=backward,
    )


def _rope_into(t, *arguments_and_out) -> None:
    note_change(arguments_and_out[-1])
    _rope_out(t, *arguments_and_out)


def _rope(t, *arguments) -> Tensor:
    out = _like(t)
    _rope_out(t, *arguments, out)
    return out


def _rope_in_place(
    t, cos, sin, positions, nope_dim, rope_first, pairs_in, pairs_out, inverse, backward
) -> None:
    note_change(t)
    _, pe = parts(t, nope_dim, rope_first)
    launch_rope(
        pe,
        pe,
        cos,
        sin,
        positions,
        pairs_in=pairs_in,
        pairs_out=pairs_out,
        inverse=inverse,
        backward=backward,
    )


def _like(t, *arguments) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _nothing(*arguments) -> None: ...


def _transposed(nope_dim, rope_first, pairs_in, pairs_out, inverse, backward):
    """Arguments of the backward: the inverse rotation, the orders of channels change places."""
    return nope_dim, rope_first, pairs_out, pairs_in, not inverse, True


def _setup_context(ctx, inputs, output) -> None:
    _, cos, sin, positions, *arguments = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.arguments = arguments


def _backward(ctx, grad):
    grad = torch.ops.megatron_mla.rope(grad, *ctx.saved_tensors, *_transposed(*ctx.arguments))
    return grad, *(None,) * 9


_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor positions, int nope_dim, bool rope_first, bool pairs_in, "
    "bool pairs_out, bool inverse, bool backward"
)
register(
    "rope",
    f"(Tensor t, {_ARGUMENTS}) -> Tensor",
    _rope,
    _like,
    setup_context=_setup_context,
    backward=_backward,
)
register("rope_", f"(Tensor(a!) t, {_ARGUMENTS}) -> ()", _rope_in_place, _nothing)
register("rope_out", f"(Tensor t, {_ARGUMENTS}, Tensor(a!) out) -> ()", _rope_into, _nothing)


class _RopeInPlace(torch.autograd.Function):
    """The storage of the input is rotated; the gradient is not touched but rotated into its own."""

    @staticmethod
    def forward(ctx, t, heads, cos, sin, positions, *arguments):
        ctx.save_for_backward(cos, sin, positions)
        ctx.arguments = heads, arguments
        ctx.mark_dirty(t)
        torch.ops.megatron_mla.rope_(t.view(heads), cos, sin, positions, *arguments)
        return t

    @staticmethod
    def backward(ctx, grad):
        heads, arguments = ctx.arguments
        shape = grad.shape
        grad = torch.ops.megatron_mla.rope(
            grad.view(heads), *ctx.saved_tensors, *_transposed(*arguments)
        )
        return grad.view(shape), *(None,) * 10


def _may_change(t: Tensor) -> bool:
    """Whether autograd lets a tensor that requires grad be changed in place."""
    if t.is_leaf:
        return False
    meta = torch._C._autograd
    return not t._is_view() or meta._get_creation_meta(t) == meta.CreationMeta.DEFAULT


def rope(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    nope_dim: int,
    rope_first: bool = False,
    interleaved: bool = True,
    inverse: bool = False,
    remove_interleaving: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate one end of every head and copy the other channels bit for bit.

    Args:
        t: [S, (B,) H, N + d] bf16 | fp16 | fp32 | fp64, last stride 1; heads ``[nope | pe]``, or
            ``[pe | nope]`` with ``rope_first``.
        cos, sin: [P, d / 2], last stride 1. Tables in the dtype of ``t`` round every product to it
            ("megatron" numerics), fp32 tables round once ("fp32" numerics).
        positions: [S] int32 | int64, index of each row inside its own sequence, below P. Not read
            on the host; a position outside of the table takes its nearest row.
        nope_dim: N, may be 0.
        interleaved: channels come in as pairs (0, 1), (2, 3), ...; else as halves.
        inverse: rotate back.
        remove_interleaving: with ``interleaved``, write pairs again instead of halves.
        out: written and returned when given, without gradients; ``t`` itself or apart from it.
    Returns:
        Shape and dtype of ``t``, contiguous where ``out`` is not given.
    Raises:
        ValueError: an argument does not fit; its name, value, the condition and a way out.
    Gradients: t yes; cos, sin, positions none.
    """
    check_rope(t, cos, sin, positions, nope_dim=nope_dim)
    pairs_out = interleaved and remove_interleaving
    arguments = (nope_dim, rope_first, interleaved, pairs_out, inverse, False)
    if out is None:
        return torch.ops.megatron_mla.rope(t, cos, sin, positions, *arguments)
    check_out(t, out)
    torch.ops.megatron_mla.rope_out(t, cos, sin, positions, *arguments, out)
    return out


def rope_(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    nope_dim: int,
    num_heads: int | None = None,
    rope_first: bool = False,
    interleaved: bool = True,
    inverse: bool = False,
    remove_interleaving: bool = False,
) -> Tensor:
    """:func:`rope` in the storage of ``t``; only the rotated channels are read and written.

    Autograd is told (the tensor is marked dirty), so a graph that saved ``t`` for its backward
    raises instead of using changed data. Where autograd forbids in-place changes, a leaf that
    requires grad or a view made inside another function, and under ``torch.compile`` the result
    is a new tensor.

    Args:
        t: [S, (B,) H, N + d], or flat [S, (B,) H * (N + d)] with ``num_heads``. Overwritten. Flat
            is the better form for the output of a linear: in-place changes of views cost autograd
            copies of their gradient.
    Returns:
        ``t``, or the new tensor.
    """
    shape = heads = t.shape
    if num_heads is not None:
        check_flat(t, num_heads)
        heads = (*t.shape[:-1], num_heads, t.shape[-1] // num_heads)
    view = t.view(heads)
    check_rope(view, cos, sin, positions, nope_dim=nope_dim, in_place=True)
    pairs_out = interleaved and remove_interleaving
    arguments = (nope_dim, rope_first, interleaved, pairs_out, inverse, False)
    tracked = torch.is_grad_enabled() and t.requires_grad
    if torch.compiler.is_compiling() or (tracked and not _may_change(t)):
        out = torch.ops.megatron_mla.rope(view, cos, sin, positions, *arguments)
        return out.view(shape)
    if tracked:
        return _RopeInPlace.apply(t, heads, cos, sin, positions, *arguments)
    torch.ops.megatron_mla.rope_(view, cos, sin, positions, *arguments)
    return t
