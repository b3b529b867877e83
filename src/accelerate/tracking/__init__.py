"""Trackers: one class per logging service, and a JSONL log that is always written."""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
