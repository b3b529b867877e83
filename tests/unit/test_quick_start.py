"""The programs that tests start collect garbage as every program does, but for what torch's import makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.python_path import QUICK_START

PROGRAM = """
import gc, weakref
import torch, torch._dynamo

class Node:
    pass

node = Node()
node.itself, seen = node, weakref.ref(node)
del node
gc.collect()
print(torch.collects, torch._dynamo.collects, gc.isenabled(), gc.get_freeze_count() > 100)
print(seen() is None, torch.made in gc.get_objects(), torch._dynamo.made in gc.get_objects())
"""
MODULE = "import gc\ncollects = gc.isenabled()\nmade = [object()]\n"


def test_torch_is_imported_without_collections_and_the_programs_own_garbage_is_collected(tmp_path: Path) -> None:
    for name in ("torch", "torch/_dynamo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(QUICK_START)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["False", "False", "True", "True", "True", "False", "True"], done.stderr
