from __future__ import annotations

import pytest

from accelerate.distributed import world
from accelerate.distributed.world import World
from accelerate.progress import tqdm

pytest.importorskip("tqdm")


@pytest.mark.parametrize(("rank", "main_process_only", "shown"), [(0, True, True), (1, True, False), (1, False, True)])
def test_the_bar_is_shown_once_per_host(
    monkeypatch: pytest.MonkeyPatch, rank: int, main_process_only: bool, shown: bool
) -> None:
    monkeypatch.setattr(world, "current_world", lambda: World.pretend(rank=rank, size=2))
    bar = tqdm(range(3), main_process_only=main_process_only)
    assert bar.disable is not shown
    assert list(bar) == [0, 1, 2]


def test_without_a_world_the_bar_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "current_world", lambda: None)
    assert not tqdm(iterable=range(3), desc="x").disable


def test_a_flag_in_the_place_of_the_iterable_is_refused() -> None:
    with pytest.raises(ValueError, match="main_process_only=True"):
        tqdm(True, range(3))
