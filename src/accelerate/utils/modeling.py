"""Old address: models larger than one device."""

from __future__ import annotations

from ..memory import clear_device_cache
from ..precision.choose import get_grad_scaler
from ..state import get_mixed_precision_context_manager
from ..strategies.unwrap import is_peft_model

__all__ = ["clear_device_cache", "get_grad_scaler", "get_mixed_precision_context_manager", "is_peft_model"]
