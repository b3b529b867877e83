"""Each call that reads a model's weights, by each object that stands for the model: whole values, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.errors import PreparationError
from tests.ranks import run_on_ranks
from tests.torch_needed import FSDP2_ON_CPU


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Linear(2, 1)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


#: How a program may name the model -> what is read by it.
FORMS: dict[str, Any] = {
    "itself": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "around": Around,
    "list": lambda model: nn.ModuleList([model]),
    "part": lambda model: getattr(model, "module", model)[0],
}
STRATEGIES: dict[str, Any] = {
    "ddp": None,
    "fsdp1": {"fsdp_version": 1},
    "fsdp1 original": {"fsdp_version": 1, "use_orig_params": True},
    "fsdp2": {"fsdp_version": 2},
}


def _tensors(state: Any) -> list[torch.Tensor]:
    """The values in the order of their names, which wrappers prefix."""
    return [value.detach().clone() for _, value in sorted(state.items())]


def read(strategy: str, folder: str) -> dict[str, dict[str, Any]]:
    options = STRATEGIES[strategy]
    plugin = None if options is None else FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = _model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: dict[str, dict[str, Any]] = {}
    for form, name in FORMS.items():
        named, target = name(model), f"{folder}/{form}"

        def saved(named: Any = named, target: str = target) -> dict[str, torch.Tensor]:
            accelerator.save_model(named, target)
            accelerator.wait_for_everyone()
            from safetensors.torch import load_file

            return load_file(f"{target}/model.safetensors")

        calls = {
            "get_state_dict": lambda named=named: accelerator.get_state_dict(named),
            "save_model": saved,
            "stream_weights": lambda named=named: {n: t.clone() for n, t in accelerator.stream_weights(named)},
        }
        for call, function in calls.items():
            try:
                state = function()
            except PreparationError as error:
                found.setdefault(form, {})[call] = str(error)
            else:
                inner = {n: value for n, value in state.items() if "own." not in n}
                found.setdefault(form, {})[call] = _tensors(inner)
    return found


@FSDP2_ON_CPU
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_weights_are_read_whole_by_whatever_names_the_model(tmp_path: Path, strategy: str) -> None:
    whole, part = _tensors(_model().state_dict()), _tensors(_model()[0].state_dict())
    found = run_on_ranks(read, 2, strategy, str(tmp_path))[0]
    for form, calls in found.items():
        for call, values in calls.items():
            if strategy.startswith("fsdp1") and form == "part":
                assert "Linear lie in a flat parameter of FSDP 1" in values, call
                continue
            expected = part if form == "part" else whole
            assert len(values) == len(expected), (form, call)
            assert all(map(torch.equal, values, expected)), (form, call)
