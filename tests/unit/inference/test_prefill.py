"""FP8 prefill of layers with and without rotation, and the hook inside of wrapped backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_mla.inference.prefill import PrefillHook, resolve_prefill_hook
from megatron_mla.kernels.fp8_pack_ref import fp8_cast_ref, fused_rope_fp8_quantize_ref
from megatron_mla.rope.frequencies import RopeParams
from megatron_mla.rope.tables import RopeTables
from tests.helpers.fp8 import assert_same_fp8
from tests.helpers.layers import small_layer
from tests.helpers.rotations import DEVICE, values

E4M3 = torch.float8_e4m3fn


class Untouchable:
    """Whatever is asked of it is a mistake."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was read")


def fake_layer(heads=8, nope=128, rotated=64, value=128, latent=512, *, rope: bool, dtype=None):
    """As much of a layer as the hook may use."""
    weight = values(heads * (nope + value), latent, dtype=torch.float32, seed=5) * latent**-0.5
    weight = weight.to(dtype or torch.bfloat16).requires_grad_()
    tables = RopeTables(RopeParams(dim=rotated), "megatron") if rope else Untouchable()
    return SimpleNamespace(
        num_heads=heads, q_head_split=(nope, rotated), kv_head_split=(nope, value), has_rope=rope,
        rope_tables=tables, linear_kv_up_proj=lambda x: (x @ weight.t(), None), weight=weight,
    )  # fmt: skip


def batch(layer, tokens=7, latent=512, seed=0, dtype=torch.bfloat16):
    """q, q_pe, kv_a and k_pe, each a slice as an engine has it, and positions."""
    nope, rotated = layer.q_head_split
    q = values(tokens, layer.num_heads, nope + rotated, dtype=dtype, seed=seed)
    row = values(tokens, 1, latent + rotated, dtype=dtype, seed=seed + 1)
    positions = torch.arange(tokens, device=DEVICE) + 3
    return q, q[..., nope:], row[:, 0, :latent], row[..., latent:], positions


MODES = pytest.mark.parametrize("rope", [True, False], ids=["rope", "nope"])


@MODES
def test_parts_are_those_of_the_twin(rope) -> None:
    layer = fake_layer(rope=rope)
    q, q_pe, kv_a, k_pe, positions = batch(layer)
    query, key, value, row = PrefillHook().prepare_prefill_qkv(
        q, q_pe, kv_a, k_pe, positions, layer
    )
    kv = (kv_a @ layer.weight.t()).detach().view(7, 8, 256)
    table = None
    if rope:
        halves = RopeTables(layer.rope_tables.params, "fp32").get(16, torch.float32, DEVICE)
        table = torch.cat(halves, -1)
    want = fused_rope_fp8_quantize_ref(
        q[..., :128], q_pe, kv[..., :128], k_pe, table, positions, False
    )
    assert_same_fp8("query", query, want[0])
    assert_same_fp8("key", key, want[1])
    assert_same_fp8("value", value, fp8_cast_ref(kv[..., 128:]))
    assert_same_fp8("latent", row[..., :512], fp8_cast_ref(kv_a).unsqueeze(1))
    for name, t, shape in (
        ("query", query, (7, 8, 192)),
        ("key", key, (7, 8, 192)),
        ("value", value, (7, 8, 128)),
        ("row", row, (7, 1, 576)),
    ):
        assert t.shape == shape, name
        assert t.is_contiguous(), name
        assert not t.requires_grad, name


@MODES
def test_cache_holds_the_bytes_that_attention_saw(rope) -> None:
    layer, rows = fake_layer(rope=rope), []
    answer = PrefillHook().prepare_prefill_qkv(*batch(layer), layer, rows.append)
    _, key, _, row = answer
    assert rows == [row]
    for head in range(8):
        assert_same_fp8(f"head {head}", row[:, 0, 512:], key[:, head, 128:])


def test_layer_without_rotation_has_no_table_and_no_positions() -> None:
    """Kimi Linear: no rotary object, so nothing may be asked of one."""
    layer = fake_layer(rope=False)
    inputs = batch(layer)[:4]
    want = PrefillHook().prepare_prefill_qkv(*inputs, None, layer)
    hook = PrefillHook()
    for positions in (torch.tensor([6, 5, 4, 3, 2, 1, 1 << 40]), Untouchable()):
        got = hook.prepare_prefill_qkv(*inputs, positions, layer)
        for name, one, other in zip("query key value row".split(), got, want, strict=True):
            assert_same_fp8(name, one, other)
    assert not hook._tables
    # Unrotated is not left out.
    raw = fp8_cast_ref(inputs[3])
    assert_same_fp8("positional channels of the cache", got[3][..., 512:], raw)
    assert_same_fp8("of the query", got[0][..., 128:], fp8_cast_ref(inputs[1]))


def test_rotating_layer_depends_on_positions() -> None:
    layer = fake_layer(rope=True)
    *inputs, positions = batch(layer)
    hook = PrefillHook()
    one, other = (
        hook.prepare_prefill_qkv(*inputs, where, layer) for where in (positions, positions.flip(0))
    )
    for name, a, b, width in (("query", one[0], other[0], 128), ("key", one[1], other[1], 128)):
        assert_same_fp8(name, a[..., :width], b[..., :width])
        assert (a.float() != b.float()).any(), name


def test_row_without_positional_channels_is_the_latent_alone() -> None:
    """GLM-5.3: rope width 0. No reserved bytes that somebody would have to zero."""
    layer = fake_layer(heads=4, nope=192, rotated=0, value=256, rope=False)
    q, q_pe, kv_a, k_pe, _ = batch(layer)
    assert q_pe.shape[-1] == 0
    query, key, value, row = PrefillHook().prepare_prefill_qkv(q, q_pe, kv_a, k_pe, None, layer)
    assert query.shape == key.shape == (7, 4, 192)
    assert value.shape == (7, 4, 256)
    assert row.shape == (7, 1, 512)
    assert_same_fp8("row", row, fp8_cast_ref(kv_a).unsqueeze(1))
    assert_same_fp8("query", query, fp8_cast_ref(q))


def test_query_part_may_be_a_tensor_of_its_own() -> None:
    layer = fake_layer(rope=True)
    q, q_pe, kv_a, k_pe, positions = batch(layer)
    want = PrefillHook().prepare_prefill_qkv(q, q_pe, kv_a, k_pe, positions, layer)
    apart, spoilt = q_pe.clone(), q.clone()
    spoilt[..., 128:] = torch.nan
    got = PrefillHook().prepare_prefill_qkv(spoilt, apart, kv_a, k_pe, positions, layer)
    assert_same_fp8("query", got[0], want[0])


def test_no_tokens_are_no_work() -> None:
    for rope in (True, False):
        layer = fake_layer(rope=rope)
        shapes = [t.shape for t in PrefillHook().prepare_prefill_qkv(*batch(layer, 0), layer)]
        assert shapes == [(0, 8, 192), (0, 8, 192), (0, 8, 128), (0, 1, 576)]


def test_table_grows_with_positions_and_is_made_once() -> None:
    layer = fake_layer(rope=True)
    *inputs, positions = batch(layer)
    hook, fixed = PrefillHook(), PrefillHook(max_positions=5000)
    for shift in (0, 4000):
        got = hook.prepare_prefill_qkv(*inputs, positions + shift, layer)
        want = fixed.prepare_prefill_qkv(*inputs, positions + shift, layer)
        assert_same_fp8("query", got[0], want[0])
    for tables in (hook._tables, fixed._tables):
        assert [t.shape[0] >= 4010 for t in tables.values()] == [True]
    (table,) = hook._tables.values()
    hook.prepare_prefill_qkv(*inputs, positions, layer)
    assert [t is table for t in hook._tables.values()] == [True]
    other = fake_layer(rope=True)
    other.rope_tables = RopeTables(RopeParams(dim=64, base=5e5), "megatron")
    assert not torch.equal(
        fixed.prepare_prefill_qkv(*inputs, positions, other)[0].view(torch.uint8),
        fixed.prepare_prefill_qkv(*inputs, positions, layer)[0].view(torch.uint8),
    )


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    layer = fake_layer(rope=True)
    inputs, hook = batch(layer), PrefillHook(max_positions=64)
    hook.prepare_prefill_qkv(*inputs, layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        hook.prepare_prefill_qkv(*inputs, layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("field", "shape"),
    [("q", (7, 8, 191)), ("q_pe", (7, 8, 63)), ("kv_a", (6, 512)), ("kv_a", (7, 1, 512)),
     ("k_pe", (7, 64)), ("k_pe", (7, 8, 64))],
)  # fmt: skip
@MODES
def test_shape_that_is_not_the_layers_is_refused_by_name(field, shape, rope) -> None:
    layer = fake_layer(rope=rope)
    names = ("q", "q_pe", "kv_a", "k_pe", "positions")
    arguments = dict(zip(names, batch(layer), strict=True)) | {field: values(*shape)}
    with pytest.raises(ValueError, match=rf"^{field} must be \[7, .*tokens"):
        PrefillHook().prepare_prefill_qkv(**arguments, layer=layer)


def test_other_refusals() -> None:
    layer = fake_layer(rope=True)
    with pytest.raises(ValueError, match="positions must be given .* layer.has_rope"):
        PrefillHook().prepare_prefill_qkv(*batch(layer)[:4], None, layer)
    with pytest.raises(ValueError, match="max_positions must be positive, got 0"):
        PrefillHook(0)
    narrow = fake_layer(rope=True)
    narrow.rope_tables = RopeTables(RopeParams(dim=32), "megatron")
    with pytest.raises(ValueError, match=r"cos_sin_cache must be float32 \[positions, 64\]"):
        PrefillHook().prepare_prefill_qkv(*batch(narrow), narrow)


@MODES
def test_attention_over_a_real_layers_parts_is_near_the_layers_own(single_rank, rope) -> None:
    """The layer writes halves and the hook pairs; products of queries and keys do not care."""
    layer = small_layer(no_rope_freq=None if rope else [1], qk_pos_emb_head_dim=8)
    assert layer.has_rope == rope
    nope, rotated = layer.q_head_split
    tokens, heads, latent_width = 24, layer.num_heads, layer.config.kv_lora_rank
    torch.manual_seed(0)
    with torch.no_grad():
        x = torch.randn(tokens, 1, layer.config.hidden_size, device=DEVICE)
        rows = layer._rows(x, None)
        q_latent = layer._query_latent(x)
        latent, k_pe = layer._key_value_latent(x, rows)
        wanted = layer._expand(q_latent, latent, k_pe, rows)
        q = layer.linear_q_up_proj(q_latent)[0].view(tokens, heads, nope + rotated)
    assert latent.shape == (tokens, 1, latent_width)
    *got, row = PrefillHook().prepare_prefill_qkv(
        q, q[..., nope:], latent[:, 0], k_pe, rows.positions, layer
    )

    def attention(query, key, value):
        scores = torch.einsum("thd,shd->hts", query, key) * layer.softmax_scale
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, value)

    want = attention(*(t.detach().float().view(tokens, heads, -1) for t in wanted))
    out = attention(*(t.float() for t in got))
    assert row.shape == (tokens, 1, latent_width + rotated)
    # Three roundings to e4m3, 2.6e-2 of a number in the mean square; scores are not wider than 2.
    assert ((out - want).norm() / want.norm()).item() < 8e-2


class Hooked:
    def prepare_prefill_qkv(self): ...


class Plain:
    """A backend without the hook."""


def hybrid(backend):
    return SimpleNamespace(full_attn_backend=backend, linear_attn_backend=Plain())


def split(prefill, decode):
    def select(mode):
        return {"extend": prefill, "decode": decode}.get(mode, prefill)

    return SimpleNamespace(prefill_backend=prefill, decode_backend=decode, _select_backend=select)


def overlap(backend):
    return SimpleNamespace(primary=backend, children=[Plain()], is_two_batch_overlap=True)


WRAPPED = {
    "bare": lambda b: b,
    "hybrid": hybrid,
    "split": lambda b: split(b, Plain()),
    "overlap": overlap,
    "hybrid-in-split": lambda b: split(hybrid(b), Plain()),
    "split-in-hybrid": lambda b: hybrid(split(b, Plain())),
    "all": lambda b: overlap(hybrid(split(hybrid(b), Plain()))),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
class TestResolve:
    def test_hook_is_found_inside(self, wrap) -> None:
        backend = Hooked()
        assert resolve_prefill_hook(wrap(backend), "extend") is backend

    def test_without_a_hook_there_is_none(self, wrap) -> None:
        assert resolve_prefill_hook(wrap(Plain()), "extend") is None
        assert resolve_prefill_hook(wrap(None), "extend") is None

    def test_ours_is_one(self, wrap) -> None:
        hook = PrefillHook()
        assert resolve_prefill_hook(wrap(hook)) is hook


def test_forward_mode_chooses() -> None:
    prefill, decode = Hooked(), Hooked()
    backend = hybrid(split(prefill, decode))
    assert resolve_prefill_hook(backend, "extend") is prefill
    assert resolve_prefill_hook(backend, "decode") is decode
    assert resolve_prefill_hook(backend) is prefill
    assert resolve_prefill_hook(hybrid(split(prefill, Plain())), "decode") is None


def test_primary_counts_with_two_batch_overlap_only() -> None:
    assert resolve_prefill_hook(SimpleNamespace(primary=Hooked())) is None
    off = SimpleNamespace(primary=Hooked(), is_two_batch_overlap=False)
    assert resolve_prefill_hook(off) is None


def test_hook_that_is_no_method_does_not_count() -> None:
    assert resolve_prefill_hook(SimpleNamespace(prepare_prefill_qkv=None)) is None


@pytest.mark.parametrize("length", [1, 2, 3])
def test_wrappers_that_contain_each_other_are_refused(length) -> None:
    wrappers = [hybrid(None) for _ in range(length)]
    for n, wrapper in enumerate(wrappers):
        wrapper.full_attn_backend = wrappers[(n + 1) % length]
    with pytest.raises(ValueError, match="backend must not contain itself, got SimpleNamespace ->"):
        resolve_prefill_hook(wrappers[0])
