"""PYTHONPATH of the programs that tests start: this source, and what makes torch's import cheaper in them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The folder of a sitecustomize: every program that imports torch spends less on it.
QUICK_START = ROOT / "tests" / "quick_start"


def python_path(*folders: Path) -> str:
    """``folders``, then those of this source and of the quick start."""
    return os.pathsep.join(str(folder) for folder in (*folders, ROOT / "src", QUICK_START))
