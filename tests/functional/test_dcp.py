"""Ranks that share the rows of a cache answer like one rank that has them all.

Under plain pytest one torchrun runs all cases and each reports for itself. Under
``torchrun --nproc-per-node=4 -m pytest`` the ranks that are there run them in step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.functional import dcp, parity
from tests.helpers.launch import run_ranks, under_torchrun

PROGRAM = Path(dcp.__file__)
pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ranks():
    """Under torchrun: this rank in torchrun's group, left again in step with the others."""
    if not under_torchrun():
        yield
        return
    parity.setup_ranks()
    yield
    dcp.group_of.known.clear()
    parity.leave_ranks()


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """Answers of all cases, and what the ranks printed."""
    if under_torchrun():
        return {}
    report = tmp_path_factory.mktemp("dcp") / "answers.json"
    try:
        output = run_ranks(PROGRAM, dcp.RANKS, "--report", str(report), timeout=240)
    except AssertionError as error:
        output = str(error)  # a failing case fails below, by name
    known = json.loads(report.read_text()) if report.exists() else {}
    return {**known, "output": output}


@pytest.mark.parametrize("case", dcp.CASES, ids=lambda case: case.id)
def test_shared_rows_answer_like_those_of_one_rank(case: dcp.Case, answers) -> None:
    if under_torchrun():
        if (started := int(os.environ["WORLD_SIZE"])) != dcp.RANKS:
            pytest.skip(f"needs {dcp.RANKS} ranks, torchrun started {started}")
        dcp.run_case(case)
        return
    assert case.id in answers, f"the ranks ended before this case:\n{answers['output']}"
    found = answers[case.id]
    assert found["ok"], found.get("error")
    assert found["worst"] <= case.bound
