"""The nine services, offline: `make trackers` makes the environment .trackers/ that has them, and runs these there."""

from __future__ import annotations

import sys
from pathlib import Path

# In any other environment there is nothing to run here.
collect_ignore_glob = [] if Path(sys.prefix).name == ".trackers" else ["test_*.py"]
