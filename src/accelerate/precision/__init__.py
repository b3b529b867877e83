"""In which number format a model computes. One file per way of doing it; :func:`choose` picks."""

from __future__ import annotations

from .base import Precision as Precision
from .choose import choose as choose
