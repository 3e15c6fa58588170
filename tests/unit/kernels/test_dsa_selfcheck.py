"""The start-up check of sparse attention's kernels finds wrong ones and lets right ones pass."""

from __future__ import annotations

import pytest
import torch

from megatron_mla.kernels import dsa_selfcheck, sparse_attention
from tests.helpers.rotations import DEVICE

WHERE = f"cuda:{torch.cuda.current_device()}" if DEVICE != "cpu" else "cpu"
PROBLEM = (5, (24, 8), (3, 16), 7)


@pytest.fixture(autouse=True)
def anew():
    dsa_selfcheck.dsa_fault.cache_clear()
    yield
    dsa_selfcheck.dsa_fault.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_pass(dtype) -> None:
    assert dsa_selfcheck.dsa_fault(WHERE, dtype, *PROBLEM) is None


def spoiled(function, change):
    def run(*args, **how):
        answer = function(*args, **how)
        return change(answer)

    return run


@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        ("sparse_attention_with_lse", lambda a: (a[0] * 1.2, a[1]), "output"),
        ("sparse_attention_with_lse", lambda a: (a[0] * 1.2, a[1]), "gradient of key"),
        ("sparse_attention_with_lse", lambda a: (a[0], a[1].cumsum(1)), "gradient of q"),
        ("sparse_attention_with_lse", lambda a: (a[0] * torch.nan, a[1]), "output"),
        ("indexer_loss", lambda loss: loss * 1.2, "loss"),
        ("index_topk", lambda slots: slots + 1, "choice of keys"),
        ("index_topk", lambda slots: slots[:, :-1], "choice of keys"),
        ("index_topk", lambda slots: slots * 0, "choice of keys"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_kernels_are_named(monkeypatch, dtype, name, change, wrong) -> None:
    monkeypatch.setattr(dsa_selfcheck, name, spoiled(getattr(dsa_selfcheck, name), change))
    assert wrong in dsa_selfcheck.dsa_fault(WHERE, dtype, *PROBLEM)


def test_kernels_that_do_not_run_are_a_sentence(monkeypatch) -> None:
    def broken(*args, **how):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dsa_selfcheck, "index_topk", broken)
    fault = dsa_selfcheck.dsa_fault(WHERE, torch.float32, *PROBLEM)
    assert "do not run" in fault and "no such instruction" in fault


def test_a_fault_of_the_hopper_kernel_leaves_the_portable_one(monkeypatch) -> None:
    """A forward that is wrong only where the kernel for Hopper runs."""
    monkeypatch.setattr(sparse_attention, "_hopper_fault", None)
    monkeypatch.setattr(sparse_attention, "fits", lambda query, v_dim: True)

    def wrong(query, key, indices, out, lse, scale):
        sparse_attention.launch_forward(query, key, indices, out, lse, scale)
        out += 1

    monkeypatch.setattr(sparse_attention, "launch_forward_hopper", wrong)
    assert dsa_selfcheck.dsa_fault(WHERE, torch.float32, *PROBLEM) is None
    assert "wrong output" in sparse_attention._hopper_fault


@pytest.mark.gpu
def test_the_hopper_kernel_is_what_runs_on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this device is no Hopper")
    query = torch.empty(1, 64, 576, dtype=torch.bfloat16, device="cuda")
    assert dsa_selfcheck.dsa_fault(WHERE, torch.bfloat16, 64, (512, 64), (32, 128), 2048) is None
    assert sparse_attention.runs_on_hopper(query, 512)
