from __future__ import annotations

from typing import Any

import pytest

from accelerate.distributed.world import World
from accelerate.tracking import GeneralTracker, base, on_main_process


def test_a_class_that_lacks_attributes_is_refused_with_their_names() -> None:
    class Unfinished(GeneralTracker):
        name = "unfinished"

    with pytest.raises(NotImplementedError, match="Unfinished lacks `requires_logging_directory`, `tracker`"):
        Unfinished()


def test_attributes_set_before_the_base_is_built_count() -> None:
    class Late(GeneralTracker):
        name = "late"
        requires_logging_directory = False

        def __init__(self) -> None:
            self.tracker = object()
            super().__init__()

    assert Late().name == "late"


def test_a_property_that_is_not_readable_yet_counts() -> None:
    class NotStarted(GeneralTracker):
        name = "not-started"
        requires_logging_directory = False

        @property
        def tracker(self) -> Any:
            raise RuntimeError("start me first")

    NotStarted()


def test_a_blank_tracker_accepts_everything() -> None:
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.store_init_configuration({"lr": 1})
    blank.log({"loss": 1}, step=3, extra=True)
    blank.finish()


class Counting:
    """A tracker's method, and how often it ran."""

    def __init__(self, main_process_only: bool) -> None:
        self.main_process_only = main_process_only
        self.ran = 0

    @on_main_process
    def log(self, by: int) -> int:
        """Counts."""
        self.ran += by
        return self.ran


@pytest.mark.parametrize(
    ("rank", "main_process_only", "runs"), [(0, True, True), (1, True, False), (0, False, True), (1, False, True)]
)
def test_methods_run_on_the_main_process_unless_the_tracker_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, rank: int, main_process_only: bool, runs: bool
) -> None:
    monkeypatch.setattr(base, "current_world", lambda: World.pretend(rank=rank, size=2))
    tracker = Counting(main_process_only)
    assert tracker.log(by=2) == (2 if runs else None)
    assert tracker.ran == (2 if runs else 0)


def test_before_the_world_is_known_methods_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "current_world", lambda: None)
    assert Counting(main_process_only=True).log(1) == 1
    assert Counting.log.__doc__ == "Counts."
