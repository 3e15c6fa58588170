"""What a forward pass over a cache needs: where its tokens go, and the memory of every layer.

Legend: s new rows of a forward pass, B sequences of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from torch import Tensor

from megatron_mla.parallel.microbatch import KeyBounds, Rows

CACHE_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_ATTRIBUTE = "_megatron_mla_cache"


@dataclass(frozen=True, eq=False)
class Step:
    """The new tokens of one forward pass.

    Attributes:
        starts, ends: tokens of every sequence before and after this pass, on the host.
        positions: [s, B] int32 on the device, position of every row in its sequence; -1 for rows
            that are padding.
        chosen: keys that layers of sparse attention have chosen in this pass, by layer number:
            [s, B, K] positions in the sequence, -1 for none.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    positions: Tensor
    chosen: dict[int, Tensor] = field(default_factory=dict)
    _made: dict = field(default_factory=dict, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether no sequence has anything in the cache yet."""
        return not any(self.starts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after this pass."""
        return max(self.ends, default=0)

    @cached_property
    def rows(self) -> Rows:
        """All rows one below the other, [s * B] of a batch of one, each with its own position.

        Padding has position 0. ``num_global`` covers all positions, as rope tables have to.
        """
        positions = self.positions.flatten().clamp(min=0)
        return Rows(
            num_local=positions.numel(),
            num_global=max(self.longest, 1),
            packed=False,
            positions=positions,
            key_positions=positions,
            cu_seqlens=None,
            cp_rank=0,
            cp_size=1,
            tp_chunks=1,
        )

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row in [s * B], sequence and position of everything that is no padding, [n] int64."""
        position, seen = self._on_host()
        row, sequence = seen.nonzero().unbind(1)
        found = torch.stack((row * len(self.starts) + sequence, sequence, position[row, sequence]))
        return found.to(self.positions.device).unbind(0)

    def key_positions(self, dcp=None) -> Tensor:
        """[B, T] int32, position that every row of the memory holds up to the last that is used.

        -1 for rows that are not there. With ``dcp``, of the rows of this rank.
        """
        if "key_positions" not in self._made:
            device = self.positions.device
            if dcp is None:
                ends = torch.tensor(self.ends, dtype=torch.int32).to(device)
                row = torch.arange(self.longest, dtype=torch.int32, device=device)
                made = torch.where(row < ends[:, None], row, -1)
            else:
                made = dcp.key_positions(self.ends, dcp.rows_needed(self.longest), device)
            self._made["key_positions"] = made
        return self._made["key_positions"]

    def key_bounds(self, stride: int) -> KeyBounds:
        """Which keys each row sees, sequence by sequence: [B * s] in memories of all sequences.

        Args:
            stride: rows of one sequence's memory.
        """
        if ("key_bounds", stride) not in self._made:
            position, seen = self._on_host()
            first = torch.arange(len(self.starts))[:, None] * stride  # [B, 1]
            start = first.expand(-1, len(position))
            end = start + torch.where(seen, position + 1, 0).t()
            host = torch.stack((start.flatten(), end.flatten())).int()
            bounds = KeyBounds(*host.to(self.positions.device), host, int(seen.sum()))
            self._made["key_bounds", stride] = bounds
        return self._made["key_bounds", stride]

    def _on_host(self) -> tuple[Tensor, Tensor]:
        """[s, B] int64 positions, and which of them are no padding."""
        start, end = torch.tensor([self.starts, self.ends])
        position = start + torch.arange(len(self.positions))[:, None]
        return position, position < end


class LatentInferenceContext(StaticInferenceContext):
    """Megatron-Core's static inference context, for sequences of unequal lengths.

    One forward pass after the other, for prompts, pieces of prompts and new tokens alike::

        context = LatentInferenceContext(batch, 4096)
        logits = model(prompts, None, None, inference_context=context.begin(prompt_lengths))
        context.advance()

    Rows past a sequence's own new tokens are padding: they are neither cached nor seen. A driver of
    Megatron-Core that counts tokens in ``sequence_len_offset`` counts those of all sequences.

    Args:
        max_batch_size: sequences.
        max_sequence_length: tokens of one, prompt and answer together.
        cache_dtype: of latents and indexer keys in the cache; None: that of the activations.
        dcp: a :class:`megatron_mla.inference.dcp.DecodeContextParallel` whose ranks share the rows
            of latents.
    Raises:
        ValueError: a size below 1, or a dtype that no cache has.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        *,
        cache_dtype: torch.dtype | None = None,
        dcp=None,
    ) -> None:
        for name, value in (
            ("max_batch_size", max_batch_size),
            ("max_sequence_length", max_sequence_length),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; it sizes the cache")
        if cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"cache_dtype must be one of {CACHE_DTYPES}, got {cache_dtype}; None takes that of "
                "the activations"
            )
        self.lengths = [0] * max_batch_size
        self._new: list[int] | None = None
        self._step: Step | None = None
        self._memory: dict[tuple[int, str], Tensor] = {}
        super().__init__(max_batch_size, max_sequence_length)
        # Sequences end at different rows, so the caller picks its logits.
        self.config.materialize_only_last_token_logits = False
        self.cache_dtype, self.dcp = cache_dtype, dcp

    @property
    def sequence_len_offset(self) -> int:
        """Tokens of the longest sequence; setting it gives all sequences that many."""
        return max(self.lengths)

    @sequence_len_offset.setter
    def sequence_len_offset(self, tokens: int) -> None:
        if tokens and len(set(self.lengths)) > 1:
            raise ValueError(
                "sequence_len_offset must be of sequences that are equally long, got lengths "
                f"{self.lengths}; call advance() after a forward pass instead"
            )
        self.lengths = [tokens] * len(self.lengths)
        self._new = self._step = None

    def begin(self, new_lengths: Sequence[int]) -> LatentInferenceContext:
        """Say how many rows of the next forward pass belong to every sequence; returns itself.

        Without it all rows belong to every sequence.
        """
        new = [int(n) for n in new_lengths]
        if not 1 <= len(new) <= self.max_batch_size or min(new) < 0:
            raise ValueError(
                f"new_lengths must be 1 to {self.max_batch_size} numbers that are not negative, "
                f"got {new}"
            )
        self._new, self._step = new, None
        return self

    def step(self, num_rows: int, batch: int, device: torch.device) -> Step:
        """Where the rows of this forward pass go; the same object in every layer of a pass.

        Raises:
            ValueError: the batch is another one than ``begin`` said, or does not fit the cache.
        """
        step = self._step
        if step is not None and step.positions.shape == (num_rows, batch):
            return step
        if batch > self.max_batch_size:
            raise ValueError(
                f"max_batch_size must hold the batch, got {self.max_batch_size} for {batch} "
                "sequences; make a context of that many"
            )
        new = [num_rows] * batch if self._new is None else self._new
        if batch != len(new) or max(new) > num_rows:
            raise ValueError(
                f"new_lengths must describe the batch, {batch} sequences of {num_rows} rows, got "
                f"{new}; call begin() before every forward pass and advance() behind it"
            )
        starts = tuple(self.lengths[:batch])
        ends = tuple(start + n for start, n in zip(starts, new, strict=True))
        if max(ends) > self.max_sequence_length:
            raise ValueError(
                f"max_sequence_length must hold every sequence, got {self.max_sequence_length} for "
                f"{max(ends)} tokens; make a context of that many"
            )
        row = torch.arange(num_rows, dtype=torch.int32, device=device)[:, None]
        first, last = torch.tensor([starts, ends], dtype=torch.int32).to(device)
        positions = first + row
        positions = positions.masked_fill(positions >= last, -1)
        self._step = Step(starts=starts, ends=ends, positions=positions)
        return self._step

    def advance(self) -> None:
        """Count the tokens of the forward pass that is over as cached."""
        if self._step is None:
            raise ValueError("advance() must follow a forward pass with this context, got none")
        self.lengths[: len(self._step.ends)] = self._step.ends
        self._new = self._step = None

    def memory(
        self, layer_number: int, name: str, shape: Sequence[int], like: Tensor, dtype=None
    ) -> Tensor:
        """What layer ``layer_number`` keeps between passes under ``name``, zeros at first.

        Args:
            like: gives the device, and the dtype unless ``dtype`` does.
        """
        key = layer_number, name
        if key not in self._memory:
            # Not an inference tensor: a pass without inference mode has to write into it too.
            with torch.inference_mode(False):
                self._memory[key] = torch.zeros(
                    tuple(shape), dtype=dtype or like.dtype, device=like.device
                )
        return self._memory[key]

    def reset(self) -> None:
        """Forget all sequences; the memory is used again."""
        super().reset()  # sets sequence_len_offset, which is all lengths
        for memory in self._memory.values():
            memory.zero_()


def latent_context(context: BaseInferenceContext) -> LatentInferenceContext:
    """The cache of an inference context.

    Megatron-Core's static context is taken too: its sequences are of one length, which its driver
    counts in ``sequence_len_offset``.

    Raises:
        ValueError: a dynamic context, which pages keys and values of heads, or one whose batch is
            cut into parts.
    """
    if not isinstance(context, StaticInferenceContext):
        raise ValueError(
            "inference_context must be a megatron_mla.inference.context.LatentInferenceContext or "
            f"Megatron-Core's StaticInferenceContext, got {type(context).__name__}, whose pages "
            "hold keys and values of heads; generate with scripts/generate.py, or export the "
            "checkpoint to an inference engine"
        )
    if context.batch_size_offset:
        raise ValueError(
            f"batch_size_offset must be 0, got {context.batch_size_offset}; hand the whole batch "
            "to one forward pass, or make a context for every part of it"
        )
    if isinstance(context, LatentInferenceContext):
        return context
    cache = getattr(context, _ATTRIBUTE, None)
    if cache is None:
        cache = LatentInferenceContext(context.max_batch_size, context.max_sequence_length)
        setattr(context, _ATTRIBUTE, cache)
    if cache.sequence_len_offset != (now := context.sequence_len_offset):
        if now == 0:
            cache.reset()
        cache.sequence_len_offset = now
    return cache
