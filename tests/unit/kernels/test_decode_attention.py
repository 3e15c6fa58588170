"""Attention over cached rows against its twin in fp64, whatever is there, and in whatever order."""

from __future__ import annotations

from random import Random

import pytest
import torch

from megatron_mla.inference.attention import attend_to_rows
from megatron_mla.kernels import decode_attention_kernel
from megatron_mla.kernels.decode_attention import decode_attention
from megatron_mla.kernels.decode_attention_kernel import decode_tile, launch_decode, split_count
from megatron_mla.kernels.decode_attention_ref import decode_attention_ref
from megatron_mla.kernels.decode_selfcheck import decode_fault
from tests.helpers.close import assert_close
from tests.helpers.rotations import DEVICE, assert_each_same_bits, assert_same_bits

# What NumPy says of the logarithm of an empty sum in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDED = "probabilities and results are rounded to 16 bits"
ORDER = "order of fp32 sums"
PAIRS = [
    (FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, E4M3), (BF16, E5M2), (FP16, E4M3),
    (FP16, E5M2), (FP32, E4M3), (FP32, BF16), (BF16, FP32), (BF16, FP16),
]  # fmt: skip


def problem(batch, s, heads, length, c, d, *, dtype=FP32, key_dtype=None, seed=0):
    """Query, keys, and positions of sequences that are all ``length`` long."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, s, heads, c + d, generator=generator)
    keys = torch.randn(batch, length, c + d, generator=generator)
    mine = torch.arange(length - s, length).repeat(batch, 1)
    positions = torch.arange(length).repeat(batch, 1)
    moved = query.to(DEVICE, dtype), keys.to(DEVICE).to(key_dtype or dtype)
    return *moved, mine.to(DEVICE), positions.to(DEVICE)


def assert_right(query, keys, mine, positions, *, c, scale=0.2, got=None):
    """Held against the twin in fp64; returns what was got."""
    how = {"scale": scale, "v_dim": c}
    got = decode_attention(query, keys, mine, positions, **how) if got is None else got
    want = decode_attention_ref(query.double(), keys.double(), mine, positions, **how)
    assert got[0].dtype == query.dtype and got[1].dtype == FP32
    assert got[0].is_contiguous() and got[1].is_contiguous()
    exact = FP32 in (query.dtype, keys.dtype)
    if query.dtype == FP32:
        assert_close("out", got[0], want[0], rel=5e-6, reason=ORDER)
    elif exact:
        assert_close("out", got[0], want[0])
    else:
        # Half an ulp of probabilities and of results, which are no larger than what is summed.
        keys = keys.double().masked_fill(~(positions >= 0).unsqueeze(-1), 0.0)
        bound = 2**-8 * max(1e-9, keys[..., :c].abs().max().item())
        assert (got[0].double() - want[0]).abs().max() <= bound, ROUNDED
        assert (got[0].isnan() == want[0].isnan()).all()
    assert_close("log-sum-exp", got[1], want[1], rel=5e-6, reason=ORDER)
    return got


def split(query, keys, mine, positions, c, *, splits, scale=0.2, tile=None):
    out = torch.empty(*query.shape[:3], c, dtype=query.dtype, device=DEVICE)
    lse = torch.empty(query.shape[:3], device=DEVICE)
    launch_decode(query, keys, mine, positions, out, lse, scale, splits=splits, tile=tile)
    return out, lse


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed) -> None:
    """Lengths, padding, gaps, any order, rows that are not there and hold NaN, any strides."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype, key_dtype = PAIRS[seed % len(PAIRS)]
    batch, s, heads = random.randint(1, 3), random.choice([1, 1, 2, 5]), random.choice([1, 3, 6, 8])
    c, d = random.randint(1, 40), random.choice([0, 1, 8, 20])
    rows, length = random.randint(1, 150), random.randint(1, 90)
    query, keys, *_ = problem(batch, s, heads, rows + 3, c, d, dtype=FP32, seed=seed)
    keys = keys[:, :rows]  # strides of a longer memory
    ends = torch.randint(0, length + 1, (batch, 1), generator=generator)
    mine = ends - s + torch.arange(s)
    mine = torch.where(torch.rand(batch, s, generator=generator) < 0.2, -1, mine)
    positions = torch.stack([
        torch.randperm(max(rows, length), generator=generator)[:rows] for _ in range(batch)
    ])  # fmt: skip
    positions = torch.where(positions < ends, positions, -1)
    if random.random() < 0.5:
        positions = positions.sort(dim=1, descending=random.random() < 0.5).values
    mine, positions = (t.to(DEVICE, random.choice([torch.int32, torch.int64]))
                       for t in (mine, positions))  # fmt: skip
    keys.masked_fill_((positions < 0).unsqueeze(-1), torch.nan)
    query.masked_fill_((mine < 0)[..., None, None], torch.nan)
    query, keys = query.to(dtype), keys.to(key_dtype)
    out, lse = decode_attention(query, keys, mine, positions, scale=0.3, v_dim=c)
    assert (out[mine < 0] == 0).all() and lse[mine < 0].isneginf().all()
    zeroed = query.masked_fill((mine < 0)[..., None, None], 0.0)
    assert_right(zeroed, keys, mine, positions, c=c, scale=0.3, got=(out, lse))


@pytest.mark.parametrize(("dtype", "key_dtype"), PAIRS, ids=str)
def test_dtypes(dtype, key_dtype) -> None:
    *tensors, mine, positions = problem(2, 2, 6, 100, 20, 8, dtype=dtype, key_dtype=key_dtype)
    assert_right(*tensors, mine, positions, c=20)


@pytest.mark.parametrize(
    ("s", "heads"), [(1, 1), (1, 8), (1, 16), (1, 130), (4, 16), (3, 6), (5, 3), (70, 2)]
)
def test_rows_of_tokens_and_heads(s, heads) -> None:
    """Fewer than a block, a block, and blocks that a token or a head ends in the middle of."""
    tensors = problem(2, s, heads, 90, 24, 8)
    assert_right(*tensors, c=24)


@pytest.mark.parametrize(("c", "d"), [(1, 0), (16, 0), (20, 8), (64, 16), (33, 1), (130, 65)])
def test_widths(c, d) -> None:
    assert_right(*problem(2, 1, 6, 70, c, d), c=c)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64])
def test_splits_do_not_matter(splits) -> None:
    """Some of them have no key, or none that is seen."""
    query, keys, mine, positions = problem(3, 2, 6, 200, 20, 8)
    positions[1, 40:] = -1
    mine[1] = torch.tensor([38, -1])
    positions[2], mine[2] = positions[2].flip(0), torch.tensor([10, 150])
    keys.masked_fill_((positions < 0).unsqueeze(-1), torch.nan)
    got = split(query, keys, mine, positions, 20, splits=splits)
    assert_right(query, keys, mine, positions, c=20, got=got)


@pytest.mark.parametrize("tile", [(16, 16, 4, 2), (16, 64, 8, 3), (32, 32, 4, 3), (64, 16, 8, 2)])
def test_tiles_do_not_matter(tile) -> None:
    query, keys, mine, positions = problem(2, 3, 20, 150, 24, 8)
    got = split(query, keys, mine, positions, 24, splits=2, tile=tile)
    assert_right(query, keys, mine, positions, c=24, got=got)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4), (4, 64)])
def test_parts_of_the_positions_merge_to_the_whole(world, interleave) -> None:
    """As decode context parallelism deals them out: every rank sees gaps, some see nothing."""
    from megatron_mla.inference.dcp import merge_partials, owned_positions

    query, keys, mine, positions = problem(1, 3, 6, 150, 20, 8)
    parts = []
    for rank in range(world):
        owned = owned_positions(150, rank, world, interleave, DEVICE).long()
        part = query, keys[:, owned], mine, positions[:, owned]
        parts.append(assert_right(*part, c=20))
    got = merge_partials(*(torch.stack(t) for t in zip(*parts, strict=True)))
    assert_right(query, keys, mine, positions, c=20, got=got)


def test_nothing_is_seen() -> None:
    query, keys, mine, positions = problem(3, 2, 6, 70, 20, 8, dtype=BF16)
    mine[0], positions[1] = -1, -1
    mine[2], positions[2] = 3, positions[2] + 4
    keys[:] = torch.nan
    for splits in (1, 4):
        out, lse = split(query, keys, mine, positions, 20, splits=splits)
        assert_same_bits("out", out, torch.zeros_like(out))
        assert lse.isneginf().all()


@pytest.mark.parametrize(("batch", "s", "length"), [(0, 1, 5), (2, 0, 5), (2, 1, 0)])
def test_nothing_at_all(batch, s, length) -> None:
    query = torch.zeros(batch, s, 3, 12, dtype=BF16, device=DEVICE)
    keys = torch.zeros(batch, length, 12, device=DEVICE).to(E4M3)
    mine, positions = (torch.zeros(batch, n, dtype=torch.int32, device=DEVICE) for n in (s, length))
    out, lse = decode_attention(query, keys, mine, positions, scale=1.0, v_dim=8)
    assert out.shape == (batch, s, 3, 8) and out.dtype == BF16 and not out.any()
    assert lse.shape == (batch, s, 3) and lse.isneginf().all()


def test_views_are_read_where_they_lie() -> None:
    """A part of a larger memory, and what has tokens or heads outermost; nothing is copied."""
    query, keys, mine, positions = problem(2, 3, 6, 70, 20, 8)
    want = assert_right(query, keys, mine, positions, c=20)
    memory = torch.full((4, 100, 28), torch.nan, device=DEVICE)
    memory[:2, :70] = keys
    apart = torch.full((70, 2, 40), torch.nan, device=DEVICE)
    apart[..., :28] = keys.transpose(0, 1)
    tokens_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    heads_first = query.transpose(0, 2).contiguous().transpose(0, 2)
    for one, other in (
        (tokens_first, memory[:2, :70]),
        (heads_first, apart[..., :28].movedim(0, 1)),
    ):
        places = mine.t().contiguous().t(), torch.stack((positions, positions), -1)[..., 0]
        got = decode_attention(one, other, *places, scale=0.2, v_dim=20)
        assert_each_same_bits("out lse", got, want)


def test_keys_of_a_block_that_no_row_sees_are_not_read(monkeypatch) -> None:
    """Neither behind the last that is seen, nor between: they would be NaN in the sums."""
    query, keys, mine, positions = problem(1, 1, 6, 300, 20, 8)
    mine[:] = 299
    positions[:, 64:192] = 1000  # there, but later than the query
    keys[:, 64:192] = torch.nan
    out, _ = split(query, keys, mine, positions, 20, splits=1)
    assert out.isfinite().all()


def test_large_logits() -> None:
    query, keys, mine, positions = problem(1, 2, 6, 90, 20, 8)
    query[..., 0], keys[..., 0] = 30.0, 30.0
    got = decode_attention(query, keys, mine, positions, scale=1.0, v_dim=20)
    want = decode_attention_ref(query.double(), keys.double(), mine, positions, scale=1.0, v_dim=20)
    assert_close("out", got[0], want[0], rel=5e-4, reason="rounding of logits of 900 in fp32")
    assert_close("log-sum-exp", got[1], want[1], rel=1e-6, reason="rounding of fp32")


def test_replays_have_the_same_bits() -> None:
    query, keys, mine, positions = problem(2, 2, 20, 300, 24, 8, dtype=BF16)
    want = split(query, keys, mine, positions, 24, splits=5)
    for _ in range(25 if DEVICE != "cpu" else 2):
        got = split(query, keys, mine, positions, 24, splits=5)
        assert_each_same_bits("out lse", got, want)


def test_splits_follow_from_shapes() -> None:
    """Enough of them to fill a device, no more than there are tiles, one where rows do."""
    assert split_count(1, 1, 132, 16, 64) == 1
    assert 100 <= split_count(1, 131072, 132, 16, 64) <= 132
    assert 50 <= split_count(2, 131072, 132, 64, 64) <= 66
    assert split_count(64, 32768, 132, 64, 64) in (2, 4)
    assert split_count(1000, 32768, 132, 64, 64) == 1
    for blocks, length in ((1, 300), (3, 5000), (40, 77)):
        assert 1 <= split_count(blocks, length, 264, 16, 32) <= -(-length // 32)


@pytest.mark.parametrize("limits", [(227 * 1024, 64), (163 * 1024, 64), (99 * 1024, 64)], ids=str)
@pytest.mark.parametrize("items", [(2, 2), (2, 1), (4, 4), (4, 1)], ids=str)
def test_tiles_fit(limits, items) -> None:
    for rows in (1, 16, 24, 128, 10_000):
        for c, d in ((512, 64), (20, 8), (512, 0), (1024, 64)):
            tile = decode_tile(rows, c, d, items, limits)
            held, keys, warps, stages = tile
            assert held in (16, 32, 64) and keys >= 16 and warps in (4, 8) and stages >= 2
            padded = decode_attention_kernel.blocks_of(c, d)["BLOCK_C"]
            assert held * padded <= 64 * 512
            assert held * padded * items[0] <= limits[0] or held == 16


def test_attend_to_rows_takes_the_twin_on_a_cpu_and_for_gradients(monkeypatch) -> None:
    query, keys, mine, positions = problem(1, 1, 2, 9, 4, 2)
    query.requires_grad_()
    out, _ = attend_to_rows(query, keys, mine, positions, scale=1.0, v_dim=4)
    assert torch.autograd.grad(out.sum(), query)[0].any()
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.ops.megatron_mla, "decode_attention", None)
        attend_to_rows(query.detach(), keys, mine, positions, scale=1.0, v_dim=4)


def test_selfcheck_finds_nothing_and_says_what_is_wrong(monkeypatch) -> None:
    from megatron_mla.kernels import decode_selfcheck

    device = "cuda:0" if DEVICE == "cuda" else "cpu"
    check = decode_selfcheck._fault.__wrapped__
    assert decode_fault(device, (BF16, E4M3), 6, (20, 8)) is None
    with torch.device("meta"):
        assert check(device, (FP32, FP32), 16, (20, 8)) is None

    def wrong(*arguments, **how):
        out, lse = decode_attention(*arguments, **how)
        return out, lse + 1

    monkeypatch.setattr(decode_selfcheck, "decode_attention", wrong)
    assert "a wrong log-sum-exp on" in check(device, (FP32, FP32), 16, (20, 8))

    def broken(*arguments, **how):
        raise RuntimeError("no FP8 on this GPU")

    monkeypatch.setattr(decode_selfcheck, "decode_attention", broken)
    assert "no FP8 on this GPU" in check(device, (FP32, FP32), 16, (20, 8))


def test_library_operator_keeps_its_contract() -> None:
    tensors = problem(2, 2, 3, 9, 4, 2)
    torch.library.opcheck(
        torch.ops.megatron_mla.decode_attention.default, (*tensors, 0.3, 4),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 3, 8)}, r"query must be \[batch, tokens, heads, width\], got"),
        ({"query": torch.zeros(2, 1, 3, 8).double()}, "query must be one of bfloat16.*float64; c"),
        ({"query": torch.zeros(2, 1, 3, 8).to(E4M3)}, "query must be one of bfloat16.*e4m3fn; ca"),
        ({"query": torch.zeros(2, 1, 8, 3).mT}, "query must have last stride 1, got strides"),
        ({"query": torch.zeros(2, 1, 3, 8).requires_grad_()}, "query must not require grad, .*no_"),
        ({"keys": torch.zeros(2, 1, 5, 8)}, r"keys must be \[batch, rows, width\], got \[2, 1, 5"),
        ({"keys": torch.zeros(2, 5, 8).int()}, "keys must be one of bfloat16.*float8_e5m2 for the"),
        ({"keys": torch.zeros(2, 8, 5).mT}, r"keys must have last stride 1, got .*contiguous\(\)"),
        ({"keys": torch.zeros(2, 5, 8).requires_grad_()}, "keys must not require grad, for the ke"),
        ({"keys": torch.zeros(3, 5, 8)}, r"keys must have the sequences and the width of query, 2"),
        ({"keys": torch.zeros(2, 5, 9)}, r"8, got \[2, 5, 9\]; pass memory\[:batch\], and absorb"),
        ({"v_dim": 9}, "v_dim must be 1 to 8, leading channels of keys, got 9; it is"),
        ({"v_dim": 0}, "v_dim must be 1 to 8"),
        ({"query_positions": torch.zeros(2, 1)}, r"query_positions must be int32 or int64 \[2, "),
        ({"query_positions": torch.zeros(1, 2).int()}, r"each row of query, got torch.int32 \[1, "),
        ({"key_positions": torch.zeros(2, 5)}, r"key_positions must be int32 or int64 \[2, 5\]"),
        ({"key_positions": torch.zeros(2, 4).int()}, "each row of keys, got .*-1 says that a row"),
    ],
)  # fmt: skip
def test_refusals(changes, message) -> None:
    arguments = {
        "query": torch.zeros(2, 1, 3, 8),
        "keys": torch.zeros(2, 5, 8),
        "query_positions": torch.zeros(2, 1, dtype=torch.int32),
        "key_positions": torch.zeros(2, 5, dtype=torch.int32),
        "v_dim": 4,
    } | changes
    arguments = {
        n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**arguments, scale=1.0)


@pytest.mark.parametrize("name", ["keys", "query_positions", "key_positions"])
def test_another_device_is_refused(name) -> None:
    names = ("query", "keys", "query_positions", "key_positions")
    arguments = dict(zip(names, problem(2, 1, 3, 9, 4, 2), strict=True))
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must be on the device of query, .*meta; move it"):
        decode_attention(**arguments, scale=1.0, v_dim=4)


def test_gradients_are_refused_only_where_they_are_recorded() -> None:
    query, keys, mine, positions = problem(1, 1, 2, 9, 4, 2)
    query.requires_grad_()
    with torch.no_grad():
        out, lse = decode_attention(query, keys, mine, positions, scale=1.0, v_dim=4)
    assert not out.requires_grad and not lse.requires_grad


# Real widths, which the interpreter has no time for.
GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize("length", [4096, 33_000])
@pytest.mark.parametrize("key_dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("s", "heads"), [(1, 8), (1, 16), (4, 16), (2, 16), (1, 64), (1, 128)])
def test_widths_of_models(s, heads, key_dtype, length) -> None:
    query, keys, mine, positions = problem(
        2, s, heads, length, 512, 64, dtype=BF16, key_dtype=key_dtype
    )
    positions[1, length // 3 :] = -1
    mine[1] = length // 3 - s + torch.arange(s)
    keys.view(torch.uint8)[1, length // 3 :] = 0xFF  # NaN in both dtypes
    # Logits of 6: some keys have most of the weight, and none may be missed.
    assert_right(query, keys, mine, positions, c=512, scale=0.25)


@GPU
def test_a_piece_of_a_prompt() -> None:
    query, keys, mine, positions = problem(1, 512, 16, 2048, 512, 64, dtype=BF16)
    mine[:, 500:] = -1
    assert_right(query, keys, mine, positions, c=512, scale=0.25)


@GPU
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_that_is_seen_is_nan(code) -> None:
    """The interpreter takes it for a number."""
    query, keys, mine, positions = problem(2, 1, 16, 300, 512, 64, dtype=BF16, key_dtype=E4M3)
    keys.view(torch.uint8)[1, 7, 5] = code
    out, lse = decode_attention(query, keys, mine, positions, scale=0.1, v_dim=512)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[0].isfinite().all() and lse[0].isfinite().all()


@GPU
def test_last_rows_past_2_31_elements() -> None:
    batch, rows, heads = 64, 70_000, 16
    assert batch * rows * 576 > 2**31
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 2 * batch * rows * 576:
        pytest.skip("needs 5 GB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 0x70, (batch, 1000, 576), device="cuda", generator=generator)
    keys = torch.full((batch, rows, 576), 0xFF, dtype=torch.uint8, device="cuda")
    keys[:, -1000:] = codes.to(torch.uint8)
    keys = keys.view(E4M3)
    query = torch.randn(batch, 1, heads, 576, device="cuda", generator=generator).to(BF16)
    positions = torch.full((batch, rows), -1, dtype=torch.int32, device="cuda")
    positions[:, -1000:] = torch.arange(1000, device="cuda")
    mine = torch.full((batch, 1), 999, dtype=torch.int32, device="cuda")
    got = decode_attention(query, keys, mine, positions, scale=1e-3, v_dim=512)
    few = query[-2:], keys[-2:, -1000:], mine[-2:], positions[-2:, -1000:]
    assert_right(*few, c=512, scale=1e-3, got=tuple(t[-2:] for t in got))


@GPU
def test_a_graph_replays_what_has_changed() -> None:
    query, keys, mine, positions = problem(2, 1, 16, 4096, 512, 64, dtype=BF16, key_dtype=E4M3)
    how = {"scale": 576**-0.5, "v_dim": 512}
    attend_to_rows(query, keys, mine, positions, **how)  # compiles, and is compared
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_to_rows(query, keys, mine, positions, **how)
    for length in (4096, 100, 1):
        mine[:] = length - 1
        positions.copy_(torch.arange(4096, device="cuda").repeat(2, 1))
        positions[:, length:] = -1
        query.normal_()
        graph.replay()
        assert_right(query, keys, mine, positions, c=512, scale=how["scale"], got=(out, lse))


@GPU
def test_attend_to_rows_takes_the_kernel_on_a_gpu(monkeypatch) -> None:
    from megatron_mla.kernels import decode_attention as module

    called = []
    monkeypatch.setattr(module, "launch_decode", lambda *a: called.append(launch_decode(*a)))
    tensors = problem(1, 1, 6, 70, 20, 8)
    attend_to_rows(*tensors, scale=0.2, v_dim=20)
    assert called
    called.clear()
    attend_to_rows(*(t.double() for t in tensors[:2]), *tensors[2:], scale=0.2, v_dim=20)
    assert not called


@GPU
@pytest.mark.parametrize("form", [{}, {"mla_form": "absorbed"}], ids=["expanded", "absorbed"])
def test_layers_decode_as_with_the_twin(form, single_rank, monkeypatch) -> None:
    from megatron_mla.inference import attention
    from megatron_mla.inference.context import LatentInferenceContext
    from tests.helpers.layers import hidden, small_layer

    layer, x = small_layer(**form).eval(), hidden(24, 2)

    def run():
        context, outs = LatentInferenceContext(2, 24), []
        with torch.no_grad():
            for piece in x.split([7, 11, 1, 5]):
                outs.append(layer(piece, None, inference_context=context)[0])
                context.advance()
        return torch.cat(outs)

    got = run()
    monkeypatch.setattr(attention, "should_use_decode_kernel", lambda *a: False)
    assert_close("output", got, run(), rel=1e-5, reason=ORDER)
