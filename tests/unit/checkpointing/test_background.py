"""Saving in the background: what is written is what was there, one save at a time, and no failure is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing import Background, EncodingError, read_checkpoint, write_checkpoint
from accelerate.checkpointing import items as items_module
from accelerate.checkpointing.store import StagingDirectory
from accelerate.errors import CheckpointError
from accelerate.settings.training import ProjectOptions
from tests.fresh import run_fresh


class Keeper:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def tied() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def run_of(model: torch.nn.Module) -> dict[str, Any]:
    """Every kind of state."""
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {
        "weights": [model.state_dict(), {"t": torch.ones(3, 3).t(), "empty": torch.empty(0), "n": torch.tensor(3)}],
        "optimizers": [optimizer],
        "schedulers": [torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        "dataloaders": [Keeper({"epoch": 1, "own": {"rank": 0}})],
        "custom_objects": [Keeper({"a": torch.arange(5), "b": (1, 2.5)}), Keeper([torch.ones(2, dtype=torch.cfloat)])],
        "scaler": torch.amp.GradScaler("cpu"),
        "step": 4,
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.finish()
    made.failure = None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves in the background stop before their first file until the event is set."""
    released = threading.Event()
    create = StagingDirectory.create

    def wait_then_create(self: StagingDirectory, name: str, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert released.wait(20)
        return create(self, name, **options)

    monkeypatch.setattr(StagingDirectory, "create", wait_then_create)
    yield released
    released.set()


@pytest.mark.parametrize("checkpoint_format", ["safe", "classic"])
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_the_files_are_the_same_byte_for_byte(
    checkpoint_format: str, safe_serialization: bool, background: Background, tmp_path: Path
) -> None:
    state = run_of(tied())
    options: dict[str, Any] = {
        "project": ProjectOptions(checkpoint_format=checkpoint_format),
        "safe_serialization": safe_serialization,
    }
    write_checkpoint(tmp_path / "now", **state, **options)
    write_checkpoint(tmp_path / "later", **state, **options, background=background, asynchronous=True)
    background.wait()
    assert contents(tmp_path / "now") == contents(tmp_path / "later")


def test_what_is_written_is_what_was_there_when_save_was_called(
    background: Background, held: threading.Event, tmp_path: Path
) -> None:
    model, keeper = tied(), Keeper({"t": torch.zeros(3), "list": [1]})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_checkpoint(
        tmp_path / "ck", weights=[model.state_dict()], custom_objects=[keeper], background=background, asynchronous=True
    )
    assert background.is_running
    assert not (tmp_path / "ck").exists()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    keeper.state["t"].fill_(7)
    keeper.state["list"].append(2)
    held.set()
    background.wait()
    loaded, kept = tied(), Keeper()
    read_checkpoint(tmp_path / "ck", models=[loaded], custom_objects=[kept])
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    assert kept.state["t"].tolist() == [0, 0, 0]
    assert kept.state["list"] == [1]
    assert loaded[0].weight is loaded[1].weight


def test_one_save_at_a_time_and_memory_is_used_again(background: Background, tmp_path: Path) -> None:
    project = ProjectOptions(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    places: set[int] = set()
    for step in range(6):
        weights = [{"w": torch.full((1000,), float(step))}]
        write_checkpoint(project=project, weights=weights, step=step, background=background, asynchronous=True)
        places.add(background.memory._plain.data_ptr())
    background.wait()
    assert len(places) == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_5"]
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(1000))
    assert read_checkpoint(project=project, models=[model]).step == 5
    assert model.w[0] == 5


def test_a_synchronous_save_waits_for_the_one_before(
    background: Background, held: threading.Event, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "a", weights=[{"w": torch.ones(1)}], background=background, asynchronous=True)
    threading.Timer(0.2, held.set).start()
    write_checkpoint(tmp_path / "b", weights=[{"w": torch.ones(1)}], background=background)
    assert (tmp_path / "a" / "manifest.json").exists()
    assert not background.is_running


def test_a_failure_is_raised_once_by_the_next_save_and_leaves_nothing(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(items_module, "write_weights", full)
    write_checkpoint(tmp_path / "bad", weights=[{"w": torch.ones(1)}], background=background, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"in the background failed: .*No space left"):
        write_checkpoint(tmp_path / "next", weights=[{"w": torch.ones(1)}], background=background)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path / "next", weights=[{"w": torch.ones(1)}], background=background)


@pytest.mark.parametrize(
    ("objects", "error"),
    [
        ({"custom_objects": [Keeper({"f": print})]}, EncodingError),
        ({"weights": [{"w": torch.ones(1, device="meta")}]}, CheckpointError),
        ({"weights": [{"w": "text"}]}, CheckpointError),
        ({"weights": [{"w": torch.ones(2, 2).to_sparse()}]}, CheckpointError),
        ({"pre_hooks": [lambda *_: 1 / 0]}, ZeroDivisionError),
    ],
)
def test_what_cannot_be_saved_is_raised_at_once(
    objects: dict[str, Any], error: type[Exception], background: Background, tmp_path: Path
) -> None:
    with pytest.raises(error):
        write_checkpoint(tmp_path / "ck", **objects, background=background, asynchronous=True)
    assert background.failure is None
    assert not background.is_running
    assert list(tmp_path.iterdir()) == []


def test_hooks_and_strategies_take_part(background: Background, tmp_path: Path) -> None:
    threads: list[str] = []

    def hook(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "from_hook").write_text("hook")
        weights.pop()

    def write_strategy_state(staging: StagingDirectory) -> Callable[[], None]:
        def later() -> None:
            threads.append(threading.current_thread().name)
            with staging.create("from_strategy") as file:
                file.write(b"strategy")

        return later

    write_checkpoint(
        tmp_path / "ck",
        weights=[{"w": torch.ones(1)}],
        pre_hooks=[hook],
        write_strategy_state=write_strategy_state,
        background=background,
        asynchronous=True,
    )
    background.wait()
    assert threads == ["checkpoint"]
    assert set(contents(tmp_path / "ck")) == {"from_hook", "from_strategy", "random_states_0.json"}


SCRIPT = """
    import sys, torch
    from pathlib import Path
    from accelerate import Accelerator
    from accelerate.checkpointing import items

    folder, case = Path(sys.argv[1]), sys.argv[2]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(256, 256))
    if case.startswith("fails"):
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        items.write_weights = full
    accelerator.save_state(folder / "ck", asynchronous=True)
    if case == "fails at the next step":
        accelerator._background.finish()
        accelerator.backward(model(torch.ones(1, 256)).sum())
    if case == "fails at the end":
        accelerator.end_training()
    print("last line")
"""


def run_script(folder: Path, case: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return run_fresh(textwrap.dedent(SCRIPT), str(folder), case, environment=environment)


def test_a_program_that_ends_at_once_still_commits(tmp_path: Path) -> None:
    done = run_script(tmp_path, "works")
    assert (done.returncode, done.stdout) == (0, "last line\n"), done.stderr
    assert (tmp_path / "ck" / "manifest.json").exists()


@pytest.mark.parametrize("case", ["fails at the next step", "fails at the end", "fails after the last line"])
def test_a_failure_ends_the_program_with_an_error(case: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, case)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert ("last line" in done.stdout) == (case == "fails after the last line")
    assert list(tmp_path.iterdir()) == []
