"""Import path kept for compatibility: a menu in the terminal."""

from __future__ import annotations

from .config.ask import BulletMenu

__all__ = ["BulletMenu"]
