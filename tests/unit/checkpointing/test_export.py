"""Folders that other libraries load: the layouts of transformers and of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpointing import Selection, export_model
from accelerate.errors import CheckpointError


class Config:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


class Net(torch.nn.Module):
    config = Config(model_type="net", dtype=torch.bfloat16, layers={3, 1})
    generation_config = Config(max_length=7)

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4)
        self.head.weight = self.body.weight


class Adapted(torch.nn.Module):
    """A model as PEFT wraps it, as far as names and configurations go."""

    def __init__(self) -> None:
        super().__init__()
        self.peft_config = {"default": Config(peft_type="LORA", r=2, inference_mode=False, target_modules={"q", "k"})}
        self.active_adapter = "default"
        layer = torch.nn.Linear(4, 4)
        layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        layer.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 1)})
        self.base_model = torch.nn.ModuleDict({"q": layer})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_configuration_and_weights_lie_side_by_side(tmp_path: Path) -> None:
    model = Net()
    export_model(model, model.state_dict(), tmp_path)
    assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "layers": [1, 3],
        "model_type": "net",
    }
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == {"body.weight", "body.bias", "head.bias"}
    assert torch.equal(weights["body.weight"], model.body.weight)


def test_a_second_export_leaves_no_stale_shards_and_foreign_files_stay(tmp_path: Path) -> None:
    model = Net()
    (tmp_path / "tokenizer.json").write_text("{}")
    export_model(model, model.state_dict(), tmp_path, max_shard_size=70)
    assert "model.safetensors.index.json" in names(tmp_path)
    export_model(model, model.state_dict(), tmp_path, select=Selection(dtype="float16"))
    assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert load_file(tmp_path / "model.safetensors")["body.weight"].dtype is torch.float16


def test_a_model_that_writes_itself_is_asked_to(tmp_path: Path) -> None:
    class Own(Net):
        def save_pretrained(self, folder: str, *, state_dict: dict[str, Any], max_shard_size: Any) -> None:
            (Path(folder) / "own.txt").write_text(" ".join(sorted(state_dict)))

    model = Own()
    export_model(model, model.state_dict(), tmp_path, select=Selection(exclude=("head.*",)))
    assert (tmp_path / "own.txt").read_text() == "body.bias body.weight"


def test_adapters_have_the_names_that_peft_reads(tmp_path: Path) -> None:
    model = Adapted()
    export_model(model, model.state_dict(), tmp_path, select=Selection(adapters_only=True))
    assert names(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == {
        "base_model.q.lora_A.weight",
        "base_model.q.weight",
        "base_model.q.bias",
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["inference_mode"], config["target_modules"]) == (True, ["k", "q"])


@pytest.mark.parametrize(
    ("model", "select", "reason"),
    [
        (torch.nn.Linear(1, 1), Selection(), "has no `config`"),
        (Net(), Selection(adapters_only=True), "no `peft_config`"),
    ],
)
def test_what_has_no_such_layout_is_refused(
    model: torch.nn.Module, select: Selection, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        export_model(model, model.state_dict(), tmp_path, select=select)
    assert list(tmp_path.iterdir()) == []
