"""The cost of the ledger of hours, and the hours of a run that is killed 20 times, against a clock outside of it.

    python benchmarks/ledger.py

An empty step takes turns with a watched one, without and with a ledger, in one process; CPU time. Then a run is killed
by SIGKILL at random instants and started again; `tests/multi/test_ledger_kills.py` checks the sum of each kind too.
Each start imports torch first, which takes 10 s on a loaded machine: --kills 3 looks at less.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

STEPS = 5_000
LINES = 1_000
STEP_SECONDS = 0.005  # what a share is of
LONGEST_SECONDS = 8.0


def cost_of_a_step(rounds: int) -> list[float]:
    """Return the CPU seconds that a step of a loop takes more than without any watch: without a ledger, and with one.

    Of each the best of all rounds, which take turns; the ledger's thread is in it.
    """
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator
    from accelerate.guests.monitor.ledger import Ledger

    loss, best = torch.tensor(1.0), [float("inf")] * 3
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, project_dir=folder)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(STEPS))))
        watch = accelerator.watch_run(every=2 * STEPS * rounds, log=False)
        with_ledger, without = watch._ledger, Ledger(None, watch._position, 300.0)
        for _ in range(rounds):
            for kind, ledger in enumerate((None, without, with_ledger)):
                watch._ledger = ledger or without
                start = time.process_time()
                for _ in loader:
                    if ledger is not None:
                        watch.step(loss)
                best[kind] = min(best[kind], (time.process_time() - start) / STEPS)
        watch._ledger = with_ledger
        accelerator.end_training()
    return [seconds - best[0] for seconds in best[1:]]


def line_seconds() -> float:
    """Return the CPU seconds of one line of the ledger, of which its thread writes one a second."""
    from accelerate.guests.monitor.ledger import Ledger, Position

    class Loop:
        def position(self) -> Position:
            return Position(1000, 0, 0, 1.0, 2.0, 3.0, progress=0, stalled=None)

    loop = Loop()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), loop.position, 300.0)
        start = time.process_time()
        for _ in range(LINES):
            ledger._write()
        seconds = (time.process_time() - start) / LINES
        ledger.close()
    return seconds


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="Of the cost of a step.")
    parser.add_argument("--kills", type=int, default=20, help="0 leaves them out.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for words, seconds in zip(("without a ledger", "with one"), cost_of_a_step(arguments.rounds), strict=True):
        share = seconds / STEP_SECONDS
        print(f"watch.step() {words:<17}{1e6 * seconds:6.2f} us  {share:.3%} of a step of 5 ms")
    print(f"a line of the ledger, once a second {1e6 * line_seconds():6.1f} us")
    if arguments.kills:
        from tests.multi.test_ledger_kills import run_with_kills

        with tempfile.TemporaryDirectory() as folder:
            seen = run_with_kills(Path(folder), arguments.kills, LONGEST_SECONDS)
        outside, inside = seen.ended - seen.began, sum(seen.hours["seconds"].values())
        print(f"{arguments.kills} kills: {outside:.2f} s outside, {inside:.2f} s in the ledger: {inside / outside:.2%}")
        rows = sorted(seen.hours["seconds"].items(), key=lambda item: -item[1])
        print("  " + ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in rows if seconds >= 0.05))


if __name__ == "__main__":
    main()
