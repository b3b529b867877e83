"""Import path kept for compatibility: Transformer Engine's fp8."""

from __future__ import annotations

from ..precision.fp8_te import apply_fp8_autowrap, contextual_fp8_autocast, convert_model, has_transformer_engine_layers

__all__ = [
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
]
