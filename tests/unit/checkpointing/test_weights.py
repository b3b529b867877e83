from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpointing import (
    clean_state_dict_for_safetensors,
    convert_file_size_to_int,
    save_model,
)
from accelerate.checkpointing import weights as weights_module
from accelerate.errors import CheckpointError, CheckpointNotFound
from tests.checkpoint_parts import load_weights


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.a_head = torch.nn.Linear(4, 5, bias=False)
        self.a_head.weight = self.embed.weight


def layers(count: int = 5) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(count)])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (12, 12),
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("1Gb", 10**9 // 8),
        ("5.5MB", 5_500_000),
        ("300KiB", 300 * 1024),
        ("2 TB", 2 * 10**12),
        ("10mb", 10**7 // 8),
    ],
)
def test_sizes_are_read_in_decimal_binary_and_bits(size: int | str, num_bytes: int) -> None:
    assert convert_file_size_to_int(size) == num_bytes


@pytest.mark.parametrize("size", ["", "GB", "10", "-1GB", "1PB", "1 G", "abc"])
def test_a_size_that_is_none_is_a_value_error(size: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        convert_file_size_to_int(size)


def test_a_model_is_one_file_with_the_documented_name(tmp_path: Path) -> None:
    model = layers()
    save_model(model.state_dict(), tmp_path)
    assert names(tmp_path) == ["model.safetensors"]
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


def test_a_large_model_is_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    model = layers()
    save_model(model.state_dict(), tmp_path, max_shard_size="1KB")
    assert names(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 288}
    assert list(index["weight_map"]) == sorted(model.state_dict())
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / shard)[name], model.state_dict()[name])
    other = layers()
    load_weights(other, tmp_path)
    assert torch.equal(other[4].weight, model[4].weight)


def test_a_tensor_larger_than_the_limit_gets_a_shard_of_its_own(tmp_path: Path) -> None:
    save_model({"a": torch.ones(10), "big": torch.ones(1000), "b": torch.ones(10)}, tmp_path, max_shard_size="1KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == dict.fromkeys(["a", "b"], "model-00002-of-00002.safetensors") | {
        "big": "model-00001-of-00002.safetensors"
    }


@pytest.mark.parametrize("seed", range(5))
def test_shards_have_the_names_and_parts_that_other_writers_give_them(seed: int, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    sizes = torch.randint(1, 400, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
    state = {f"part.{number}": torch.ones(size) for number, size in enumerate(sizes)}
    save_model(state, tmp_path, max_shard_size=1200)
    expected = hub.split_torch_state_dict_into_shards(state, max_shard_size=1200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == expected.tensor_to_filename


@pytest.mark.parametrize("max_shard_size", ["1GB", "1KB"])
def test_the_older_format_is_written_and_read_on_request(max_shard_size: str, tmp_path: Path) -> None:
    model = layers()
    save_model(model.state_dict(), tmp_path, max_shard_size, safe_serialization=False)
    expected = "pytorch_model.bin" if max_shard_size == "1GB" else "pytorch_model.bin.index.json"
    assert expected in names(tmp_path)
    other = layers()
    load_weights(other, tmp_path)
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("before", [("1KB", True), ("1KB", False), ("1GB", False), ("1GB", True)], ids=str)
@pytest.mark.parametrize("after", [("1KB", True), ("500B", False), ("1GB", False), ("1GB", True)], ids=str)
def test_the_folder_holds_exactly_the_new_weights_and_other_files(
    before: tuple[str, bool], after: tuple[str, bool], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_card.safetensors").write_text("not ours")
    after = ("1KB" if after[0] == "500B" else after[0], after[1])
    save_model(layers(9).state_dict(), tmp_path, *before)
    save_model(layers(2).state_dict(), tmp_path, *after)
    (tmp_path / "fresh").mkdir()
    save_model(layers(2).state_dict(), tmp_path / "fresh", *after)
    expected = [*names(tmp_path / "fresh"), "config.json", "fresh", "model_card.safetensors"]
    assert names(tmp_path) == sorted(expected)


def test_a_tensor_with_two_names_is_saved_once_and_loaded_into_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights_module._warn_removed.cache_clear()
    model = Tied()
    with caplog.at_level(logging.WARNING):
        save_model(model.state_dict(), tmp_path)
        save_model(model.state_dict(), tmp_path)
    assert [record.getMessage().count("a_head.weight") for record in caplog.records] == [1]
    assert list(load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    other = Tied()
    load_weights(other, tmp_path)
    assert torch.equal(other.a_head.weight, model.embed.weight)


def test_a_model_that_no_longer_ties_them_is_refused(tmp_path: Path) -> None:
    save_model(Tied().state_dict(), tmp_path)
    other = Tied()
    other.a_head.weight = torch.nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(CheckpointError, match=r"(?s)doesn't fit the model.*a_head\.weight"):
        load_weights(other, tmp_path)
    load_weights(other, tmp_path, strict=False)


def test_views_of_one_storage_are_all_saved(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    state = {"whole": whole, "head": whole[:4], "tail": whole[4:], "square": whole.reshape(3, 4)}
    save_model(state, tmp_path)
    back = load_file(tmp_path / "model.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_cleaning_a_state_dict_leaves_the_argument_alone() -> None:
    tensor = torch.ones(2, 3)
    state = {"a": tensor, "b": tensor, "c": tensor.t(), "note": "text"}
    cleaned = clean_state_dict_for_safetensors(state)
    assert list(state) == ["a", "b", "c", "note"]
    assert list(cleaned) == ["a", "c", "note"]
    assert cleaned["c"].is_contiguous()


def test_a_model_without_values_is_a_runtime_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = layers()
    with pytest.raises(RuntimeError, match="meta device"):
        save_model(model.state_dict(), tmp_path / "out")


def test_a_failed_save_leaves_the_old_weights(tmp_path: Path) -> None:
    model = layers()
    save_model(model.state_dict(), tmp_path)
    with pytest.raises(CheckpointError, match="odd"):
        save_model({**layers().state_dict(), "odd": torch.eye(2).to_sparse()}, tmp_path)
    assert names(tmp_path) == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], model[0].weight)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        save_model({}, tmp_path / "file")


def test_no_weights_and_missing_shards_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no weights in .*model\.safetensors"):
        load_weights(layers(), tmp_path)
    save_model(layers().state_dict(), tmp_path, max_shard_size="1KB")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards are missing: model-00002-of-00002\.safetensors"):
        load_weights(layers(), tmp_path)


def test_loaded_weights_do_not_follow_the_file(tmp_path: Path) -> None:
    model = layers(1)
    save_model({name: torch.ones_like(value) for name, value in model.state_dict().items()}, tmp_path)
    for assign in (False, True):
        load_weights(model, tmp_path, assign=assign)
        size = (tmp_path / "model.safetensors").stat().st_size
        with open(tmp_path / "model.safetensors", "r+b") as file:
            before = file.read()
            file.seek(size - 200)
            file.write(b"\0" * 200)
        assert model[0].weight.sum() == 64
        (tmp_path / "model.safetensors").write_bytes(before)


def test_a_pickle_is_read_to_the_map_location(tmp_path: Path) -> None:
    model = layers(1)
    save_model(model.state_dict(), tmp_path, safe_serialization=False)
    load_weights(model, tmp_path, map_location="meta", assign=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
