"""Random problems for the tests of the kernels, and equality of bits.

Legend: d rotated channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mla.parallel.layout import sbhd_positions, thd_positions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)

# Of the data and of the tables: "megatron" numerics where they are equal, else "fp32" numerics.
NUMERICS = [(dtype, dtype) for dtype in DTYPES]
NUMERICS += [(dtype, torch.float32) for dtype in DTYPES if dtype != torch.float32]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Elements that one launch may handle, padding to powers of two included: about 0.1 s when
# interpreted.
_BUDGET = 1 << 17


def examples(count: int) -> settings:
    """Settings of a property: ``count`` examples, fewer where nearly each compiles its kernels."""
    return settings(max_examples=count if DEVICE == "cpu" else max(count // 4, 10))


def assert_same_bits(name: str, got: Tensor, want: Tensor, *, finite: bool = True) -> None:
    """Assert equality of shape, dtype and every bit, so -0 is not +0.

    Args:
        finite: refuse NaN and infinity first: what nobody wrote is NaN in these tests.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, not {want.dtype}"
    got, want = got.detach().contiguous(), want.detach().contiguous()
    if finite:
        for whose, t in (("expected", want), ("got", got)):
            strange = ~t.isfinite()
            if strange.any():
                at = strange.nonzero()[0].tolist()
                raise AssertionError(
                    f"{name}: {int(strange.sum())} of {t.numel()} values {whose} are not finite, "
                    f"first at {at}: {t[tuple(at)].item()}"
                )
    bits = _BITS[got.element_size()]
    differ = got.view(bits) != want.view(bits)
    if differ.any():
        at = differ.nonzero()[0].tolist()
        raise AssertionError(
            f"{name} {got.dtype} {tuple(got.shape)}: {int(differ.sum())} of {differ.numel()} "
            f"values differ, first at {at}: got {got[tuple(at)].item()!r}, "
            f"expected {want[tuple(at)].item()!r}"
        )


def assert_each_same_bits(names: str, got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """:func:`assert_same_bits` of tensors named by words."""
    for name, one, other in zip(names.split(), got, want, strict=True):
        assert_same_bits(name, one, other)


def storage_of(t: Tensor) -> Tensor:
    """All of the memory that ``t`` is a view of, flat."""
    return torch.tensor([], dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers of many magnitudes, some of them zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator, dtype=torch.float64)
    exponent = torch.randint(-6, 4, shape, generator=generator)
    zero = torch.randint(0, 8, shape, generator=generator) == 0
    t = torch.where(zero, t.sign() * 0.0, torch.ldexp(t, exponent))
    return t.to(dtype).to(DEVICE)


def tables(
    length: int, rotated: int, dtype: torch.dtype, *, concentration: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin, [length, rotated / 2]."""
    half = rotated // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return tuple((f(angle) * concentration).to(dtype).to(DEVICE) for f in (torch.cos, torch.sin))


def five_rows(dtype: torch.dtype = torch.float32, rotated: int = 6) -> tuple[Tensor, ...]:
    """cos, sin and positions of five rows; one position is 0, one comes twice."""
    positions = torch.tensor([4, 0, 7, 7, 1], device=DEVICE)
    return *tables(8, rotated, dtype, concentration=0.7), positions


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    Attributes:
        order: dims from the slowest to the fastest.
        room: foreign entries of each dim, half of them in front.
        step: distance of neighbours of the last dim.
        expanded: dims of stride 0.
    """

    order: tuple[int, ...]
    room: tuple[int, ...]
    step: int = 1
    expanded: tuple[int, ...] = ()


def laid_out(t: Tensor, layout: Layout) -> Tensor:
    """The values of ``t`` (of its first entries along expanded dims) amid NaN."""
    shape = t.shape
    for dim in layout.expanded:
        t = t.narrow(dim, 0, min(1, t.shape[dim]))
    taken = [*t.shape[:-1], t.shape[-1] * layout.step]
    sizes = [n + room for n, room in zip(taken, layout.room, strict=True)]
    storage = torch.full(
        [sizes[d] for d in layout.order], torch.nan, dtype=t.dtype, device=t.device
    )
    view = storage.permute([layout.order.index(d) for d in range(t.dim())])
    for dim, (n, room) in enumerate(zip(taken, layout.room, strict=True)):
        view = view.narrow(dim, room // 2, n)
    view = view[..., :: layout.step]
    return view.copy_(t).expand(shape)


@st.composite
def layouts(draw, dims: int, *, unit: bool, expand: bool = True) -> Layout:
    """Layouts of ``dims`` dims; with ``unit``, neighbours of the last dim are neighbours."""
    moved = dims - 1 if unit else dims
    order = (*draw(st.permutations(range(moved))), *range(moved, dims))
    room = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=dims, max_size=dims)))
    step = 1 if unit else draw(st.sampled_from([1, 1, 2, 3]))
    shared = st.lists(st.integers(0, moved - 1), max_size=dims, unique=True)
    expanded = draw(st.one_of(st.just([]), shared)) if expand else []
    return Layout(order, room, step, tuple(expanded))


@dataclass(frozen=True)
class Rows:
    """Rows of one context-parallel rank: packed sequences and a tail, or ``extra`` rows."""

    lengths: tuple[int, ...] | None
    extra: int
    offset: int
    cp_size: int
    cp_rank: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return sum(self.lengths or ()) // self.cp_size + self.extra

    def positions(self) -> Tensor:
        if self.lengths is None:
            positions = sbhd_positions(
                self.count, self.cp_rank, self.cp_size, offset=self.offset, device=DEVICE
            )
        else:
            cu_seqlens = torch.tensor([0, *accumulate(self.lengths)], device=DEVICE)
            positions = thd_positions(cu_seqlens, self.count, self.cp_rank, self.cp_size)
        return positions.to(self.dtype)


@st.composite
def _rows(draw, most: int) -> Rows:
    cp_size = draw(st.sampled_from([1, 1, 2, 4]))
    # Two chunks of every sequence lie on a rank.
    unit = 1 if cp_size == 1 else 2
    rest = {
        "cp_size": cp_size,
        "cp_rank": draw(st.integers(0, cp_size - 1)),
        "dtype": draw(st.sampled_from([torch.int32, torch.int64])),
    }
    if draw(st.booleans()):
        rows = draw(st.integers(0, most // unit)) * unit
        return Rows(None, rows, draw(st.integers(0, 5)), **rest)
    lengths, left = [], most
    for chunk in draw(st.lists(st.integers(0, 9), max_size=6)):
        chunk = min(chunk, left // unit)
        left -= chunk * unit
        lengths.append(chunk * unit * cp_size)
    return Rows(tuple(lengths), draw(st.integers(0, min(3, left))), 0, **rest)


@dataclass(frozen=True)
class Case:
    """One problem; tensors of a case are numbered, and each number has a layout."""

    rows: Rows
    batch: int | None
    heads: int
    nope: int
    rotated: int
    value: int
    numerics: tuple[torch.dtype, torch.dtype]
    concentration: float
    table_room: int
    inputs: tuple[Layout, ...]
    grads: tuple[Layout, ...]

    def _shape(self, heads: int, width: int) -> tuple[int, ...]:
        batch = () if self.batch is None else (self.batch,)
        return (self.rows.count, *batch, heads, width)

    def input(self, number: int, width: int, heads: int | None = None) -> Tensor:
        shape = self._shape(self.heads if heads is None else heads, width)
        t = values(*shape, dtype=self.numerics[0], seed=number)
        return laid_out(t, self.inputs[number])

    def grad(self, number: int, width: int) -> Tensor:
        t = values(*self._shape(self.heads, width), dtype=self.numerics[0], seed=100 + number)
        return laid_out(t, self.grads[number])

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin, positions; the tables are as long as needed and lie amid NaN."""
        positions = self.rows.positions()
        length = int(positions.max()) + 1 if len(positions) else 1
        pair = tables(length, self.rotated, self.numerics[1], concentration=self.concentration)
        layout = Layout((0, 1), (2, self.table_room))
        return *(laid_out(table, layout) for table in pair), positions


HEADS = [1, 2, 6, 10, 12, 16, 20, 33, 64, 96, 128, 130]
NOPE = [0, 1, 12, 24, 96, 128, 192, 512, 528]
ROTATED = [2, 6, 24, 64, 96]
VALUE = [0, 1, 20, 128]


@st.composite
def cases(
    draw, *, inputs: int = 1, grads: int = 1, unit: bool = True, expand: bool = True,
    most_heads: int = 130,
) -> Case:  # fmt: skip
    """Problems with ``inputs`` tensors in and ``grads`` gradients, these of any strides.

    Args:
        unit: the last stride of inputs is 1.
        expand: inputs may overlap themselves.
    """
    usual = [heads for heads in HEADS if heads <= most_heads]
    heads = draw(st.one_of(st.sampled_from(usual), st.integers(1, most_heads)))
    nope, rotated = draw(st.sampled_from(NOPE)), draw(st.sampled_from(ROTATED))
    value = draw(st.sampled_from(VALUE))
    batch = draw(st.sampled_from([None, None, 1, 2, 3]))
    padded = _power_of_two(heads) * (_power_of_two(nope + value) + _power_of_two(rotated))
    most = min(24, max(1, _BUDGET // padded // (batch or 1)))
    rows = draw(_rows(most))
    if rows.lengths is not None:
        batch = None
    dims = 3 if batch is None else 4
    given = layouts(dims, unit=unit, expand=expand)
    incoming = layouts(dims, unit=False)
    return Case(
        rows, batch, heads, nope, rotated, value,
        numerics=draw(st.sampled_from(NUMERICS)),
        concentration=draw(st.sampled_from([1.0, 0.7])),
        table_room=draw(st.sampled_from([0, 1, rotated // 2])),
        inputs=tuple(draw(given) for _ in range(inputs)),
        grads=tuple(draw(incoming) for _ in range(grads)),
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def forward_backward(
    op: Callable, inputs: list[Tensor], arguments: tuple, grads: list[Tensor], **how
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs of ``op(*inputs, *arguments, **how)`` and gradients of the inputs.

    Neither the inputs nor the incoming gradients may change, nor anything beside them.
    """
    leaves = [t.detach().requires_grad_() for t in inputs]
    before = [storage_of(t).clone() for t in (*inputs, *grads)]
    outputs = op(*leaves, *arguments, **how)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    got = torch.autograd.grad(outputs, leaves, grads)
    for t, old in zip((*inputs, *grads), before, strict=True):
        assert_same_bits("what was given", storage_of(t), old, finite=False)
    return tuple(t.detach() for t in outputs), got


def complex_rotation(
    t: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool = True,
    inverse: bool = False, remove_interleaving: bool = False,
) -> Tensor:  # fmt: skip
    """Rotation of all channels as a product of complex numbers: a second opinion on the twins."""
    half = cos.shape[-1]
    if not interleaved:
        t = t.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    z = torch.view_as_complex(t.unflatten(-1, (half, 2)).contiguous())
    angle = torch.complex(cos, -sin if inverse else sin)[positions.long()]
    z = z * angle.view(len(positions), *(1,) * (t.dim() - 2), half)
    pairs = torch.view_as_real(z)
    return (pairs if interleaved and remove_interleaving else pairs.transpose(-1, -2)).flatten(-2)
