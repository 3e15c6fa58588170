"""Our rope and our layers against numbers that transformers and Megatron-Core computed.

Runs over every file of ``tests/golden``, or of the folder that ``MEGATRON_MLA_GOLDEN_DIR`` names.
"""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels.kv_split_ref import rope_kv_split_ref
from megatron_mla.kernels.rope_ref import rope_ref
from megatron_mla.parallel.layout import rows_of_rank, sbhd_positions, thd_positions
from megatron_mla.rope.frequencies import RopeParams, concentration, inv_freq, softmax_scale
from megatron_mla.rope.tables import RopeTables, half_width
from tests.helpers import golden
from tests.helpers.close import rel_error

# max|a - b| / max|b|. Right answers of two libraries differ by up to 9e-7 in these cases, every
# mistake tried moves one of them by 2e-2 or more.
FP32_BOUND = 1e-5

CASES = {path.stem: golden.load(path) for path in golden.paths()}


def cases(*kinds: str):
    named = {name: case for name, case in CASES.items() if golden.kind_of(case) in kinds}
    # A folder without such cases yields a visible skip, never an empty success.
    return pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in named.items()])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def true_fp32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_folder_holds_cases():
    assert CASES, f"no *.pt in {golden.FOLDER}"


# --- rope ---


def run_eager() -> tuple:
    return rope_ref, rope_kv_split_ref


def run_fused() -> tuple:
    from megatron_mla.kernels.kv_split import rope_kv_split
    from megatron_mla.kernels.rope import rope

    return rope, rope_kv_split


both_paths = pytest.mark.parametrize("path", [run_eager, run_fused])


def rope_params(case: golden.Case) -> RopeParams:
    table = case["table"]
    assert table.get("correction_range_round_to_int", True), "only the rounded range is supported"
    names = {
        "rotary_base": "base",
        "scaling_factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        **{name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    }
    fields = {ours: table[theirs] for theirs, ours in names.items() if theirs in table}
    return RopeParams(dim=table["dim"], rope_type=table["kind"], **fields)


def positions_of(case: golden.Case, rank: dict) -> torch.Tensor:
    """Positions of the rank's rows by our layout, which must hold the same tokens as the file."""
    tokens, size, number = rank["tokens"], rank["cp_size"], rank["cp_rank"]
    total = sum(len(r["tokens"]) for r in case["ranks"] if r["cp_size"] == size)
    cu = case.get("cu_seqlens")
    assert torch.equal(rows_of_rank(total, number, size, cu), torch.as_tensor(tokens).long())
    if cu is None:
        return sbhd_positions(len(tokens), number, size)
    if case["freqs"].shape[0] >= total:
        # "Running" cases: stock Megatron-Core lets positions run on through a table this long.
        return rows_of_rank(total, number, size, cu).int()
    return thd_positions(cu, len(tokens), number, size)


def own_tables(case: golden.Case, device: torch.device):
    dtype = golden.DTYPES[case["meta"]["dtype"]]
    return RopeTables(rope_params(case), "megatron").get(case["freqs"].shape[0], dtype, device)


def file_tables(case: golden.Case, device: torch.device):
    dtype = golden.DTYPES[case["meta"]["dtype"]]
    angles, factor = case["freqs"], case["mscale"]
    return tuple(
        half_width((turn(angles) * factor).to(dtype), case["table"]["dim"]).to(device)
        for turn in (torch.cos, torch.sin)
    )


def assert_same_numbers(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16 to the bit, which is what the rounded tables promise; fp32 up to rounding."""
    got = got.detach().cpu()
    if expected.dtype == torch.float32:
        assert rel_error(got, expected) <= FP32_BOUND, name
    else:
        assert got.dtype == expected.dtype, name
        differ = int((got != expected).sum())
        assert differ == 0, f"{name}: {differ} of {got.numel()} elements differ"


@cases("rope", "rope_qkv")
def test_tables_match_megatron(case, device):
    params = rope_params(case)
    assert concentration(params) == pytest.approx(case["mscale"], rel=1e-12)
    rows, half = case["freqs"].shape[0], params.dim // 2
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), inv_freq(params))
    assert rel_error(angles, case["freqs"].view(rows, -1)[:, :half]) <= 1e-6
    for name, own, stored in zip(
        ("cos", "sin"), own_tables(case, device), file_tables(case, device), strict=True
    ):
        assert own.dtype == stored.dtype and own.shape[-1] == half
        if name in case:
            stored = half_width(case[name], params.dim, name)
        # One rounding of the dtype: cos and sin of other machines may differ in their last bit.
        step = torch.finfo(own.dtype).eps * max(1.0, case["mscale"])
        assert (own[:rows].cpu().double() - stored.cpu().double()).abs().max() <= step


@cases("rope")
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("tables", [own_tables, file_tables])
@both_paths
def test_rotation_matches_megatron_on_every_rank(case, layout, tables, path, device):
    rope, _ = path()
    cos, sin = tables(case, device)
    expected = case[layout]
    for rank in case["ranks"]:
        rows = torch.as_tensor(rank["tokens"]).long()
        t = case["t"][rows].to(device).requires_grad_()
        positions = positions_of(case, rank).to(device)
        how = {"rope_first": True, "interleaved": layout == "interleaved"}
        output = rope(t, cos, sin, positions, nope_dim=t.shape[-1] - 2 * cos.shape[-1], **how)
        output.backward(case["grad_output"][rows].to(device))
        where = f"cp rank {rank['cp_rank']} of {rank['cp_size']}"
        assert_same_numbers(f"output, {where}", output, expected["output"][rows])
        assert_same_numbers(f"gradient, {where}", t.grad, expected["grad_t"][rows])


@cases("rope_qkv")
@pytest.mark.parametrize("tables", [own_tables, file_tables])
@both_paths
def test_query_key_value_match_megatron_on_every_rank(case, tables, path, device):
    rope, kv_split = path()
    cos, sin = tables(case, device)
    nope = case["qk_head_dim"]
    for rank in case["ranks"]:
        rows = torch.as_tensor(rank["tokens"]).long()
        q, kv, k_pe = (
            case[name][rows].to(device).requires_grad_() for name in ("q", "kv", "k_pos_emb")
        )
        positions = positions_of(case, rank).to(device)
        query = rope(q, cos, sin, positions, nope_dim=nope)
        key, value = kv_split(kv, k_pe, cos, sin, positions, k_dim=nope)
        outputs = {"query": query, "key": key, "value": value}
        torch.autograd.backward(
            list(outputs.values()), [case[f"grad_{n}"][rows].to(device) for n in outputs]
        )
        where = f"cp rank {rank['cp_rank']} of {rank['cp_size']}"
        for name, output in outputs.items():
            assert_same_numbers(f"{name}, {where}", output, case[name][rows])
        for name, leaf in (("q", q), ("kv", kv), ("k_pos_emb", k_pe)):
            assert_same_numbers(f"grad_{name}, {where}", leaf.grad, case[f"grad_{name}"][rows])


# --- layers ---


def assert_same_keys(case: golden.Case, chosen: dict[int, torch.Tensor]) -> None:
    """Every row has chosen the keys that the library's row chose, those it may see."""
    if golden.kind_of(case) != "dsa":
        assert not chosen
        return
    assert chosen.keys() == {1}  # a second layer shares the first one's
    want = case["topk_mask"]  # [b, s_q, s_k]
    indices = chosen[1].cpu().transpose(0, 1).long()
    got = torch.zeros(*want.shape[:2], want.shape[2] + 1, dtype=torch.bool)
    got.scatter_(2, indices.masked_fill(indices < 0, want.shape[2]), True)
    assert torch.equal(got[..., :-1], want)
    assert int((indices >= 0).sum()) == int(want.sum())  # none twice


def run_layers(case: golden.Case, dtype: torch.dtype, device: torch.device):
    """Output, input gradient, weight gradients (by layer prefix and name), indices and losses."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.spec_utils import build_module

    from megatron_mla import MLATransformerConfig
    from megatron_mla.attention.index_sharing import IndexBook, with_index_book
    from megatron_mla.attention.indexer_loss import IndexerLossLog
    from megatron_mla.specs import kda_attention_spec, mla_attention_spec

    fields = golden.config_fields(case)
    attention_spec = kda_attention_spec if golden.kind_of(case) == "kda" else mla_attention_spec
    if device.type == "cuda" and dtype == torch.bfloat16:
        # The files' core attention keeps probabilities in fp32; fused backends round them to bf16.
        fields["attention_backend"] = AttnBackend.unfused
    config = MLATransformerConfig(**fields, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    packed = None
    if case.get("qkv_format") == "thd":
        cu = case["cu_seqlens"].to(device)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=case["max_seqlen"],
            max_seqlen_kv=case["max_seqlen"],
        )
    book, log = IndexBook(), IndexerLossLog(config.num_layers, device)
    packed = with_index_book(packed, book)
    layers = {}
    for number, prefix in enumerate(golden.layer_names(case), start=1):
        layer = build_module(
            attention_spec(config),
            config=config,
            layer_number=number,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ).to(device)
        weights = golden.layer_weights(case, "state_dict", prefix)
        loaded = layer.load_state_dict({n: w.to(dtype) for n, w in weights.items()}, strict=False)
        extra = [n for n in loaded.missing_keys if not n.endswith("_extra_state")]
        assert not extra and not loaded.unexpected_keys, loaded
        layers[prefix] = layer
        log.attach(layer)

    # A copy: the case itself, which other tests read, must not begin to require gradients.
    hidden = golden.sequence_first(case, "hidden_states").to(device, dtype, copy=True)
    hidden.requires_grad_()
    x = hidden
    for layer in layers.values():
        output, bias = layer(x, attention_mask=None, packed_seq_params=packed)
        assert bias is None
        x = output if len(layers) == 1 else x + output
    x.backward(golden.sequence_first(case, "grad_output").to(device, dtype))
    grads = {
        prefix + name: p.grad
        for prefix, layer in layers.items()
        for name, p in layer.named_parameters()
        if p.grad is not None
    }
    grads = {n: g.cpu() for n, g in grads.items()}
    return x.detach().cpu(), hidden.grad.cpu(), grads, book.chosen, log.read()


def expected_grads(case: golden.Case) -> dict[str, torch.Tensor]:
    return {
        prefix + name: grad
        for prefix in golden.layer_names(case)
        for name, grad in golden.layer_weights(case, "grad_params", prefix).items()
    }


@cases("dense", "absorbed", "dsa")
def test_scales_and_frequencies_match_the_library(case):
    from megatron_mla import MLATransformerConfig

    config = MLATransformerConfig(**golden.config_fields(case))
    params, conventions = RopeParams.from_config(config), case["conventions"]
    assert softmax_scale(params, config.qk_width) == pytest.approx(
        conventions["softmax_scale"], rel=1e-9
    )
    if "rope_attention_factor" in conventions:
        assert concentration(params) == pytest.approx(
            conventions["rope_attention_factor"], rel=1e-9
        )
    if "inv_freq" in case:
        assert rel_error(inv_freq(params), case["inv_freq"]) <= 1e-6


@cases("dense", "absorbed", "dsa", "kda")
def test_layer_matches_the_library(case, device, single_rank):
    if golden.kind_of(case) == "kda":
        device = torch.device("cpu")  # fla-core's kernels multiply fp32 in TF32
    dtype = golden.DTYPES[case["meta"]["dtype"]]
    output, grad_input, grads, chosen, losses = run_layers(case, dtype, device)
    assert_same_keys(case, chosen)
    assert losses.keys() == ({1} if "indexer_loss" in case else set())
    if losses:
        assert losses[1] == pytest.approx(case["indexer_loss"].item(), rel=FP32_BOUND)
    library = {
        "output": golden.sequence_first(case, "output"),
        "input gradient": golden.sequence_first(case, "grad_input"),
        **expected_grads(case),
    }
    ours = {"output": output, "input gradient": grad_input, **grads}
    assert ours.keys() == library.keys()
    if dtype == torch.float32:
        errors = {name: rel_error(ours[name], library[name]) for name in library}
        assert all(error <= FP32_BOUND for error in errors.values()), errors
        return

    # Two right answers differ in bf16: both are measured by the same case in fp32. The file holds
    # its output and input gradient; for the weights our own layer, held to them, gives the rest.
    output, grad_input, grads, *_ = run_layers(case, torch.float32, device)
    truth = {"output": output, "input gradient": grad_input, **grads}
    for name, key in (("output", "ref_output"), ("input gradient", "ref_grad_input")):
        reference = golden.sequence_first(case, key)
        assert rel_error(truth[name], reference) <= FP32_BOUND, name
        truth[name] = reference
    errors = {
        name: (rel_error(ours[name], truth[name]), rel_error(library[name], truth[name]))
        for name in library
    }
    far = {name: pair for name, pair in errors.items() if not pair[0] <= 2 * pair[1]}
    assert not far, f"(ours, the library's) distance from fp32: {far}"


@cases("kimi_model")
def test_model_matches_the_library(case, single_rank):
    """Layers of Kimi Delta Attention and of MLA, dense and with experts, from input to logits."""
    from megatron.core.models.gpt import GPTModel

    from megatron_mla import MLATransformerConfig
    from megatron_mla.specs import mla_block_spec

    if torch.cuda.is_available():
        pytest.skip("fla-core's kernels multiply fp32 in TF32, and GPTModel has no CPU to go to")
    config = MLATransformerConfig(**golden.config_fields(case))
    model = GPTModel(
        config,
        transformer_layer_spec=mla_block_spec(config),
        vocab_size=case["output"].shape[-1],
        max_sequence_length=case["output"].shape[1],
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    weights = golden.kimi_model_weights(case, "state_dict")
    loaded = model.load_state_dict(weights, strict=False)
    extra = ("_extra_state", "local_tokens_per_expert")
    missing = [n for n in loaded.missing_keys if not n.endswith(extra)]
    assert missing == ["embedding.word_embeddings.weight"] and not loaded.unexpected_keys, loaded
    x = golden.sequence_first(case, "hidden_states").clone().requires_grad_()
    logits = model(None, None, None, decoder_input=x)
    logits.backward(case["grad_output"])
    library = {
        "input gradient": golden.sequence_first(case, "grad_input"),
        "output": case["output"],
    }
    library |= golden.kimi_model_weights(case, "grad_params")
    ours = {"input gradient": x.grad, "output": logits.detach()}
    ours |= {n: p.grad for n, p in model.named_parameters() if not n.startswith("embedding")}
    assert ours.keys() == library.keys()
    errors = {name: rel_error(ours[name], library[name]) for name in library}
    assert all(error <= FP32_BOUND for error in errors.values()), errors
