"""assert_close passes what rounding explains and nothing else."""

import pytest
import torch

from tests.helpers.close import assert_close, rel_error

DTYPES = [
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.float32, id="fp32"),
]


@pytest.fixture
def truth() -> torch.Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_truth_passes(truth, dtype):
    assert_close("rounded", truth.to(dtype), truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_too_far_fails_at_its_coordinate(truth, dtype):
    got = truth.to(dtype)
    rounding = (got.double() - truth).abs().max().item()
    got[2, 3, 1] = truth[2, 3, 1] + 8 * rounding + 1e-5
    with pytest.raises(AssertionError, match=r"^far .*1 of 120 beyond it; worst at \[2, 3, 1\]"):
        assert_close("far", got, truth)


def test_bound_is_two_roundings():
    # Neighbours of 1 in bf16 are 2^-7 apart: got[1] is off by one step, got[0] is rightly rounded.
    got = torch.tensor([1.0, 1.0 + 2**-7], dtype=torch.bfloat16)
    assert_close("within", got, torch.tensor([1.0 + 2**-8, 1.0]))
    with pytest.raises(AssertionError, match=r"2 x rounding.*worst at \[1\]"):
        assert_close("beyond", got, torch.tensor([1.0 + 0.9 * 2**-8, 1.0]))


@pytest.mark.parametrize(
    ("error", "passes"), [pytest.param(9e-7, True, id="9e-7"), pytest.param(2e-6, False, id="2e-6")]
)
def test_fp32_has_an_absolute_floor(error, passes):
    truth = torch.zeros(3)
    got = torch.tensor([0.0, error, 0.0])
    if passes:
        assert_close("near", got, truth)
    else:
        with pytest.raises(AssertionError, match=r"worst at \[1\]"):
            assert_close("far", got, truth)


def test_bf16_of_a_representable_truth_is_exact():
    truth = torch.tensor([1.0, 2.0])
    with pytest.raises(AssertionError, match="2 x rounding 0"):
        assert_close("off by one step", torch.tensor([1.0, 2.0156], dtype=torch.bfloat16), truth)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        pytest.param(float("nan"), "NaN", id="nan"),
        pytest.param(float("inf"), r"\+inf", id="plus-inf"),
        pytest.param(float("-inf"), "-inf", id="minus-inf"),
    ],
)
def test_anomaly_in_one_of_the_two_fails(truth, value, kind):
    spoiled = truth.clone()
    spoiled[1, 0, 5] = value
    with pytest.raises(AssertionError, match=rf"{kind} in other places.*\[1, 0, 5\]"):
        assert_close("got spoiled", spoiled.float(), truth)
    with pytest.raises(AssertionError, match=rf"{kind} in other places.*\[1, 0, 5\]"):
        assert_close("truth spoiled", truth.float(), spoiled)
    with pytest.raises(AssertionError, match=kind):
        assert_close("rel does not excuse", spoiled.float(), truth, rel=1e9, reason="a test")
    assert_close("both", spoiled.float(), spoiled)


def test_infinities_of_other_sign_fail():
    with pytest.raises(AssertionError, match=r"\+inf"):
        assert_close("sign", torch.tensor([float("inf")]), torch.tensor([float("-inf")]))


def test_error_beside_a_common_anomaly_is_seen():
    truth = torch.tensor([float("nan"), 1.0])
    with pytest.raises(AssertionError, match=r"worst at \[1\]"):
        assert_close("beside", torch.tensor([float("nan"), 1.1]), truth)


def test_overflow_of_the_dtype_is_expected():
    truth = torch.tensor([1e6, 1.0])
    assert_close("overflow", truth.half(), truth)
    with pytest.raises(AssertionError, match=r"\+inf in other places"):
        assert_close("clamped", torch.tensor([65504.0, 1.0]).half(), truth)


def test_shapes_must_match():
    # Broadcasting would compare one row with all of them and call it equal.
    with pytest.raises(AssertionError, match=r"shape \(2, 1\), expected \(2, 3\)"):
        assert_close("broadcast", torch.zeros(2, 1), torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="shapes differ"):
        rel_error(torch.zeros(2, 1), torch.zeros(2, 3))


def test_empty_tensors_are_equal():
    assert_close("empty", torch.zeros(0, 3), torch.zeros(0, 3))


def test_looser_bound_needs_a_reason(truth):
    with pytest.raises(TypeError, match="needs a reason"):
        assert_close("loose", truth.float(), truth, rel=1e-2)


def test_looser_bound_is_relative_to_the_largest(truth):
    got = (truth + 0.009 * truth.abs().max()).float()
    assert_close("within", got, truth, rel=1e-2, reason="a test")
    with pytest.raises(AssertionError, match=r"5\.0e-03 x max\|truth\|.*: a test"):
        assert_close("beyond", got, truth, rel=5e-3, reason="a test")


def test_rel_error():
    a, b = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])
    assert rel_error(a, b) == 0.25
    assert rel_error(b * 0, b * 0) == 0.0
    assert rel_error(b, b * 0) == float("inf")
    # NaN compares false with every bound.
    assert not rel_error(torch.tensor([float("nan"), 4.0]), b) <= 1e9
