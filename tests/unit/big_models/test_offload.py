from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate.big_models.offload import (
    MappedFile,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accelerate.errors import CheckpointError, CheckpointNotFound, SettingError

TENSORS = {
    "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    "brain": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "number": torch.tensor(7.5),
    "long": torch.arange(5),
    "flags": torch.tensor([True, False]),
    "eight": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3),
    "strided": torch.arange(6.0).reshape(2, 3).t(),
}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    raw = [each.contiguous().reshape(-1).view(torch.uint8) if each.numel() else each for each in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*raw)


def test_every_dtype_comes_back_from_the_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, TENSORS)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["brain"] == {"dtype": "bfloat16", "shape": [3, 2]}
    assert (tmp_path / "half.dat").stat().st_size == 12
    for name, tensor in TENSORS.items():
        assert same(load_offloaded_weight(tmp_path / f"{name}.dat", index[name]), tensor), name
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(same(loader[name], tensor) for name, tensor in TENSORS.items())
    assert list(loader) == list(TENSORS) and len(loader) == len(TENSORS)


def test_an_index_grows(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(2), "a", tmp_path)
    assert offload_weight(torch.ones(2), "b", tmp_path, index) is index
    save_offload_index({"a": index["a"]}, tmp_path)
    save_offload_index({"b": index["b"]}, tmp_path)
    save_offload_index({}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}


def test_what_cannot_be_offloaded_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        offload_weight(torch.ones(2, device="meta"), "w", tmp_path)
    offload_weight(torch.ones(3), "w", tmp_path)
    with pytest.raises(CheckpointError, match=r"12 bytes, .* shape \(4,\), which are 16"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": [4]})
    with pytest.raises(CheckpointError, match="'float33', which is no dtype"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float33", "shape": [3]})
    (tmp_path / "index.json").write_text("[")
    with pytest.raises(CheckpointError, match="can't be read"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(SettingError, match="needs a `state_dict`"):
        OffloadedWeightsLoader()


def test_memory_comes_before_files(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    loader = OffloadedWeightsLoader(state_dict={"a": torch.ones(1)}, save_folder=tmp_path)
    assert (loader["a"].item(), loader["b"].item()) == (1, 0)
    assert loader.all_keys == ["a", "b"] and "c" not in loader
    with pytest.raises(KeyError):
        loader["c"]


def test_safetensors_files_are_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: each.contiguous() for name, each in TENSORS.items()}, path, {"format": "pt"})
    index = {
        f"model.{name}": {"safetensors_file": str(path), "weight_name": name, "dtype": str(each.dtype)[6:]}
        for name, each in TENSORS.items()
    }
    loader = OffloadedWeightsLoader(index=index)
    for name, tensor in TENSORS.items():
        assert same(loader[f"model.{name}"], tensor), name
    assert loader["model.half"].data_ptr() == loader["model.half"].data_ptr(), "no copy"
    loader.release(list(loader))
    assert same(loader["model.half"], TENSORS["half"])


def test_an_index_may_ask_for_another_dtype(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    loader = OffloadedWeightsLoader(
        index={"w": {"safetensors_file": str(tmp_path / "m.safetensors"), "dtype": "bfloat16"}}
    )
    assert loader["w"].dtype is torch.bfloat16


def test_writing_to_what_is_read_in_place_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2000)}, path)
    before = path.read_bytes()
    OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path)}})["w"].zero_()
    assert path.read_bytes() == before


def test_a_loader_can_be_copied_and_pickled(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    loader = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(tmp_path / "m.safetensors")}})
    assert loader["w"].sum() == 2
    assert copy.deepcopy(loader)["w"].sum() == pickle.loads(pickle.dumps(loader))["w"].sum() == 2


def test_a_tied_name_is_another_name_of_the_same_weight(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    offload_state_dict(tmp_path, {"raw": torch.zeros(1)})
    index = json.loads((tmp_path / "index.json").read_text())
    index["w"] = {"safetensors_file": str(tmp_path / "m.safetensors")}
    loader = OffloadedWeightsLoader(state_dict={"ram": torch.ones(3)}, save_folder=tmp_path, index=index)
    for known in ("w", "raw", "ram"):
        loader.alias(f"{known}2", known)
        assert torch.equal(loader[f"{known}2"], loader[known])
    assert loader["w"].data_ptr() == loader["w2"].data_ptr()
    assert "w2" in loader.all_keys


def write(path: Path, header: object, size: int = 0) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def test_broken_safetensors_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(CheckpointNotFound, match="missing"):
        MappedFile(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        MappedFile(path)
    path.write_bytes((10**6).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header would have 1000000 bytes"):
        MappedFile(path)
    entry = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    with pytest.raises(CheckpointError, match=r"cut off: w ends at byte"):
        MappedFile(write(path, entry, 15))
    assert MappedFile(write(path, entry, 16)).describe("w")[1] == (4,)
    entry["w"]["shape"] = [5]
    with pytest.raises(CheckpointError, match=r"16 bytes, which isn't F32 of \[5\]"):
        MappedFile(write(path, entry, 16))
    with pytest.raises(CheckpointError, match="entry of w"):
        MappedFile(write(path, {"w": {}}, 16))
    strange = MappedFile(write(path, {"w": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}, 1))
    with pytest.raises(CheckpointError, match="F3, which isn't known"):
        strange.tensor("w")


def test_an_odd_header_is_read_too(tmp_path: Path) -> None:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    text += b" " * ((3 - (8 + len(text))) % 4)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert (8 + len(text)) % 4 == 3
    assert MappedFile(path).tensor("w").tolist() == [1.0, 2.0]


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux tells what is resident")
def test_released_tensors_are_not_resident(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(16 << 20)}, path)
    file = MappedFile(path)

    def resident() -> int:
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024

    before = resident()
    file.tensor("w").sum()
    assert resident() - before > 50 << 20
    file.release("w")
    assert resident() - before < 10 << 20


def test_a_prefix_hides_itself() -> None:
    data = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert dict(data) == {"x": 1, "y": 2} and len(data) == 2
    assert "x" in data and "a.x" not in data and data.get("z") is None
    assert (data.prefix, data.dataset["b.x"]) == ("a.", 3)


def test_submodules_of_a_state_dict() -> None:
    state = {"a": 1, "a.b": 2, "ab": 3, "c.a": 4}
    assert extract_submodules_state_dict(state, ["a"]) == {"a": 1, "a.b": 2}  # pyright: ignore[reportArgumentType]
