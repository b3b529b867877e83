"""The cost of `accelerate monitor` by the number of ranks: opening a run's files, the next refresh, what the page gets.

    python benchmarks/monitor.py --ranks 16384 --reports 100

The files are made up beforehand, of the size that ranks write.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from accelerate.guests.monitor.reading import RunFiles
from accelerate.guests.monitor.snapshot import snapshot
from accelerate.guests.monitor.terminal import screen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.monitor.many_ranks import write_large_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--reports", type=int, default=100, help="In the file of each rank.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_large_run(Path(folder), arguments.ranks, reports=arguments.reports)
        began, used = perf_counter(), process_time()
        run = RunFiles(Path(folder))
        run.refresh()
        content = snapshot(run)
        print(f"open: {perf_counter() - began:.2f} s, {process_time() - used:.2f} s of CPU")
        began = perf_counter()
        run.refresh()
        print(f"next refresh: {perf_counter() - began:.3f} s")
        began = perf_counter()
        snapshot(run)
        print(f"what is shown of it: {perf_counter() - began:.3f} s, {len(json.dumps(content)):,} bytes")
        print(f"lines in a terminal: {len(screen(content, 120))}")
        print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")


if __name__ == "__main__":
    main()
