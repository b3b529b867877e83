from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate import optional
from accelerate.distributed.world import World
from accelerate.settings.labels import LoggerType
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    JSONLTracker,
    WandBTracker,
    base,
    filter_trackers,
    find_tracker,
    get_available_trackers,
    init_run_log,
    init_trackers,
    register_tracker_class,
)


class ListTracker(GeneralTracker):
    """Records what is done to it."""

    name = "list"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("made", run_name, kwargs)]

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))


class FolderTracker(ListTracker):
    name = "folder"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__(run_name, logging_dir=logging_dir)


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which services count as installed; empty at first."""
    names: set[str] = set()
    for name in LOGGER_TYPE_TO_CLASS:
        monkeypatch.setattr(optional, f"is_{name}_available", lambda name=name: name in names)
    return names


def off_main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "current_world", lambda: World.pretend(rank=1, size=2))


def test_no_tracker_is_asked_for(installed: set[str]) -> None:
    assert filter_trackers(None) == []
    assert filter_trackers([]) == []


def test_names_and_labels_mean_the_same_and_count_once(installed: set[str]) -> None:
    installed.add("wandb")
    assert filter_trackers(["wandb", LoggerType.WANDB]) == [LoggerType.WANDB]


def test_all_means_every_installed_one_and_the_objects_given(installed: set[str]) -> None:
    installed.update({"wandb", "mlflow"})
    mine = ListTracker()
    assert set(filter_trackers(["all", mine])) == {mine, LoggerType.WANDB, LoggerType.MLFLOW}
    assert set(get_available_trackers()) == {LoggerType.WANDB, LoggerType.MLFLOW}


def test_all_leaves_out_what_needs_a_folder_when_there_is_none(installed: set[str]) -> None:
    installed.update({"wandb", "tensorboard"})
    assert filter_trackers("all") == [LoggerType.WANDB]
    assert set(filter_trackers("all", "logs")) == {LoggerType.WANDB, LoggerType.TENSORBOARD}


def test_a_tracker_that_is_not_installed_is_dropped_with_a_warning_if_none_is_left(
    installed: set[str],
) -> None:
    installed.add("mlflow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert filter_trackers(["wandb", "mlflow"]) == [LoggerType.MLFLOW]
    said = r"`log_with=wandb` was passed but no supported trackers.*pip install \"accelerate\[wandb\]\""
    with pytest.warns(UserWarning, match=said):
        assert filter_trackers("wandb") == []


def test_every_service_that_is_missing_has_an_extra_of_its_name(installed: set[str]) -> None:
    project = Path(__file__).parents[3] / "pyproject.toml"
    extras = set(re.findall(r"^(\w+) = \[", project.read_text(encoding="utf-8"), re.MULTILINE))
    services = [str(label) for label in LoggerType if label != LoggerType.ALL]
    assert set(services) <= extras
    with pytest.warns(UserWarning, match=re.escape(f"accelerate[{','.join(services)}]")):
        assert filter_trackers(services) == []


def test_all_is_about_services_and_names_keep_their_order(installed: set[str]) -> None:
    installed.add("wandb")
    mine = ListTracker()
    register_tracker_class(FolderTracker)
    assert get_available_trackers() == [LoggerType.WANDB]
    assert filter_trackers("all", "logs") == [LoggerType.WANDB]
    assert filter_trackers(["folder", mine, "wandb"], "logs") == ["folder", mine, LoggerType.WANDB]


def test_an_unknown_name_is_refused_with_the_known_ones(installed: set[str]) -> None:
    with pytest.raises(
        ValueError, match=r"logging capability: wandbb .*Did you mean wandb\?.*all.*wandb.*register_tracker_class"
    ):
        filter_trackers("wandbb")
    with pytest.raises(ValueError, match="3"):
        filter_trackers([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="ListTracker"):
        filter_trackers(ListTracker)  # type: ignore[arg-type]


def test_a_tracker_that_needs_a_folder_is_refused_without_one(installed: set[str]) -> None:
    installed.add("tensorboard")
    with pytest.raises(ValueError, match=r"'tensorboard' needs a folder.*project_dir"):
        filter_trackers("tensorboard")


def test_a_registered_class_is_taken_by_its_name() -> None:
    register_tracker_class(ListTracker)
    assert filter_trackers("list") == ["list"]
    [tracker] = init_trackers(filter_trackers("list"), "my_run", init_kwargs={"list": {"color": "red"}})
    assert tracker.tracker == [("made", "my_run", {"color": "red"}), "start"]


def test_registering_over_a_name_warns() -> None:
    class OtherTracker(ListTracker):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_tracker_class(ListTracker)
    with pytest.warns(UserWarning, match=r"name 'list' is already registered \(ListTracker\).*OtherTracker"):
        register_tracker_class(OtherTracker)
    assert LOGGER_TYPE_TO_CLASS["list"] is OtherTracker


def test_a_class_that_lacks_what_the_contract_asks_for_is_refused_when_it_is_registered() -> None:
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    class Empty(GeneralTracker):
        name = ""
        requires_logging_directory = False

    class Undecided(GeneralTracker):
        name = "undecided"

    before = dict(LOGGER_TYPE_TO_CLASS)
    for wrong, what in (
        (ListTracker(), "subclass of `GeneralTracker`"),
        (dict, "subclass of `GeneralTracker`"),
        (Nameless, "non-empty `name`"),
        (Empty, "non-empty `name`"),
        (Undecided, "`requires_logging_directory` class attribute"),
    ):
        with pytest.raises(ValueError, match=what):
            register_tracker_class(wrong)  # type: ignore[arg-type]
    assert before == LOGGER_TYPE_TO_CLASS


def test_the_trackers_of_a_run_are_made_started_and_told_the_configuration(tmp_path: Path) -> None:
    register_tracker_class(FolderTracker)
    mine = ListTracker()
    config = {"lr": 0.1}
    trackers = init_trackers([mine, "folder"], "my_run", config, logging_dir=tmp_path)
    assert [tracker.name for tracker in trackers] == ["list", "folder"]
    assert mine.calls[1:] == ["start", ("config", config)]
    assert trackers[1].tracker[0] == ("made", "my_run", {"logging_dir": tmp_path})


def test_the_jsonl_log_is_there_exactly_when_there_is_a_folder(tmp_path: Path) -> None:
    assert init_run_log("my_run") == []
    [log] = init_run_log("my_run", logging_dir=tmp_path)
    assert isinstance(log, JSONLTracker)
    assert init_run_log("my_run", init_kwargs={"jsonl": {"enabled": False}}, logging_dir=tmp_path) == []


def test_off_the_main_process_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    off_main(monkeypatch)
    monkeypatch.setattr("accelerate.tracking.choose.writes_here", base.writes_here)
    mine = ListTracker()
    assert init_trackers([mine], "my_run", logging_dir=tmp_path) == []
    assert init_run_log("my_run", logging_dir=tmp_path) == []
    assert mine.calls == [("made", "", {})]
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_is_found_by_name_wrapped_or_raw() -> None:
    mine = ListTracker()
    assert find_tracker([mine], "list") is mine
    assert find_tracker([mine], "list", unwrap=True) is mine.calls


def test_an_unknown_tracker_is_refused_on_the_main_process_and_blank_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"wandb is not an available tracker.*Running: list"):
        find_tracker([ListTracker()], "wandb")
    off_main(monkeypatch)
    blank = find_tracker([], "wandb")
    assert isinstance(blank, GeneralTracker)
    assert blank.log({"loss": 1}) is None and blank.finish() is None


def test_every_built_in_tracker_is_in_the_table_under_its_label() -> None:
    assert set(LOGGER_TYPE_TO_CLASS) == {str(label) for label in LoggerType} - {"all"}
    assert LOGGER_TYPE_TO_CLASS["wandb"] is WandBTracker
