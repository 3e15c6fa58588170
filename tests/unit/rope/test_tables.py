"""Tables grow on demand and a row depends on its position alone."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.rope.frequencies import RopeParams, concentration, inv_freq
from megatron_mla.rope.tables import RopeTables, half_width, shared_tables

YARN = RopeParams(dim=12, rope_type="yarn", factor=4, original_max_position=16, mscale_all_dim=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_table_is_rounded_once_after_the_factor(dtype) -> None:
    cos, sin = RopeTables(YARN).get(5, dtype, "cpu")
    angle = torch.outer(torch.arange(5.0), inv_freq(YARN))
    assert concentration(YARN) != 1
    assert torch.equal(cos[:5], (angle.cos() * concentration(YARN)).to(dtype))
    assert torch.equal(sin[:5], (angle.sin() * concentration(YARN)).to(dtype))


def test_fp32_numerics_keep_fp32_tables() -> None:
    cos, _ = RopeTables(YARN, "fp32").get(5, torch.bfloat16, "cpu")
    assert cos.dtype == torch.float32


def test_growth_keeps_every_row_and_never_shrinks() -> None:
    tables = RopeTables(YARN)
    short = tables.get(10, torch.float32, "cpu")
    long = tables.get(5000, torch.float32, "cpu")
    assert long[0].shape == (8192, 6)
    for before, after in zip(short, long, strict=True):
        assert torch.equal(before, after[: len(before)])
    assert tables.get(10, torch.float32, "cpu")[0] is long[0]


def test_one_table_for_all_layers_of_the_same_rope() -> None:
    again = RopeParams(**{f: getattr(YARN, f) for f in YARN.__dataclass_fields__})
    assert shared_tables(YARN, "megatron") is shared_tables(again, "megatron")
    assert shared_tables(YARN, "megatron") is not shared_tables(YARN, "fp32")


def test_full_width_table_is_halved_and_a_narrow_one_refused() -> None:
    full = torch.randn(7, 4).repeat(1, 2)[:, None, None, :]
    assert torch.equal(half_width(full, 8), full[:, 0, 0, :4])
    with pytest.raises(ValueError, match=r"cos.*8.*got 2"):
        half_width(torch.randn(512, 1, 1, 2), 8)
