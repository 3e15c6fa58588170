"""Decode context parallelism against one rank: the cases, and the program that every rank runs.

Every group of W consecutive ranks solves a problem of its own: each rank writes its rows of the
latents, answers for all heads over them, and its own heads after the merge are compared with plain
softmax attention over all latents. Memory is full of NaN where nothing was written. Under torchrun
this file is that program: ``torchrun --nproc-per-node=4 tests/functional/dcp.py``; the answers of
all cases go to the JSON file named by ``--report``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 4
HEADS, LATENT, POSITIONAL = 8, 32, 8
WIDTH = LATENT + POSITIONAL
SCALE = 0.3
# Seconds that a rank waits for one that failed, and failures after which the rest is left out.
PATIENCE = datetime.timedelta(seconds=20)
MOST_FAILURES = 5
LENGTHS = (1, 2, 5, 37, 64)
BATCHES = tuple((length,) for length in LENGTHS) + ((64, 3, 37, 1),)


@dataclasses.dataclass(frozen=True)
class Case:
    """One check of one way to share rows."""

    kind: str
    world: int
    interleave: int
    comm: str

    @property
    def id(self) -> str:
        return f"{self.kind}-w{self.world}-i{self.interleave}-{self.comm}"

    @property
    def bound(self) -> float:
        """Largest error allowed, of the largest value.

        bf16: partial results and the merged one are rounded by 2^-9 each, and a partial result may
        be larger than the whole.
        """
        return {"bf16": 1e-2, "fp32": 1e-5}.get(self.kind, 1e-12)


# Fewer of those that move rows only: they merge nothing.
_MERGING = ("decode", "several", "pieces", "base2", "fp8", "bf16", "fp32", "sparse")
_MOVING = ("prefix", "refusals")
CASES = [
    Case(kind, world, interleave, comm)
    for kind in (*_MERGING, *_MOVING)
    for world in (1, 2, 4)
    for interleave in (1, 4)
    for comm in (("ag_rs", "a2a") if kind in _MERGING else ("ag_rs",))
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Latents of B sequences and queries of their last tokens, the same on all ranks of a group.

    Attributes:
        lengths: B numbers. latents: [B, longest, E]. queries: [B, s, HEADS, E].
        positions: [B, s] of the queries, -1 for those that a short sequence does not have.
    """

    lengths: tuple[int, ...]
    latents: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(cls, lengths, *, rows: int, seed: int, dtype=torch.float64) -> Problem:
        """Even tokens lie along the queries and odd ones against them.

        The ranks' weights are then far from 1 / W, so that a wrong merge is seen.
        """
        generator = torch.Generator().manual_seed(1000 * seed + sum(lengths) + rows)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch, longest = len(lengths), max(lengths)
        along = random(batch, 1, WIDTH)
        sign = 1 - 2 * (torch.arange(longest, dtype=torch.float64) % 2)
        latents = random(batch, longest, WIDTH) + 0.3 * sign[:, None] * along
        queries = random(batch, rows, HEADS, WIDTH) + along[:, None]
        positions = torch.tensor(lengths)[:, None] - rows + torch.arange(rows)
        device = _device()
        return cls(
            tuple(lengths),
            latents.to(dtype).to(device),
            queries.to(dtype).to(device),
            positions.clamp(min=-1).to(torch.int32).to(device),
        )

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain softmax, one query row after the other: [B, s, HEADS, LATENT] and lse, fp64."""
        keys, queries = self.latents.double(), self.queries.double()
        out = queries.new_zeros(*queries.shape[:3], LATENT)
        lse = queries.new_full(queries.shape[:3], -math.inf)
        for b, rows in enumerate(self.positions.tolist()):
            for i, position in enumerate(rows):
                seen = keys[b, : position + 1]
                if not len(seen):
                    continue
                scores = queries[b, i] @ seen.T * SCALE
                out[b, i] = scores.softmax(-1) @ seen[:, :LATENT]
                lse[b, i] = scores.logsumexp(-1)
        return out, lse


class Worst:
    """Largest error so far, of the largest finite value; -inf stands where the truth has it."""

    def __init__(self) -> None:
        self.error = 0.0

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.shape == want.shape, (got.shape, want.shape)
        same = got.double() == want.double()  # infinities
        error = (got.double() - want.double()).masked_fill(same, 0.0).abs().max().item()
        scale = want.double().abs().masked_fill(want.isinf(), 0.0).max().item() or 1.0
        self.error = max(self.error, math.inf if math.isnan(error) else error / scale)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def group_of(world: int):
    """This rank's group of ``world`` consecutive ranks; made once, and anew after a failure."""
    if world not in group_of.known:
        group_of.known[world] = dist.new_subgroups(world, timeout=PATIENCE)[0]
    return group_of.known[world]


group_of.known = {}


def fresh(dcp, problem: Problem, dtype, extra: int = 3) -> torch.Tensor:
    """Memory of NaN, with room for ``extra`` tokens more than there are."""
    rows = dcp.rows_needed(max(problem.lengths) + extra)
    memory = torch.full((len(problem.lengths), rows, WIDTH), math.nan, device=_device())
    return memory.to(dtype)


def fill(dcp, memory: torch.Tensor, problem: Problem, cuts=()) -> None:
    """Write all latents, in the passes between ``cuts``; short sequences are padded."""
    values = problem.latents.to(memory.dtype).transpose(0, 1)
    longest = len(values)
    number = torch.arange(longest, dtype=torch.int32, device=memory.device)[:, None]
    lengths = torch.tensor(problem.lengths, device=memory.device)
    positions = torch.where(number < lengths, number, -1)
    cuts = sorted({0, longest, *(cut for cut in cuts if cut < longest)})
    for start, end in zip(cuts, cuts[1:], strict=False):
        dcp.write_owned(memory, values[start:end], positions[start:end])


def own(dcp, t: torch.Tensor) -> torch.Tensor:
    """Heads of this rank, of [B, s, HEADS, ...]."""
    return t.chunk(dcp.size, dim=2)[dcp.rank]


def answer(dcp, memory, problem: Problem, *, base: str = "e"):
    """What a layer does for new tokens: this rank's heads over the rows of all ranks."""
    from megatron_mla.inference.attention import attend_to_rows

    queries = dcp.gather_queries(own(dcp, problem.queries).contiguous())
    assert queries.equal(problem.queries), "heads are in another order than the global one"
    there = dcp.key_positions(problem.lengths, memory.shape[1], memory.device)
    out, lse = attend_to_rows(queries, memory, problem.positions, there, scale=SCALE, v_dim=LATENT)
    # What a kernel may leave behind where this rank has no key.
    empty = lse.isneginf()
    out = out.masked_fill(empty.unsqueeze(-1), math.nan)
    lse = lse.masked_fill(empty, math.inf)
    if base == "2":
        lse = lse / math.log(2)
    out, lse = dcp.merge(out, lse, lse_base=base) if dcp.size > 1 else _clean(out, lse)
    return out, lse * math.log(2) if base == "2" else lse


def _clean(out, lse):
    """One rank gets its arguments back: take the NaN of padding out again."""
    empty = lse.isposinf()
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -math.inf)


def check_merge(case: Case, dcp, *, rows=1, dtype=torch.float64, cache=None, cuts=(), base="e"):
    """Own heads equal those of one rank, for all lengths; returns the largest error."""
    worst = Worst()
    group = dist.get_rank() // case.world
    for lengths in BATCHES:
        problem = Problem.make(lengths, rows=rows, seed=group, dtype=dtype)
        if not torch.is_inference_mode_enabled():
            problem.queries.requires_grad_()  # as outside of no_grad; nothing may come of it
        memory = fresh(dcp, problem, cache or dtype)
        fill(dcp, memory, problem, cuts)
        if cache is not None:  # one rank's cache of that dtype, and not the latents
            rounded = problem.latents.to(cache).to(dtype)
            problem = dataclasses.replace(problem, latents=rounded)
        out, lse = answer(dcp, memory, problem, base=base)
        assert out.dtype == dtype
        assert dcp.size == 1 or not (out.requires_grad or lse.requires_grad)
        want_out, want_lse = problem.truth()
        if lengths == (1,):  # ranks without a key take nothing away
            assert out[:, -1].double().equal(own(dcp, want_out)[:, -1])
        worst.compare(out, own(dcp, want_out))
        worst.compare(lse, own(dcp, want_lse))
    return worst.error


def check_decode(case, dcp):
    """One new token of every sequence, in inference mode."""
    with torch.inference_mode():
        return check_merge(case, dcp)


def check_several(case, dcp):
    """Six new tokens of a sequence see each other causally; short ones have fewer."""
    return check_merge(case, dcp, rows=6)


def check_pieces(case, dcp):
    """The cache filled in passes that cut through what a rank owns in a row."""
    return check_merge(case, dcp, rows=2, cuts=(1, 3, 9, 10, 11, 38))


def check_base2(case, dcp):
    """The logarithm of base 2, and that the other base would be noticed."""
    error = check_merge(case, dcp, rows=2, base="2")
    if dcp.size > 1:
        problem = Problem.make((64,), rows=2, seed=1)
        memory = fresh(dcp, problem, torch.float64)
        fill(dcp, memory, problem)
        out, lse = answer(dcp, memory, problem)
        wrong = _merge_in_wrong_base(dcp, memory, problem)
        assert (wrong - out).abs().max() > 1e-2, "weights are too even to tell bases apart"
    return error


def _merge_in_wrong_base(dcp, memory, problem):
    """Levels of base e that are said to be of base 2."""
    from megatron_mla.inference.attention import attend_to_rows

    queries = dcp.gather_queries(own(dcp, problem.queries))
    there = dcp.key_positions(problem.lengths, memory.shape[1], memory.device)
    parts = attend_to_rows(queries, memory, problem.positions, there, scale=SCALE, v_dim=LATENT)
    return dcp.merge(*parts, lse_base="2")[0]


def check_fp8(case, dcp):
    """An FP8 cache gives what one rank's FP8 cache gives."""
    return check_merge(case, dcp, rows=2, cache=torch.float8_e4m3fn)


def check_bf16(case, dcp):
    """Queries, cache and partial results in bf16, against exact sums of the same numbers."""
    return check_merge(case, dcp, rows=2, dtype=torch.bfloat16)


def check_fp32(case, dcp):
    return check_merge(case, dcp, rows=2, dtype=torch.float32)


def check_sparse(case, dcp):
    """Attention over chosen keys; one query's are all of rank 0, one's all of the last rank."""
    from megatron_mla.inference.dcp import owned_positions
    from megatron_mla.kernels.sparse_attention_ref import sparse_attention_ref

    length, slots = 64, 16
    problem = Problem.make((length,), rows=4, seed=dist.get_rank() // case.world)
    memory = fresh(dcp, problem, torch.float64)
    fill(dcp, memory, problem)
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(length, generator=generator) for _ in range(4)])
    chosen = chosen[:, :slots].contiguous()
    chosen[0, 5:9] = chosen[0, -1] = -1  # empty slots in the middle
    for row, rank in ((1, 0), (2, dcp.size - 1)):
        theirs = owned_positions(length, rank, dcp.size, dcp.interleave)
        order = torch.randperm(len(theirs), generator=generator)[:slots]
        chosen[row], chosen[row, : len(order)] = -1, theirs[order].long()
    chosen[3] = -1  # nothing at all
    chosen = chosen.to(_device())
    want = sparse_attention_ref(
        problem.queries[0], problem.latents[0], chosen, scale=SCALE, v_dim=LATENT
    )

    rows, counts = dcp.owned_indices(chosen)
    assert counts.tolist() == (rows >= 0).sum(-1).tolist()
    assert dcp.size == 1 or dcp.rank == 0 or counts[1] == 0, "a rank should own none"
    queries = dcp.gather_queries(own(dcp, problem.queries).contiguous())
    out = sparse_attention_ref(queries[0], memory[0], rows, scale=SCALE, v_dim=LATENT)
    keys = memory[0][rows.clamp(min=0)].masked_fill((rows < 0).unsqueeze(-1), 0.0)
    scores = torch.einsum("the,tke->thk", queries[0], keys) * SCALE
    lse = scores.masked_fill((rows < 0).unsqueeze(1), -math.inf).logsumexp(-1)
    got, _ = dcp.merge(out[None], lse[None])
    worst = Worst()
    worst.compare(got, own(dcp, want[None]))
    assert not own(dcp, want[None])[:, 3].any() and not got[:, 3].any()
    return worst.error


def check_prefix(case, dcp):
    """Gathered rows are the cache of one rank, byte by byte, from any start."""
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        for lengths in BATCHES:
            problem = Problem.make(lengths, rows=1, seed=dist.get_rank() // case.world)
            memory = fresh(dcp, problem, dtype)
            fill(dcp, memory, problem, cuts=(7,))
            whole = problem.latents.to(dtype)
            for start in (None, 0, 1, 3, 6, 30):
                starts = [min(start or 0, n) for n in lengths]
                given = None if start is None else starts
                got = dcp.gather_rows(memory, lengths, given)
                spans = [n - first for n, first in zip(lengths, starts, strict=True)]
                assert got.dtype == dtype
                assert got.shape == (len(lengths), max(spans), WIDTH)
                for b, (first, span) in enumerate(zip(starts, spans, strict=True)):
                    want = whole[b, first : first + span]
                    assert got[b, :span].view(torch.uint8).equal(want.view(torch.uint8))
                    assert not got[b, span:].float().any(), "padding is not 0"
    return 0.0


def check_refusals(case, dcp):
    """Groups that this rank is no member of; heads that do not divide."""
    from megatron_mla.inference.dcp import DecodeContextParallel

    stranger = dist.new_group([0])
    messages = []
    attempts = [lambda: dcp.merge(torch.zeros(1, 1, 7, 2), torch.zeros(1, 1, 7))]
    if dist.get_rank():
        attempts.append(lambda: DecodeContextParallel(stranger))
    for attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    want = (dcp.size > 1) + (dist.get_rank() > 0)
    assert len(messages) == want, messages
    return 0.0


def run_case(case: Case) -> float:
    """Largest error of one case over all ranks; AssertionError on every rank when any is off."""
    from megatron_mla.inference.dcp import DecodeContextParallel

    dcp = DecodeContextParallel(group_of(case.world), interleave=case.interleave, comm=case.comm)
    assert (dcp.size, dcp.rank) == (case.world, dist.get_rank() % case.world)
    error, fault = 0.0, None
    try:
        error = globals()[f"check_{case.kind}"](case, dcp)
    except Exception:  # told below, when all ranks are here
        fault = traceback.format_exc(limit=6)
    flags = torch.tensor([error, float(fault is not None)], device=_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    worst, failed = flags.tolist()
    if failed:  # somebody may still be on the way in it
        group_of.known.pop(case.world)
    assert not failed, f"rank {dist.get_rank()}: {fault or 'see the other ranks'}"
    assert worst <= case.bound, f"off by {worst:.2e}, {case.bound:.0e} allowed"
    return worst


def main() -> int:
    from tests.functional.parity import leave_ranks, setup_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write the answers as JSON")
    parser.add_argument("--only", default="", help="run cases whose id has this text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    setup_ranks()
    torch.backends.cuda.matmul.allow_tf32 = False
    answers: dict[str, dict] = {}
    for case in CASES:
        failures = sum(not found["ok"] for found in answers.values())
        if options.only not in case.id or failures >= MOST_FAILURES:
            continue
        try:
            answers[case.id] = {"ok": True, "worst": run_case(case)}
        except Exception:
            answers[case.id] = {"ok": False, "error": traceback.format_exc(limit=6)}
        found = answers[case.id]
        if dist.get_rank() == 0:
            text = f"worst {found['worst']:.1e}" if found["ok"] else found["error"]
            print("ok  " if found["ok"] else "FAIL", case.id, text, flush=True)
    if dist.get_rank() == 0 and options.report:
        options.report.write_text(json.dumps(answers))
    group_of.known.clear()
    leave_ranks()
    return 0 if all(found["ok"] for found in answers.values()) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
