"""Timing of the benchmarks, on a device that is made up."""

from __future__ import annotations

import pytest
import torch

from scripts.bench import common


@pytest.fixture
def made_up_device(monkeypatch):
    """Its clock advances by what a call returns; the list of everything it was told to do."""
    told: list = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("event")
            self.at_us = sum(item for item in told if isinstance(item, int))

        def elapsed_time(self, end):
            return (end.at_us - self.at_us) / 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append("idle"))
    return told


def test_calls_take_turns_and_inputs_rotate(made_up_device):
    seen = []

    def call(name, us):
        seen.append(name)
        made_up_device.append(us)

    ours = [lambda i=i: call(f"ours {i}", 10) for i in range(2)]
    medians = common.times_us(
        {"ours": ours, "eager": lambda: call("eager", 30)}, rounds=2, repeats=3
    )
    assert medians == {"ours": 10, "eager": 30}
    turn = ["ours 0", "ours 1", "ours 0", "eager", "eager", "eager"]
    assert seen == turn * 3  # warm-up and two rounds
    assert "idle" not in made_up_device


def test_device_idles_before_the_first_event(made_up_device):
    common.times_us({"ours": lambda: made_up_device.append(7)}, rounds=1, repeats=2, lead_cycles=9)
    assert made_up_device == [7] * 3 + ["idle", "event", 7, "event"] * 2


def test_answers_of_a_rotation_are_held(made_up_device):
    alive = []

    class Answer:
        def __init__(self):
            alive.append(self)

        def __del__(self):
            most.append(len(made) - len(gone))
            gone.append(1)

    made, gone, most = [], [], []

    def call():
        made.append(1)
        answer = Answer()
        alive.clear()
        return answer

    common.times_us({"ours": [call, call]}, rounds=1, repeats=6)
    assert max(most) == 3  # two held, one new
    made.clear(), gone.clear(), most.clear()
    common.times_us({"ours": call}, rounds=1, repeats=6)
    assert max(most) == 1


@pytest.mark.parametrize(
    ("got", "want", "far"),
    [
        pytest.param(torch.ones(4), torch.ones(4), 0, id="equal"),
        pytest.param(torch.full((4,), 1.5), torch.ones(4), 0.5, id="relative-norm"),
        pytest.param(torch.full((4,), torch.nan), torch.ones(4), torch.inf, id="nan"),
        pytest.param(torch.ones(3), torch.ones(4), torch.inf, id="shape"),
        pytest.param((torch.ones(4), torch.ones(2)), (torch.ones(4),) * 2, torch.inf, id="second"),
    ],
)
def test_distance(got, want, far):
    assert common.distance(got, want) == far
