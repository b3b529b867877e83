"""The cost of a checkpoint by the number of ranks: rank 0's plan, index and manifest, and what a folder holds.

    python benchmarks/layout.py --ranks 16384 --tensors 1000 --shards 64

The ranks are made up in one process, by the functions that they call, with empty files; each of `--tensors` tensors is
cut into `--shards`, and each cut lies on ranks/shards replicas. `--torch RANKS` plans for so many ranks as torch's own
planner does, where every rank proposes all that it has. Seconds are CPU time, as other work is done meanwhile.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate.checkpointing import dcp
from accelerate.checkpointing.dcp import read_metadata
from accelerate.checkpointing.manifest import read_manifest
from tests.unit.checkpointing.many_ranks import (
    Save,
    commit,
    entries_by_folder,
    plan_by_rank_0,
    results_of,
    write_index,
)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@contextmanager
def measured(what: str) -> Iterator[None]:
    before, began = peak(), process_time()
    yield
    print(f"{what}: {process_time() - began:.2f} s, {peak() - before} MB more at the peak", flush=True)


def plan(save: Save, folder: Path) -> None:
    proposals = [save.quick_proposal_of(rank) for rank in range(save.ranks)]
    print(f"proposals: {sum(map(len, proposals)) / 1e6:.1f} MB, the largest {max(map(len, proposals)) / 1e3:.0f} kB")
    with measured("plan of rank 0"):
        plans, metadata = plan_by_rank_0(folder, proposals)
    results = [results_of(message) for message in plans]
    with measured("index of rank 0"):
        write_index(folder, metadata, results)
    size, pieces = (folder / ".metadata").stat().st_size, len(read_metadata(folder).storage_data)
    print(f"index: {size / 1e6:.1f} MB, {pieces:,} pieces")


def plan_as_torch(save: Save) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    messages = [dcp._packed(save.plan_of(rank)) for rank in range(save.ranks)]
    print(f"torch, {save.ranks} ranks: proposals {sum(map(len, messages)) / 1e6:.1f} MB")
    with measured("torch's plan of rank 0"):
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, None, True)
        planner.create_global_plan([dcp._unpacked(message) for message in messages])


def files(ranks: int, folder: Path) -> None:
    with measured("stage and commit empty files"):
        store = commit(folder, ranks)
    entries = entries_by_folder(store.folder)
    print(f"{sum(entries.values()):,} entries, at most {max(entries.values()):,} in a folder")
    print(f"manifest: {(store.folder / 'manifest.json').stat().st_size / 1e6:.1f} MB")
    with measured("read the manifest"):
        read_manifest(store.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--torch", type=int, metavar="RANKS", help="Plan as torch does, for so many ranks.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.torch:
            plan_as_torch(Save(arguments.torch, arguments.tensors, arguments.shards))
            return
        plan(Save(arguments.ranks, arguments.tensors, arguments.shards), Path(folder) / "shards")
        files(arguments.ranks, Path(folder) / "checkpoint_0")


if __name__ == "__main__":
    main()
