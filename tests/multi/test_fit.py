"""On every layout and on all ranks alike: a checkpoint is loaded whole or not at all, and optimizers go by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.errors import CheckpointError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks

LAYOUTS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp2-sharded": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp2-full": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "fsdp1-sharded": {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT", "use_orig_params": True},
    "fsdp1-full": {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT", "use_orig_params": True},
}


class Net(nn.Module):
    a: nn.Linear
    b: nn.Linear
    c: nn.Linear

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(inputs)).relu())


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    def __init__(
        self,
        layout: str,
        order: str = "abc",
        *,
        frozen: str = "",
        objects: int = 1,
        num_groups: int = 1,
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        options = LAYOUTS[layout]
        plugin = None if options is None else FullyShardedDataParallelPlugin(**options)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(len(order) + ord(order[0]))
        model = Net(order)
        trained = [p for name, p in model.named_parameters() if not (frozen and name.startswith(frozen))]
        groups = [{"params": trained[number::num_groups], "lr": 0.1 + number} for number in range(num_groups)]
        self.inner = kind(groups, lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, self.inner)
        self.counters = [Counter() for _ in range(objects)]
        self.accelerator.register_for_checkpointing(*self.counters)

    def train(self) -> None:
        generator = torch.Generator().manual_seed(3 + self.accelerator.process_index)
        for _ in range(2):
            loss = self.model(torch.randn(3, 4, generator=generator)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.counters[0].count += 2

    def local(self) -> list[Any]:
        """What this rank has of everything that a load changes, copied."""
        tensors: list[Any] = [*self.model.parameters()]
        tensors += [value for state in self.inner.state.values() for value in state.values()]
        local = [(one.to_local() if hasattr(one, "to_local") else one).detach().tolist() for one in tensors]
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in self.inner.param_groups
        ]
        return [local, settings, torch.get_rng_state().tolist(), [one.count for one in self.counters]]

    def weights(self) -> dict[str, list[float]]:
        return {name: value.tolist() for name, value in sorted(self.accelerator.get_state_dict(self.model).items())}


def _refusal(run: Run, folder: Path) -> tuple[str, bool]:
    before = run.local()
    with pytest.raises(CheckpointError) as refused:
        run.accelerator.load_state(folder)
    return str(refused.value), run.local() == before


def _cases(layout: str, folder: Path) -> tuple[list[tuple[str, bool]], bool]:
    saved = Run(layout)
    saved.train()
    saved.accelerator.save_state(folder)
    rank = saved.accelerator.process_index
    refusals = [
        _refusal(Run(layout, "abcd"), folder),
        _refusal(
            Run(layout, frozen="" if layout.startswith("fsdp1") else "c", objects=1 + layout.startswith("fsdp1")),
            folder,
        ),
        _refusal(Run(layout, objects=1 + rank), folder),  # on rank 1 alone
        _refusal(Run(layout, num_groups=2), folder),
        _refusal(Run(layout, kind=torch.optim.SGD), folder),
    ]
    other = Run(layout, "cab")
    other.accelerator.load_state(folder)
    for run in (saved, other):
        run.train()
    return refusals, saved.weights() == other.weights()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_refuse_alike_and_unchanged_and_another_order_of_modules_trains_on_equally(
    layout: str, tmp_path: Path
) -> None:
    for refusals, is_equal in run_on_ranks(_cases, 2, layout, tmp_path / "ck", timeout_seconds=180):
        assert [unchanged for _, unchanged in refusals] == [True] * 5
        assert "d." in refusals[0][0] and "registered" in refusals[2][0]
        assert ("registered" if layout.startswith("fsdp1") else "c.weight") in refusals[1][0]
        assert "other parameter groups" in refusals[3][0] and "another kind of optimizer" in refusals[4][0]
        assert is_equal


def _before_prepare(folder: Path) -> list[str]:
    Run("ddp", objects=0).accelerator.save_state(folder)
    said = []
    for load in ("load_state", "resume"):
        with pytest.raises(CheckpointError) as refused:
            getattr(Accelerator(cpu=True), load)(folder)
        said.append(str(refused.value))
    return said


def test_all_ranks_refuse_a_load_before_prepare(tmp_path: Path) -> None:
    answers = run_on_ranks(_before_prepare, 2, tmp_path / "ck")
    assert all("nothing is prepared or registered" in text for said in answers for text in said)
