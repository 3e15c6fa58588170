"""MLA, absorbed MLA and DeepSeek sparse attention layers for Megatron-Core."""

from megatron_mla.config import MLATransformerConfig
from megatron_mla.selection import should_use_fused_mla_rope

__version__ = "0.1.0"

__all__ = ["MLATransformerConfig", "__version__", "should_use_fused_mla_rope"]
