"""Which implementation runs, and why: the only module that asks what this machine has.

Every choice is a pure function of the configuration and the machine. A refusal is a sentence;
it is said once per process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
import warnings

import torch

logger = logging.getLogger("megatron_mla")

MIN_TRITON = (3, 6)
"""The oldest Triton that the kernels were tried with."""

_said: set[str] = set()


def say_once(key: str, message: str, *, warn: bool = False, level: int = logging.INFO) -> None:
    """Log (at ``level``) or warn ``message`` the first time this process meets ``key``."""
    if key in _said:
        return
    _said.add(key)
    if warn:
        warnings.warn(message, UserWarning, stacklevel=3)
    else:
        logger.log(level, message)


def forget_said() -> None:
    """Let every message be said again; for tests."""
    _said.clear()


@functools.cache
def missing_reason(module: str) -> str | None:
    """Why an optional package cannot be used, or None when it imports.

    A half-broken package may raise anything at import, not only ImportError; whatever it raises,
    the feature counts as absent and the reason is kept.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  any exception of a foreign package at import
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


def te_missing_reason() -> str | None:
    """Why Transformer Engine cannot be used, or None."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA device and there is none"
    return missing_reason("transformer_engine.pytorch")


def triton_missing_reason() -> str | None:
    """Why no Triton kernel can run here, or None."""
    reason = missing_reason("triton")
    if reason is not None:
        return reason
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device and TRITON_INTERPRET=1 is not set"
    import triton

    if tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2]) < MIN_TRITON:
        wanted = ".".join(map(str, MIN_TRITON))
        return f"Triton {triton.__version__} is older than {wanted}"
    return None


def fla_missing_reason() -> str | None:
    """Why the operators of Kimi Delta Attention (package fla-core) cannot be used, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells users without a GPU that they have none
        return missing_reason("fla.ops.kda")


def check_kda_can_run(config) -> None:
    """Refuse layers of Kimi Delta Attention that could not run here.

    Raises:
        ImportError: fla-core is missing or broken, with the reason.
        ValueError: ``deterministic_mode`` on a GPU.
    """
    reason = fla_missing_reason()
    if reason is not None:
        raise ImportError(
            f"mla_full_attn_layers={config.mla_full_attn_layers!r} makes layers of Kimi Delta "
            f"Attention, which need fla-core, but {reason}; pip install megatron-mla[fla], or set "
            "it to None for MLA everywhere"
        )
    if config.deterministic_mode and torch.cuda.is_available():
        raise ValueError(
            "deterministic_mode must be off with layers of Kimi Delta Attention on a GPU, got "
            "True; fla-core chooses its kernels by how long they take, and with them the order of "
            "sums, so switch it off, or train on the CPU"
        )


def kernels_missing_reason(dtype: torch.dtype) -> str | None:
    """Why the kernels of rotary embedding cannot run here, or None.

    Asked for the first time it compares them with their twins, which may compile for seconds.
    """
    return _fault("megatron_mla.kernels.selfcheck", "rope_fault", dtype)


def _fault(module: str, check: str, *arguments) -> str | None:
    """Why kernels cannot run, or what their self-check found wrong with them."""
    reason = triton_missing_reason() or missing_reason(module)
    if reason is not None:
        return reason
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    return getattr(sys.modules[module], check)(device, *arguments)


def should_use_dsa_kernels(config, num_heads: int) -> bool:
    """Whether sparse attention runs on its Triton operators.

    Args:
        config: its ``params_dtype`` and widths are those that the kernels are checked with.
        num_heads: of this rank.
    Returns:
        False silently with ``dsa_kernel_backend="none"``, and with None where there is no CUDA
        device; False with one warning per process where the operators cannot run or are wrong on
        this machine; else True.
    """
    backend = config.dsa_kernel_backend
    if backend == "none" or (backend is None and not torch.cuda.is_available()):
        return False
    reason = None
    if config.params_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reason = f"they take bf16, fp16 and fp32, not {config.params_dtype}"
    reason = reason or _fault(
        "megatron_mla.kernels.dsa_selfcheck",
        "dsa_fault",
        config.params_dtype,
        num_heads,
        (config.kv_lora_rank, config.qk_pos_emb_head_dim),
        (config.dsa_indexer_n_heads, config.dsa_indexer_head_dim),
        config.dsa_indexer_topk,
    )
    if reason is None:
        return True
    say_once(
        "dsa-kernels",
        f"Falling back to the eager operators of sparse attention: {reason}. "
        "dsa_kernel_backend='none' silences this.",
        warn=True,
    )
    return False


def should_use_decode_kernel(query: torch.Tensor, keys: torch.Tensor, v_dim: int) -> bool:
    """Whether attention over cached rows runs in its Triton kernel.

    The first call for a kind of tensors holds the kernel against its twin, which takes seconds and
    waits for the device: it cannot be inside of a CUDA graph.

    Args:
        query: [B, s, H, E]. keys: [B, T, E]. v_dim: width of the value.
    Returns:
        False silently where they are not on a CUDA device, in fp64, and where gradients are
        recorded; False with one warning per process where the kernel cannot run or is wrong on this
        machine; else True.
    """
    recorded = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)
    if not query.is_cuda or torch.float64 in (query.dtype, keys.dtype) or recorded:
        return False
    reason = _fault(
        "megatron_mla.kernels.decode_selfcheck",
        "decode_fault",
        (query.dtype, keys.dtype),
        query.shape[1] * query.shape[2],
        (v_dim, keys.shape[-1] - v_dim),
    )
    if reason is None:
        return True
    say_once(
        "decode-kernel",
        f"Falling back to plain PyTorch for attention over a cache: {reason}.",
        warn=True,
    )
    return False


def should_use_fused_mla_rope(config) -> bool:
    """Whether MLA layers rotate and pack with the fused kernels.

    Args:
        config: anything with ``apply_rope_fusion`` and ``rotary_percent``; its ``params_dtype``
            is the one that the kernels are checked in.
    Returns:
        False silently with ``apply_rope_fusion`` off (``--no-rope-fusion``) and where nothing
        rotates (``qk_pos_emb_head_dim=0``); False with one warning per process for
        ``rotary_percent < 1`` (the kernels rotate the full positional slice) and where no kernel
        can run or the kernels are wrong on this machine; else True.
    """
    if not config.apply_rope_fusion or getattr(config, "qk_pos_emb_head_dim", None) == 0:
        return False
    percent = getattr(config, "rotary_percent", 1.0)
    if percent < 1.0:
        say_once(
            "rope-percent",
            f"Falling back to the unfused path for RoPE: rotary_percent = {percent} < 1, and the "
            "fused kernels rotate the full positional slice. --no-rope-fusion silences this.",
            warn=True,
        )
        return False
    reason = kernels_missing_reason(getattr(config, "params_dtype", torch.float32))
    if reason is not None:
        say_once(
            "rope-kernels",
            f"Falling back to the unfused path for RoPE: {reason}. --no-rope-fusion silences this.",
            warn=True,
        )
        return False
    return True


def determinism_is_asked(config, on_gpu: bool) -> bool:
    """Whether gradients must have the same bits every time.

    Raises:
        ValueError: ``deterministic_mode`` on a GPU without torch's deterministic algorithms, by
            whose flag torch's operators choose how to sum.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
    if config.deterministic_mode and on_gpu and not strict:
        raise ValueError(
            "deterministic_mode must come with torch.use_deterministic_algorithms(True), which is "
            "off; call it before the first step (scripts/pretrain.py does)"
        )
    return strict


def cudnn_attention_reason(
    query: torch.Tensor, v_dim: int, deterministic: bool = False
) -> str | None:
    """Why torch's cuDNN attention cannot take these tensors, or None.

    Args:
        query: [..., qk width], on the device and in the dtype of the attention.
        deterministic: gradients must have the same bits every time.
    """
    if query.device.type != "cuda":
        return "the tensors are not on a CUDA device"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN attention takes bf16 and fp16, not {query.dtype}"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if deterministic:
        return "torch has no deterministic backward of it, and deterministic ones are asked for"
    if torch.cuda.get_device_capability(query.device) < (9, 0):
        return "unequal K and V widths need compute capability 9.0 or later in cuDNN"
    if query.shape[-1] % 8 or v_dim % 8:
        return f"head widths {query.shape[-1]} and {v_dim} must be multiples of 8"
    if max(query.shape[-1], v_dim) > 256:
        return f"head widths {query.shape[-1]} and {v_dim} must not pass 256"
    return None
