"""Cases of the benchmark of sparse attention, their inputs, and everybody who solves them.

Legend: T query rows, S keys, H attention heads, C latent and D = C + positional channels, n indexer
heads, K chosen keys.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

# Of relative norms, or shares of keys that differ. Products of sparse attention round their
# probabilities to bf16; near ties of scores fall to either side.
LIMITS = {"index_scores": 1e-4, "select_topk": 0.0, "index_topk": 2e-3, "sparse_attention": 2e-2,
          "indexer_loss": 2e-2}  # fmt: skip
PEER_LIMIT = 5e-2
KEYS_LIMIT = 2e-2
# What is cut when a few rows are looked at alone.
BY_ROW = ("q", "w", "query", "indices", "grad", "starts", "ends", "scores", "lse")
LEAVES = {"sparse_attention": ("query", "key"), "indexer_loss": ("q", "k", "w")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on the last rows of a causal sequence.

    Attributes:
        op: name of the operator in megatron_mla.kernels.
        rows, keys: T, of which the last sees all of S keys.
        eager: time the twin too.
    """

    name: str
    op: str
    rows: int
    keys: int
    heads: int = 64
    latent: int = 512
    positional: int = 64
    index_heads: int = 32
    index_width: int = 128
    topk: int = 2048
    directions: tuple[str, ...] = ("forward",)
    eager: bool = False

    def scaled(self) -> Case:
        """The same case in a size for a CPU."""
        rows = 12
        return replace(
            self, rows=rows, keys=rows + 7 * (self.keys > self.rows), heads=min(self.heads, 3),
            latent=16, positional=8, index_heads=min(self.index_heads, 3), index_width=16, topk=5,
        )  # fmt: skip

    @property
    def width(self) -> int:
        return self.latent + self.positional

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def slots(self) -> int:
        return min(self.topk, self.keys)

    def valid(self) -> int:
        """Slots that hold a key, of all rows."""
        first = self.keys - self.rows
        return sum(min(self.topk, first + row + 1) for row in range(self.rows))


def _attention(tokens: int, heads: int) -> Case:
    return Case(
        name=f"{tokens}x{heads}", op="sparse_attention", rows=tokens, keys=tokens, heads=heads,
        directions=("forward", "backward"), eager=(tokens, heads) == (8192, 64),
    )  # fmt: skip


CASES = (
    Case(name="4096x32768-32-heads", op="index_scores", rows=4096, keys=32768, index_heads=32),
    Case(name="4096x32768-64-heads", op="index_scores", rows=4096, keys=32768, index_heads=64),
    Case(name="8192x8192-64-heads", op="index_scores", rows=8192, keys=8192, index_heads=64,
         eager=True),
    Case(name="4096x32768", op="select_topk", rows=4096, keys=32768, eager=True),
    Case(name="8192x8192", op="select_topk", rows=8192, keys=8192),
    Case(name="1024x131072", op="select_topk", rows=1024, keys=131072),
    Case(name="8192", op="index_topk", rows=8192, keys=8192, eager=True),
    Case(name="32768", op="index_topk", rows=32768, keys=32768),
    *(_attention(8192, heads) for heads in (8, 16, 64, 128)),
    *(_attention(tokens, 64) for tokens in (4096, 32768, 131072)),
    Case(name="8192", op="indexer_loss", rows=8192, keys=8192, directions=("forward+backward",),
         eager=True),
    Case(name="32768", op="indexer_loss", rows=32768, keys=32768, directions=("forward+backward",)),
)  # fmt: skip


def flops(c: Case, direction: str) -> float:
    """Of valid slots; those of all scores as if no row had a limit ("dense")."""
    if c.op in ("index_scores", "index_topk"):
        return 2 * c.rows * c.keys * c.index_heads * c.index_width
    if c.op == "sparse_attention":
        forward = 2 * c.valid() * c.heads * (c.width + c.latent)
        return forward * (1 if direction == "forward" else 2.5)
    if c.op == "indexer_loss":  # the target once; scores, and their gradients of q and k
        return 2 * c.valid() * (c.heads * c.width + 3 * c.index_heads * c.index_width)
    return 0


def moved_bytes(c: Case) -> int:
    """Of a selection: the scores once, and the indices."""
    return 4 * c.rows * (c.keys + c.slots) if c.op == "select_topk" else 0


# --- inputs ---


def spread_slots(seen: Tensor, topk: int, generator: torch.Generator) -> Tensor:
    """[T, K] int32: for every row that many keys of those before ``seen``, rising, none twice.

    They are spread evenly over what the row sees; -1 behind those of a row that sees fewer.
    """
    slot = torch.arange(topk + 1, device=seen.device)
    many = torch.maximum(seen, torch.full_like(seen, topk)).unsqueeze(-1)
    border = slot * many // topk
    room = border[:, 1:] - border[:, :-1]
    luck = torch.rand(room.shape, generator=generator, device=seen.device)
    keys = border[:, :-1] + (luck * room).long().clamp(max=room - 1)
    return keys.masked_fill(slot[:-1] >= seen.unsqueeze(-1), -1).int()


def build(c: Case, device: str, dtype: torch.dtype, seed: int) -> SimpleNamespace:
    """Inputs for all implementations; the same numbers for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, **how) -> Tensor:
        how = {"dtype": dtype, **how}
        return torch.randn(shape, generator=generator, device=device, **how)

    ends = torch.arange(c.keys - c.rows + 1, c.keys + 1, dtype=torch.int32)
    if c.op == "select_topk":  # all of the columns, as torch.topk
        ends = torch.full_like(ends, c.keys)
    host = torch.stack((torch.zeros_like(ends), ends))
    starts, ends = host.to(device)
    x = SimpleNamespace(starts=starts, ends=ends, host=host, lse=None)
    if c.op == "select_topk":
        x.scores = random(c.rows, c.keys, dtype=torch.float32)
        return x
    if c.op != "sparse_attention":
        x.q = random(c.rows, c.index_heads, c.index_width)
        x.k = random(c.keys, c.index_width)
        x.w = random(c.rows, c.index_heads) * (c.index_heads * c.index_width) ** -0.5
    if c.op in LEAVES:
        x.query, x.key = random(c.rows, c.heads, c.width), random(c.keys, c.width)
        x.indices = spread_slots(ends.long(), c.slots, generator)
        if c.op == "sparse_attention":
            x.grad = random(c.rows, c.heads, c.latent)
    return x


def bounds(x: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(starts=x.starts, ends=x.ends, host=x.host)


def part(x: SimpleNamespace, rows: Tensor) -> SimpleNamespace:
    """The problem of some of the rows, before all of the keys."""
    cut = {name: t[rows.to(t.device)] for name, t in vars(x).items()
           if name in BY_ROW and t is not None}  # fmt: skip
    return SimpleNamespace(**{**vars(x), **cut, "host": x.host[:, rows.cpu()]})


def some_rows(c: Case, count: int = 16) -> Tensor:
    """Rows at the beginning, in the middle and at the end."""
    starts = 0, (c.rows - count) // 2, c.rows - count
    rows = torch.cat([torch.arange(start, start + count) for start in starts])
    return rows[(rows >= 0) & (rows < c.rows)].unique()


# --- solvers: functions of (case, inputs) ---


@functools.cache
def imported(module: str, name: str) -> Callable:
    return getattr(importlib.import_module(module), name)


def kernel(module: str, name: str) -> Callable:
    return imported(f"megatron_mla.kernels.{module}", name)


def seen_columns(x: SimpleNamespace, keys: int) -> Tensor:
    column = torch.arange(keys, device=x.starts.device)
    return (column >= x.starts[:, None]) & (column < x.ends[:, None])


def ours_scores(c: Case, x: SimpleNamespace) -> Tensor:
    """As the choice has them: nothing is written where no row sees a key."""
    out = torch.empty(len(x.q), c.keys, dtype=torch.float32, device=x.q.device)
    kernel("index", "launch_scores")(x.q, x.k, x.w, x.starts, x.ends, out)
    return out


def eager_scores(c: Case, x: SimpleNamespace) -> Tensor:
    """In chunks of rows that make 2^28 products."""
    step = max(1, (1 << 28) // (c.index_heads * c.keys))
    chunks = zip(x.q.split(step), x.w.split(step), strict=True)
    return torch.cat([kernel("index_ref", "index_scores_ref")(q, x.k, w) for q, w in chunks])


def ours_selection(c: Case, x: SimpleNamespace) -> Tensor:
    return kernel("topk", "select_topk")(x.scores, x.starts, x.ends, c.topk)


def eager_selection(c: Case, x: SimpleNamespace) -> Tensor:
    seen = seen_columns(x, c.keys)
    return kernel("index_ref", "best_keys")(x.scores, seen, c.slots)


def torch_topk(c: Case, x: SimpleNamespace) -> Tensor:
    return x.scores.topk(c.slots, dim=-1).indices


def choice(c: Case, x: SimpleNamespace, module: str = "index", name: str = "index_topk") -> Tensor:
    return kernel(module, name)(x.q, x.k, x.w, bounds(x), topk=c.topk)


def eager_choice(c: Case, x: SimpleNamespace) -> Tensor:
    return choice(c, x, "index_ref", "index_topk_ref")


def attention(module: str, name: str) -> Callable:
    return lambda c, x: kernel(module, name)(
        x.query, x.key, x.indices, scale=c.scale, v_dim=c.latent
    )


def deterministic_attention(c: Case, x: SimpleNamespace) -> Tensor:
    return attention("sparse_attention", "sparse_attention")(c, x)


# Its backward is called under torch.use_deterministic_algorithms(True).
deterministic_attention.deterministic = True


def loss(module: str, name: str, choose: Callable | None = None, **how) -> Callable:
    """Over the keys that are given, or over those that ``choose`` chooses within the time."""

    def run(c: Case, x: SimpleNamespace) -> Tensor:
        indices = x.indices if choose is None else choose(c, x)
        inputs = x.q, x.k, x.w, x.query.detach(), x.key.detach(), bounds(x)
        return kernel(module, name)(*inputs, scale=c.scale, indices=indices, **how)

    return run


def loss_with_lse(c: Case, x: SimpleNamespace) -> Tensor:
    """As the layer has it: the attention has left its log-sum-exp, outside of the time."""
    if x.lse is None:
        attend = kernel("sparse_attention", "sparse_attention_with_lse")
        with torch.no_grad():
            x.lse = attend(x.query, x.key, x.indices, scale=c.scale, v_dim=c.latent)[1]
    return loss("indexer_loss", "indexer_loss", lse=x.lse)(c, x)


MEGATRON = "megatron.core.transformer.experimental_attention_variant.ops"
# Rows that Megatron-Core hands over at once.
MEGATRON_ROWS = 8192


def tilelang(module: str, name: str) -> Callable:
    importlib.import_module("tilelang")  # without it Megatron-Core's functions decline everything
    return imported(f"{MEGATRON}.{module}", name)


def tilelang_scores(c: Case, x: SimpleNamespace) -> Tensor:
    run = tilelang("tilelang_indexer_fwd", "indexer_fwd_interface")
    return run(x.q, x.k, x.w, x.starts, x.ends)


def _declined(answer):
    if answer is None:
        raise NotImplementedError("Megatron-Core's TileLang operator declines this case")
    return answer


def tilelang_choice(c: Case, x: SimpleNamespace) -> Tensor:
    run = tilelang("tilelang_dsa", "fused_qk_topk_lighting")
    q, k, w = (t.unsqueeze(1) for t in (x.q, x.k, x.w))
    return _declined(run(q, k, w, c.topk, x.starts, x.ends, MEGATRON_ROWS)).squeeze(0)


def tilelang_attention(c: Case, x: SimpleNamespace) -> Tensor:
    run = tilelang("tilelang_dsa", "fused_sparse_mla_absorbed")
    query, key = x.query.unsqueeze(1), x.key[:, None, None]
    return _declined(run(query, key, x.indices.unsqueeze(0), c.scale, c.latent)).squeeze(1)


def tilelang_loss(c: Case, x: SimpleNamespace) -> Tensor:
    run = tilelang("tilelang_dsa", "fused_qk_topk_lighting_with_streaming_sparse_kl")
    q, k, w, query = (t.unsqueeze(1) for t in (x.q, x.k, x.w, x.query.detach()))
    groups = SimpleNamespace(tp=None, cp=None)
    answer = run(
        q, k, w, c.topk, x.starts, x.ends, MEGATRON_ROWS, query, x.key.detach()[:, None, None],
        c.scale, 1.0, groups, calculate_per_token_loss=True,
    )  # fmt: skip
    return _declined(answer)[1]


def flash_mla(c: Case, x: SimpleNamespace) -> Tensor:
    run = imported("flash_mla", "flash_mla_sparse_fwd")
    return run(x.query, x.key.unsqueeze(1), x.indices.unsqueeze(1), c.scale, c.latent)[0]


def implementations(c: Case, direction: str) -> dict[str, tuple[Callable, Callable, float]]:
    """By name: who solves the case, whom it is held against, limit of their distance."""
    limit, peer = LIMITS[c.op], PEER_LIMIT
    if c.op == "index_scores":
        found = {"ours": (ours_scores, eager_scores, limit),
                 "tilelang": (tilelang_scores, eager_scores, peer)}  # fmt: skip
    elif c.op == "select_topk":
        found = {"ours": (ours_selection, eager_selection, limit),
                 "torch.topk": (torch_topk, eager_selection, KEYS_LIMIT)}  # fmt: skip
    elif c.op == "index_topk":
        found = {"ours": (choice, eager_choice, limit),
                 "tilelang": (tilelang_choice, eager_choice, KEYS_LIMIT)}  # fmt: skip
    elif c.op == "sparse_attention":
        twin = attention("sparse_attention_ref", "sparse_attention_ref")
        found = {"ours": (attention("sparse_attention", "sparse_attention"), twin, limit),
                 "tilelang": (tilelang_attention, twin, peer)}  # fmt: skip
        if direction == "forward":
            found["flashmla"] = flash_mla, twin, peer
        else:
            found["ours deterministic"] = deterministic_attention, twin, limit
    else:
        twin = loss("indexer_loss_ref", "indexer_loss_ref")
        ours = "indexer_loss", "indexer_loss"
        choosing = loss("indexer_loss_ref", "indexer_loss_ref", choose=eager_choice)
        found = {"ours": (loss_with_lse, twin, limit),
                 "ours without lse": (loss(*ours), twin, limit),
                 "ours deterministic": (loss(*ours, deterministic=True), twin, limit),
                 "ours with choice": (loss(*ours, choose=choice), choosing, limit),
                 "tilelang with choice": (tilelang_loss, choosing, peer)}  # fmt: skip
    if c.eager:
        twin = found["ours"][1]
        found["eager"] = twin, twin, peer
    return found
