"""Layers over a cache give what one forward pass over everything gives, in all their forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_mla.attention.index_sharing import IndexBook, with_index_book
from megatron_mla.inference.context import LatentInferenceContext
from megatron_mla.selection import missing_reason
from tests.helpers.close import assert_close
from tests.helpers.layers import DSA, dsa_layer, gradients, hidden, packed, small_layer

pytestmark = pytest.mark.usefixtures("single_rank")

FORMS = {
    "expanded": {},
    "expanded-without-q-lora": {"q_lora_rank": None},
    "expanded-yarn": {"rope_type": "yarn"},
    "expanded-partial": {"rotary_percent": 0.5},
    "expanded-recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
    },
    "nope": {"no_rope_freq": 1},
    "nope-width-0": {"no_rope_freq": 1, "qk_pos_emb_head_dim": 0},
    "absorbed": {"mla_form": "absorbed"},
    "absorbed-yarn": {"mla_form": "absorbed", "rope_type": "yarn"},
    "absorbed-nope": {"mla_form": "absorbed", "no_rope_freq": 1},
    "absorbed-no-norms": {"mla_form": "absorbed", "qk_layernorm": False},
    "dsa": DSA,
    "dsa-nope-width-0": {**DSA, "no_rope_freq": 1, "qk_pos_emb_head_dim": 0},
    "dsa-all-keys": {**DSA, "dsa_indexer_topk": 40},
    "dsa-one-key": {**DSA, "dsa_indexer_topk": 1},
    "dsa-warmup": {**DSA, "dsa_indexer_stage": "warmup"},
}
FORM = pytest.mark.parametrize("form", FORMS)
PIECES = {"whole": [24], "ones": [1] * 24, "threes": [3] * 8, "uneven": [7, 11, 1, 5]}
FP8 = torch.float8_e4m3fn
# By sequence, new tokens of every pass; the second has none at first, the last none in the end.
UNEQUAL = [[5, 1, 3, 1, 14], [0, 2, 1, 1, 4], [9, 1, 0, 2, 0]]


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(monkeypatch):
    """What nobody wrote must not matter."""
    make = LatentInferenceContext.memory

    def memory(self, number, name, *args, **how):
        is_new = (number, name) not in self._memory
        made = make(self, number, name, *args, **how)
        return made.fill_(torch.nan) if is_new else made

    monkeypatch.setattr(LatentInferenceContext, "memory", memory)


@torch.no_grad()
def in_pieces(layer, x, sizes, cache_dtype=None, context=None, **how):
    if context is None:
        context = LatentInferenceContext(x.shape[1] + 1, len(x) + 3, cache_dtype=cache_dtype)
    outs = []
    for piece in x.split(sizes):
        out, bias = layer(piece, None, inference_context=context, **how)
        assert bias is None
        context.advance()
        outs.append(out)
    return torch.cat(outs)


@torch.no_grad()
def unequal(layer, x, context):
    """[24, 3, hidden] of sequences that come as :data:`UNEQUAL` says; 0 where none comes."""
    got = torch.zeros_like(x)
    for new in zip(*UNEQUAL, strict=True):
        piece = torch.full((max(new) + 1, *x.shape[1:]), 1e3, dtype=x.dtype, device=x.device)
        places = [slice(start, start + n) for start, n in zip(context.lengths, new, strict=False)]
        for b, place in enumerate(places):
            piece[: new[b], b] = x[place, b]
        out, _ = layer(piece, None, inference_context=context.begin(new))
        context.advance()
        assert out.isfinite().all()
        for b, place in enumerate(places):
            got[place, b] = out[: new[b], b]
    return got


def whole(layer, x):
    with torch.no_grad():
        return layer(x, None)[0]


def unequal_truth(layer, x):
    truth = whole(layer, x)
    for b, new in enumerate(UNEQUAL):
        truth[sum(new) :, b] = 0
    return truth


@FORM
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_of_any_size_are_one_forward_pass(form, pieces) -> None:
    layer, x = small_layer(**FORMS[form]).eval(), hidden(24, 2)
    got = in_pieces(layer, x, PIECES[pieces])
    assert_close("output", got, whole(layer, x), rel=1e-5, reason="sums in another order")


@FORM
def test_fp64_leaves_no_room_for_a_wrong_key(form) -> None:
    changes = {k: v for k, v in FORMS[form].items() if not k.startswith("recompute")}
    layer, x = small_layer(**changes).eval().double(), hidden(24, 2).double()
    # Tables stay in the dtype of the activations, fp64 here.
    got = in_pieces(layer, x, PIECES["uneven"])
    assert_close("output", got, whole(layer, x), rel=1e-12, reason="sums in another order")


@FORM
@pytest.mark.parametrize("twice", [False, True], ids=["fresh", "reset"])
def test_sequences_of_unequal_lengths(form, twice) -> None:
    layer, x = small_layer(**FORMS[form]).eval(), hidden(24, 3)
    context = LatentInferenceContext(3, 24)
    if twice:
        in_pieces(layer, hidden(24, 3, seed=7), [20, 4], context=context)
        context.reset()
    got = unequal(layer, x, context)
    assert_close("output", got, unequal_truth(layer, x), rel=1e-5, reason="other order of sums")


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("form", ["expanded", "nope-width-0", "absorbed", "dsa", "dsa-all-keys"])
def test_a_narrow_cache_rounds_alike_however_rows_come(form, cache_dtype) -> None:
    layer, x = small_layer(**FORMS[form]).eval(), hidden(24, 2)
    first = in_pieces(layer, x, [24], cache_dtype)
    for pieces in ("ones", "uneven"):
        # Rows of other matrix products may round to another FP8 neighbour, which is seldom.
        got = in_pieces(layer, x, PIECES[pieces], cache_dtype)
        assert_close(pieces, got, first, rel=1e-3, reason="a row of the cache rounded otherwise")
    if form == "dsa":
        return  # rounded indexer keys choose other rows
    eps = 2**-8 if cache_dtype == torch.bfloat16 else 2**-4
    got = in_pieces(layer, x, PIECES["uneven"], cache_dtype)
    assert_close("truth", got, whole(layer, x), rel=eps, reason="half an ulp of latents and keys")
    assert not torch.allclose(got, whole(layer, x), rtol=0, atol=1e-5), "nothing was rounded"


def test_bf16_layers_and_fp8_cache_work_together() -> None:
    layer, x = small_layer(params_dtype=torch.bfloat16).eval().bfloat16(), hidden(24, 2).bfloat16()
    truth = whole(small_layer().eval().bfloat16(), x)
    for cache_dtype, rel in ((None, 2e-2), (FP8, 2**-4)):
        got = in_pieces(layer, x, PIECES["uneven"], cache_dtype)
        assert got.dtype == torch.bfloat16
        assert_close("output", got, truth.float(), rel=rel, reason="rounding of bf16 and the cache")


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=["as-activations", "fp8"])
def test_sparse_attention_by_kernels(cache_dtype) -> None:
    if missing_reason("triton") is not None:
        pytest.skip("needs Triton")
    x = hidden(12, 3)
    layers = [dsa_layer(dsa_kernel_backend=backend).eval() for backend in ("triton", "none")]
    if layers[0].core_attention.operators[0] is layers[1].core_attention.operators[0]:
        pytest.skip("kernels cannot run here")
    got, truth = (in_pieces(layer, x, [7, 1, 4], cache_dtype) for layer in layers)
    assert_close("output", got, truth, rel=1e-5, reason="sums in another order")


def shared_layers():
    changes = {"num_layers": 2, "dsa_indexer_topk_freq": 2}
    return dsa_layer(1, **changes).eval(), dsa_layer(2, **changes).eval()


@pytest.mark.parametrize("with_book", [False, True], ids=["alone", "book"])
def test_layers_share_the_keys_that_one_has_chosen(with_book) -> None:
    source, sharer = shared_layers()
    x, book = hidden(24, 2), IndexBook()
    with torch.no_grad():
        source(x, None, packed_seq_params=with_index_book(None, book))
        truth, _ = sharer(x, None, packed_seq_params=with_index_book(None, book))
    context, outs, chosen = LatentInferenceContext(2, 24), [], []
    with torch.no_grad():
        for piece in x.split([7, 11, 1, 5]):
            params = with_index_book(None) if with_book else None
            book_here = params._megatron_mla_index_book if with_book else None
            how = {"packed_seq_params": params, "inference_context": context}
            source(piece, None, **how)
            outs.append(sharer(piece, None, **how)[0])
            step = context.step(*piece.shape[:2], piece.device)
            chosen.append((book_here if with_book else step).chosen[1])
            context.advance()
    got = torch.cat(outs)
    assert_close("output", got, truth, rel=1e-5, reason="sums in another order")
    # Positions in the sequence, as a forward pass without a cache records them.
    assert torch.equal(torch.cat(chosen), book.chosen[1])


def test_given_keys_are_used() -> None:
    layer, x = dsa_layer().eval(), hidden(24, 2)
    given = torch.stack([torch.randperm(24)[:5] for _ in range(48)]).view(24, 2, 5)
    with torch.no_grad():
        truth, _ = layer(x, None, packed_seq_params=with_index_book(None, IndexBook({1: given})))
    context, outs, start = LatentInferenceContext(2, 24), [], 0
    for size in (9, 1, 14):
        book = IndexBook({1: given[start : start + size]})
        how = {"packed_seq_params": with_index_book(None, book), "inference_context": context}
        outs.append(layer(x[start : start + size], None, **how)[0])
        context.advance()
        start += size
    assert_close("output", torch.cat(outs), truth, rel=1e-5, reason="sums in another order")


def test_a_layer_that_shares_says_when_nobody_has_chosen() -> None:
    _, sharer = shared_layers()
    with pytest.raises(ValueError, match="layer 2 must find the indices of layer 1 .* in order"):
        sharer(hidden(4), None, inference_context=LatentInferenceContext(1, 4))


def test_sequences_of_zero_tokens_only() -> None:
    for form in ("expanded", "absorbed", "dsa"):
        layer, context = small_layer(**FORMS[form]).eval(), LatentInferenceContext(2, 4)
        for cache_dtype in (None, FP8):
            context = LatentInferenceContext(2, 4, cache_dtype=cache_dtype)
            out, _ = layer(hidden(2, 2), None, inference_context=context.begin([0, 0]))
            assert out.isfinite().all()


@pytest.mark.parametrize("form", ["expanded", "dsa"])
@pytest.mark.parametrize("argument", ["inference_context", "inference_params"])
def test_static_context_of_megatron_core(form, argument) -> None:
    layer, x = small_layer(**FORMS[form]).eval(), hidden(24, 2)
    static, truth = StaticInferenceContext(2, 24), whole(layer, x)
    for _ in range(2):
        outs = []
        with torch.no_grad():
            for piece in x.split([7, 11, 1, 5]):
                outs.append(layer(piece, None, **{argument: static})[0])
                static.increment_sequence_len_offset(len(piece))
        assert_close("output", torch.cat(outs), truth, rel=1e-5, reason="other order of sums")
        static.reset()


@pytest.mark.parametrize("form", ["expanded", "absorbed", "dsa"])
def test_training_goes_on_beside_a_cache(form) -> None:
    """Neither tables nor memory made in one mode stand in the way of another, and no gradient."""
    layer, x = small_layer(**FORMS[form], rotary_base=4321.0), hidden(24, 2)
    context = LatentInferenceContext(2, 24)
    with torch.inference_mode():
        first, _ = layer.eval()(x[:20], None, inference_context=context)
    context.advance()
    out, _, grads = gradients(layer.train(), x, torch.ones_like(x))
    assert all(grad.isfinite().all() for grad in grads.values())
    rest, _ = layer.eval()(x[20:].requires_grad_(), None, inference_context=context)
    assert not rest.requires_grad
    got = torch.cat((first, rest))
    assert_close("output", got, out, rel=1e-5, reason="sums in another order")


def test_what_has_no_cache_is_refused_with_a_way_out() -> None:
    layer, x = small_layer(), hidden(4)
    context = LatentInferenceContext(1, 4)
    with pytest.raises(ValueError, match=r"evaluation mode, .*model\.eval"):
        layer(x, None, inference_context=context)
    layer.eval()
    with pytest.raises(ValueError, match=r"packed_seq_params must not be thd .*begin\(\)"):
        layer(x, None, inference_context=context, packed_seq_params=packed([4]))
    with pytest.raises(ValueError, match="inference_context must be a .*, got dict, whose"):
        layer(x, None, inference_context={})
    with pytest.raises(ValueError, match="max_sequence_length must hold"):
        layer(hidden(5), None, inference_context=context)
    with pytest.raises(ValueError, match="hidden_states must be"):
        layer(x[:, 0], None, inference_context=context)
    layer.sequence_parallel = True
    with pytest.raises(ValueError, match="sequence_parallel must be off"):
        layer(x, None, inference_context=context)
    layer.sequence_parallel = False
    layer.groups = dataclasses.replace(layer.groups, cp_size=2)
    with pytest.raises(ValueError, match=r"context_parallel_size must be 1 .*dcp=\.\.\."):
        layer(x, None, inference_context=context)
