"""MLA over tp x cp x sequence parallelism, packed and not, equals one rank in every gradient.

Under plain pytest one torchrun per world size runs all of its cases (a launch costs more than most
cases) and each case reports for itself. Under ``torchrun --nproc-per-node=N -m pytest`` the ranks
that are there run the cases of their number, in step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.functional import parity
from tests.helpers.launch import run_ranks, under_torchrun

PROGRAM = Path(parity.__file__)


@pytest.fixture(scope="module", autouse=True)
def ranks():
    """Under torchrun: this rank in torchrun's group, left again in step with the others."""
    if not under_torchrun():
        yield
        return
    parity.setup_ranks()
    yield
    parity.leave_ranks()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers of all cases of a world size; its ranks start when the first one is asked for."""
    known: dict[int, dict] = {}

    def of(world: int) -> dict:
        if world not in known:
            report = tmp_path_factory.mktemp("parity") / f"{world}.json"
            try:
                output = run_ranks(PROGRAM, world, "--report", str(report), timeout=420)
            except AssertionError as error:
                output = str(error)  # a failing case fails below, by name
            known[world] = json.loads(report.read_text()) if report.exists() else {}
            known[world]["output"] = output
        return known[world]

    return of


@pytest.mark.parametrize("case", parity.CASES, ids=lambda case: case.id)
def test_parallel_equals_one_rank(case: parity.Case, answers) -> None:
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if case.world != world:
            pytest.skip(f"needs {case.world} ranks, torchrun started {world}")
        parity.run_case(case, torch.float32)
        return
    found = answers(case.world)
    assert case.id in found, f"the ranks ended before this case:\n{found['output']}"
    answer = found[case.id]
    assert answer["ok"], answer.get("error")
    # fla-core's kernels, on a GPU alone, multiply in TF32.
    tf32 = case.form == "kda" and torch.cuda.is_available()
    assert max(answer["worst"].values()) < (1e-3 if tf32 else 1e-5)
