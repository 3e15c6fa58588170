"""Set-up that tests share: the CPU shim, a group of one rank, and which tests can run here."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests.helpers.launch import under_torchrun

# Kernels run on a CPU in Triton's interpreter, here and in the ranks that tests start. Triton reads
# this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run: a red test is red again when it is run again.
hypothesis.settings.register_profile(
    "deterministic", derandomize=True, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("deterministic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def cpu_shim() -> None:
    """Megatron-Core on the CPU where there is no GPU; nothing changes where there is one."""
    from megatron_mla.cpu_shim import install_cpu_shim

    install_cpu_shim()


@pytest.fixture(scope="session")
def default_group():
    """torch's default process group: torchrun's own under torchrun, else one of a single rank."""
    if dist.is_initialized():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if under_torchrun():
        dist.init_process_group(backend)
    else:
        # A store in memory: no port, so nothing to collide with.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def single_rank_groups(default_group) -> None:
    """Megatron-Core's parallel state with tp = cp = pp = 1, made once.

    Every gloo group keeps threads until the process ends: groups of their own for hundreds of tests
    are thousands of threads.
    """
    from megatron.core import parallel_state

    # Whatever was there before would answer instead.
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture
def single_rank(single_rank_groups) -> None:
    """The groups of :func:`single_rank_groups` with fresh random states.

    Under torchrun every rank is such a group of its own; the rest are data-parallel copies.
    """
    from megatron.core import tensor_parallel

    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
