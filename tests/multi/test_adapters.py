"""Adapters (PEFT) under FSDP: what is saved of them alone comes back, for real."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, save_fsdp_model
from tests.ranks import run_on_ranks

peft: Any = pytest.importorskip("peft", reason="make clients installs it")


def there_and_back(version: int, form: str, folder: str) -> dict[str, Any]:
    """Three updates, saved; three more; loaded."""
    options: dict[str, Any] = {"use_orig_params": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form, **options)
    run = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    base = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4)})
    base.forward = lambda x: base["b"](torch.relu(base["a"](x)))  # pyright: ignore[reportAttributeAccessIssue]
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["a"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = run.prepare(model, optimizer)

    def train() -> dict[str, Any]:
        for _ in range(3):
            run.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in run.get_state_dict(model).items()}

    saved = train()
    save_fsdp_model(plugin, run, model, folder, adapter_only=True)
    trained = train()
    load_fsdp_model(plugin, run, model, folder, adapter_only=True)
    loaded = run.get_state_dict(model)
    same = {name: bool(torch.equal(value, loaded[name])) for name, value in saved.items()}
    moved = [name for name, value in saved.items() if not torch.equal(value, trained[name])]
    return {"same": same, "moved": moved, "files": sorted(os.listdir(folder))}


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_an_adapter_that_was_saved_alone_comes_back(version: int, form: str, tmp_path: Path) -> None:
    """Under the names that PEFT gives it in files, which leave the adapter's own name out."""
    found = run_on_ranks(lambda: there_and_back(version, form, str(tmp_path)), 2)[0]
    assert len(found["moved"]) == 2 and all("lora" in name for name in found["moved"])
    assert all(found["same"].values())
    assert found["files"] == ["pytorch_model_fsdp.bin" if form == "FULL_STATE_DICT" else "pytorch_model_fsdp_0"]
