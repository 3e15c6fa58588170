"""What no kernel can take is refused by name before anything is launched."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.absorb import absorb_query
from megatron_mla.kernels.concat import rope_concat
from megatron_mla.kernels.kv_split import rope_kv_split
from megatron_mla.kernels.rope import rope, rope_
from tests.helpers.rotations import DEVICE, storage_of, tables, values


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def strided(*shape):
    return values(*shape[:-1], 2 * shape[-1])[..., ::2]


def table(length=8, half=3, dtype=torch.float32, leading=()):
    return torch.ones(*leading, length, half, dtype=dtype, device=DEVICE)


def both(**how):
    return {"cos": table(**how), "sin": table(**how)}


def positions(rows=5, dtype=torch.int32):
    return torch.arange(rows, dtype=dtype, device=DEVICE)


CALLS = {
    "rope": (rope, {"t": (5, 2, 18)}, {"nope_dim": 12}),
    "rope_": (rope_, {"t": (5, 2, 18)}, {"nope_dim": 12}),
    "concat": (rope_concat, {"nope": (5, 2, 12), "pe": (5, 2, 6)}, {}),
    "kv_split": (rope_kv_split, {"kv": (5, 2, 20), "k_pe": (5, 1, 6)}, {"k_dim": 12}),
    "absorb": (absorb_query, {"q": (5, 2, 18), "wk": (2, 12, 7)}, {"nope_dim": 12}),
}

BAD_TABLES = {
    "narrow-table": (lambda: both(half=1), "cos and sin must be .* 3"),
    "wide-table": (lambda: both(half=6), "cos and sin must be .* 3"),
    "narrow-sin": (lambda: {"sin": table(half=2)}, "cos and sin must be .* 3"),
    "shorter-sin": (lambda: {"sin": table(length=7)}, "cos and sin must be"),
    "table-of-three-dims": (lambda: both(leading=(1,)), "cos and sin must be"),
    "sin-of-another-dtype": (
        lambda: {"sin": table(dtype=torch.float64)},
        "sin must be torch.float32",
    ),
    "half-tables": (lambda: both(dtype=torch.float16), "cos must be torch.float32"),
    "sin-of-other-strides": (
        lambda: {"sin": table(half=6)[:, :3]},
        "cos and sin must have the same str",
    ),
    "table-last-stride": (lambda: {"cos": table(half=6)[:, ::2]}, "cos must have last stride 1"),
    "no-table": (lambda: both(length=0), "cos and sin .* empty tables"),
    "float-positions": (
        lambda: {"positions": positions(dtype=torch.float32)},
        "positions must be int32",
    ),
    "short-positions": (
        lambda: {"positions": positions(dtype=torch.int16)},
        "positions must be int32",
    ),
    "too-few-positions": (
        lambda: {"positions": positions(4)},
        r"positions must be int32 or int64 \[5\]",
    ),
    "too-many-positions": (
        lambda: {"positions": positions(6)},
        r"positions must be int32 or int64 \[5\]",
    ),
    "positions-by-batch": (
        lambda: {"positions": positions().view(5, 1)},
        "positions must be int32",
    ),
    "positions-strided": (
        lambda: {"positions": positions(10)[::2]},
        "positions must be contiguous",
    ),
}
BAD_TENSORS = [
    ("rope", "odd-rotation", lambda: {"nope_dim": 13}, "rotated channels of t must be an even"),
    ("rope", "no-rotation", lambda: {"nope_dim": 18}, "rotated channels of t .* got 0.*nope_dim"),
    ("rope", "nope-past-the-head", lambda: {"nope_dim": 20}, "rotated channels of t .* got -2"),
    ("rope", "negative-nope", lambda: {"nope_dim": -1}, "nope_dim must not be negative, got -1"),
    ("rope", "t-last-stride", lambda: {"t": strided(5, 2, 18)}, "t must have last stride 1"),
    ("rope", "integers", lambda: {"t": integers(5, 2, 18)}, "t must be bfloat16.* got torch.int32"),
    ("rope", "no-heads-dim", lambda: {"t": values(5, 18)}, r"t must be .* got \[5, 18\]"),
    ("rope", "five-dims", lambda: {"t": values(5, 1, 1, 2, 18)}, "t must be .*rows, batch, heads"),
    ("rope", "out-shape", lambda: {"out": values(5, 3, 18)}, "out must have the shape of t"),
    (
        "rope",
        "out-dtype",
        lambda: {"out": values(5, 2, 18).double()},
        "out must have dtype and device",
    ),
    ("rope", "out-last-stride", lambda: {"out": strided(5, 2, 18)}, "out must have last stride 1"),
    (
        "rope",
        "out-overlaps",
        lambda: {"out": values(5, 1, 18).expand(5, 2, 18)},
        "out must not overlap",
    ),
    ("rope_", "odd-rotation", lambda: {"nope_dim": 13}, "rotated channels of t must be an even"),
    ("rope_", "t-last-stride", lambda: {"t": strided(5, 2, 18)}, "t must have last stride 1"),
    ("rope_", "integers", lambda: {"t": integers(5, 2, 18)}, "t must be bfloat16"),
    ("rope_", "flat-of-no-heads", lambda: {"t": values(5, 36), "num_heads": 0}, "num_heads"),
    (
        "rope_",
        "flat-that-does-not-divide",
        lambda: {"t": values(5, 36), "num_heads": 5},
        "num_heads",
    ),
    ("concat", "integers", lambda: {"nope": integers(5, 2, 12)}, "nope must be bfloat16"),
    ("concat", "dtypes", lambda: {"pe": values(5, 2, 6).double()}, "pe must have dtype .* of nope"),
    ("concat", "heads", lambda: {"pe": values(5, 1, 6)}, r"pe must be \[5, 2, d\].*expand"),
    ("concat", "rows", lambda: {"pe": values(4, 2, 6)}, r"pe must be \[5, 2, d\]"),
    (
        "concat",
        "odd-rotation",
        lambda: {"pe": values(5, 2, 5)},
        "rotated channels of pe must be an even",
    ),
    ("concat", "no-rotation", lambda: {"pe": values(5, 2, 0)}, "rotated channels of pe .* got 0"),
    ("kv_split", "kv-last-stride", lambda: {"kv": strided(5, 2, 20)}, "kv must have last stride 1"),
    (
        "kv_split",
        "k_pe-last-stride",
        lambda: {"k_pe": strided(5, 1, 6)},
        "k_pe must have last stride 1",
    ),
    ("kv_split", "integers", lambda: {"kv": integers(5, 2, 20)}, "kv must be bfloat16"),
    (
        "kv_split",
        "dtypes",
        lambda: {"k_pe": values(5, 1, 6).double()},
        "k_pe must have dtype .* of kv",
    ),
    (
        "kv_split",
        "k_pe-of-every-head",
        lambda: {"k_pe": values(5, 2, 6)},
        r"k_pe must be \[5, 1, d\]",
    ),
    ("kv_split", "rows", lambda: {"k_pe": values(4, 1, 6)}, r"k_pe must be \[5, 1, d\]"),
    (
        "kv_split",
        "k_dim-past-the-head",
        lambda: {"k_dim": 21},
        r"k_dim must be in \[0, 20\].* got 21",
    ),
    ("kv_split", "negative-k_dim", lambda: {"k_dim": -1}, r"k_dim must be in \[0, 20\].* got -1"),
    (
        "kv_split",
        "odd-rotation",
        lambda: {"k_pe": values(5, 1, 5)},
        "rotated channels of k_pe must be",
    ),
    ("absorb", "odd-rotation", lambda: {"nope_dim": 13}, "rotated channels of q must be an even"),
    ("absorb", "q-last-stride", lambda: {"q": strided(5, 2, 18)}, "q must have last stride 1"),
    ("absorb", "heads", lambda: {"wk": values(3, 12, 7)}, r"wk must be \[2, 12, C\]"),
    ("absorb", "nope", lambda: {"wk": values(2, 11, 7)}, r"wk must be \[2, 12, C\]"),
    ("absorb", "flat-weight", lambda: {"wk": values(24, 7)}, r"wk must be \[2, 12, C\]"),
    ("absorb", "dtypes", lambda: {"wk": values(2, 12, 7).double()}, "wk must have dtype .* of q"),
]


REFUSED = [
    *((call, name, *bad) for call in CALLS for name, bad in BAD_TABLES.items()),
    *BAD_TENSORS,
]


@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        pytest.param(call, change, message, id=f"{call}-{name}")
        for call, name, change, message in REFUSED
    ],
)
def test_argument_is_refused_by_name_and_nothing_is_written(call, change, message) -> None:
    op, shapes, how = CALLS[call]
    arguments = {name: values(*shape) for name, shape in shapes.items()}
    arguments |= {"cos": table(), "sin": table(), "positions": positions(), **how, **change()}
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    before = {name: storage_of(t).clone() for name, t in tensors.items()}
    with pytest.raises(ValueError, match=message):
        op(**arguments)
    for name, t in tensors.items():
        assert torch.equal(storage_of(t), before[name]), f"{name} was written"


@pytest.mark.parametrize("call", CALLS)
def test_arguments_that_the_others_spoil_are_taken(call) -> None:
    op, shapes, how = CALLS[call]
    inputs = {name: values(*shape) for name, shape in shapes.items()}
    cos, sin = tables(8, 6, torch.float32)
    op(**inputs, cos=cos, sin=sin, positions=positions(), **how)


def test_partial_rotation_is_pointed_to_the_unfused_path() -> None:
    """Width 64 with ``rotary_percent`` 0.125: garbage near 1e14 in Megatron-LM issue 5317."""
    narrow = table(half=4)
    with pytest.raises(ValueError, match=r"\[positions, 32\] for 64 .*--no-rope-fusion"):
        rope(values(5, 2, 192), narrow, narrow, positions(), nope_dim=128)
