"""Comparison of tensors with a tolerance that follows from rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Two correct sums in another order differ by a few roundings of the working precision even where
# the truth happens to be representable. Narrower dtypes get their room from the rounding itself.
_ABSOLUTE_FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}


def rel_error(a: Tensor, b: Tensor) -> float:
    """``max|a - b| / max|b|`` over whole tensors, in fp64; NaN where either holds one."""
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if b.numel() == 0:
        return 0.0
    a64, b64 = _fp64(a), _fp64(b)
    error = (a64 - b64).abs().max()
    # No scale to measure by: 0 where both are zero, else infinite.
    return 0.0 if error == 0 else (error / b64.abs().max()).item()


def assert_close(
    name: str, got: Tensor, truth: Tensor, *, rel: float | None = None, reason: str = ""
) -> None:
    """Assert that ``got`` is ``truth`` up to the rounding that its dtype cannot avoid.

    Non-finite values must stand in the same places, with the same sign. The largest error of the
    others may be twice that of merely rounding ``truth`` to the dtype of ``got``, plus 1e-6 in
    fp32 (1e-12 in fp64).

    Args:
        name: what is compared, for the message.
        truth: the same shape, fp32 or fp64: compute it wider than ``got`` where rounding matters.
        rel: another bound instead: the largest error over ``max|truth|``.
        reason: why the derived bound does not fit; required with ``rel``.
    """
    if rel is not None and not reason.strip():
        raise TypeError(f"{name}: rel={rel} needs a reason")
    if got.shape != truth.shape:
        raise AssertionError(
            f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)} like the truth"
        )
    if got.numel() == 0:
        return
    rounded = _fp64(truth.detach().to(got.dtype))
    got64, truth64 = _fp64(got), _fp64(truth)
    _assert_same_anomalies(name, got64, rounded)

    finite = rounded.isfinite()
    error = torch.where(finite, (got64 - truth64).abs(), 0.0)
    if rel is None:
        rounding = torch.where(finite, (rounded - truth64).abs(), 0.0).max().item()
        floor = _ABSOLUTE_FLOOR.get(got.dtype, 0.0)
        bound, rule = 2 * rounding + floor, f"2 x rounding {rounding:.3e} + {floor:.0e}"
    else:
        scale = torch.where(finite, truth64.abs(), 0.0).max().item()
        bound, rule = rel * scale, f"{rel:.1e} x max|truth| {scale:.3e}: {reason}"
    if error.max().item() <= bound:
        return
    at = _worst(error)
    raise AssertionError(
        f"{name} {got.dtype} {tuple(got.shape)}: error {error[at]:.3e} > {bound:.3e} ({rule}), "
        f"{int((error > bound).sum())} of {error.numel()} beyond it; worst at {list(at)}: "
        f"got {got64[at]:.9g}, truth {truth64[at]:.9g}"
    )


def _assert_same_anomalies(name: str, got: Tensor, truth: Tensor) -> None:
    # ``truth`` is rounded already: what overflows the dtype has to be infinite in ``got`` as well.
    for kind, places in (
        ("NaN", torch.isnan),
        ("+inf", torch.isposinf),
        ("-inf", torch.isneginf),
    ):
        differ = places(got) != places(truth)
        if differ.any():
            at = _worst(differ.to(torch.float64))
            raise AssertionError(
                f"{name}: {kind} in other places than in the truth, {int(differ.sum())} of them; "
                f"first at {list(at)}: got {got[at]:.9g}, truth {truth[at]:.9g}"
            )


def _fp64(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _worst(error: Tensor) -> tuple[int, ...]:
    """Coordinate of the (first) largest entry."""
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
