from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.big_models import load
from accelerate.big_models import load as sources
from accelerate.big_models.load import (
    CheckpointMismatch,
    find_files,
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_state_dict,
)
from accelerate.big_models.offload import offload_state_dict
from accelerate.errors import CheckpointError, CheckpointNotFound, SettingError


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def saved(path: Path, model: nn.Module | None = None, **metadata: str) -> Path:
    state = (model or net(1)).state_dict()
    save_file({name: each.contiguous() for name, each in state.items()}, path, metadata or {"format": "pt"})
    return path


def equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


# ---------------------------------------------------------------------------------------------- finding files


def test_a_folder_prefers_what_holds_no_code(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert find_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    saved(tmp_path / "model.safetensors")
    assert find_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_single_index_or_file_of_any_name_is_found(tmp_path: Path) -> None:
    saved(tmp_path / "shard.safetensors")
    assert find_files(tmp_path) == [tmp_path / "shard.safetensors"]
    (tmp_path / "some.index.json").write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    assert find_files(tmp_path) == find_files(tmp_path / "some.index.json") == [tmp_path / "shard.safetensors"]
    (tmp_path / "other.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"several checkpoints: other\.index\.json, some\.index\.json"):
        find_files(tmp_path)


def test_nothing_to_find_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        find_files(tmp_path)
    with pytest.raises(CheckpointNotFound, match="no such file"):
        find_files(tmp_path / "nowhere")
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not an index of weights"):
        find_files(tmp_path)


# --------------------------------------------------------------------------------------------------- one file


def test_a_state_dict_lies_where_the_map_says(tmp_path: Path) -> None:
    state = load_state_dict(saved(tmp_path / "model.safetensors"), {"": "cpu", "2": "meta"})
    assert state["0.weight"].device.type == "cpu" and state["2.bias"].is_meta
    torch.save(net(1).state_dict(), tmp_path / "model.bin")
    plain = load_state_dict(tmp_path / "model.bin")
    assert torch.equal(plain["0.weight"], net(1)[0].weight)


def test_a_loaded_state_dict_outlives_its_file(tmp_path: Path) -> None:
    state = load_state_dict(saved(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(state["0.weight"], net(1)[0].weight)


def test_other_frameworks_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="written for 'tf'"):
        load_state_dict(saved(tmp_path / "model.safetensors", format="tf"))


def test_a_pickle_that_could_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.nn.Linear}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="could run code"):
        load_state_dict(tmp_path / "model.bin")


# ------------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("empty", [True, False])
def test_a_model_gets_the_weights(tmp_path: Path, device_map: Any, empty: bool) -> None:
    model = net().to("meta") if empty else net()
    load_checkpoint_in_model(model, saved(tmp_path / "model.safetensors"), device_map)
    assert equal(model, net(1))
    assert all(isinstance(each, nn.Parameter) and each.requires_grad for each in model.parameters())


def test_weights_are_copied_into_a_model_that_has_some(tmp_path: Path) -> None:
    model = net()
    weight = model[0].weight
    load_checkpoint_in_model(model, saved(tmp_path / "model.safetensors"))
    assert model[0].weight is weight, "an optimizer that holds it still trains it"


def test_a_checkpoint_of_another_model_is_refused_untouched(tmp_path: Path) -> None:
    model, other = net(), nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"0\.weight is \(5, 3\) there and \(4, 3\) here") as caught:
        load_checkpoint_in_model(model, saved(tmp_path / "model.safetensors", other), {"": "cpu"})
    assert isinstance(caught.value, CheckpointMismatch) and "of 9 tensors" in str(caught.value)
    assert equal(model, net())


def test_other_names_are_told_or_with_strict_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(4, 3), "extra": torch.ones(1)}, path)
    with caplog.at_level(logging.WARNING):
        model = net()
        load_checkpoint_in_model(model, path)
    assert "the file lacks 8: 0.bias" in caplog.text and "only the file has 1: extra" in caplog.text
    assert torch.equal(model[0].weight, torch.ones(4, 3))
    with pytest.raises(CheckpointMismatch, match="strict=True"):
        load_checkpoint_in_model(net(), path, strict=True)


@pytest.mark.parametrize("kept", [(), ("0.weight", "0.bias")], ids=["no name fits", "some names are missing"])
@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"0": "cpu", "1": "disk", "2": "disk"}, {"": "disk"}, "auto"], ids=str
)
def test_a_model_without_values_is_not_dispatched_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device_map: Any, kept: tuple[str, ...]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: net().state_dict()[name] for name in kept} | {"other.weight": torch.ones(1)}, path)
    with init_empty_weights():
        model = net()
    with pytest.raises(CheckpointMismatch) as caught:
        load_checkpoint_and_dispatch(model, path, device_map, offload_folder=tmp_path / "offload")
    text = str(caught.value)
    assert str(path) in text and f"the file lacks {9 - len(kept)}: " in text and "2.weight" in text
    assert "only the file has 1: other.weight" in text and "own checkpoint" in text and not caplog.text


def test_what_a_file_lacks_may_have_values_already(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(4, 3)}, path)
    assert load_checkpoint_and_dispatch(net(), path, {"": "cpu"})[0].weight.eq(1).all()


def test_ties_are_no_missing_names(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        model["b"].weight = model["a"].weight
        return model

    save_file({"b.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for model in (tied(), tied().to("meta")):
        model["b"].weight = model["a"].weight
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=True)
        assert model["a"].weight is model["b"].weight
        assert torch.equal(model["a"].weight, torch.ones(2, 2))


def test_the_models_dtype_counts_unless_one_is_asked(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors")
    model = net().half()
    load_checkpoint_in_model(model, path, {"": "cpu"})
    assert model[0].weight.dtype is torch.float16
    load_checkpoint_in_model(model, path, {"": "cpu"}, dtype=torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16 and model[1].num_batches_tracked.dtype is torch.int64


def test_some_modules_can_stay_in_full_precision(tmp_path: Path) -> None:
    path, model = saved(tmp_path / "model.safetensors"), net()
    load_checkpoint_in_model(model, path, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["1"])
    assert model[0].weight.dtype is torch.float16 and model[1].weight.dtype is torch.float32
    load_checkpoint_in_model(model, path, {"": "cpu"}, dtype="bfloat16", keep_in_fp32_modules=["1"])
    assert model[1].weight.dtype is torch.bfloat16, "documented for float16 only"


def test_what_goes_to_disk_is_not_read(tmp_path: Path) -> None:
    path, folder, model = saved(tmp_path / "model.safetensors"), tmp_path / "offload", net()
    load_checkpoint_in_model(model, path, {"0": "disk", "1": "cpu", "2": "cpu"}, offload_folder=folder)
    assert model[0].weight.is_meta and not model[2].weight.is_meta
    index = json.loads((folder / "index.json").read_text())
    assert set(index) == {"0.weight", "0.bias"} and index["0.bias"]["safetensors_file"] == str(path)
    assert list(folder.iterdir()) == [folder / "index.json"]


def test_what_changes_its_dtype_is_written_once(tmp_path: Path) -> None:
    path, folder = saved(tmp_path / "model.safetensors"), tmp_path / "offload"
    load_checkpoint_in_model(net(), path, {"": "disk"}, offload_folder=folder, dtype="float16", offload_buffers=True)
    assert (folder / "0.weight.dat").stat().st_size == 24
    index = json.loads((folder / "index.json").read_text())
    assert index["0.weight"] == {"dtype": "float16", "shape": [4, 3]}
    assert "safetensors_file" in index["1.num_batches_tracked"], "an integer stays what it is"


def test_a_map_with_holes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no device to 2\.weight"):
        load_checkpoint_in_model(net(), saved(tmp_path / "model.safetensors"), {"0": "cpu", "1": "cpu"})


def test_a_truncated_file_is_refused_untouched(tmp_path: Path) -> None:
    path, model = saved(tmp_path / "model.safetensors"), net()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut off"):
        load_checkpoint_in_model(model, path)
    assert equal(model, net())


def test_an_offload_folder_can_be_loaded_back(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, net(1).state_dict())
    model = net().to("meta")
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert equal(model, net(1))
    load_offloaded_weights(model, {}, tmp_path)


def test_too_little_memory_is_refused_with_names_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = saved(tmp_path / "model.safetensors"), net().to("meta")
    needed = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    monkeypatch.setattr(load, "free_memory_on", lambda place: needed - 1)
    names = sorted(dict(model.named_parameters()), key=lambda name: -model.get_parameter(name).numel())
    with pytest.raises(SettingError, match=rf"takes .* on cpu, where .* are free; the largest are {names[0]} \("):
        load_checkpoint_in_model(model, path, {"": "cpu"})
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint_in_model(net(), path)  # into memory that the model has already
    monkeypatch.setattr(load, "free_memory_on", lambda place: needed)
    load_checkpoint_in_model(model, path, {"": "cpu"})


def test_only_so_many_tensors_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(40)))
    path = saved(tmp_path / "model.safetensors", model)
    read, placed, most = [], [], []
    original = sources.MappedFile.tensor

    def tensor(source: Any, name: str) -> torch.Tensor:
        read.append(name)
        most.append(len(read) - len(placed))
        return original(source, name)

    monkeypatch.setattr(sources.MappedFile, "tensor", tensor)
    empty = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in range(40)))
    load_checkpoint_in_model(empty, path, {"": "cpu"}, loaded=placed.append)
    assert sorted(read) == sorted(placed) == sorted(model.state_dict())
    assert max(most) <= load.MAX_IN_FLIGHT
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), empty.parameters(), strict=True))
