"""Cases of the rotary benchmark, their inputs, and everybody who solves them."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from scripts.bench.common import compiled

PEER_LIMIT = 2e-2
ABSORB_LIMIT = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on tokens of a number of heads.

    Attributes:
        op: name of the operator in megatron_mla.kernels.
        n, d: unrotated and rotated channels of a head.
        c: value channels (rope_kv_split) or latent channels (absorb_query).
        sequences: packed sequences of about equal length; None for one unpacked batch.
        keywords: of the operator and its twin.
        peers: functions of (case, inputs) by name.
        compiled: torch.compile of the twin too, which takes seconds.
        fp32: fp32 tables too.
    """

    name: str
    op: str
    tokens: int
    heads: int
    n: int
    d: int = 64
    c: int = 0
    sequences: int | None = None
    directions: tuple[str, ...] = ("forward", "backward")
    keywords: dict = field(default_factory=dict)
    peers: dict[str, Callable] = field(default_factory=dict)
    compiled: bool = False
    fp32: bool = False

    def scaled(self, tokens: int, heads: int) -> Case:
        """The same case with few tokens and heads."""
        sequences = self.sequences and min(self.sequences, tokens)
        return replace(self, tokens=tokens, heads=min(heads, self.heads), sequences=sequences)


@functools.cache
def imported(module: str, name: str) -> Callable:
    return getattr(importlib.import_module(module), name)


def upstream(function: str, x: SimpleNamespace, tensors: tuple[Tensor, ...], *widths: int):
    """Megatron-Core's functions want [S, B, H, width] where nothing is packed."""
    run = imported("megatron.core.fusions.fused_mla_yarn_rope_apply", function)
    if x.cu is not None:
        return run(*tensors, *x.full_tables, *widths, x.cu)
    answer = run(*(t.unsqueeze(1) for t in tensors), *x.full_tables, *widths)
    return tuple(t.squeeze(1) for t in answer) if isinstance(answer, tuple) else answer.squeeze(1)


def upstream_concat(c: Case, x: SimpleNamespace):
    return upstream("fused_mla_rope_concat", x, x.leaves)


def upstream_kv(c: Case, x: SimpleNamespace):
    return upstream("fused_apply_mla_rope_for_kv", x, x.leaves, c.d, c.n, c.c)


def upstream_in_place(c: Case, x: SimpleNamespace):
    return upstream("fused_apply_mla_rope_for_q", x, x.leaves, c.n, c.d)


def upstream_clone(c: Case, x: SimpleNamespace):
    return upstream("fused_apply_mla_rope_for_q", x, (x.leaves[0].clone(),), c.n, c.d)


def absorbed(c: Case, x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    q, wk = x.leaves
    return torch.einsum("shn,hnc->shc", q[..., : c.n], wk), q[..., c.n :]


def einsum_and_upstream(c: Case, x: SimpleNamespace):
    return upstream("fused_mla_rope_concat", x, absorbed(c, x))


def einsum_and_ours(c: Case, x: SimpleNamespace):
    return operators("rope_concat")[0](*absorbed(c, x), *x.tables)


def transformer_engine(c: Case, x: SimpleNamespace):
    run = imported("transformer_engine.pytorch.attention.rope", "apply_rotary_pos_emb")
    return run(x.leaves[0].unsqueeze(1), x.angles, interleaved=True, fused=True).squeeze(1)


def liger(c: Case, x: SimpleNamespace):
    """In place, from halves to halves, with the one key head that it cannot do without."""
    cos, sin = (table[: c.tokens].flatten(1).unsqueeze(0) for table in x.full_tables)
    apply = imported("liger_kernel.ops.rope", "LigerRopeFunction").apply
    return apply(x.halves, x.key_head, cos, sin)[0].transpose(1, 2).squeeze(0)


def halves_to_pairs(t: Tensor) -> Tensor:
    return torch.stack(t.chunk(2, dim=-1), dim=-1).flatten(-2)


CONCAT = {"op": "rope_concat", "n": 512, "peers": {"upstream": upstream_concat}}
ABSORB = {"op": "absorb_query", "n": 192, "c": 512, "keywords": {"nope_dim": 192}, "peers": {
    "einsum + rope_concat": einsum_and_ours, "einsum + upstream": einsum_and_upstream,
}}  # fmt: skip
ROTATE = {"op": "rope_", "directions": ("forward",), "peers": {"upstream": upstream_in_place}}
KV = {"op": "rope_kv_split", "peers": {"upstream": upstream_kv}}


def kv_cases(name: str, n: int, c: int, **fields):
    """Values as a view of kv, forward, and values packed."""
    for form, pack, directions in (
        ("view-of-v", False, ("forward",)),
        ("packed-v", True, ("forward", "backward")),
    ):
        keywords = {"k_dim": n, "pack_value": pack}
        yield Case(name=f"kv-{name}-{form}", n=n, c=c, keywords=keywords, directions=directions,
                   **fields, **KV)  # fmt: skip


COUNTS = (1, 64, 512, 2048, 2401)
CASES = (
    Case(name="pack-q-4096x64", tokens=4096, heads=64, compiled=True, fp32=True, **CONCAT),
    Case(name="pack-q-4096x128", tokens=4096, heads=128, **CONCAT),
    Case(name="pack-q-32768x16", tokens=32768, heads=16, **CONCAT),
    Case(name="absorb-q-4096x64", tokens=4096, heads=64, **ABSORB),
    Case(name="absorb-q-4096x128", tokens=4096, heads=128, **ABSORB),
    *(Case(name=f"pack-q-32768x16-{count}-sequences", tokens=32768, heads=16, sequences=count,
           **{**CONCAT, "directions": ("forward",)}) for count in COUNTS),
    # What stock Megatron-Core has for packed sequences rotates in place and packs nothing.
    *(Case(name=f"rotate-q-32768x16-{count}-sequences", tokens=32768, heads=16, sequences=count,
           n=512, keywords={"nope_dim": 512}, **ROTATE) for count in COUNTS),
    Case(name="rotate-q-4096x128", tokens=4096, heads=128, n=128, keywords={"nope_dim": 128},
         **ROTATE),
    Case(name="copy-q-4096x128", op="rope", tokens=4096, heads=128, n=128, compiled=True, fp32=True,
         keywords={"nope_dim": 128}, peers={"upstream with a clone": upstream_clone}),
    Case(name="only-rotated-4096x128", op="rope", tokens=4096, heads=128, n=0,
         keywords={"nope_dim": 0, "remove_interleaving": True}, directions=("forward",),
         peers={"transformer engine": transformer_engine, "liger": liger}),
    *kv_cases("4096x128", 128, 128, tokens=4096, heads=128, compiled=True),
    *kv_cases("32768x16", 128, 128, tokens=32768, heads=16),
    *kv_cases("glm-4096x64", 192, 256, tokens=4096, heads=64),
    Case(name="latent-key-4096", tokens=4096, heads=1, **CONCAT),
    Case(name="latent-key-32768", tokens=32768, heads=1, **CONCAT),
)  # fmt: skip


def operators(op: str) -> tuple[Callable, Callable]:
    """The operator and its twin."""
    files = {"rope_concat": "concat", "absorb_query": "absorb", "rope_kv_split": "kv_split"}
    module = f"megatron_mla.kernels.{files.get(op, 'rope')}"
    return imported(module, op), imported(f"{module}_ref", f"{op.rstrip('_')}_ref")


def moved_bytes(c: Case, direction: str, itemsize: int = 2) -> int:
    """Bytes of all inputs and outputs once; of the tables, the rows that occur."""
    head, rows = c.n + c.d, c.tokens * c.heads
    if c.op == "rope_":
        elements = rows * 2 * c.d
    elif c.op == "absorb_query" and direction == "forward":
        elements = rows * (head + c.c + c.d) + c.heads * c.n * c.c
    elif c.op == "absorb_query":  # gradient, q_nope, wk; gradients of q and wk
        elements = rows * (c.c + c.d + c.n + head) + 2 * c.heads * c.n * c.c
    elif c.op == "rope_kv_split":
        elements = rows * (c.n + head + 2 * c.c * c.keywords["pack_value"]) + c.tokens * c.d
    else:
        elements = rows * 2 * head
    positions = math.ceil(c.tokens / (c.sequences or 1))
    return (elements + positions * c.d) * itemsize + 4 * c.tokens  # positions are int32


def flops(c: Case, direction: str) -> int:
    products = {"forward": 1, "backward": 2}[direction] * (c.op == "absorb_query")
    return products * 2 * c.tokens * c.heads * c.n * c.c


def build(c: Case, device: str, dtype: torch.dtype, seed: int, grad: bool) -> SimpleNamespace:
    """Inputs for all implementations; the same numbers for the same seed."""
    from megatron_mla.parallel.layout import sbhd_positions, thd_positions
    from megatron_mla.rope.frequencies import RopeParams, inv_freq
    from megatron_mla.rope.tables import shared_tables

    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    if c.op == "rope_concat":
        leaves = random(c.tokens, c.heads, c.n), random(c.tokens, c.heads, c.d)
    elif c.op == "absorb_query":
        leaves = random(c.tokens, c.heads, c.n + c.d), random(c.heads, c.n, c.c)
    elif c.op == "rope_kv_split":
        leaves = random(c.tokens, c.heads, c.n + c.c), random(c.tokens, 1, c.d)
    else:
        leaves = (random(c.tokens, c.heads, c.n + c.d),)
    x = SimpleNamespace(cu=None, leaves=tuple(t.requires_grad_(grad) for t in leaves))
    positions = sbhd_positions(c.tokens, device=device)
    if c.sequences:
        cu = torch.arange(c.sequences + 1, device=device) * c.tokens // c.sequences
        x.cu = cu.to(torch.int32)
        positions = thd_positions(x.cu, c.tokens)
    params = RopeParams(dim=c.d)
    x.tables = *shared_tables(params, "megatron").get(c.tokens, dtype, device), positions
    x.fp32_tables = *shared_tables(params, "fp32").get(c.tokens, dtype, device), positions
    x.full_tables = tuple(torch.cat((t, t), dim=-1)[:, None, None] for t in x.tables[:2])
    if "liger" in c.peers:
        angles = torch.outer(positions.float(), inv_freq(params, device))
        x.angles = angles.repeat_interleave(2, dim=-1)[:, None, None]
        halves = torch.cat((leaves[0][..., ::2], leaves[0][..., 1::2]), dim=-1)
        x.halves = halves.unsqueeze(0).transpose(1, 2)  # [B, H, S, d] in storage of [B, S, H, d]
        x.key_head = random(1, c.tokens, 1, c.d).transpose(1, 2)
    return x


def implementations(c: Case) -> dict[str, tuple[Callable, Callable, float]]:
    """By name: function of the inputs, the one it is held against, limit of their distance."""
    from megatron_mla.parallel.layout import thd_positions

    ours, twin = operators(c.op)
    limit = ABSORB_LIMIT if c.op == "absorb_query" else 0.0

    def call(function: Callable, tables: str = "tables") -> Callable:
        return lambda x: function(*x.leaves, *getattr(x, tables), **c.keywords)

    eager = call(twin)
    found = {"ours": (call(ours), eager, limit)}
    if c.fp32:
        found["ours fp32"] = call(ours, "fp32_tables"), call(twin, "fp32_tables"), limit
    if c.sequences:
        found["ours with positions"] = (
            lambda x: ours(*x.leaves, *x.tables[:2], thd_positions(x.cu, c.tokens), **c.keywords),
            eager,
            limit,
        )
    if c.sequences in (None, 1):
        found["eager"] = eager, eager, PEER_LIMIT
    if c.compiled:
        found["torch.compile"] = call(compiled(twin)), eager, PEER_LIMIT
    for name, peer in c.peers.items():
        found[name] = functools.partial(peer, c), eager, PEER_LIMIT
    return found
