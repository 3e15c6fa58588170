"""No tile changes a bit or writes past a tensor: ragged heads, sentinels, padded widths."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.kv_split import launch_kv_split
from megatron_mla.kernels.kv_split_backward import launch_kv_split_backward
from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref, sum_heads_ref
from megatron_mla.kernels.rope import launch_rope
from megatron_mla.kernels.rope_ref import rope_ref
from tests.helpers.rotations import DEVICE, assert_same_bits, tables, values

# Multiples of no block and of some.
HEADS = pytest.mark.parametrize("heads", [6, 10, 12, 20, 96])
BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128]
if DEVICE == "cuda":
    # Registers hold a tile.
    TILES = [(t, h) for t in BLOCKS for h in BLOCKS if t * h <= 512]
    WARPS = [4, 8]
else:
    # Every program of the interpreter takes milliseconds, and it has no warps.
    TILES = [(4, h) for h in BLOCKS] + [(t, 8) for t in BLOCKS if t != 4]
    TILES += [(1, 128), (128, 1), (128, 128)]
    WARPS = [4]
NUM_WARPS = pytest.mark.parametrize("num_warps", WARPS)
SENTINELS = 4

ROWS, NOPE, ROTATED, VALUE = 3, 10, 6, 5


def arguments(rows: int = ROWS, rotated: int = ROTATED):
    return *tables(12, rotated, torch.float32), torch.arange(rows, device=DEVICE).flip(0) + 2


class Guarded:
    """A tensor in the middle of a storage, and what of that must not change."""

    def __init__(self, *shape: int, data: torch.Tensor | None = None):
        self.storage = torch.full((shape[0] + 2 * SENTINELS, *shape[1:]), 4321.0, device=DEVICE)
        self.inside = self.storage[SENTINELS:-SENTINELS]
        self.inside.copy_(torch.nan * self.inside if data is None else data)
        self._before = self.storage.clone()

    def check(self, name: str, want: torch.Tensor) -> None:
        self._before[SENTINELS:-SENTINELS] = want
        assert_same_bits(f"{name} and {SENTINELS} rows beside it", self.storage, self._before)


def _check_rope(heads: int, tile: tuple[int, int], num_warps: int, inverse: bool) -> None:
    data = values(ROWS, heads, NOPE + ROTATED)
    how = {"interleaved": not inverse, "inverse": inverse}
    want = rope_ref(data, *arguments(), nope_dim=NOPE, **how)
    launch = {"pairs_in": not inverse, "pairs_out": False, "inverse": inverse}
    launch |= {"tile": tile, "num_warps": num_warps}
    place, out = Guarded(*data.shape, data=data), Guarded(*data.shape)
    pe = place.inside[..., NOPE:]
    nope, nope_out = place.inside[..., :NOPE], out.inside[..., :NOPE]
    launch_rope(pe, out.inside[..., NOPE:], *arguments(), nope=nope, nope_out=nope_out, **launch)
    out.check(f"out of place, tile {tile}", want)
    place.check(f"input, tile {tile}", data)
    launch_rope(pe, pe, *arguments(), **launch)
    place.check(f"in place, tile {tile}", want)


@HEADS
@NUM_WARPS
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "backward"])
def test_no_tile_changes_a_rotation(heads, num_warps, inverse) -> None:
    for tile in TILES:
        _check_rope(heads, tile, num_warps, inverse)


@HEADS
@NUM_WARPS
def test_no_tile_changes_keys_and_values(heads, num_warps) -> None:
    kv, k_pe = values(ROWS, heads, NOPE + VALUE), values(ROWS, 1, ROTATED, seed=1)
    want_key, want_value = rope_kv_split_ref(kv, k_pe, *arguments(), k_dim=NOPE)
    for tile in TILES:
        key, value = Guarded(*want_key.shape), Guarded(*want_value.shape)
        launch_kv_split(
            kv, k_pe, key.inside, value.inside, *arguments(),
            k_dim=NOPE, tile=tile, num_warps=num_warps,
        )  # fmt: skip
        key.check(f"key, tile {tile}", want_key)
        value.check(f"value, tile {tile}", want_value)


@HEADS
@NUM_WARPS
@pytest.mark.parametrize("rows", [1, ROWS, 9])
def test_no_tile_changes_gradients_of_keys_and_values(heads, num_warps, rows) -> None:
    kv = values(rows, heads, NOPE + VALUE).requires_grad_()
    k_pe = values(rows, 1, ROTATED, seed=1).requires_grad_()
    outputs = rope_kv_split_ref(kv, k_pe, *arguments(rows), k_dim=NOPE)
    grads = [values(*t.shape, seed=seed) for seed, t in enumerate(outputs, 2)]
    want_kv, want_pe = torch.autograd.grad(outputs, (kv, k_pe), grads)
    for block_t in BLOCKS if DEVICE == "cpu" else BLOCKS[:5]:
        grad_kv, grad_pe = Guarded(*kv.shape), Guarded(*k_pe.shape)
        launch_kv_split_backward(
            *grads, grad_kv.inside, grad_pe.inside, *arguments(rows),
            k_dim=NOPE, block_t=block_t, num_warps=num_warps,
        )  # fmt: skip
        grad_kv.check(f"gradient of kv, block_t {block_t}", want_kv)
        grad_pe.check(f"gradient of k_pe, block_t {block_t}", want_pe)


@HEADS
@pytest.mark.parametrize("block_t", [1, 4])
def test_heads_past_a_block_belong_to_their_own_token(heads, block_t) -> None:
    """Four tokens of 192-wide heads in blocks of 8, as in Megatron-LM issue 6890."""
    data = values(4, heads, 192)
    tables_and_positions = arguments(4, 64)
    want = rope_ref(data, *tables_and_positions, nope_dim=128)
    place = Guarded(*data.shape, data=data)
    pe = place.inside[..., 128:]
    launch_rope(pe, pe, *tables_and_positions, tile=(block_t, 8))
    place.check("in place", want)


@pytest.mark.parametrize("k_dim", [96, 192])
@pytest.mark.parametrize("v_dim", [0, 128], ids=["no-value", "value"])
def test_key_widths_that_are_no_power_of_two(k_dim, v_dim) -> None:
    """Key and value are masked on their own, as in radixark/Megatron-LM pull request 5."""
    kv = values(4, 6, k_dim + v_dim).requires_grad_()
    k_pe = values(4, 1, 64, seed=1).requires_grad_()
    tables_and_positions = arguments(4, 64)
    want = rope_kv_split_ref(kv, k_pe, *tables_and_positions, k_dim=k_dim)
    key, value = Guarded(*want[0].shape), Guarded(*want[1].shape)
    launch_kv_split(
        kv.detach(), k_pe.detach(), key.inside, value.inside, *tables_and_positions,
        k_dim=k_dim, tile=(2, 4),
    )  # fmt: skip
    key.check("key", want[0].detach())
    value.check("value", want[1].detach())
    grads = [values(*t.shape, seed=seed) for seed, t in enumerate(want, 2)]
    want_kv, want_pe = torch.autograd.grad(want, (kv, k_pe), grads)
    grad_kv, grad_pe = Guarded(*kv.shape), Guarded(*k_pe.shape)
    launch_kv_split_backward(
        *grads, grad_kv.inside, grad_pe.inside, *tables_and_positions, k_dim=k_dim, block_t=2
    )
    grad_kv.check("gradient of kv", want_kv)
    grad_pe.check("gradient of k_pe", want_pe)


def test_a_sum_over_heads_is_one_sum_whatever_its_neighbours() -> None:
    """Rows alone or together: the order of a sum is not a matter of tiles."""
    t = values(7, 45, 6)
    whole = sum_heads_ref(t)
    for row in range(7):
        assert_same_bits(f"row {row}", sum_heads_ref(t[row : row + 1]), whole[row : row + 1])
