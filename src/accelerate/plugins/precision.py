"""What autocast and the gradient scaler are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..settings.ddp import AutocastOptions, GradScalerOptions
from .base import KwargsHandler


@dataclass
class AutocastKwargs(AutocastOptions, KwargsHandler):
    """Arguments of ``torch.autocast``, and the precision in which a prepared model hands back its outputs.

    ``output_dtype=None`` leaves outputs in the precision in which they were computed.
    """

    own_fields: ClassVar[frozenset[str]] = frozenset({"output_dtype"})

    output_dtype: torch.dtype | None = field(default=torch.float32)


@dataclass
class GradScalerKwargs(GradScalerOptions, KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, which scales the loss so that fp16 gradients don't underflow."""
