from __future__ import annotations

import copy
import json
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import accelerate.big_modeling as big_modeling
from accelerate import infer_auto_device_map
from accelerate.big_modeling import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.big_models.load import load_checkpoint_in_model
from accelerate.errors import CheckpointError, PreparationError, SettingError
from accelerate.hooks import remove_hook_from_submodules
from accelerate.hooks.align import get_state_dict_offloaded_model


class Layer(nn.Module):
    """A residual block with a buffer that no state dict has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        h = self.down(torch.relu(self.up(self.norm(x)))) * self.gain + self.table
        return x + h if shift is None else x + h + shift


class Tower(nn.Module):
    """Embedding, blocks, batch norm, and a head that is tied to the embedding."""

    def __init__(self, depth: int = 4, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, shift=x.mean())
        return self.head(self.norm(x))


IDS = torch.tensor([1, 5, 9, 3])


def tower(**options: Any) -> Tower:
    torch.manual_seed(0)
    model = Tower(**options).eval()
    model.norm.running_mean.uniform_()
    return model


def empty_tower(**options: Any) -> Tower:
    with init_empty_weights():
        return Tower(**options).eval()


def some_maps(seed: int) -> dict[str, Any]:
    """A random split over cpu and disk at a random depth, tied weights on either side of it."""
    rng = random.Random(seed)
    names = ["embed", "norm", "head"]
    for index in range(4):
        inside = ["up", "down", "norm", "gain", "table"]
        names += [f"layers.{index}.{each}" for each in inside] if rng.random() < 0.4 else [f"layers.{index}"]
    return {name: rng.choice(["cpu", "disk"]) for name in names}


# ------------------------------------------------------------------------------------- built without values


def test_an_empty_model_has_buffers_but_no_weights() -> None:
    model = empty_tower()
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.head.weight is model.embed.weight, "ties stay ties"
    assert not nn.Linear(1, 1).weight.is_meta, "the block is over"


def test_buffers_are_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with init_empty_weights(include_buffers=True):
        assert all(buffer.is_meta for buffer in nn.BatchNorm1d(3).buffers())
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert nn.BatchNorm1d(3).running_mean.is_meta
        with init_on_device("cpu", include_buffers=True):
            assert not nn.BatchNorm1d(3).running_mean.is_meta


def test_blocks_nest_and_end_after_errors() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        with init_on_device("cpu"):
            assert not nn.Linear(1, 1).weight.is_meta
        assert nn.Linear(1, 1).weight.is_meta
        raise ZeroDivisionError
    assert not nn.Linear(1, 1).weight.is_meta


def test_a_parameter_keeps_class_flag_and_marks() -> None:
    class Marked(nn.Parameter):
        pass

    weight = Marked(torch.ones(2), requires_grad=False)
    weight.mark = 3  # pyright: ignore[reportAttributeAccessIssue]
    with init_empty_weights():
        module = nn.Module()
        module.weight = weight
    assert isinstance(module.weight, Marked) and module.weight.is_meta
    assert not module.weight.requires_grad and module.weight.mark == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_other_threads_build_ordinary_models() -> None:
    inside, built = threading.Event(), threading.Event()
    found: list[bool] = []

    def other() -> None:
        inside.wait(10)
        found.append(nn.Linear(1, 1).weight.is_meta)
        built.set()

    thread = threading.Thread(target=other)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert built.wait(10)
    thread.join()
    assert found == [False]


# ------------------------------------------------------------------------------------------- one device


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("preload", [None, ["Layer"]])
def test_offloaded_models_give_the_same_outputs(tmp_path: Path, offload_buffers: bool, preload: Any) -> None:
    expected = tower()(IDS)
    options: Any = {"offload_buffers": offload_buffers, "preload_module_classes": preload}
    for model in (cpu_offload(tower(), **options), disk_offload(tower(), tmp_path, **options)):
        assert torch.equal(model(IDS), expected)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.norm.running_mean.is_meta == offload_buffers
        remove_hook_from_submodules(model)
        assert torch.equal(model(IDS), expected), "whole again without hooks"


def test_a_disk_offload_folder_is_the_documented_one_and_is_used_again(tmp_path: Path) -> None:
    disk_offload(tower(), tmp_path, offload_buffers=True)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["layers.0.up.weight"] == {"dtype": "float32", "shape": [16, 8]}
    assert (tmp_path / "layers.0.up.weight.dat").stat().st_size == 16 * 8 * 4
    empty = disk_offload(empty_tower(), tmp_path, offload_buffers=True)
    assert torch.equal(empty(IDS), tower()(IDS))


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    disk_offload(tower(), tmp_path)
    with pytest.raises(PreparationError, match=r"another model than this Tower: embed\.weight is \(11, 8\) there"):
        disk_offload(tower(width=4), tmp_path)
    with pytest.raises(PreparationError, match=r"it lacks layers\.4\.gain"):
        disk_offload(tower(depth=5), tmp_path)


def test_stages_have_handles() -> None:
    expected = tower()(IDS)
    first, handle = cpu_offload_with_hook(tower(), "cpu")
    second, other = cpu_offload_with_hook(tower(), "cpu", prev_module_hook=handle)
    assert other.hook.prev_module_hook is handle and handle.model is first
    assert torch.equal(first(IDS), expected) and torch.equal(second(IDS), expected)
    handle.offload()
    handle.remove()
    assert "_hf_hook" not in first.__dict__


# --------------------------------------------------------------------------------------------- several devices


def test_one_device_needs_no_hooks() -> None:
    model = dispatch_model(tower(), {"": "cpu"})
    assert "_hf_hook" not in model.__dict__ and model.hf_device_map == {"": "cpu"}
    assert model.head.weight is model.embed.weight
    model = dispatch_model(tower(), {"": "cpu"}, force_hooks=True)
    assert "_hf_hook" in model.__dict__ and torch.equal(model(IDS), tower()(IDS))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tied", [True, False])
def test_any_split_over_cpu_and_disk_gives_the_same_outputs(tmp_path: Path, seed: int, tied: bool) -> None:
    device_map = some_maps(seed)
    expected = tower(tied=tied)(IDS)
    model = dispatch_model(tower(tied=tied), device_map, offload_dir=tmp_path, offload_buffers=seed % 2 == 0)
    assert torch.equal(model(IDS), expected)
    assert model.hf_device_map == device_map
    for name, place in device_map.items():
        owner, _, leaf = name.rpartition(".")
        part = model.get_submodule(owner)._parameters.get(leaf)
        if part is not None:
            assert part.is_meta == (place == "disk")
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], each) for name, each in tower(tied=tied).state_dict().items())


def test_weights_of_the_host_can_wait_for_a_main_device() -> None:
    # "meta" stands for an accelerator: nothing computes there, but everything has to be brought there.
    model = dispatch_model(tower(), {"": "cpu"}, main_device="meta", force_hooks=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.layers[0].up._hf_hook.execution_device == "meta"
    assert model.embed(IDS).is_meta


def test_a_split_between_the_host_and_a_main_device() -> None:
    device_map = {"embed": "meta", "layers": "cpu", "norm": "meta", "head": "meta"}
    model = dispatch_model(tower(tied=False), device_map)
    assert model.layers[1].up._hf_hook.offload and not model.embed._hf_hook.offload
    assert model.layers[1].up._hf_hook.execution_device == "meta"


def test_moving_a_dispatched_model_warns_and_is_refused_where_weights_are_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(tower(), some_maps(0), offload_dir=tmp_path)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="You can't move this Tower"):
        model.to("cpu")
    assert "shouldn't move" in caplog.text
    with pytest.raises(RuntimeError):
        model.cuda()
    remove_hook_from_submodules(model)
    model.to("cpu")


def test_an_incomplete_map_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head\.weight"):
        dispatch_model(tower(tied=False), {"embed": "cpu", "layers": "cpu", "norm": "cpu"})


def test_the_check_is_looked_up_where_libraries_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big_modeling, "check_device_map", lambda *args: None)
    dispatch_model(tower(tied=False), {"embed": "cpu", "layers": "cpu", "norm": "cpu"}, force_hooks=True)


def test_disk_needs_a_place() -> None:
    with pytest.raises(SettingError, match=r"sends embed.* to disk: give `offload_dir`"):
        dispatch_model(tower(), {"embed": "disk", "layers": "cpu", "norm": "cpu", "head": "disk"})


def test_a_whole_model_on_disk(tmp_path: Path) -> None:
    model = dispatch_model(tower(), {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model(IDS), tower()(IDS))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_torn_ties_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device_map = {"embed": "cpu", "layers": "cpu", "norm": "cpu", "head": "disk"}
    with caplog.at_level(logging.WARNING):
        model = dispatch_model(tower(), device_map, offload_dir=tmp_path)
    assert "one parameter" in caplog.text
    assert torch.equal(model(IDS), tower()(IDS))


# ------------------------------------------------------------------------------------------------ checkpoints


def write_checkpoint(folder: Path, model: nn.Module, num_shards: int = 1) -> Path:
    state = {name: each.contiguous() for name, each in model.state_dict().items() if name != "head.weight"}
    if isinstance(model, Tower) and model.head.weight is not model.embed.weight:
        state["head.weight"] = model.head.weight.detach()
    if num_shards == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder
    shards = [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
    weight_map = {name: shards[index % num_shards] for index, name in enumerate(state)}
    for shard in shards:
        save_file({name: state[name] for name in state if weight_map[name] == shard}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_is_loaded_onto_any_split(tmp_path: Path, seed: int, num_shards: int) -> None:
    checkpoint = write_checkpoint(tmp_path, tower(), num_shards)
    model = load_checkpoint_and_dispatch(empty_tower(), checkpoint, some_maps(seed))
    assert torch.equal(model(IDS), tower()(IDS))
    assert sorted(path.suffix for path in tmp_path.iterdir()).count(".dat") == 0, "nothing was copied"


def test_weights_on_disk_stay_in_the_original_files(tmp_path: Path) -> None:
    checkpoint, folder = write_checkpoint(tmp_path, tower()), tmp_path / "offload"
    model = load_checkpoint_and_dispatch(empty_tower(), checkpoint, {"": "disk"}, offload_folder=folder)
    entry = model.layers[0].up._hf_hook.weights_map.dataset.index["layers.0.up.weight"]
    assert entry == {
        "safetensors_file": str((checkpoint / "model.safetensors").absolute()),
        "weight_name": "layers.0.up.weight",
        "dtype": "float32",
    }
    assert torch.equal(model(IDS), tower()(IDS))


def test_the_two_steps_can_be_taken_one_by_one(tmp_path: Path) -> None:
    checkpoint, folder, device_map = write_checkpoint(tmp_path, tower()), tmp_path / "offload", some_maps(3)
    model = empty_tower()
    load_checkpoint_in_model(model, checkpoint, device_map, offload_folder=folder)
    model = dispatch_model(model, device_map, offload_dir=folder)
    assert torch.equal(model(IDS), tower()(IDS))
    with pytest.raises(SettingError, match="offload_folder"):
        load_checkpoint_in_model(empty_tower(), checkpoint, device_map)


def test_a_pickle_is_written_to_the_folder_where_it_goes_to_disk(tmp_path: Path) -> None:
    torch.save(tower().state_dict(), tmp_path / "pytorch_model.bin")
    folder = tmp_path / "offload"
    model = load_checkpoint_and_dispatch(empty_tower(), tmp_path, some_maps(1), offload_folder=folder)
    assert torch.equal(model(IDS), tower()(IDS))
    assert list(folder.glob("*.dat"))
    with pytest.raises(SettingError, match="can't be read in place"):
        load_checkpoint_and_dispatch(empty_tower(), tmp_path, some_maps(1))


@pytest.mark.parametrize("way", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_can_be_inferred(tmp_path: Path, way: Any) -> None:
    checkpoint = write_checkpoint(tmp_path, tower())
    model = load_checkpoint_and_dispatch(
        empty_tower(), checkpoint, way, max_memory={"cpu": 4000}, no_split_module_classes=["Layer"]
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(IDS), tower()(IDS))


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'auto', 'balanced'"):
        load_checkpoint_and_dispatch(empty_tower(), tmp_path, "best")  # pyright: ignore[reportArgumentType]


def test_a_dtype_is_for_floats_and_disk_too(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, tower())
    device_map = some_maps(2)
    model = load_checkpoint_and_dispatch(empty_tower(), checkpoint, device_map, dtype="bfloat16", offload_buffers=True)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    expected = tower().to(torch.bfloat16)
    for layer in model.layers:
        layer.table = layer.table.to(torch.bfloat16)
    assert torch.equal(model(IDS), expected(IDS))


def test_the_root_without_a_map_is_only_loaded(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty_tower(), write_checkpoint(tmp_path, tower()))
    assert not any("_hf_hook" in module.__dict__ for module in model.modules())
    assert torch.equal(model(IDS), tower()(IDS))
    assert model.head.weight is model.embed.weight


def test_the_plan_of_a_budget_is_a_map_that_runs(tmp_path: Path) -> None:
    plan = infer_auto_device_map(tower(), {"cpu": 5000}, no_split_module_classes="Layer", method="exact")
    model = load_checkpoint_and_dispatch(empty_tower(), write_checkpoint(tmp_path, tower()), plan)
    assert torch.equal(model(IDS), tower()(IDS))


def test_a_dispatched_model_can_be_copied_and_keeps_its_source_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, tower())
    before = load_file(checkpoint / "model.safetensors")
    model = load_checkpoint_and_dispatch(empty_tower(), checkpoint, {"": "disk"})
    assert torch.equal(copy.deepcopy(model)(IDS), tower()(IDS))
    after = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(after[name], each) for name, each in before.items())


def test_a_missing_shard_is_named_before_anything_happens(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, tower(), 3)
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 3 shards are missing: model-00002-of-00003"):
        load_checkpoint_and_dispatch(empty_tower(), checkpoint, {"": "cpu"})


# ------------------------------------------------------------------------------------------------ small dtypes


def test_linear_layers_wait_in_a_small_dtype() -> None:
    model = tower(tied=False)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern=[r"layers\.0", "^head$"])
    assert model.layers[1].up.weight.dtype is torch.bfloat16
    assert model.layers[0].up.weight.dtype is torch.float32 and model.head.weight.dtype is torch.float32
    assert model.embed.weight.dtype is torch.float32 and model.layers[1].norm.weight.dtype is torch.float32
    assert model(IDS).dtype is torch.float32
    other = tower(tied=False)
    attach_layerwise_casting_hooks(other, torch.bfloat16, torch.float32, skip_modules_classes=(Layer,))
    assert other.layers[1].up.weight.dtype is torch.float32 and other.head.weight.dtype is torch.bfloat16
