from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import accelerate.logging as accelerate_logging
from accelerate.distributed.world import World
from accelerate.logging import MultiProcessAdapter, get_logger, install_rich_tracebacks
from tests.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    accelerate_logging._logged_once.clear()


def be(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
    monkeypatch.setattr(accelerate_logging, "current_world", lambda: World.pretend(rank=rank, size=size))


def test_a_line_comes_from_the_main_process_with_its_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = get_logger("a.test", "INFO")
    be(monkeypatch, 0)
    logger.info("loss %s", 0.5)
    be(monkeypatch, 1)
    logger.info("not this")
    logger.info("but %s", "this", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] loss 0.5", "[RANK 1] but this"]


def test_before_the_world_is_known_logging_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_logging, "current_world", lambda: None)
    logger = get_logger("a.test")
    with pytest.raises(RuntimeError, match=r"Accelerator\(\).*PartialState\(\)"):
        logger.info("too early")


def test_records_name_the_callers_file_and_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    be(monkeypatch, 0)
    logger = get_logger("a.test", "INFO")
    here = inspect.currentframe()
    assert here is not None
    first = here.f_lineno + 1
    logger.info("one")
    logger.log(logging.INFO, "two")
    logger.warning_once("three")
    assert [(Path(record.pathname).name, record.lineno) for record in caplog.records] == [
        ("test_logging.py", first + offset) for offset in range(3)
    ]


def test_a_warning_given_once_is_cached_by_its_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    be(monkeypatch, 0)
    logger = get_logger("a.test")
    for _ in range(2):
        logger.warning_once("careful with %s", ["a", "list"])
        logger.warning_once("careful with %s", "text")
    get_logger("another.test").warning_once("careful with %s", "text")
    assert len(caplog.records) == 3


def test_the_level_is_the_argument_else_the_environment_else_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger().level
    assert get_logger("level.untouched").logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("level.environment").logger.level == logging.DEBUG
    assert get_logger("level.argument", "error").logger.level == logging.ERROR
    assert logging.getLogger().level == root


def test_the_adapter_is_a_logger_adapter_with_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, 0)
    logger = get_logger("an.adapter")
    logger.setLevel(logging.ERROR)
    assert isinstance(logger, MultiProcessAdapter) and logger.logger.name == "an.adapter"
    assert not logger.isEnabledFor(logging.WARNING)


def test_tracebacks_are_shown_by_rich_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = MagicMock()
    monkeypatch.setitem(sys.modules, "rich", rich)
    monkeypatch.setitem(sys.modules, "rich.traceback", rich.traceback)
    install_rich_tracebacks()
    rich.traceback.install.assert_not_called()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    install_rich_tracebacks()
    rich.traceback.install.assert_called_once_with(show_locals=False)


def _log_in_order(path: str, levels: tuple[int, ...]) -> None:
    import time

    from accelerate.state import PartialState

    state = PartialState(cpu=True)
    logger = get_logger("in.order")
    logger.setLevel(levels[state.process_index])
    logger.logger.addHandler(logging.FileHandler(path))
    time.sleep(0.1 * (state.num_processes - state.process_index))  # the last rank is ready first
    logger.info("here", main_process_only=False, in_order=True)


@pytest.mark.parametrize(
    ("levels", "ranks"), [((logging.INFO,) * 3, [0, 1, 2]), ((logging.INFO, logging.ERROR, logging.INFO), [0, 2])]
)
def test_in_order_every_rank_takes_its_turn_whatever_its_level(
    tmp_path: Path, levels: tuple[int, ...], ranks: list[int]
) -> None:
    path = tmp_path / "log"
    arguments: tuple[Any, ...] = (str(path), levels)
    run_on_ranks(_log_in_order, 3, *arguments)
    assert path.read_text().splitlines() == [f"[RANK {rank}] here" for rank in ranks]
