"""MLA, absorbed MLA and DeepSeek sparse attention layers for Megatron-Core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_mla.config import MLATransformerConfig as MLATransformerConfig
    from megatron_mla.selection import should_use_fused_mla_rope as should_use_fused_mla_rope

__version__ = "0.1.0"

# Imported when asked for: Megatron-Core takes seconds to import, and a program that prints its
# --help, or sets warning filters first, should not have to wait for it.
_HOMES = {
    "MLATransformerConfig": "megatron_mla.config",
    "should_use_fused_mla_rope": "megatron_mla.selection",
}

__all__ = ["MLATransformerConfig", "__version__", "should_use_fused_mla_rope"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
