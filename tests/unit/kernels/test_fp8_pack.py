"""Queries and keys in FP8: bytes of the twin, whatever is rotated, shared, strided or absent."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mla.kernels import fp8_pack, rotation
from megatron_mla.kernels.fp8_pack import fp8_cast, fused_rope_fp8_quantize
from megatron_mla.kernels.fp8_pack_ref import (
    LIMITS,
    checked,
    fp8_cast_ref,
    fused_rope_fp8_quantize_ref,
)
from tests.helpers.close import rel_error
from tests.helpers.fp8 import assert_same_fp8, joint_table
from tests.helpers.rotations import DEVICE, examples, laid_out, layouts, storage_of, values

# What NumPy says of NaN in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
NEOX = pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
MODES = pytest.mark.parametrize("mode", ["nope", "halves", "pairs"])
INPUTS = [torch.bfloat16, torch.float16, torch.float32]


def where(mode: str, tokens: int, rotated: int, rows: int = 16):
    """Table, positions and style of a mode; with positions that come twice and in no order."""
    if mode == "nope":
        return None, None, True
    positions = torch.arange(tokens, device=DEVICE) * 7 % rows
    return joint_table(rows, rotated, DEVICE), positions, mode == "halves"


def parts(tokens=5, heads=3, n=12, d=6, *, tokens_k=None, heads_k=None, n_k=None, pe_heads=1,
          dtype=torch.bfloat16):  # fmt: skip
    """q_nope, q_pe, k_nope and k_pe as a layer has them: slices of wider tensors."""
    tokens_k = tokens if tokens_k is None else tokens_k
    heads_k = heads if heads_k is None else heads_k
    n_k = n if n_k is None else n_k
    q = values(tokens, heads, n + d, dtype=dtype)
    kv = values(tokens_k, heads_k, n_k + 8, dtype=dtype, seed=1)
    latent = values(tokens_k, pe_heads, 10 + d, dtype=dtype, seed=2)
    return q[..., :n], q[..., n:], kv[..., :n_k], latent[..., 10:]


def assert_twin(*arguments, **how) -> tuple[torch.Tensor, torch.Tensor]:
    got = fused_rope_fp8_quantize(*arguments, **how)
    want = fused_rope_fp8_quantize_ref(*arguments, **how)
    for name, one, other in zip(("query", "key"), got, want, strict=True):
        assert one.is_contiguous()
        assert_same_fp8(name, one, other)
    return got


@st.composite
def problems(draw):
    """Arguments of any strides, and keywords."""
    heads = draw(st.sampled_from([1, 2, 5, 16, 33]))
    heads_k = draw(st.sampled_from([1, heads, 3]))
    d = draw(st.sampled_from([0, 2, 6, 24, 64]))
    n_q, n_k = (draw(st.sampled_from([0, 1, 12, 24, 128, 192])) for _ in "qk")
    tokens = draw(st.integers(0, 9))
    tokens_k = draw(st.one_of(st.just(tokens), st.integers(0, 9)))
    pe_heads = draw(st.sampled_from([1, heads_k]))
    shapes = [(tokens, heads, n_q), (tokens, heads, d)]
    shapes += [(tokens_k, heads_k, n_k), (tokens_k, pe_heads, d)]
    dtype = draw(st.sampled_from(INPUTS))
    tensors = [
        laid_out(values(*shape, dtype=dtype, seed=seed), draw(layouts(3, unit=False)))
        for seed, shape in enumerate(shapes)
    ]
    for n in (2, 3):
        if tensors[n].shape[1] == 1 and heads_k == 1 and draw(st.booleans()):
            tensors[n] = tensors[n].squeeze(1)
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    table = positions = positions_k = None
    if draw(st.sampled_from([True, True, False])):
        table = joint_table(11, d, DEVICE)
        positions, positions_k = (
            torch.tensor(draw(st.lists(st.integers(0, 10), min_size=n, max_size=n)),
                         dtype=integers, device=DEVICE)
            for n in (tokens, tokens_k)
        )  # fmt: skip
    scales = []
    for _ in "qk":
        scale = draw(st.sampled_from([1.0, 0.37, 1000.0]))
        on_device = draw(st.booleans())
        scales.append(torch.tensor([scale], device=DEVICE) if on_device else scale)
    return (*tensors, table, positions, draw(st.booleans())), {
        "positions_k": positions_k,
        "quantize_dtype": draw(st.sampled_from([E4M3, E5M2])),
        "quant_scale_q": scales[0],
        "quant_scale_kv": scales[1],
    }


@pytest.mark.timeout(900)
@examples(150)
@given(problem=problems())
def test_bytes_are_those_of_the_twin_and_nothing_else_changes(problem) -> None:
    arguments, how = problem
    before = [storage_of(t).clone() for t in arguments[:4]]
    assert_twin(*arguments, **how)
    for t, old in zip(arguments[:4], before, strict=True):
        assert torch.equal(storage_of(t).nan_to_num(7.0), old.nan_to_num(7.0))


def test_the_kernel_is_what_runs_here() -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU takes the twin")
    assert fp8_pack.writer_for(torch.device(DEVICE)).__name__ == "launch_fp8_pack"


class TestNope:
    def test_pack_is_a_plain_cast_of_every_slice(self) -> None:
        """The shapes of a Kimi Linear layer, its shared key a slice of the latent row."""
        q_nope, q_pe, k_nope, k_pe = parts(7, 4, 128, 64)
        query, key = fused_rope_fp8_quantize(q_nope, q_pe, k_nope, k_pe, None, None, True)
        assert query.shape == key.shape == (7, 4, 192)
        for name, got, raw in (
            ("q nope", query[..., :128], q_nope),
            ("q pe", query[..., 128:], q_pe),
            ("k nope", key[..., :128], k_nope),
            ("k pe of every head", key[..., 128:], k_pe.expand(7, 4, 64)),
            ("what decode reads back", key[:, :1, 128:], k_pe),
        ):
            assert_same_fp8(name, got, raw.float().clamp(-448, 448).to(E4M3))

    @NEOX
    def test_is_the_rotation_at_position_0(self, neox) -> None:
        inputs = parts(7, 4, 24, 12)
        zeros = torch.zeros(7, dtype=torch.int32, device=DEVICE)
        table = joint_table(3, 12, DEVICE)
        rotated = fused_rope_fp8_quantize(*inputs, table, zeros, neox)
        plain = fused_rope_fp8_quantize(*inputs, None, None, neox)
        for name, one, other in zip(("query", "key"), rotated, plain, strict=True):
            # -0 - 0 * x may be +0.
            assert_same_fp8(name, one, other, zeros=False)

    @pytest.mark.parametrize("neox", [True, False, None])
    def test_layer_without_a_table_needs_no_positions_and_reads_none(self, neox) -> None:
        inputs = parts()
        want = fused_rope_fp8_quantize(*inputs, None, None, True)
        strange = [torch.tensor([9, -5, 1 << 40, 0, 3], device=DEVICE), object()]
        for positions in (*strange, want[0]):
            got = fused_rope_fp8_quantize(*inputs, None, positions, neox, positions_k=positions)
            for name, one, other in zip(("query", "key"), got, want, strict=True):
                assert_same_fp8(name, one, other)

    def test_positional_channels_are_kept_unrotated_and_count(self) -> None:
        """Nothing but the rotation drops out: 64 channels still reach queries and keys."""
        q_nope, q_pe, k_nope, k_pe = parts(n=8, d=64)
        query, key = fused_rope_fp8_quantize(q_nope, q_pe, k_nope, k_pe, None, None, True)
        zero_q, zero_k = fused_rope_fp8_quantize(
            q_nope, q_pe * 0, k_nope, k_pe * 0, None, None, True
        )
        assert query.shape == zero_q.shape == (5, 3, 72)
        assert (query.float() != zero_q.float()).any(-1).all()
        assert (key.float() != zero_k.float()).any(-1).all()

    def test_odd_positional_width_is_fine_without_rotation(self) -> None:
        assert_twin(*parts(d=5), None, None, True)


@MODES
def test_shared_key_is_the_same_on_every_head(mode) -> None:
    inputs = parts(9, 6, 20, 12)
    _, key = assert_twin(*inputs, *where(mode, 9, 12))
    for head in range(6):
        assert_same_fp8(f"head {head}", key[:, head, 20:], key[:, 0, 20:])


@MODES
def test_shared_key_comes_in_three_forms(mode) -> None:
    q_nope, q_pe, k_nope, k_pe = parts(5, 3, 12, 6)
    rest = where(mode, 5, 6)
    want = assert_twin(q_nope, q_pe, k_nope, k_pe, *rest)
    for form in (k_pe.squeeze(1), k_pe.expand(5, 3, 6), k_pe.expand(5, 3, 6).contiguous()):
        got = assert_twin(q_nope, q_pe, k_nope, form, *rest)
        assert_same_fp8("key", got[1], want[1])
    assert_twin(q_nope, q_pe, k_nope, values(5, 3, 6, seed=4), *rest)


@MODES
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "one-head"])
def test_single_head_of_a_latent_stays_single(mode, flat) -> None:
    q_nope, q_pe, latent, k_pe = parts(5, 16, 40, 6, heads_k=1)
    if flat:
        latent, k_pe = latent.squeeze(1), k_pe.squeeze(1)
    query, key = assert_twin(q_nope, q_pe, latent, k_pe, *where(mode, 5, 6))
    assert query.shape == (5, 16, 46)
    assert key.shape == (5, 1, 46)


@MODES
def test_queries_and_keys_have_their_own_tokens_positions_heads_and_widths(mode) -> None:
    """Context parallelism: 8 local queries, 32 gathered keys."""
    inputs = parts(8, 4, 24, 12, tokens_k=32, heads_k=2, n_k=40)
    table, positions, neox = where(mode, 32, 12)
    positions_q = None if positions is None else positions[8:16].contiguous()
    how = {"positions_k": positions}
    query, key = assert_twin(*inputs, table, positions_q, neox, **how)
    assert query.shape == (8, 4, 36)
    assert key.shape == (32, 2, 52)
    # The same rows alone.
    alone, _ = assert_twin(*(t[:8] for t in inputs), table, positions_q, neox)
    assert_same_fp8("query", query, alone)


@NEOX
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_positions_may_have_32_or_64_bits(dtype, neox) -> None:
    table, positions, _ = where("halves", 5, 6)
    assert_twin(*parts(), table, positions.to(dtype), neox)


@MODES
@pytest.mark.parametrize(("n", "d"), [(24, 64), (528, 64), (192, 64), (1, 2), (0, 6), (13, 10)])
def test_widths_need_not_fit_each_other(mode, n, d) -> None:
    assert_twin(*parts(n=n, d=d), *where(mode, 5, d))


@pytest.mark.parametrize("table", [None, "of no width"], ids=["no-table", "empty-table"])
def test_rope_width_0_packs_the_unrotated_channels_alone(table) -> None:
    """GLM-5.3. Nothing is written where a fixed layout would have 64 channels."""
    inputs = parts(n=192, d=0)
    if table is not None:
        table = torch.empty(8, 0, device=DEVICE)
    positions = torch.arange(5, device=DEVICE)
    room = torch.full((5 * 3 * 192 + 64,), torch.nan, device=DEVICE).to(E4M3)
    out = room[: 5 * 3 * 192].view(5, 3, 192)
    query, key = fused_rope_fp8_quantize(*inputs, table, positions, False, q_out=out)
    assert query is out
    assert_same_fp8("query", query, fp8_cast_ref(inputs[0]))
    assert_same_fp8("key", key, fp8_cast_ref(inputs[2]))
    assert room[-64:].float().isnan().all()


@MODES
@pytest.mark.parametrize(("tokens", "tokens_k"), [(0, 0), (0, 4), (4, 0)])
def test_no_tokens_are_no_work(mode, tokens, tokens_k) -> None:
    table, _, neox = where(mode, 4, 6)
    positions = [torch.arange(n, device=DEVICE) for n in (tokens, tokens_k)]
    inputs = parts(tokens, tokens_k=tokens_k)
    query, key = assert_twin(*inputs, table, positions[0], neox, positions_k=positions[1])
    assert query.shape == (tokens, 3, 18)
    assert key.shape == (tokens_k, 3, 18)


@FP8
def test_every_bf16_and_fp16_number_is_rounded_as_the_twin_does(fp8) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        x = bits.view(64, 1, 1024).to(DEVICE)
        query, _ = assert_twin(x, x[..., :0], x, x[..., :0], None, None, True, quantize_dtype=fp8)
        assert torch.equal(query.float().isnan(), x.isnan())
        assert query.float().nan_to_num(0.0).abs().max() == LIMITS[fp8]


@FP8
def test_fp32_is_rounded_once_to_nearest_even(fp8) -> None:
    """Ties, and their neighbours in fp32, around every number of the format; subnormal ones too."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8).double()
    codes = codes[codes.isfinite()].unique()
    ties = ((codes[1:] + codes[:-1]) / 2).float()
    infinity = torch.tensor(torch.inf)
    x = torch.cat((codes.float(), ties, ties.nextafter(infinity), ties.nextafter(-infinity)))
    query, _ = assert_twin(*[x.view(-1, 1, 1).to(DEVICE)] * 4, None, None, True, quantize_dtype=fp8)
    got = query[:, 0, 0].double().cpu()
    nearest = (got - x.double()).abs()
    best = (codes[None] - x.double()[:, None]).abs().min(1).values
    assert torch.equal(nearest, best)


@MODES
@FP8
def test_what_is_out_of_range_saturates_and_nan_stays(mode, fp8) -> None:
    limit = LIMITS[fp8]
    strange = [limit, 1.03 * limit, 1.05 * limit, 30 * limit, torch.inf, -torch.inf, torch.nan]
    strange += [-torch.nan, -2 * limit, 0.0, -0.0, 1e-30, -1e-30, 2.0**-9, 2.0**-10, 3 * 2.0**-17]
    row = torch.tensor(strange, device=DEVICE)
    inputs = [row.expand(3, 2, 16).contiguous() for _ in range(4)]
    table, _, neox = where(mode, 3, 16)
    # NaN and infinity spread over their pair where it is turned.
    positions = torch.tensor([0, 1, 5], device=DEVICE)
    query, key = assert_twin(*inputs, table, positions, neox, quantize_dtype=fp8)
    for t in (query, key):
        nope = t[..., :16].float()
        assert nope[..., :5].eq(limit).all()
        assert nope[..., 5].eq(-limit).all()
        assert nope[..., 6:8].isnan().all()
        assert nope[..., 8].eq(-limit).all()
        assert not t.float().isinf().any()


@FP8
@pytest.mark.parametrize("scale", [0.125, 0.37, 3, 1e4, 1e-30])
def test_scale_is_a_number_or_lies_on_the_device(scale, fp8) -> None:
    inputs, rest = parts(dtype=torch.float32), where("pairs", 5, 6)
    results = []
    for q, kv in ((scale, 1.0), (torch.tensor(float(scale), device=DEVICE), torch.ones(1, 1))):
        kv = kv.to(DEVICE) if isinstance(kv, torch.Tensor) else kv
        how = {"quant_scale_q": q, "quant_scale_kv": kv, "quantize_dtype": fp8}
        results.append(assert_twin(*inputs, *rest, **how))
    assert_same_fp8("query", results[0][0], results[1][0])
    assert_same_fp8("key", results[0][1], results[1][1])
    plain, _ = assert_twin(*(t * scale for t in inputs), None, None, True, quantize_dtype=fp8)
    assert_same_fp8("unrotated channels", results[0][0][..., :12], plain[..., :12])
    # Keys have their own.
    _, key = assert_twin(*inputs, *rest, quant_scale_kv=scale, quantize_dtype=fp8)
    assert (key.view(torch.uint8) != results[0][1].view(torch.uint8)).any()


@MODES
def test_given_outputs_are_filled(mode) -> None:
    inputs, rest = parts(), where(mode, 5, 6)
    q_out, k_out = (torch.full((5, 3, 18), torch.nan, device=DEVICE).to(E4M3) for _ in "qk")
    versions = q_out._version, k_out._version
    query, key = assert_twin(*inputs, *rest)
    got = fused_rope_fp8_quantize(*inputs, *rest, q_out=q_out, k_out=k_out)
    assert got[0] is q_out
    assert got[1] is k_out
    assert_same_fp8("query", q_out, query)
    assert_same_fp8("key", k_out, key)
    assert (q_out._version, k_out._version) > versions


@NEOX
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_pairs_stay_in_place_and_turn_by_their_angle(neox, dtype) -> None:
    """Against complex numbers in fp64: one rounding, so half an ulp of FP8."""
    inputs = parts(9, 3, 4, 8, dtype=dtype)
    table, positions, _ = where("halves", 9, 8)
    query, key = fused_rope_fp8_quantize(*inputs, table, positions, neox)
    angle = torch.complex(*table.double().chunk(2, -1))[positions].unsqueeze(1)
    for name, got, raw in (("query", query, inputs[1]), ("key", key, inputs[3])):
        raw = raw.double()
        first, second = raw.chunk(2, -1) if neox else (raw[..., ::2], raw[..., 1::2])
        turned = torch.complex(first, second) * angle
        together = (turned.real, turned.imag)
        want = torch.cat(together, -1) if neox else torch.stack(together, -1).flatten(-2)
        want = want.clamp(-448, 448)
        error = (got[..., 4:].double() - want).abs()
        assert (error <= want.abs() * 2.0**-4 * 1.0001 + 2.0**-10).all(), name


def test_both_orders_give_the_same_products_of_queries_and_keys() -> None:
    """Channels of pairs put into halves on both sides are a permutation of products."""
    inputs = parts(9, 3, 4, 8, dtype=torch.float32)
    table, positions, _ = where("halves", 9, 8)
    in_halves = [
        torch.cat((t[..., ::2], t[..., 1::2]), -1) if n % 2 else t for n, t in enumerate(inputs)
    ]
    pairs = fused_rope_fp8_quantize(*inputs, table, positions, False)
    halves = fused_rope_fp8_quantize(*in_halves, table, positions, True)
    products = [
        torch.einsum("thd,shd->hts", *(t.double() for t in both)) for both in (pairs, halves)
    ]
    assert rel_error(products[0], products[1]) < 1e-12


@MODES
def test_attention_in_fp8_is_near_that_in_bf16(mode) -> None:
    """e4m3 is off by 2.6e-2 of a normal number in the mean square, attention by three of those:
    of the values, and by the queries and keys in scores of standard deviation 1."""
    torch.manual_seed(0)
    tokens, heads, n, d = 64, 4, 128, 64
    q, k, v = (torch.randn(tokens, heads, w, device=DEVICE).bfloat16() for w in (n + d, n, n))
    k_pe = torch.randn(tokens, 1, d, device=DEVICE).bfloat16()
    rest = where(mode, tokens, d, rows=64)

    def off(got, truth):
        return ((got.float() - truth).norm() / truth.norm()).item()

    def attention(query, key, value):
        scores = torch.einsum("thd,shd->hts", query.float(), key.float()) * (n + d) ** -0.5
        return torch.einsum("hts,shd->thd", scores.softmax(-1), value.float())

    query, key = fused_rope_fp8_quantize(q[..., :n], q[..., n:], k, k_pe, *rest)
    got = attention(query, key, fp8_cast(v))
    exact = [q[..., n:].float(), k_pe.float()]
    if rest[0] is not None:
        cos, sin = rest[0][rest[1]].unsqueeze(1).chunk(2, -1)
        for i, t in enumerate(exact):
            x, y = t.chunk(2, -1) if rest[2] else (t[..., ::2], t[..., 1::2])
            turned = x * cos - y * sin, y * cos + x * sin
            exact[i] = torch.cat(turned, -1) if rest[2] else torch.stack(turned, -1).flatten(-2)
    full_q = torch.cat((q[..., :n].float(), exact[0]), -1)
    full_k = torch.cat((k.float(), exact[1].expand(-1, heads, -1)), -1)
    assert off(query, full_q) < 2.7e-2
    assert off(key, full_k) < 2.7e-2
    assert off(got, attention(full_q, full_k, v)) < 3**0.5 * 2.7e-2


class TestCast:
    @FP8
    @pytest.mark.parametrize("dtype", INPUTS, ids=str)
    @pytest.mark.parametrize("shape", [(), (7,), (5, 12), (5, 3, 20), (2, 3, 4, 5), (0, 4), (3, 0)])
    def test_any_shape(self, shape, dtype, fp8) -> None:
        x = values(*shape, dtype=dtype)
        got = fp8_cast(x, fp8, 0.37)
        limit = LIMITS[fp8]
        assert_same_fp8("cast", got, (x.float() * 0.37).clamp(-limit, limit).to(fp8))

    @pytest.mark.parametrize("width", [40, 5000], ids=["kernel", "too-wide-for-it"])
    def test_any_strides(self, width) -> None:
        kv = values(5, 3, width + 12)
        for x in (kv[..., 12:], kv[..., 12:].transpose(0, 1), kv[::2, :, ::3], kv[:, 0]):
            got = fp8_cast(x)
            assert got.is_contiguous()
            assert_same_fp8("cast", got, x.float().clamp(-448, 448).to(E4M3).contiguous())

    def test_scale_on_the_device(self) -> None:
        x, scale = values(5, 12), torch.tensor([0.25], device=DEVICE)
        assert_same_fp8("cast", fp8_cast(x, scale=scale), fp8_cast(x * 0.25))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": torch.zeros(3, 4, dtype=torch.int32)}, "x must be bfloat16.* got torch.int32"),
            ({"x": torch.zeros(3, 4, requires_grad=True)}, r"x must not require.*x.detach\(\)"),
            ({"dtype": torch.int8}, "dtype must be torch.float8_e4m3fn or .* got torch.int8"),
            ({"scale": -1.0}, "scale must be finite and positive, got -1.0"),
            ({"scale": torch.ones(2)}, r"scale must be a number or one float32 .*\[2\]"),
        ],
        ids=["integers", "grad", "dtype", "scale", "scales"],
    )
    @pytest.mark.parametrize("cast", [fp8_cast, fp8_cast_ref], ids=["public", "twin"])
    def test_refusals(self, cast, change, message) -> None:
        with pytest.raises(ValueError, match=message):
            cast(**{"x": torch.zeros(3, 4), **change})


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def fp8(*shape, dtype=E4M3, device=DEVICE):
    return torch.zeros(shape, dtype=torch.float32, device=device).to(dtype)


def table(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


REFUSED = {
    "q_nope-dtype": ({"q_nope": ints(0).expand(5, 3, 12)}, "q_nope must be bfloat16.*int64"),
    "k_pe-fp64": ({"k_pe": values(5, 1, 6).double()}, "k_pe must be bfloat16.*float64"),
    "q_nope-dims": ({"q_nope": values(5, 36)}, r"q_nope must be \[tokens, heads, width\], got"),
    "q_pe-dims": ({"q_pe": values(5, 1, 3, 6)}, r"q_pe must be \[tokens, heads, width\], got"),
    "k_nope-dims": ({"k_nope": values(5)}, r"k_nope must be .* or \[tokens, width\], got \[5\]"),
    "q_pe-heads": ({"q_pe": values(5, 2, 6)}, r"q_pe must be \[5, 3, d\] like q_nope"),
    "q_pe-tokens": ({"q_pe": values(4, 3, 6)}, r"q_pe must be \[5, 3, d\] like q_nope"),
    "k_pe-heads": ({"k_pe": values(5, 2, 6)}, r"k_pe must be \[5, 1 or 3, 6\].*\[5, 2, 6\]"),
    "k_pe-of-more-heads": (
        {"k_nope": values(5, 12), "k_pe": values(5, 3, 6)},
        r"k_pe must be \[5, 1 or 1, 6\]",
    ),
    "k_pe-tokens": ({"k_pe": values(4, 1, 6)}, r"k_pe must be \[5, 1 or 3, 6\]"),
    "k_pe-width": ({"k_pe": values(5, 1, 4)}, r"k_pe must be .*width of q_pe, got \[5, 1, 4\]"),
    "odd-rotation": (
        {"q_pe": values(5, 3, 5), "k_pe": values(5, 1, 5), "cos_sin_cache": table(8, 5)},
        "rotated channels of q_pe and k_pe must be even, got 5",
    ),
    "table-width": ({"cos_sin_cache": table(8, 3)}, r"cos_sin_cache must be .*\[positions, 6\]"),
    "table-dims": ({"cos_sin_cache": table(8, 1, 6)}, r"cos_sin_cache must be float32 \[pos"),
    "table-dtype": (
        {"cos_sin_cache": table(8, 6, dtype=torch.bfloat16)},
        "cos_sin_cache must be float32 .* got torch.bfloat16",
    ),
    "table-stride": ({"cos_sin_cache": table(8, 12)[:, ::2]}, "cos_sin_cache must have last str"),
    "table-empty": ({"cos_sin_cache": table(0, 6)}, "cos_sin_cache must have a row for every"),
    "no-positions": ({"positions": None}, r"positions must be int32 or int64 \[5\].* got None"),
    "float-positions": ({"positions": values(5)}, "positions must be int32 or int64"),
    "few-positions": ({"positions": ints(0, 1)}, r"positions must be .*\[5\], one for each .*\[2"),
    "few-positions-of-keys": (
        {"positions_k": ints(0, 1)},
        r"positions_k must be int32 or int64 \[5\], one for each token of k_nope",
    ),
    "positions-of-other-keys": (
        {"k_nope": values(7, 3, 12), "k_pe": values(7, 6)},
        r"positions_k must be .*\[7\].*give positions and positions_k",
    ),
    "positions-stride": ({"positions": ints(*range(8), 0, 0)[::2]}, "positions must be contiguous"),
    "scale_q": ({"quant_scale_q": 0.0}, "quant_scale_q must be finite and positive, got 0.0"),
    "scale_kv": ({"quant_scale_kv": float("inf")}, "quant_scale_kv must be finite and positive"),
    "scale_q-elements": ({"quant_scale_q": table(3)}, "quant_scale_q must be a number or one"),
    "scale_kv-dtype": (
        {"quant_scale_kv": table(1, dtype=torch.float64)},
        "quant_scale_kv must be a number or one float32 element",
    ),
    "quantize_dtype": ({"quantize_dtype": torch.float16}, "quantize_dtype must be torch.float8_e4"),
    "q_out-shape": ({"q_out": fp8(5, 3, 17)}, r"q_out must have shape \[5, 3, 18\], got .*17"),
    "k_out-shape": ({"k_out": fp8(5, 1, 18)}, r"k_out must have shape \[5, 3, 18\]"),
    "q_out-dtype": ({"q_out": fp8(5, 3, 18, dtype=E5M2)}, "q_out must have dtype torch.float8_e4"),
    "k_out-dtype": ({"k_out": values(5, 3, 18)}, "k_out must have dtype torch.float8_e4"),
    "q_out-device": (
        {"q_out": torch.empty(5, 3, 18, dtype=E4M3, device="meta")},
        "q_out must have device .* got meta",
    ),
    "k_out-stride": ({"k_out": fp8(5, 3, 36)[..., ::2]}, "k_out must be contiguous, got strides"),
    "q_out-transposed": ({"q_out": fp8(3, 5, 18).transpose(0, 1)}, "q_out must be contiguous"),
    "grad": ({"k_nope": values(5, 3, 12).requires_grad_()}, "k_nope must not require grad.*no_gr"),
    "device": (
        {"k_pe": torch.empty(5, 1, 6, device="meta")},
        "k_pe must be on the device of q_nope, .* got meta",
    ),
    "table-device": (
        {"cos_sin_cache": torch.empty(8, 6, device="meta")},
        "cos_sin_cache must be on the device",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize(
    "op", [fused_rope_fp8_quantize, fused_rope_fp8_quantize_ref], ids=["public", "twin"]
)
def test_argument_is_refused_by_name_and_nothing_is_written(op, change, message) -> None:
    names = ("q_nope", "q_pe", "k_nope", "k_pe")
    arguments = dict(zip(names, parts(), strict=True))
    arguments |= {"cos_sin_cache": table(8, 6), "positions": ints(*range(5)), "is_neox_style": True}
    arguments |= {"q_out": fp8(5, 3, 18), **change}
    before = arguments["q_out"].view(torch.uint8).clone()
    with pytest.raises(ValueError, match=message):
        op(**arguments)
    if before.device.type != "meta":
        assert torch.equal(arguments["q_out"].view(torch.uint8), before), "q_out was written"


@pytest.mark.skipif(DEVICE == "cuda", reason="would wait for the GPU there")
@pytest.mark.parametrize("bad", [-1, 8])
@pytest.mark.parametrize("name", ["positions", "positions_k"])
def test_position_outside_of_the_table_is_refused_on_a_cpu(name, bad) -> None:
    where = {"positions": ints(*range(5)), "positions_k": ints(*range(5))}
    where[name] = ints(0, 1, bad, 2, 3)
    positions = where.pop("positions")
    with pytest.raises(ValueError, match=rf"^{name} must be in \[0, 8\).*{bad}"):
        fused_rope_fp8_quantize(*parts(), table(8, 6), positions, True, **where)


@NEOX
def test_position_outside_of_the_table_takes_its_nearest_row_in_the_kernel(neox) -> None:
    table, _, _ = where("halves", 5, 6)
    positions = ints(-3, 15, 16, 1 << 40, 2)
    near = checked(*parts(), table, positions.clamp(0, 15), neox)
    fp8_pack.writer_for(torch.device(DEVICE))(*near)
    far = checked(*parts(), table, ints(0, 0, 0, 0, 0), neox)
    far = (*far[:5], positions, positions, *far[7:])
    fp8_pack.writer_for(torch.device(DEVICE))(*far)
    assert_same_fp8("query", far[-2], near[-2])
    assert_same_fp8("key", far[-1], near[-1])


def test_inputs_that_require_grad_are_taken_without_gradients() -> None:
    inputs = [t.detach().requires_grad_() for t in parts()]
    with torch.no_grad():
        query, key = fused_rope_fp8_quantize(*inputs, *where("pairs", 5, 6))
    assert not query.requires_grad
    assert not key.requires_grad


@MODES
@pytest.mark.parametrize("tile", [(1, 1), (4, 2), (2, 16), (16, 1)], ids=str)
def test_no_tile_changes_a_byte(mode, tile) -> None:
    pytest.importorskip("triton")
    from megatron_mla.kernels.fp8_pack_kernel import launch_fp8_pack

    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU takes the twin")
    inputs, rest = parts(9, 5, 20, 12), where(mode, 9, 12)
    want = fused_rope_fp8_quantize_ref(*inputs, *rest)
    arguments = checked(*inputs, *rest)
    launch_fp8_pack(*arguments, tiles=(tile, tile[::-1]))
    assert_same_fp8("query", arguments[-2], want[0])
    assert_same_fp8("key", arguments[-1], want[1])


def test_operator_is_registered_as_it_behaves() -> None:
    pytest.importorskip("triton")
    *tensors, scale_q, scale_kv, q_out, k_out = checked(*parts(), *where("pairs", 5, 6))
    arguments = (*tensors, 1.0, 0.5, None, None, q_out, k_out)
    # "test_schema" multiplies what is written, which FP8 on a CPU cannot be.
    torch.library.opcheck(
        torch.ops.megatron_mla.fp8_pack.default, arguments, test_utils=("test_faketensor",)
    )


def test_compiled_bytes_are_the_uncompiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fused_rope_fp8_quantize, fullgraph=True, backend="aot_eager")
    inputs, rest = parts(), where("pairs", 5, 6)
    # The CPU shim has told torch to run everything uncompiled.
    with torch.compiler.set_stance("default"):
        got = compiled(*inputs, *rest)
    want = fused_rope_fp8_quantize(*inputs, *rest)
    assert_same_fp8("query", got[0], want[0])
    assert_same_fp8("key", got[1], want[1])


WITHOUT = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
if sys.argv[1] == "no-triton":
    sys.modules["triton"] = None
import torch
from megatron_mla.kernels.fp8_pack import fp8_cast, fused_rope_fp8_quantize, writer_for
assert writer_for(torch.device("cpu")).__name__ == "pack_ref"
q = torch.randn(5, 3, 18)
table, positions = torch.ones(8, 6), torch.arange(5)
query, key = fused_rope_fp8_quantize(
    q[..., :12], q[..., 12:], q[..., :12], q[:, :1, 12:], table, positions, False)
assert torch.equal(query[..., :12].float(), fp8_cast(q[..., :12]).float())
assert query.shape == key.shape == q.shape
"""


@pytest.mark.parametrize("absent", ["no-triton", "no-interpreter"])
def test_without_a_kernel_the_twin_answers(absent) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, absent], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module", params=[90, 100], ids=lambda capability: f"sm_{capability}")
def report(request) -> list[dict]:
    from tests.unit.kernels.test_compiles import PROGRAM, compiled

    return compiled(PROGRAM.with_name("offline_fp8.py"), request.param)


class TestCompiler:
    """See test_compiles.py; the program is offline_fp8.py."""

    def test_casts_round_fp32_once_and_no_product_is_fused_into_a_sum(self, report) -> None:
        assert len(report) == 24
        for entry in report:
            what = entry["launch"], entry["mode"]
            kind = "e5m2" if entry["launch"] == "e5m2" else "e4m3"
            assert entry["casts"] == [f"cvt.rn.satfinite.{kind}x2.f32"], what
            assert not entry["contractions"], what

    def test_sixteen_bytes_are_moved_at_a_time(self, report) -> None:
        """Stores of all heads, and loads but those of the shared key and the angles."""
        for entry in report:
            what = entry["launch"], entry["mode"], entry["accesses"]
            stores = [i for i in entry["accesses"] if i.startswith("st.")]
            wide = [i for i in stores if i in ("st.global.v4.b32", "st.global.v2.b64")]
            loads = [i for i in entry["accesses"] if i in ("ld.global.v4.b32", "ld.global.v2.b64")]
            if entry["launch"] == "ragged":
                continue
            assert len(loads) >= 16, what
            assert len(wide) >= 8, what
            if entry["launch"] in ("heads", "fp16", "e5m2", "no-pe"):
                assert wide == stores, what


@pytest.mark.gpu
class TestGPU:
    @MODES
    @FP8
    @pytest.mark.parametrize(
        ("tokens", "heads", "heads_k", "n", "d"),
        [(4096, 16, 16, 128, 64), (999, 128, 128, 128, 64), (777, 64, 1, 512, 64),
         (1000, 64, 64, 192, 64), (555, 24, 24, 192, 0)],
        ids=["deepseek-tp8", "deepseek", "latent", "glm-5", "glm-5.3"],
    )  # fmt: skip
    def test_bytes_at_the_widths_of_models(self, tokens, heads, heads_k, n, d, fp8, mode) -> None:
        inputs = parts(tokens, heads, n, d, heads_k=heads_k)
        assert_twin(*inputs, *where(mode, tokens, d, rows=4096), quantize_dtype=fp8)

    @MODES
    def test_last_rows_past_2_31_elements(self, mode) -> None:
        rows, heads, n, d = 90_000, 128, 128, 64
        assert rows * heads * (n + d) > 2**31
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < 7 * rows * heads * (n + d):
            pytest.skip("needs 16 GB of free GPU memory")
        generator = torch.Generator("cuda").manual_seed(0)
        q = torch.zeros(rows, heads, n + d, dtype=torch.bfloat16, device="cuda")
        q.normal_(generator=generator)
        k_pe = values(rows, 1, d, dtype=torch.bfloat16)
        table, positions, neox = where(mode, rows, d, rows=4096)
        q_nope, q_pe = q[..., :n], q[..., n:]
        query, key = fused_rope_fp8_quantize(q_nope, q_pe, q_nope, k_pe, table, positions, neox)
        end = slice(-64, None)
        last = None if positions is None else positions[end]
        want = fused_rope_fp8_quantize_ref(
            q_nope[end], q_pe[end], q_nope[end], k_pe[end], table, last, neox
        )
        assert_same_fp8("last queries", query[end], want[0])
        assert_same_fp8("last keys", key[end], want[1])

    def test_replayed_graph_has_the_eager_bytes(self) -> None:
        inputs, rest = parts(32, 12, 128, 64), where("pairs", 32, 64)
        scale = torch.ones(1, device="cuda")
        how = {"quant_scale_q": scale, "quant_scale_kv": scale}
        fused_rope_fp8_quantize(*inputs, *rest, **how)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            query, key = fused_rope_fp8_quantize(*inputs, *rest, **how)
        scale.fill_(0.37)
        inputs[0].copy_(inputs[0].flip(0))
        graph.replay()
        want = fused_rope_fp8_quantize_ref(*inputs, *rest, **how)
        assert_same_fp8("query", query, want[0])
        assert_same_fp8("key", key, want[1])

    def test_nothing_waits_for_the_gpu(self) -> None:
        inputs, rest = parts(), where("pairs", 5, 6)
        scale = torch.ones(1, device="cuda")
        fused_rope_fp8_quantize(*inputs, *rest, quant_scale_q=scale)
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused_rope_fp8_quantize(*inputs, *rest, quant_scale_q=scale)
            fp8_cast(inputs[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_tiles_fill_sixteen_byte_stores() -> None:
    """128 threads times 16 channels of one half of the rotated ones."""
    pytest.importorskip("triton")
    from megatron_mla.kernels.fp8_pack_kernel import tile_of

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "_CPU_TILE", rotation._GPU_TILE)
        for tokens, heads in ((4096, 128), (65536, 8), (4096, 24)):
            rows = torch.empty(tokens, heads, 1, dtype=torch.bfloat16).expand(-1, -1, 128)
            tile = tile_of(rows, rows[..., :64])
            assert tile[0] * tile[1] * 32 == 128 * 16
