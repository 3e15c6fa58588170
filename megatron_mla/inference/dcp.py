"""Decode context parallelism: tensor-parallel ranks share the rows of one latent cache.

All heads read the same latents, so tensor-parallel ranks would keep W copies of them. Here each of
W ranks keeps the rows of 1 / W of the positions: queries of all heads go to the rows, and the
partial results of the ranks are merged by their log-sum-exp. Nothing here has gradients.

Legend: W ranks of the group, I positions that a rank owns in a row (interleave), B sequences, s
rows of a forward pass, h heads of a rank, E channels of a cached row, C of them the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

COMMS = ("ag_rs", "a2a")
LSE_BASES = ("e", "2")
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LSE_DTYPES = (torch.float32, torch.float64)


def owner(p, world: int, interleave: int):
    """Rank that keeps position ``p``; ints and integer tensors, not negative, here and below."""
    return (p // interleave) % world


def local_row(p, world: int, interleave: int):
    """Row of position ``p`` in the memory of its owner."""
    return (p // (world * interleave)) * interleave + p % interleave


def global_position(row, rank, world: int, interleave: int):
    """Position that local row ``row`` of ``rank`` holds: the inverse of :func:`local_row`."""
    return (row // interleave) * (world * interleave) + rank * interleave + row % interleave


def owned_count(length, rank, world: int, interleave: int):
    """How many of the positions [0, ``length``) ``rank`` owns, which are its first rows."""
    cycle = world * interleave
    rest = length % cycle - rank * interleave
    if isinstance(rest, Tensor):
        rest = rest.clamp(0, interleave)
    else:
        rest = min(max(rest, 0), interleave)
    return (length // cycle) * interleave + rest


def owned_range_count(start, end, rank, world: int, interleave: int):
    """How many of the positions [``start``, ``end``) ``rank`` owns."""
    return owned_count(end, rank, world, interleave) - owned_count(start, rank, world, interleave)


def owned_positions(length: int, rank: int, world: int, interleave: int, device=None) -> Tensor:
    """Positions of [0, ``length``) that ``rank`` owns, rising: [owned_count] int32."""
    count = owned_count(length, rank, world, interleave)
    row = torch.arange(count, dtype=torch.int32, device=device)
    return global_position(row, rank, world, interleave)


def key_positions(
    lengths: Sequence[int] | Tensor,
    rows: int,
    rank: int,
    world: int,
    interleave: int,
    device=None,
) -> Tensor:
    """Global position of every local row.

    Args:
        lengths: [B] tokens of every sequence, over all ranks.
        rows: of the local memory.
        device: of the result; None: that of ``lengths``, or the CPU.
    Returns:
        [B, rows] int32, -1 for rows that no token has yet.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int32, device=device)
    row = torch.arange(rows, dtype=torch.int32, device=lengths.device)
    position = global_position(row, rank, world, interleave)
    return torch.where(position < lengths[:, None], position, -1)


def owned_indices(indices: Tensor, rank: int, world: int, interleave: int) -> tuple[Tensor, Tensor]:
    """The part of chosen keys that ``rank`` has, for sparse attention over its own rows.

    Args:
        indices: [..., K] integer global positions, negative in empty slots anywhere.
    Returns:
        [..., K] local rows in the same dtype: the owned ones first, in the order that they had,
        then -1; and [...] int32, how many there are, possibly none.
    """
    mine = (indices >= 0) & (owner(indices, world, interleave) == rank)
    rows = torch.where(mine, local_row(indices, world, interleave), -1)
    order = (~mine).to(torch.uint8).argsort(dim=-1, stable=True)
    return rows.gather(-1, order), mine.sum(-1, dtype=torch.int32)


def write_owned(
    memory: Tensor, values: Tensor, positions: Tensor, rank: int, world: int, interleave: int
) -> None:
    """Store the tokens that ``rank`` owns; others and padding are left out. No communication.

    Args:
        memory: [B, rows, E], changed in place.
        values: [s, B, E] in the dtype of ``memory``, of all tokens of the pass.
        positions: [s, B] integer, no position twice in a sequence; negative for padding.
    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    rows, channels = memory.shape[1:]
    if values.shape != (*positions.shape, channels) or memory.shape[0] != positions.shape[1]:
        raise ValueError(
            "values must be [s, B, E] for positions [s, B] and memory [B, rows, E], got "
            f"{tuple(values.shape)}, {tuple(positions.shape)} and {tuple(memory.shape)}; pass "
            "memory[:B] of a memory for more sequences"
        )
    if values.dtype != memory.dtype:
        raise ValueError(
            f"values must have the dtype of memory, {memory.dtype}, got {values.dtype}; cast them "
            "first, to FP8 with a clamp: torch's cast makes what is too large NaN"
        )
    if not positions.numel():
        return
    if rows == 0:
        raise ValueError(
            f"memory must have rows for its tokens, got {tuple(memory.shape)}; make it of "
            "rows_needed(max_sequence_length)"
        )
    mine = (positions >= 0) & (owner(positions, world, interleave) == rank)
    # Picking rows by a mask waits for the device, so all tokens write: those that are not owned
    # what another of their sequence writes. A sequence without an owned one writes back its row 0.
    token = torch.arange(len(positions), device=positions.device)[:, None]
    token = torch.where(mine, token, mine.to(torch.uint8).argmax(dim=0))  # [s, B]
    sequence = torch.arange(positions.shape[1], device=positions.device).expand_as(token)
    some = mine.any(dim=0)
    row = local_row(positions.gather(0, token).long(), world, interleave).masked_fill(~some, 0)
    store, values = _indexable(memory), _indexable(values.detach())
    chosen = torch.where(some[:, None], values[token, sequence], store[:, 0])
    store.index_put_((sequence, row), chosen)


def merge_partials(outs: Tensor, lses: Tensor, *, lse_base: str = "e") -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over parts of them.

    Args:
        outs: [W, ..., C] of the parts, bf16, fp16, fp32 or fp64; what it holds where a part has no
            weight does not matter.
        lses: [W, ...] fp32 or fp64, log-sum-exp of the scaled scores. -inf, +inf and NaN all say
            that a part has no key.
        lse_base: ``"e"`` or ``"2"``, of the logarithm, in ``lses`` and in the result.
    Returns:
        [..., C] and [...] in the dtypes of the arguments, sums in fp32 (fp64 for fp64); 0 and -inf
        where no part has a key.
    Raises:
        ValueError: a dtype, a shape or a base that does not fit.
    """
    _check_partials(outs, lses, lse_base)
    weights, level = _weights(lses.to(_wide(outs, lses)), lse_base)
    return _scaled(outs, weights).sum(0).to(outs.dtype), level.to(lses.dtype)


class DecodeContextParallel:
    """W ranks that share the rows of latents, and how they answer together.

    Args:
        group: W consecutive tensor-parallel ranks, in the order of their heads. The whole
            tensor-parallel group, or ``torch.distributed.new_subgroups(W)`` where W divides it.
        interleave: I; rank r owns positions p with ``(p // I) % W == r``.
        comm: how partial results are merged. ``"ag_rs"``: all-gather of the log-sum-exp,
            reduce-scatter of the outputs in fp32. ``"a2a"``: one all-to-all of both.
    Attributes:
        rank, size: place of this process in the group, and W.
    Raises:
        ValueError: no group or not a member of it, ranks that cannot be neighbours, an interleave
            below 1, an unknown ``comm``.
    """

    def __init__(self, group: dist.ProcessGroup, *, interleave: int = 1, comm: str = "ag_rs"):
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                "group must be a torch.distributed.ProcessGroup that has this process, got "
                f"{group!r}; pass the tensor-parallel group or new_subgroups(W)[0]"
            )
        if not isinstance(interleave, int) or isinstance(interleave, bool) or interleave < 1:
            raise ValueError(
                f"interleave must be an integer of at least 1, got {interleave!r}; 1 deals out "
                "positions one by one"
            )
        if comm not in COMMS:
            raise ValueError(f"comm must be one of {COMMS}, got {comm!r}")
        ranks = dist.get_process_group_ranks(group)
        # Tensor-parallel ranks are evenly spaced, as neighbours among them are.
        spaces = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
        if len(spaces) > 1 or min(spaces, default=1) < 1:
            raise ValueError(
                "group must be consecutive tensor-parallel ranks in the order of their heads, got "
                f"ranks {ranks}; make it with torch.distributed.new_subgroups(W)"
            )
        self.group, self.interleave, self.comm = group, interleave, comm
        self.rank, self.size = group.rank(), group.size()

    def rows_needed(self, max_sequence_length: int) -> int:
        """Rows that the memory of every rank needs: the most that any owns, which is rank 0."""
        return owned_count(max_sequence_length, 0, self.size, self.interleave)

    def write_owned(self, memory: Tensor, values: Tensor, positions: Tensor) -> None:
        """:func:`write_owned` of this rank."""
        write_owned(memory, values, positions, self.rank, self.size, self.interleave)

    def key_positions(self, lengths: Sequence[int] | Tensor, rows: int, device=None) -> Tensor:
        """:func:`key_positions` of this rank.

        They are global, so that causal bounds of several query rows of a sequence need no kernel
        that knows about ranks.
        """
        return key_positions(lengths, rows, self.rank, self.size, self.interleave, device)

    def owned_indices(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`owned_indices` of this rank."""
        return owned_indices(indices, self.rank, self.size, self.interleave)

    def gather_queries(self, q: Tensor) -> Tensor:
        """Queries of all heads of the group; one collective.

        Args:
            q: [B, s, h, E] of this rank's heads, of any dtype.
        Returns:
            [B, s, W * h, E], heads in the order of the ranks, which is the global one.
        """
        if q.dim() != 4:
            raise ValueError(f"q must be [B, s, h, E], got {tuple(q.shape)}")
        if self.size == 1:
            return q
        return self._all_gather(q).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def merge(self, out: Tensor, lse: Tensor, *, lse_base: str = "e") -> tuple[Tensor, Tensor]:
        """Results over the rows of all ranks, for the heads of this one.

        Args:
            out: [B, s, W * h, C] over this rank's rows, for all heads of the group.
            lse: [B, s, W * h] fp32 or fp64; both as :func:`merge_partials` takes them.
            lse_base: ``"e"`` or ``"2"``, of the logarithm, in ``lse`` and in the result.
        Returns:
            [B, s, h, C] and [B, s, h] in the dtypes of the arguments. One rank alone gets its
            arguments back as they are.
        Raises:
            ValueError: a dtype, a shape or a base that does not fit.
        """
        _check_partials(out, lse, lse_base)
        if out.dim() != 4 or out.shape[2] % self.size:
            raise ValueError(
                f"out must be [B, s, heads, C] with a multiple of {self.size} heads, those of all "
                f"ranks, got {tuple(out.shape)}; gather_queries makes such queries"
            )
        if self.size == 1:
            return out, lse
        if self.comm == "a2a":
            return self._merge_by_all_to_all(out, lse, lse_base)
        return self._merge_by_reduce_scatter(out, lse, lse_base)

    def gather_rows(
        self, memory: Tensor, lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> Tensor:
        """Cached rows of all ranks in the order of their positions, for a prefill over a prefix.

        Args:
            memory: [B, rows, E] of this rank, of any dtype; FP8 stays as it is, byte by byte.
            lengths: [B] tokens of every sequence, on the host and the same on every rank.
            starts: [B] first position of every sequence that is asked for; None: 0.
        Returns:
            [B, N, E], row i of sequence b holds position ``starts[b] + i``; N is the longest
            ``lengths[b] - starts[b]``, rows past a sequence's own are 0.
        Raises:
            ValueError: lengths or starts that do not fit the memory.
        """
        first = [0] * len(lengths) if starts is None else [int(n) for n in starts]
        last = [int(n) for n in lengths]
        batch, rows, channels = memory.shape
        if not len(last) == len(first) == batch or any(
            not 0 <= a <= b for a, b in zip(first, last, strict=True)
        ):
            raise ValueError(
                f"lengths and starts must be {batch} numbers each, 0 <= start <= length, got "
                f"{last} and {first}; pass memory[:B] of a memory for more sequences"
            )
        if self.rows_needed(max(last, default=0)) > rows:
            raise ValueError(
                f"memory must hold every sequence, got {rows} rows on {self.size} ranks for "
                f"{max(last)} tokens; make it of rows_needed(max_sequence_length)"
            )
        longest = max((b - a for a, b in zip(first, last, strict=True)), default=0)
        if longest == 0:
            return memory.new_zeros(batch, 0, channels)
        # The same on all ranks: a collective takes equal parts.
        most = max(
            owned_range_count(a, b, rank, self.size, self.interleave)
            for a, b in zip(first, last, strict=True)
            for rank in range(self.size)
        )
        bounds = torch.tensor([first, last]).to(memory.device)
        begin, end = bounds[..., None]  # [B, 1]
        sequence = torch.arange(batch, device=memory.device)[:, None]
        row = torch.arange(most, device=memory.device)
        row = row + owned_count(begin, self.rank, self.size, self.interleave)
        # Rows behind the last are sent as well, whatever they hold, and picked by nobody.
        part = _indexable(memory)[sequence, row.clamp(max=rows - 1)]  # [B, most, E]
        parts = self._all_gather(part)
        position = begin + torch.arange(longest, device=memory.device)
        rank = owner(position, self.size, self.interleave)
        row = local_row(position, self.size, self.interleave)
        row = row - owned_count(begin, rank, self.size, self.interleave)
        whole = parts[rank, sequence, row.clamp(max=most - 1)]
        whole = whole.masked_fill((position >= end).unsqueeze(-1), 0)
        return whole.view(memory.dtype)

    def _merge_by_reduce_scatter(self, out, lse, base):
        weights, level = _weights(self._all_gather(lse).to(_wide(out, lse)), base)
        parts = self._by_rank(_scaled(out, weights[self.rank])).contiguous()
        own = parts.new_empty(parts.shape[1:])
        dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=self.group)
        return own.to(out.dtype), self._by_rank(level)[self.rank].to(lse.dtype)

    def _merge_by_all_to_all(self, out, lse, base):
        parts = (self._by_rank(out), self._by_rank(lse).unsqueeze(-1))
        # One message, and of bytes: the two need not have one dtype.
        sent = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        width = out.shape[-1] * out.itemsize
        outs = got[..., :width].contiguous().view(out.dtype)
        lses = got[..., width:].contiguous().view(lse.dtype).squeeze(-1)
        return merge_partials(outs, lses, lse_base=base)

    def _by_rank(self, t: Tensor) -> Tensor:
        """[B, s, W * h, ...] -> [W, B, s, h, ...], what each rank's heads are."""
        return t.detach().unflatten(2, (self.size, -1)).movedim(2, 0)

    def _all_gather(self, t: Tensor) -> Tensor:
        """[...] of every rank -> [W, ...]; bytes travel, for not every backend knows FP8."""
        t = t.detach().contiguous()
        if self.size == 1:
            return t.unsqueeze(0)
        sent = t.view(torch.uint8)
        got = sent.new_empty(self.size, *sent.shape)
        # Flat: gloo takes no stacked parts.
        dist.all_gather_into_tensor(got.view(-1), sent.view(-1), group=self.group)
        return got.view(t.dtype)


def _indexable(t: Tensor) -> Tensor:
    """FP8 as bytes, which can be indexed everywhere; the rest as it is. Shares its memory."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def _wide(out: Tensor, lse: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(out.dtype, lse.dtype), torch.float32)


def _weights(levels: Tensor, base: str) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of parts [W, ...] -> their shares of the whole [W, ...], and its own [...]."""
    exp, log = (torch.exp, torch.log) if base == "e" else (torch.exp2, torch.log2)
    # NaN compares false: it becomes -inf like +inf, which kernels report for no keys too.
    levels = torch.where(levels < torch.inf, levels, -torch.inf)
    top = levels.amax(0)
    top = top.masked_fill(top.isneginf(), 0.0)
    shares = exp(levels - top)
    total = shares.sum(0)
    return shares / total.masked_fill(total == 0, 1.0), top + log(total)


def _scaled(out: Tensor, weights: Tensor) -> Tensor:
    """``out`` [..., C] times ``weights`` [...] in their dtype, 0 without weight whatever it is."""
    weights = weights.unsqueeze(-1)
    return out.to(weights.dtype).masked_fill(weights == 0, 0.0) * weights


def _check_partials(out: Tensor, lse: Tensor, base: str) -> None:
    if out.dtype not in _OUT_DTYPES or lse.dtype not in _LSE_DTYPES:
        raise ValueError(
            f"out must be one of {_OUT_DTYPES} and lse one of {_LSE_DTYPES}, got {out.dtype} and "
            f"{lse.dtype}; cast them"
        )
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"lse must be of the shape of out without its last dimension, got {tuple(lse.shape)} "
            f"for {tuple(out.shape)}"
        )
    if base not in LSE_BASES:
        raise ValueError(
            f"lse_base must be one of {LSE_BASES}, got {base!r}; ask the kernel's documentation"
        )
