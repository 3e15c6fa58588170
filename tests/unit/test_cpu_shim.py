"""The shim moves Megatron-Core to the CPU and leaves its numbers alone."""

import subprocess
import sys

import pytest
import torch

from megatron_mla.cpu_shim import install_cpu_shim
from tests.helpers.launch import run_ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the shim does nothing where CUDA is available"
)


@pytest.fixture(autouse=True)
def shim():
    assert install_cpu_shim()


@pytest.fixture
def tracker():
    """A fresh tracker with the one state that these tests fork."""
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    torch.manual_seed(1)
    tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, 7)
    yield tracker
    random.initialize_rng_tracker(force_reset=True)


def test_import_alone_patches_nothing():
    code = (
        "import torch; before = torch.cuda.current_device, torch.distributed.all_reduce;"
        "import megatron_mla.cpu_shim;"
        "assert before == (torch.cuda.current_device, torch.distributed.all_reduce)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_second_install_adds_no_second_mode():
    depth = torch._C._len_torch_function_stack()
    assert install_cpu_shim()
    assert torch._C._len_torch_function_stack() == depth


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.zeros(2, device="cuda"), id="literal"),
        pytest.param(lambda: torch.zeros(2, device=torch.device("cuda", 0)), id="device-object"),
        pytest.param(lambda: torch.zeros(2, device=torch.cuda.current_device()), id="current"),
        pytest.param(lambda: torch.zeros(2).pin_memory().cuda(non_blocking=True), id="pinned"),
        pytest.param(lambda: torch.empty(2, pin_memory=True), id="pinned-empty"),
        pytest.param(lambda: torch.zeros(2).to("cuda"), id="to-positional"),
        pytest.param(lambda: torch.zeros(2).to(device="cuda:0"), id="to-keyword"),
        pytest.param(lambda: torch.nn.Linear(2, 2).cuda().weight, id="module"),
    ],
)
def test_cuda_means_cpu(make):
    assert make().device.type == "cpu"


def test_streams_and_events_answer():
    stream = torch.cuda.Stream(device="cuda")
    assert stream == torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        event = stream.record_event(torch.cuda.Event())
    assert event.query()
    torch.cuda.synchronize()


def test_fork_draws_from_its_own_state(tracker, caplog):
    torch.manual_seed(3)
    outside = [torch.rand(2), torch.rand(2)]
    torch.manual_seed(3)
    first = torch.rand(2)
    with tracker.fork():
        inside = torch.rand(2)
    second = torch.rand(2)
    assert torch.equal(torch.stack([first, second]), torch.stack(outside))
    torch.manual_seed(7)
    assert torch.equal(inside, torch.rand(2))
    assert "CPU RNG state changed" not in caplog.text


def _dropout_inside_and_outside_fork(x, weight, tracker):
    with tracker.fork():
        hidden = torch.nn.functional.dropout(x @ weight, 0.3)
    return torch.nn.functional.dropout(hidden, 0.2)


@pytest.mark.parametrize("kind", ["checkpoint", "checkpoint-without-output"])
def test_recompute_replays_dropout(tracker, kind):
    from megatron.core.tensor_parallel import random

    def gradients(kind: str | None):
        torch.manual_seed(5)
        tracker.reset()
        tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, 7)
        x, weight, head = (torch.randn(16, 16, requires_grad=True) for _ in range(3))

        def layer(x):
            return _dropout_inside_and_outside_fork(x, weight, tracker)

        if kind == "checkpoint":
            logits = random.checkpoint(layer, False, x) @ head
        elif kind == "checkpoint-without-output":
            recompute = random.CheckpointWithoutOutput(fp8=None)
            hidden = recompute.checkpoint(layer, x)
            logits = hidden @ head
            recompute.discard_output_and_register_recompute(logits)
            assert hidden.untyped_storage().nbytes() == 0
        else:
            logits = layer(x) @ head
        # Something else draws before the backward pass, as the next layer would.
        loss = torch.nn.functional.dropout(logits, 0.1).square().sum()
        loss.backward()
        return loss, x.grad, weight.grad, head.grad, torch.rand(3)

    for got, expected in zip(gradients(kind), gradients(None), strict=True):
        assert torch.equal(got, expected)


COLLECTIVES = """
import torch, torch.distributed as dist
from megatron_mla.cpu_shim import install_cpu_shim

install_cpu_shim()
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((3,), 2.0 + 4 * rank)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert x.tolist() == [4.0] * 3, x
send, receive = torch.tensor([1, 2]), torch.tensor([rank + 1, rank + 1])
got = torch.empty(2 * rank + 2)
dist.all_to_all_single(got, torch.arange(3.0) + 10 * rank, receive, send)
assert got.tolist() == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]][rank], got
print(f"rank {rank} ok", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_collectives_that_gloo_lacks(tmp_path):
    """An average, and an all-to-all whose sizes are tensors, as the MoE dispatcher calls it."""
    program = tmp_path / "collectives.py"
    program.write_text(COLLECTIVES)
    output = run_ranks(program, 2, timeout=120)
    assert "rank 0 ok" in output and "rank 1 ok" in output
