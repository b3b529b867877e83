"""The accumulation clock: windows, loaders, several clocks in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from accelerate.errors import SettingError
from accelerate.gradients import GradientState


class Plugin:
    """What the clock asks of a GradientAccumulationPlugin."""

    def __init__(self, **kwargs: object) -> None:
        self.kwargs = kwargs

    def to_kwargs(self) -> dict[str, object]:
        return dict(self.kwargs)


class Loader:
    """What the clock reads from a running loader."""

    def __init__(self, end: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end
        self.remainder = remainder


@pytest.fixture(autouse=True)
def no_newest_clock() -> Iterator[None]:
    GradientState._reset_state()
    yield
    GradientState._reset_state()


def test_every_nth_micro_batch_synchronises() -> None:
    clock = GradientState.create(Plugin(num_steps=3))
    assert [clock.advance() for _ in range(6)] == [False, False, True, False, False, True]


def test_the_last_batch_of_a_loader_synchronises_and_restarts_the_count() -> None:
    clock, loader = GradientState.create(Plugin(num_steps=4)), Loader()
    clock._add_dataloader(loader)
    assert [clock.advance(), clock.advance()] == [False, False]
    loader.end_of_dataloader = True
    assert clock.advance()
    clock._remove_dataloader(loader)
    assert [clock.advance() for _ in range(4)] == [False, False, False, True]


def test_a_loader_that_must_not_end_windows_does_not() -> None:
    clock, loader = GradientState.create(Plugin(num_steps=4, sync_with_dataloader=False)), Loader(end=True)
    clock._add_dataloader(loader)
    assert [clock.advance() for _ in range(4)] == [False, False, False, True]


def test_two_models_of_one_loop_have_windows_of_their_own() -> None:
    clock = GradientState.create(Plugin(num_steps=2))
    turns = [clock.advance(key) for key in ("generator", "critic", "generator", "critic")]
    assert turns == [False, False, True, True]


def test_two_clocks_do_not_disturb_each_other() -> None:
    first, second = GradientState.create(Plugin(num_steps=2)), GradientState.create(Plugin(num_steps=3))
    first.advance()
    assert second.count_of(()) == 0 and first.num_steps == 2 and second.num_steps == 3


def test_the_bare_constructor_gives_the_newest_clock() -> None:
    GradientState.create(Plugin(num_steps=2))
    newest = GradientState.create(Plugin(num_steps=5))
    assert GradientState() is newest
    GradientState(Plugin(num_steps=7))
    assert newest.num_steps == 7, "new plugin arguments replace the old ones"


def test_the_innermost_running_loader_is_the_active_one() -> None:
    clock, outer, inner = GradientState.create(), Loader(remainder=3), Loader(end=True, remainder=1)
    assert not clock.in_dataloader and clock.remainder == -1 and not clock.end_of_dataloader
    clock._add_dataloader(outer)
    clock._add_dataloader(inner)
    assert clock.active_dataloader is inner and clock.end_of_dataloader and clock.remainder == 1
    clock._remove_dataloader(inner)
    assert clock.active_dataloader is outer and not clock.end_of_dataloader and clock.remainder == 3


def test_a_forgotten_loader_does_not_stay_active() -> None:
    clock, loader = GradientState.create(), Loader()
    clock._add_dataloader(loader)
    del loader
    gc.collect()
    assert not clock.in_dataloader


def test_less_than_one_step_is_refused() -> None:
    with pytest.raises(SettingError, match="gradient_accumulation_steps=0"):
        GradientState.create().num_steps = 0


def test_gradients_of_an_open_window_are_protected_wherever_the_loop_clears_them() -> None:
    clock = GradientState.create(Plugin(num_steps=2))
    protected = []
    for _ in range(4):
        clock.advance()
        protected.append(clock.protects_gradients)  # at the top of the loop
        clock.note_backward()
        protected.append(clock.protects_gradients)  # at its end
    assert protected == [False, True, True, False] * 2


def test_who_decides_the_sync_decides_the_clearing() -> None:
    clock = GradientState.create(Plugin(num_steps=2))
    clock.advance()
    clock._set_sync_gradients(False)
    assert clock.protects_gradients
    clock._set_sync_gradients(True)
    assert not clock.protects_gradients
