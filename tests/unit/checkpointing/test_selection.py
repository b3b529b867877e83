"""Parts of a run: some weights, another precision, models only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpointing import Selection, read_checkpoint, write_checkpoint
from accelerate.errors import CheckpointError, SettingError


class Net(torch.nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        self.head = torch.nn.Linear(4, 1)
        self.tied = self.base
        self.register_buffer("counter", torch.tensor(5))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


def names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def save(folder: Path, select: Selection, value: float = 3.0) -> None:
    model = Net(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    write_checkpoint(folder, weights=[model.state_dict()], optimizers=[optimizer], select=select)


def test_excluded_weights_are_not_saved_and_stay_as_they_are_when_loaded(tmp_path: Path) -> None:
    save(tmp_path / "ck", Selection(exclude=("head.*", "counter")))
    assert names(tmp_path / "ck") == {"base.weight", "base.bias", "lora_A.default.weight"}
    model = Net(1.0)
    read_checkpoint(tmp_path / "ck", models=[model], model_only=True)
    assert (model.base.weight[0, 0].item(), model.head.weight[0, 0].item()) == (3.0, 1.0)


def test_a_weight_that_was_not_excluded_must_be_there(tmp_path: Path) -> None:
    save(tmp_path / "ck", Selection(exclude=("head.*",)))
    model = Net()
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        read_checkpoint(tmp_path / "ck", models=[model], model_only=True)


def test_the_precision_changes_for_floating_point_weights_only(tmp_path: Path) -> None:
    save(tmp_path / "ck", Selection(dtype="bf16"))
    saved = load_file(tmp_path / "ck" / "model.safetensors")
    assert saved["base.weight"].dtype is torch.bfloat16
    assert saved["counter"].dtype is torch.int64
    assert "tied.weight" not in saved  # one tensor still
    model = Net()
    read_checkpoint(tmp_path / "ck", models=[model], model_only=True)
    assert model.base.weight.dtype is torch.float32
    assert model.tied.weight[0, 0].item() == 3.0


def test_only_adapters(tmp_path: Path) -> None:
    save(tmp_path / "ck", Selection(adapters_only=True))
    assert names(tmp_path / "ck") == {"lora_A.default.weight"}
    model = Net(1.0)
    read_checkpoint(tmp_path / "ck", models=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=1.0)])
    assert (model.lora_A["default"].weight[0, 0].item(), model.base.weight[0, 0].item()) == (3.0, 1.0)


def test_models_only_is_recorded_and_loading_more_is_refused_in_words(tmp_path: Path) -> None:
    save(tmp_path / "ck", Selection(model_only=True))
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["manifest.json", "model.safetensors"]
    manifest = json.loads((tmp_path / "ck" / "manifest.json").read_text())
    assert manifest["details"]["selection"] == {"model_only": True}
    model = Net()
    with pytest.raises(CheckpointError, match=r"holds models only.*model_only=True"):
        read_checkpoint(tmp_path / "ck", models=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=1.0)])
    read_checkpoint(tmp_path / "ck", models=[model], model_only=True)
    assert model.base.weight[0, 0].item() == 3.0


def test_only_the_models_of_a_whole_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "ck", Selection())
    model = Net()
    other = torch.optim.AdamW(model.parameters())
    read_checkpoint(tmp_path / "ck", models=[model], optimizers=[other], model_only=True)
    assert model.base.weight[0, 0].item() == 3.0


def test_a_selection_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leaves none of the"):
        save(tmp_path / "ck", Selection(exclude=("*",)))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(SettingError, match="no such dtype"):
        Selection(dtype="float17")
