"""Import path kept for compatibility: single questions, and the values of their answers."""

from __future__ import annotations

from .ask import BulletMenu
from .interview import (
    DYNAMO_BACKENDS,
    SubcommandHelpFormatter,
    _ask_field,
    _ask_options,
    _convert_compute_environment,
    _convert_distributed_mode,
    _convert_dynamo_backend,
    _convert_fp8_backend,
    _convert_mixed_precision,
    _convert_sagemaker_distributed_mode,
    _convert_yes_no_to_bool,
)

__all__ = [
    "DYNAMO_BACKENDS",
    "BulletMenu",
    "SubcommandHelpFormatter",
    "_ask_field",
    "_ask_options",
    "_convert_compute_environment",
    "_convert_distributed_mode",
    "_convert_dynamo_backend",
    "_convert_fp8_backend",
    "_convert_mixed_precision",
    "_convert_sagemaker_distributed_mode",
    "_convert_yes_no_to_bool",
]
