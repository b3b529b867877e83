"""Sharded weights become one file; nothing in a folder of shards is executed."""

from __future__ import annotations

import pickle
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpointing import dcp as merge_module
from accelerate.checkpointing import merge_fsdp_weights, read_checkpoint, save_model
from accelerate.checkpointing.dcp import read_metadata
from accelerate.checkpointing.sharded import InPlace, read_optimizer_shards, write_shards
from accelerate.commands import merge as merge_command
from accelerate.errors import CheckpointError, CheckpointNotFound
from tests.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about one process being one process
        yield


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3).bfloat16())
    made.register_buffer("counter", torch.tensor(7))
    return made


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype is right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_one_file_holds_what_the_shards_held(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", model=model().state_dict())
    path = merge_fsdp_weights(tmp_path / "shards", tmp_path / "out")
    assert path == str(tmp_path / "out" / "model.safetensors")
    assert same(load_file(path), model().state_dict())
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_shards_of_several_ranks(tmp_path: Path) -> None:
    def write() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from accelerate.distributed.world import join_world

        world = join_world(cpu=True)
        mesh = init_device_mesh("cpu", (world.size,))
        made = model()
        made[1].float()
        fully_shard(made, mesh=mesh)
        write_shards(tmp_path / "ck" / "pytorch_model_fsdp_0", model=made.state_dict())

    run_on_ranks(write, 2)
    expected = model()
    expected[1].float()
    assert same(load_file(merge_fsdp_weights(tmp_path / "ck", tmp_path / "out")), expected.state_dict())


def test_little_lies_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "shards", model=model().state_dict())
    read: list[int] = []
    read_tensors = merge_module.read_tensors

    def counted(*arguments: Any) -> dict[str, Any]:
        found = read_tensors(*arguments)
        read.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(merge_module, "read_tensors", counted)
    monkeypatch.setattr(merge_module, "_CHUNK_BYTES", 50)
    assert same(load_file(merge_fsdp_weights(tmp_path / "shards", tmp_path / "out")), model().state_dict())
    assert max(read) == 6 * 8 * 4  # the largest tensor


def test_as_a_pickle(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", model=model().state_dict())
    path = merge_fsdp_weights(tmp_path / "shards", tmp_path / "out", safe_serialization=False)
    assert path.endswith("pytorch_model.bin")
    assert same(torch.load(path, weights_only=True), model().state_dict())


def test_safetensors_shards_with_an_index(tmp_path: Path) -> None:
    save_model(model().state_dict(), tmp_path / "shards", max_shard_size=100)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    assert same(load_file(merge_fsdp_weights(tmp_path / "shards", tmp_path / "out")), model().state_dict())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(tmp_path / "ck" / "pytorch_model_fsdp_0", model=model().state_dict())
    assert merge_command.main([str(tmp_path / "ck"), str(tmp_path / "out"), "--remove_checkpoint_dir"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert not (tmp_path / "ck" / "pytorch_model_fsdp_0").exists()
    assert same(load_file(tmp_path / "out" / "model.safetensors"), model().state_dict())
    assert merge_command.main([str(tmp_path / "ck"), str(tmp_path / "out")]) == 2
    assert "no sharded weights" in capsys.readouterr().err


def test_a_folder_without_shards_is_refused_and_one_nearby_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "ck" / "other_0", optimizer={"state": {"w": {"exp_avg": torch.ones(2)}}})
    with pytest.raises(CheckpointNotFound, match="other_0"):
        merge_fsdp_weights(tmp_path / "ck", tmp_path / "out")
    with pytest.raises(CheckpointNotFound):
        merge_fsdp_weights(tmp_path / "nowhere", tmp_path / "out")


def test_the_output_is_never_removed_with_the_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", model=model().state_dict())
    with pytest.raises(CheckpointError, match="not removed"):
        merge_fsdp_weights(tmp_path / "shards", tmp_path / "shards" / "out", remove_checkpoint_dir=True)
    assert (tmp_path / "shards" / "out" / "model.safetensors").exists()


# -------------------------------------------------------------------------------------------------- hostile


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", str(self.mark)],)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "ck" / "pytorch_model_fsdp_0", model=model().state_dict())
    index = tmp_path / "ck" / "pytorch_model_fsdp_0" / ".metadata"
    index.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="could run code"):
        merge_fsdp_weights(tmp_path / "ck", tmp_path / "out")
    with pytest.raises(CheckpointError, match="could run code"):
        read_checkpoint(tmp_path / "ck", models=[model()])
    assert not (tmp_path / "ran").exists()


class AsAttribute:
    """Pickled as ``getattr(owner, name)``, as Python 3.11.0 to 3.11.3 pickle the members of an enumeration."""

    def __init__(self, owner: object, name: str) -> None:
        self.made = (getattr, (owner, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made


def test_the_index_of_another_python_names_members_by_attribute(tmp_path: Path) -> None:
    import torch.distributed.checkpoint.metadata as metadata

    kinds = metadata._MEM_FORMAT_ENCODING
    index = tmp_path / ".metadata"
    index.write_bytes(pickle.dumps(AsAttribute(kinds, "TORCH_PRESERVE_FORMAT")))
    assert read_metadata(tmp_path) is kinds.TORCH_PRESERVE_FORMAT
    for owner, name in ((Path, "unlink"), (kinds, "__class__"), (metadata.Metadata, "__init__")):
        index.write_bytes(pickle.dumps(AsAttribute(owner, name)))
        with pytest.raises(CheckpointError, match="could run code"):
            read_metadata(tmp_path)


def test_a_torn_index_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", model=model().state_dict())
    index = tmp_path / "shards" / ".metadata"
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        merge_fsdp_weights(tmp_path / "shards", tmp_path / "out")


def test_an_entry_that_would_run_code_is_refused(tmp_path: Path) -> None:
    made = model().float()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
    shards = InPlace().optimizer_shards(optimizer, [made])
    write_shards(tmp_path / "good", optimizer=shards)
    other = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    read_optimizer_shards(InPlace(), other, [made], tmp_path / "good")()
    assert other.param_groups[0]["lr"] == 0.5
    shards["param_groups"][0]["lr"] = Bomb(tmp_path / "ran")
    write_shards(tmp_path / "bad", optimizer=shards)
    with pytest.raises(CheckpointError, match=r"lr: .*could run code"):
        read_optimizer_shards(InPlace(), other, [made], tmp_path / "bad")()
    assert not (tmp_path / "ran").exists()
