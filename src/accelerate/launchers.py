"""Import path kept for compatibility: the launchers for notebooks and tests."""

from .launch.functions import debug_launcher, notebook_launcher, test_launch

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]
