"""On two ranks and in every layout: an optimizer of parameters of no prepared model is named, others aren't."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from tests.ranks import run_on_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": {"fsdp_plugin": {"fsdp_version": 2}},
    "FSDP1": {"fsdp_plugin": {"fsdp_version": 1, "use_orig_params": True}},
    "FSDP1, flat": {"fsdp_plugin": {"fsdp_version": 1, "use_orig_params": False}},
}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @property
    def remarks(self) -> list[str]:
        return [text for text in self.texts if "trains no parameter" in text or "also trains" in text]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(rows).relu())


def remarks(layout: dict[str, Any], *, prepares_model: bool, others: int = 0) -> list[str]:
    AcceleratorState._reset_state(True)
    kept = Kept()
    logging.getLogger("accelerate").addHandler(kept)
    options = dict(layout)
    if "fsdp_plugin" in options:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", **options["fsdp_plugin"])
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model: Any = Block()
    temperatures = [nn.Parameter(torch.ones(())) for _ in range(others)]
    optimizer: Any = torch.optim.SGD([*model.parameters(), *temperatures], lr=0.1)
    if prepares_model:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).sum() * sum(temperatures, torch.ones(())))
        optimizer.step()
        optimizer.zero_grad()
    return kept.remarks


def remarks_on_stages() -> list[str]:
    """Two optimizers, each with parameters of one stage only."""
    AcceleratorState._reset_state(True)
    kept = Kept()
    logging.getLogger("accelerate").addHandler(kept)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers: Any = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    accelerator.pipeline_step(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.functional.mse_loss)
    for optimizer in optimizers:
        optimizer.step()
    return kept.remarks


def all_layouts() -> dict[str, list[str]]:
    found = {name: remarks(layout, prepares_model=True) for name, layout in LAYOUTS.items()}
    some = remarks({}, prepares_model=True, others=2)
    found["stages"] = remarks_on_stages()
    return {**found, "alone": remarks({}, prepares_model=False), "some": some}


def test_only_the_optimizer_of_no_prepared_model_is_named_in_every_layout() -> None:
    main, other = run_on_ranks(all_layouts, 2, timeout_seconds=180)
    alone, some = main.pop("alone"), main.pop("some")
    assert len(some) == 1 and "SGD also trains 2 parameters of no prepared model" in some[0]
    assert len(alone) == 1 and "not averaged over processes" in alone[0]
    assert {name: texts for name, texts in main.items() if texts} == {}
    assert not any(other.values())
