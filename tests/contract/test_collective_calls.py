"""The page "Which calls are collective": complete, and true for what one rank may call alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from tests.ranks import run_on_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "collective_calls.md"
WORDS = ("every rank", "alike", "any rank", "any rank; ZeRO-3: every rank")


def table() -> dict[str, list[str]]:
    """By method what the page says of it: replicated, sharded, pipeline, DeepSpeed."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_page_has_every_public_method() -> None:
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    methods = {name for name in public if not isinstance(getattr(Accelerator, name), property)}
    rows = table()
    assert set(rows) == methods
    assert all(len(cells) == 4 and set(cells) <= set(WORDS) for cells in rows.values())
    assert list(rows) == sorted(rows, key=str.lower)


class Quiet(GeneralTracker):
    name = "quiet"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None: ...


class Count:
    def __init__(self) -> None:
        self.count = 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Configured(nn.Linear):
    config = {"size": 1}


def used(context: Any) -> None:
    with context:
        pass


def calls(accelerator: Accelerator, model: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """How each method that the page calls "any rank" is called, in the order of the run."""
    return {
        "register_for_checkpointing": lambda: accelerator.register_for_checkpointing(Count()),
        "register_save_state_pre_hook": lambda: accelerator.register_save_state_pre_hook(lambda *_: None),
        "register_load_state_pre_hook": lambda: accelerator.register_load_state_pre_hook(lambda *_: None),
        "save_state": lambda: accelerator.save_state(f"{folder}/state"),
        "save_model": lambda: accelerator.save_model(model, f"{folder}/model"),
        "export_model": lambda: accelerator.export_model(model, f"{folder}/exported"),
        "get_state_dict": lambda: accelerator.save(accelerator.get_state_dict(model), f"{folder}/state.bin"),
        "save": lambda: accelerator.save({"number": 1}, f"{folder}/number.bin"),
        "fingerprint": accelerator.fingerprint,
        "unwrap_model": lambda: torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/own.bin"),
        "wait_for_checkpoint": accelerator.wait_for_checkpoint,
        "init_trackers": lambda: accelerator.init_trackers("project", {"lr": 0.1}),
        "log": lambda: accelerator.log({"loss": 1.0}, step=1),
        "get_tracker": lambda: accelerator.get_tracker("quiet"),
        "print": lambda: accelerator.print("by the main process"),
        "autocast": lambda: used(accelerator.autocast()),
        "on_main_process": lambda: accelerator.on_main_process(lambda: None)(),
        "on_local_main_process": lambda: accelerator.on_local_main_process(lambda: None)(),
        "on_last_process": lambda: accelerator.on_last_process(lambda: None)(),
        "on_process": lambda: accelerator.on_process(lambda: None, 0)(),
        "on_local_process": lambda: accelerator.on_local_process(lambda: None, 0)(),
        "split_between_processes": lambda: used(accelerator.split_between_processes([1, 2])),
        "verify_device_map": lambda: accelerator.verify_device_map(model),
        "set_trigger": accelerator.set_trigger,
        "free_memory": accelerator.free_memory,
        "clear": accelerator.clear,
        "end_training": lambda: None,  # the last of all, below
    }


def train(folder: str | None) -> tuple[list[float], list[str]]:
    accelerator = Accelerator(cpu=True, log_with=Quiet())
    set_seed(3)
    model = Configured(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader([torch.tensor([float(i)]) for i in range(120)], batch_size=1, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    made = {} if folder is None or not accelerator.is_main_process else calls(accelerator, model, folder)
    pending = list(made.items())
    losses: list[float] = []
    for rows in loader:
        loss = model(rows).square().mean() + 0 * torch.rand(1).sum()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if pending:
            pending.pop(0)[1]()
            for prepared in (model, optimizer, schedule, loader):
                prepared.state_dict()
    assert not pending
    accelerator.wait_for_everyone()
    if made:
        accelerator.end_training()
    return losses, list(made)


def test_what_any_rank_may_call_works_on_the_main_process_alone_and_training_goes_on(tmp_path: Path) -> None:
    plain = run_on_ranks(train, 2, None)
    alone = run_on_ranks(train, 2, str(tmp_path))
    assert [losses for losses, _ in alone] == [losses for losses, _ in plain]
    assert set(alone[0][1]) == {name for name, cells in table().items() if cells[0] == "any rank"}
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"state", "model", "exported", "state.bin", "number.bin", "own.bin"}


@pytest.mark.parametrize("column", [1, 2])
def test_where_state_lies_over_the_ranks_it_is_saved_by_all(column: int) -> None:
    rows = table()
    assert {rows[name][column] for name in ("save_state", "save_model", "get_state_dict", "export_model")} == {
        "every rank"
    }
