"""A run that was saved inside an update, and whose gradients can't be used: one remark, and where it begins."""

from __future__ import annotations

from typing import Any, cast

import pytest

from accelerate import PartialState
from accelerate.checkpointing import LoadedCheckpoint
from accelerate.checkpointing.manifest import Manifest
from accelerate.training import open_window
from accelerate.training.accumulation import GradientState
from tests.multi.test_main_only import Messages
from tests.ranks import run_on_ranks


class World:
    size = 2


class Window:
    """Of which the load says `lost`."""

    def __init__(self, gradient_state: GradientState, lost: str | None) -> None:
        self.gradient_state, self.lost = gradient_state, lost

    def load_state_dict(self, state: Any, count_of: Any, num_ranks: int, world: Any) -> str | None:
        step = count_of(self.gradient_state.step)
        if self.lost is None and step is not None:
            self.gradient_state.step = step
            return None
        return self.lost or "no whole number"


def gone_on(before: dict[str, Any], had_window: bool, lost: str | None, steps: int) -> tuple[int, list[str]]:
    PartialState(cpu=True)
    gradient_state, messages = GradientState(), Messages()
    gradient_state.num_steps = steps
    manifest = Manifest({}, details={"pace": {"ranks": 2, "steps": 4, "samples": [4], **before}})
    loaded = LoadedCheckpoint("ck", 6, manifest, had_open_window=had_window)
    loader = type("Loader", (), {"total_batch_size": 4})()
    window = cast(Any, Window(gradient_state, lost))
    open_window.restore_accumulation(
        loaded, cast(Any, World()), [loader], gradient_state, window, keep_global_batch=False
    )
    return gradient_state.step, messages.about("micro-batches are lost")


@pytest.mark.parametrize(
    ("before", "had_window", "lost", "steps", "step", "num_remarks"),
    [
        ({}, False, None, 4, 6, 0),  # the program that saved keeps no gradients
        ({}, True, None, 4, 6, 0),
        ({}, True, "alone", 4, 4, 1),
        ({"ranks": 4, "samples": [8]}, True, None, 4, 4, 1),  # half the samples per update
        ({"ranks": 4, "steps": 5}, True, "pieces", 4, 4, 1),
        ({"steps": 5}, False, None, 4, 4, 1),
        ({"ranks": 4, "samples": [8]}, True, None, 8, 12, 0),  # 2 of 4 micro-batches are 4 of 8
        ({"ranks": 1, "samples": [2]}, True, None, 2, 3, 0),  # and 1 of 2
        ({"ranks": 1, "steps": 5, "samples": [4]}, True, None, 5, 6, 0),
        ({"ranks": 4, "steps": 4, "samples": [3]}, True, None, 3, 3, 1),  # and 1.5 of 3
    ],
)
def test_the_window_begins_whole_where_its_gradients_are_lost(
    before: dict[str, Any], had_window: bool, lost: str | None, steps: int, step: int, num_remarks: int
) -> None:
    ((found, remarks),) = run_on_ranks(gone_on, 1, before, had_window, lost, steps)
    assert (found, len(remarks)) == (step, num_remarks)
