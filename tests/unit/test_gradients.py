"""The gradient state: accumulation windows, loaders, several gradient states in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from accelerate.errors import SettingError
from accelerate.training.accumulation import GradientState


class Plugin:
    """The part that the gradient state reads of a GradientAccumulationPlugin."""

    def __init__(self, **kwargs: object) -> None:
        self.kwargs = kwargs

    def to_kwargs(self) -> dict[str, object]:
        return dict(self.kwargs)


class Loader:
    """The part that the gradient state reads of a running loader."""

    def __init__(self, end: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end
        self.remainder = remainder


@pytest.fixture(autouse=True)
def no_newest_clock() -> Iterator[None]:
    GradientState._reset_state()
    yield
    GradientState._reset_state()


def test_every_nth_micro_batch_synchronises() -> None:
    gradient_state = GradientState.create(Plugin(num_steps=3))
    assert [gradient_state.advance() for _ in range(6)] == [False, False, True, False, False, True]


def test_the_last_batch_of_a_loader_synchronises_and_restarts_the_count() -> None:
    gradient_state, loader = GradientState.create(Plugin(num_steps=4)), Loader()
    gradient_state._add_dataloader(loader)
    assert [gradient_state.advance(), gradient_state.advance()] == [False, False]
    loader.end_of_dataloader = True
    assert gradient_state.advance()
    gradient_state._remove_dataloader(loader)
    assert [gradient_state.advance() for _ in range(4)] == [False, False, False, True]


def test_a_loader_that_must_not_end_windows_does_not() -> None:
    gradient_state, loader = GradientState.create(Plugin(num_steps=4, sync_with_dataloader=False)), Loader(end=True)
    gradient_state._add_dataloader(loader)
    assert [gradient_state.advance() for _ in range(4)] == [False, False, False, True]


def test_two_models_of_one_loop_have_windows_of_their_own() -> None:
    gradient_state = GradientState.create(Plugin(num_steps=2))
    turns = [gradient_state.advance(key) for key in ("generator", "critic", "generator", "critic")]
    assert turns == [False, False, True, True]


def test_two_clocks_do_not_disturb_each_other() -> None:
    first, second = GradientState.create(Plugin(num_steps=2)), GradientState.create(Plugin(num_steps=3))
    first.advance()
    assert second.windows == {} and first.num_steps == 2 and second.num_steps == 3


def test_the_bare_constructor_gives_the_newest_clock() -> None:
    GradientState.create(Plugin(num_steps=2))
    newest = GradientState.create(Plugin(num_steps=5))
    assert GradientState() is newest
    GradientState(Plugin(num_steps=7))
    assert newest.num_steps == 7, "new plugin arguments replace the old ones"


def test_the_innermost_running_loader_is_the_active_one() -> None:
    gradient_state, outer, inner = GradientState.create(), Loader(remainder=3), Loader(end=True, remainder=1)
    assert not gradient_state.in_dataloader and gradient_state.remainder == -1 and not gradient_state.end_of_dataloader
    gradient_state._add_dataloader(outer)
    gradient_state._add_dataloader(inner)
    assert (
        gradient_state.active_dataloader is inner and gradient_state.end_of_dataloader and gradient_state.remainder == 1
    )
    gradient_state._remove_dataloader(inner)
    assert (
        gradient_state.active_dataloader is outer
        and not gradient_state.end_of_dataloader
        and gradient_state.remainder == 3
    )


def test_a_forgotten_loader_does_not_stay_active() -> None:
    gradient_state, loader = GradientState.create(), Loader()
    gradient_state._add_dataloader(loader)
    del loader
    gc.collect()
    assert not gradient_state.in_dataloader


def test_less_than_one_step_is_refused() -> None:
    with pytest.raises(SettingError, match="gradient_accumulation_steps=0"):
        GradientState.create().num_steps = 0


def test_gradients_of_an_open_window_are_protected_wherever_the_loop_clears_them() -> None:
    gradient_state = GradientState.create(Plugin(num_steps=2))
    protected = []
    for _ in range(4):
        gradient_state.advance()
        protected.append(gradient_state.protects_gradients)  # at the top of the loop
        gradient_state.note_backward()
        protected.append(gradient_state.protects_gradients)  # at its end
    assert protected == [False, True, True, False] * 2


def test_backward_passes_are_counted_across_windows() -> None:
    gradient_state = GradientState.create(Plugin(num_steps=2))
    counts = []
    for _ in range(3):
        gradient_state.advance()
        gradient_state.note_backward()
        counts.append(gradient_state.num_backwards)
    assert counts == [1, 2, 3]


def test_who_decides_the_sync_decides_the_clearing() -> None:
    gradient_state = GradientState.create(Plugin(num_steps=2))
    gradient_state.advance()
    gradient_state._set_sync_gradients(False)
    assert gradient_state.protects_gradients
    gradient_state._set_sync_gradients(True)
    assert not gradient_state.protects_gradients
