"""Operators of ``torch.library``; opaque to ``torch.compile``, which keeps their launch options."""

from __future__ import annotations

from collections.abc import Callable

import torch


def note_change(t: torch.Tensor) -> None:
    """Count a change that only a kernel sees, so that a graph which saved ``t`` raises."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def register(
    name: str,
    schema: str,
    run: Callable,
    fake: Callable,
    *,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
) -> None:
    """Define ``torch.ops.megatron_mla.<name>``.

    Args:
        schema: ``(arguments) -> results``, with ``(a!)`` at what is written.
        run: CPU (interpreter) and CUDA implementation.
        fake: shapes and dtypes of the results without data.
        setup_context, backward: autograd, as in ``torch.library.register_autograd``.
    """
    qualified = f"megatron_mla::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, ("cpu", "cuda"), run)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
