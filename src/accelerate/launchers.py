"""Old address of the launchers for notebooks and tests."""

from accelerate.launch.inprocess import debug_launcher, notebook_launcher, test_launch

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]
