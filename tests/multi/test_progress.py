"""Progress bars of several ranks: one a host, also beside what is printed."""

from __future__ import annotations

import io

import pytest

from accelerate import Accelerator
from tests.ranks import run_on_ranks

pytest.importorskip("tqdm")


def shown(main_process_only: bool) -> str:
    from accelerate.utils import tqdm

    Accelerator(cpu=True)
    screen = io.StringIO()
    bar = tqdm(range(3), desc="epoch", file=screen, mininterval=0, main_process_only=main_process_only)
    seen = []
    for number in bar:  # the loop is the same, shown or not
        seen.append(number)
        bar.set_postfix(loss=0.5)
    assert seen == [0, 1, 2]
    bar.write("a line above the bar", file=screen)
    bar.close()
    return screen.getvalue()


def test_one_of_two_ranks_shows_a_bar() -> None:
    first, second = run_on_ranks(shown, 2, True)
    assert "epoch: 100%" in first and "3/3" in first and "loss=0.5" in first
    assert second == "a line above the bar\n"


def test_each_of_two_ranks_shows_a_bar_where_that_is_asked_for() -> None:
    assert all("epoch: 100%" in screen for screen in run_on_ranks(shown, 2, False))
