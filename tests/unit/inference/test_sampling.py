"""What the next token is drawn from."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.inference.sampling import Sampler, probabilities

LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]).log()


def test_plain_softmax() -> None:
    assert torch.allclose(probabilities(LOGITS), LOGITS.exp())
    hot = probabilities(LOGITS, temperature=2.0)
    assert torch.allclose(hot, (LOGITS / 2).softmax(-1))


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),  # of the two, the first has 4 / 7
    ],
)
def test_likeliest_tokens_only(how, first) -> None:
    got = probabilities(LOGITS, **how)
    assert torch.allclose(got[0], torch.tensor(first, dtype=torch.float32), atol=1e-6)
    assert torch.allclose(got.sum(-1), torch.ones(2))


def test_top_k_of_equal_logits_takes_the_first() -> None:
    assert probabilities(torch.zeros(1, 4), top_k=2).tolist() == [[0.5, 0.5, 0, 0]]


def test_tiny_temperature_is_the_likeliest_token() -> None:
    got = probabilities(torch.tensor([[3e4, -3e4, 2.9e4]]), temperature=1e-30)
    assert got.tolist() == [[1, 0, 0]]


def test_greedy_needs_no_random_numbers() -> None:
    sampler = Sampler(temperature=0)
    before = sampler.generator.get_state()
    assert sampler(LOGITS).tolist() == [1, 0]
    assert torch.equal(sampler.generator.get_state(), before)


def test_seed_makes_the_draws_and_nobody_else() -> None:
    state = torch.get_rng_state()
    one, same, other = Sampler(seed=3), Sampler(seed=3), Sampler(seed=4)
    draws = [[s(LOGITS).tolist() for _ in range(20)] for s in (one, same, other)]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_follow_the_distribution() -> None:
    sampler = Sampler(top_p=0.75)
    drawn = sampler(LOGITS[:1].expand(20_000, -1)).bincount(minlength=4) / 20_000
    assert torch.allclose(drawn, torch.tensor([0, 4 / 9, 2 / 9, 3 / 9]), atol=0.02)


def test_tokens_beyond_the_last_are_never_drawn() -> None:
    logits = torch.tensor([[1.0, 2.0, 99.0]])
    assert Sampler(temperature=0, num_tokens=2)(logits).item() == 1
    assert Sampler(num_tokens=2)(logits.expand(100, -1)).max() < 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number of at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top_p must be"),
    ],
)
def test_values_out_of_range_are_refused(how, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**how)
