"""Import path kept for compatibility: the questions about a SageMaker job."""

from __future__ import annotations

from .config_args import SageMakerConfig
from .interview import get_sagemaker_input

__all__ = ["SageMakerConfig", "get_sagemaker_input"]
