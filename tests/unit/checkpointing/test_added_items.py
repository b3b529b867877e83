"""Items that a rank adds to a committed checkpoint: a kill or a removal meanwhile never leaves it torn."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from accelerate.checkpointing import items as added_items_module
from accelerate.checkpointing import write_checkpoint
from accelerate.checkpointing.agreement import Ranks
from accelerate.checkpointing.codec import encode
from accelerate.checkpointing.items import ABSENT_RANKS, AddedItems, state_item
from accelerate.checkpointing.layout import RANDOM, read_state
from accelerate.checkpointing.manifest import Manifest, read_manifest
from accelerate.checkpointing.store import CheckpointStore, file_names
from accelerate.errors import CheckpointError

OWN = f"{RANDOM.name(1)}.json"


class Committed:
    """The main process has committed what lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder)
        self._identity = manifest_of(folder).identity

    def wait_for_outcome(self) -> str:
        return self._identity

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        yield


class RankOne:
    """Where the second of two ranks is."""

    rank = local_rank = 1
    size = local_size = 2
    members = None

    @property
    def holders(self) -> RankOne:
        return self


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def save_alone(folder: Path, step: int) -> None:
    weights = [{"w": torch.full((4096,), float(step))}]
    write_checkpoint(folder, weights=weights, step=step, details={ABSENT_RANKS: [1]})


def addition_to(folder: Path, step: int) -> AddedItems:
    addition = AddedItems(cast(Any, Committed(folder)), Ranks(cast(Any, RankOne()), alone=True))
    addition.items.append(state_item(RANDOM.name(1), encode({"step": step}, "streams"), beside=False))
    (addition.staging.folder / "hook" / "of").mkdir(parents=True)
    (addition.staging.folder / "hook" / "of" / "rank_1.bin").write_bytes(bytes([step % 256]) * 10_000)
    return addition


def check(folder: Path) -> int:
    """The step of the whole checkpoint in ``folder``; the added item, if it is listed, is of the same step."""
    store = CheckpointStore(folder)
    store.require()
    assert store.problem() is None
    manifest = manifest_of(folder)
    is_listed = OWN in manifest.files
    assert is_listed == ("hook/of/rank_1.bin" in manifest.files) == (ABSENT_RANKS not in manifest.details)
    if is_listed:
        assert read_state(folder, RANDOM.name(1)) == {"step": manifest.step}
        assert (folder / "hook" / "of" / "rank_1.bin").read_bytes()[0] == manifest.step % 256
    return manifest.step


def test_an_added_item_is_listed_and_its_rank_is_no_longer_absent(tmp_path: Path) -> None:
    save_alone(tmp_path / "ck", 3)
    addition_to(tmp_path / "ck", 3).add()
    assert check(tmp_path / "ck") == 3 and OWN in manifest_of(tmp_path / "ck").files


def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save_alone(folder, 0)
    chance = random.Random(7)
    for _ in range(12):
        first = check(folder) + 1
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                for step in count(first):
                    save_alone(folder, step)
                    addition_to(folder, step).add()
            os._exit(1)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # it has begun
            with suppress(OSError, CheckpointError):
                if (found := read_manifest(folder)) is not None and found.step >= first:
                    break
        time.sleep(chance.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it ended by itself"
        assert check(folder) >= first
    save_alone(folder, 10**6)
    assert check(folder) == 10**6
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_that_was_removed_or_replaced_gets_no_items(tmp_path: Path, replaced: bool) -> None:
    save_alone(tmp_path / "ck", 1)
    addition = addition_to(tmp_path / "ck", 1)
    shutil.rmtree(tmp_path / "ck")
    if replaced:
        save_alone(tmp_path / "ck", 2)
    addition.add()
    assert check(tmp_path / "ck") == 2 if replaced else not (tmp_path / "ck").exists()


def test_a_checkpoint_that_is_removed_while_items_are_added_stays_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_alone(tmp_path / "ck", 1)
    addition = addition_to(tmp_path / "ck", 1)

    def removed_meanwhile(folder: Path) -> list[str]:
        shutil.rmtree(tmp_path / "ck")
        return file_names(folder)

    monkeypatch.setattr(added_items_module, "file_names", removed_meanwhile)
    addition.add()
    assert not (tmp_path / "ck").exists()
