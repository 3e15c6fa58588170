"""Run stock Megatron-Core on a machine without a GPU: one explicit call, never at import time.

Megatron-Core 0.19 asks ``torch.cuda`` for the current device in some thirty places, keeps the
states of the GPU's random generator, and writes ``device="cuda"`` in its gradient buffers,
schedules and checkpoints. :func:`install_cpu_shim` answers those questions for the CPU, so that
``GPTModel`` with tensor, sequence, context and expert parallelism, its ``DistributedDataParallel``,
schedules, activation recompute and distributed checkpoints run on gloo. No result depends on it:
it changes where tensors live, not what is computed.

Its optimisers still refuse CPU tensors; ``megatron_mla.recipe.optim`` says what a run uses instead.
"""

from __future__ import annotations

import contextlib
import logging

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def install_cpu_shim() -> bool:
    """Make Megatron-Core use the CPU where it would ask for a GPU. Safe to call many times.

    Call it before a model or a process group is made. The rule: where ``torch.cuda.is_available()``
    nothing is changed and False comes back, so a program may call this without asking; to use the
    CPU of a machine with GPUs, start the program with ``CUDA_VISIBLE_DEVICES=""``. The patches stay
    for the life of the process. The device mapping is active in the calling thread (autograd of
    CPU tensors runs there too).

    Returns:
        True when the shim is in force.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _patch_torch_cuda()
        _patch_random_states()
        patch_gloo_collectives()
        _CudaMeansCpu().__enter__()
        # Megatron-Core decorates its fused bias/activation functions with torch.compile when its
        # modules are imported. On a CPU that wants a C++ compiler and minutes; the undecorated
        # Python computes the same.
        torch.compiler.set_stance("force_eager")
        _installed = True
    return True


class _Stream:
    """The one stream of a CPU: work is done when the call returns, so nothing ever waits."""

    _only: _Stream | None = None

    def __new__(cls, *args, **kwargs):
        # One object for all, because Megatron-Core compares streams to see whether it is on a
        # side stream.
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    device = _CPU
    cuda_stream = 0

    def wait_stream(self, stream) -> None: ...
    def wait_event(self, event) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event=None):
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that has always happened."""

    def __init__(self, *args, **kwargs) -> None: ...
    def record(self, stream=None) -> None: ...
    def wait(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    # A torch.device, not an index: it goes into ``device=`` arguments, where 0 would mean cuda:0.
    cuda.current_device = lambda: _CPU
    # DDP and the MoE dispatcher order their collectives by streams and events.
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.is_current_stream_capturing = lambda: False
    # initialize_model_parallel, pipeline p2p and checkpoint saving synchronise the device.
    cuda.synchronize = lambda device=None: None
    # Builds of torch without CUDA raise here; builds with it answer -2.
    cuda.nvtx.range_push = lambda message: 0
    cuda.nvtx.range_pop = lambda: 0


def _patch_random_states() -> None:
    """Let the tracker keep states of the CPU's generator, the one that CPU dropout draws from."""
    from megatron.core.tensor_parallel import random as mcore_random

    def get_state(device="cuda", clone: bool = False, graph_safe: bool = False):
        return torch.default_generator.get_state()

    def set_state(new_state, device=-1, graph_safe: bool = False) -> None:
        torch.default_generator.set_state(new_state)

    def seed_all(seed: int) -> None:
        # torch.manual_seed would come back here through manual_seed_all.
        torch.default_generator.manual_seed(int(seed))

    mcore_random._get_cuda_rng_state = get_state
    mcore_random._set_cuda_rng_state = set_state
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = get_state
        module.set_rng_state = set_state
        module.manual_seed = seed_all
        module.manual_seed_all = seed_all

    # CheckpointWithoutOutput compiles a C++ extension at its first backward to give the discarded
    # output its recomputed storage. A copy between storages does the same without a compiler and,
    # like it, below the version counters of the tensors that saved the output.
    mcore_random._get_share_storage = lambda: _copy_storage

    # ``fork`` warns when the CPU generator moved inside it. Here that is its purpose.
    logging.getLogger(mcore_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _copy_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    target, source = dst.untyped_storage(), src.untyped_storage()
    target.resize_(source.nbytes())
    target.copy_(source)


def patch_gloo_collectives() -> None:
    """Give gloo what Megatron-Core asks of NCCL: averages, and sizes of parts given as tensors.

    Other backends are asked as before. :func:`install_cpu_shim` does this by itself; call it where
    ranks share a GPU, which NCCL refuses and gloo allows.
    """
    from torch.distributed import distributed_c10d as c10d

    stock_all_reduce, stock_all_to_all = c10d.all_reduce, c10d.all_to_all_single

    def all_reduce(tensor, op=c10d.ReduceOp.SUM, group=None, async_op=False):
        # finalize_model_grads averages over tensor-parallel ranks; gloo has no ReduceOp.AVG.
        if op == c10d.ReduceOp.AVG and c10d.get_backend(group) == "gloo":
            # Divided first, so that an asynchronous call needs nothing done at its end.
            tensor.div_(c10d.get_world_size(group))
            op = c10d.ReduceOp.SUM
        return stock_all_reduce(tensor, op=op, group=group, async_op=async_op)

    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        # The MoE dispatcher turns the sizes into numbers when it copies them from a GPU; there is
        # no such copy here, and gloo takes no tensors.
        sizes = (
            s.tolist() if isinstance(s, torch.Tensor) else s
            for s in (output_split_sizes, input_split_sizes)
        )
        return stock_all_to_all(output, input, *sizes, group=group, async_op=async_op)

    for module in (c10d, torch.distributed):
        module.all_reduce = all_reduce
        module.all_to_all_single = all_to_all_single


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Read a literal ``device="cuda"`` as the CPU; pinned memory and ``.cuda()`` do nothing."""

    _returns_self = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self._returns_self:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))
