"""Megatron-Core's fused MLA rotary functions by their own names and signatures.

Change the import line of ``megatron.core.fusions.fused_mla_yarn_rope_apply`` to this module and
nothing else. Results are those of the unfused path to the bit; heads, widths, strides and numbers
of packed sequences are free; wrong arguments raise ``ValueError`` before anything is launched.

Legend: S rows, B batch, T rows of a packed ("thd") tensor on this rank, H heads, d = ``emb_dim``
rotated channels, P rows of a rope table.

Tables are Megatron's: cos and sin [P, 1, 1, d] (or [P, d]) whose halves are equal. In the dtype of
the activations every product is rounded, as the unfused path does; fp32 tables round once.

Rows and tables:

* "sbhd", no ``cu_seqlens``: table row i belongs to row i. With ``cp_size`` > 1 a table of S rows is
  one that was cut for this rank already, as Megatron-Core's is; one of at least S * cp_size rows is
  a whole one, read in zigzag order.
* "thd", padded ``cu_seqlens`` over all ranks: every sequence starts at table row 0 and is cut in
  zigzag order over ``cp_size`` ranks. Rows past ``cu_seqlens[-1]`` are rotated as position 0.

Positions are computed, and held against the table on the host, once for each ``cu_seqlens`` or
``position_ids`` tensor (not under ``torch.compile`` or while a CUDA graph is captured, where they
are computed in the graph and kernels read the nearest row of a table that is too short).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.rope import rope, rope_
from megatron_mla.parallel import layout
from megatron_mla.rope.tables import half_width

HAVE_TRITON = True
"""Megatron-Core's module has this name; importing this one without Triton fails."""

# What was computed of a tensor, for as long as it lives.
_computed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _once[T](source: Tensor, key: tuple, compute: Callable[[], T]) -> T:
    """``compute()``, at most once for this content of ``source`` and ``key``."""
    if _in_graph() or source.is_inference():
        return compute()
    version, known = _computed.get(source, (None, None))
    if version != source._version:
        version, known = source._version, {}
        _computed[source] = version, known
    if key not in known:
        # Not as inference tensors, which a later training step could not save for its backward.
        with torch.inference_mode(False):
            known[key] = compute()
    return known[key]


def _in_graph() -> bool:
    """No host may look at data here."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=64)
def _unpacked_positions(rows: int, cp_rank: int, cp_size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return layout.sbhd_positions(rows, cp_rank, cp_size, device=device)


def _check_rows(table: Tensor, needed: int, why: str) -> None:
    if table.shape[0] < needed:
        raise ValueError(
            f"cos and sin must have at least {needed} rows, one for each position {why}, got "
            f"{table.shape[0]}; make the table for a longer sequence"
        )


def _positions(
    t: Tensor,
    table: Tensor,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    position_ids: Tensor | None = None,
    global_start: int | None = None,
) -> Tensor:
    """Positions of the rows of ``t``, each a row of ``table``."""
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, cp_size = {cp_size}), got {cp_rank}")
    rows = t.shape[0] if t.dim() else 0
    if position_ids is not None:
        return _given_positions(position_ids, table)
    if cu_seqlens is None:
        if t.dim() != 4:
            raise ValueError(
                "a tensor without cu_seqlens must be [rows, batch, heads, width], got "
                f"{list(t.shape)}; pass the cumulative lengths of packed sequences"
            )
        if cp_size > 1 and table.shape[0] != rows:
            _check_rows(table, rows * cp_size, "of all context-parallel ranks")
            return _unpacked_positions(rows, cp_rank, cp_size, t.device)
        _check_rows(table, rows, "of the sequence")
        return _unpacked_positions(rows, 0, 1, t.device)
    if t.dim() != 3:
        raise ValueError(
            f"a tensor with cu_seqlens must be [tokens, heads, width], got {list(t.shape)}; "
            "leave cu_seqlens out for an unpacked batch"
        )
    if global_start is not None:
        return _contiguous_positions(cu_seqlens, rows, global_start, table, t.device)

    def compute() -> Tensor:
        if not _in_graph():
            layout.check_cu_seqlens(cu_seqlens, cp_size, total=rows * cp_size)
            _check_longest(cu_seqlens, table)
        return layout.thd_positions(cu_seqlens.to(t.device), rows, cp_rank, cp_size)

    return _once(cu_seqlens, ("zigzag", rows, cp_rank, cp_size, table.shape[0], t.device), compute)


def _check_longest(cu_seqlens: Tensor, table: Tensor) -> None:
    if cu_seqlens.numel() > 1:
        _check_rows(table, int(cu_seqlens.diff().max()), "of the longest packed sequence")


def _given_positions(position_ids: Tensor, table: Tensor) -> Tensor:
    def largest() -> int:
        low, high = (int(x) for x in position_ids.aminmax())
        if low < 0:
            raise ValueError(f"position_ids must not be negative, got {low}")
        return high

    if position_ids.numel() and not _in_graph():
        _check_rows(table, _once(position_ids, ("largest",), largest) + 1, "in position_ids")
    return position_ids.contiguous()


def _contiguous_positions(
    cu_seqlens: Tensor, rows: int, global_start: int, table: Tensor, device: torch.device
) -> Tensor:
    """Positions of ``rows`` consecutive rows of the packed batch from row ``global_start`` on."""

    def compute() -> Tensor:
        if not _in_graph():
            layout.check_cu_seqlens(cu_seqlens, 1)
            _check_longest(cu_seqlens, table)
        cu = cu_seqlens.to(device)
        behind = max(global_start, 0) + rows
        positions = layout.thd_positions(cu, behind)
        row = torch.arange(global_start, global_start + rows, device=device)
        return positions[row.clamp(min=0)].masked_fill(row < 0, 0)

    key = ("contiguous", rows, global_start, table.shape[0], device)
    return _once(cu_seqlens, key, compute)


def _half_tables(cos: Tensor, sin: Tensor, emb_dim: int) -> tuple[Tensor, Tensor]:
    return half_width(cos, emb_dim, "cos"), half_width(sin, emb_dim, "sin")


def _refuse_interleaved(rotary_interleaved: bool) -> None:
    if rotary_interleaved:
        raise ValueError(
            "rotary_interleaved must be False for MLA, got True; its channels always come in as "
            "pairs, and remove_interleaving=True writes pairs again"
        )


def _check_width(name: str, t: Tensor, width: int, what: str) -> None:
    if t.shape[-1] != width:
        raise ValueError(f"{name} must be {what} = {width} wide, got {list(t.shape)}")


def fused_mla_rope_inplace(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    thd_global_start: int | None = None,
) -> Tensor:
    """Rotate ``emb_dim`` channels of every head in the storage of ``t``.

    Autograd is told, see :func:`megatron_mla.kernels.rope.rope_`; where it forbids in-place changes
    (a leaf that requires grad, a view made inside another function) a new tensor is returned. The
    backward leaves the incoming gradient alone.

    Args:
        t: [S, B, H, nope_dim + emb_dim], or [T, H, nope_dim + emb_dim] with ``cu_seqlens_q`` or
            ``position_ids``. Last stride 1.
        cos, sin: see the module.
        cu_seqlens_q: [N + 1] int32 | int64, padded cumulative lengths over all ranks.
        rotary_interleaved: must be False, as in Megatron-Core.
        inverse: rotate back.
        remove_interleaving: write pairs instead of halves.
        position_ids: [S] or [T] int32 | int64, table row of every row; overrides the above.
        rope_first: heads are ``[pe | nope]``.
        thd_global_start: rows are consecutive rows of the packed batch from this one on, instead
            of zigzag parts; rows before 0 are rotated as position 0.
    Returns:
        ``t``.
    Raises:
        ValueError: an argument does not fit; nothing was changed.
    """
    arguments = _rope_arguments(
        t, cos, sin, nope_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved,
        position_ids, thd_global_start,
    )  # fmt: skip
    return rope_(
        t,
        *arguments,
        nope_dim=nope_dim,
        rope_first=rope_first,
        inverse=inverse,
        remove_interleaving=remove_interleaving,
    )


def fused_mla_rope_out_of_place(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    thd_global_start: int | None = None,
) -> Tensor:
    """:func:`fused_mla_rope_inplace` into a new contiguous tensor; ``t`` keeps its content."""
    arguments = _rope_arguments(
        t, cos, sin, nope_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved,
        position_ids, thd_global_start,
    )  # fmt: skip
    return rope(
        t,
        *arguments,
        nope_dim=nope_dim,
        rope_first=rope_first,
        inverse=inverse,
        remove_interleaving=remove_interleaving,
    )


def _rope_arguments(
    t, cos, sin, nope_dim, emb_dim, cu_seqlens, cp_rank, cp_size, rotary_interleaved,
    position_ids, global_start,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Half-width tables and positions."""
    _refuse_interleaved(rotary_interleaved)
    _check_width("t", t, nope_dim + emb_dim, "nope_dim + emb_dim")
    cos, sin = _half_tables(cos, sin, emb_dim)
    positions = _positions(t, cos, cu_seqlens, cp_rank, cp_size, position_ids, global_start)
    return cos, sin, positions


def fused_apply_mla_rope_for_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> Tensor:
    """:func:`fused_mla_rope_inplace` of queries ``[nope | pe]``, under its older name."""
    return fused_mla_rope_inplace(
        t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved
    )


def fused_mla_rope_concat(
    nope: Tensor,
    rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> Tensor:
    """Pack ``[nope | rotated rope]`` into one contiguous tensor.

    Args:
        nope: [S, B, H, N], or [T, H, N] with ``cu_seqlens``; any strides.
        rope: [S, B, H, d] or [T, H, d]; any strides.
    Returns:
        [S, B, H, N + d] or [T, H, N + d], contiguous.
    Raises:
        ValueError: an argument does not fit.
    """
    cos, sin = _half_tables(cos, sin, rope.shape[-1])
    positions = _positions(rope, cos, cu_seqlens, cp_rank, cp_size)
    return rope_concat(nope, rope, cos, sin, positions)


def fused_mla_rope_kv_split(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    remove_interleaving: bool = False,
) -> tuple[Tensor, Tensor]:
    """Split ``kv`` into keys, with the shared rotated part on every head, and values.

    Args:
        kv: [S, B, H, k_dim + v_dim], or [T, H, k_dim + v_dim] with ``cu_seqlens_kv``; last
            stride 1.
        k_pos_emb: [S, B, 1, emb_dim] or [T, 1, emb_dim]. Last stride 1.
        v_dim: may be 0.
        remove_interleaving: write pairs instead of halves.
    Returns:
        Key [..., H, k_dim + emb_dim] and value [..., H, v_dim], both contiguous.
    Raises:
        ValueError: an argument does not fit.
    """
    _refuse_interleaved(rotary_interleaved)
    _check_width("kv", kv, k_dim + v_dim, "k_dim + v_dim")
    cos, sin = _half_tables(cos, sin, emb_dim)
    positions = _positions(kv, cos, cu_seqlens_kv, cp_rank, cp_size)
    return rope_kv_split(
        kv,
        k_pos_emb,
        cos,
        sin,
        positions,
        k_dim=k_dim,
        remove_interleaving=remove_interleaving,
        pack_value=True,
    )


fused_apply_mla_rope_for_kv = fused_mla_rope_kv_split
"""The older name of :func:`fused_mla_rope_kv_split`."""
