"""Import path kept for compatibility: the model to estimate."""

from __future__ import annotations

from ..guests.estimate.subject import find_subject, inputs_of_transformers

__all__ = ["find_subject", "inputs_of_transformers"]
