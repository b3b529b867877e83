"""Files that other files name are read from inside their folder only; and every place that opens one is known."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelerate
from accelerate.big_modeling import load_checkpoint_and_dispatch
from accelerate.big_models.load import load_checkpoint_in_model
from accelerate.big_models.offload import OffloadedWeightsLoader, offload_state_dict
from accelerate.checkpointing import write_checkpoint
from accelerate.checkpointing.agreement import Ranks
from accelerate.checkpointing.dcp import merge_fsdp_weights, read_metadata
from accelerate.checkpointing.layout import read_state
from accelerate.checkpointing.manifest import Manifest, measure, problems, read_manifest
from accelerate.checkpointing.remote import RemoteStore
from accelerate.checkpointing.series import inspect
from accelerate.checkpointing.storage import RemoteStorage, inside, storage_of
from accelerate.checkpointing.store import CheckpointStore
from accelerate.errors import CheckpointError
from tests.checkpoint_parts import load_weights

PACKAGE: Final = Path(accelerate.__file__).parent

#: A name in a file, and what the refusal says about it. `{out}` is an absolute path of weights that do exist.
HOSTILE: Final = {
    "../outside.safetensors": "by `..`",
    "inner/../../outside.safetensors": "by `..`",
    "..\\outside.safetensors": "by `..`",
    "{out}": "an absolute path",
    "\\outside.safetensors": "an absolute path",
    "C:\\outside.safetensors": "names a drive",
    "C:/outside.safetensors": "names a drive",
    "C:outside.safetensors": "names a drive",
    "\\\\server\\share\\outside.safetensors": "a network path",
    "//server/share/outside.safetensors": "a network path",
    "link.safetensors": "a link that leads to",
    "linked/outside.safetensors": "a link that leads to",
    "chain.safetensors": "a link that leads to",
    "chained/outside.safetensors": "a link that leads to",
    "C:": "names a drive",
    "\\\\?\\C:\\outside.safetensors": "a network path",
    "": "is no file name",
    "a\0b": "is no file name",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with links that lead out, and weights beside it that it must not reach."""
    inner = tmp_path / "checkpoint"
    inner.mkdir()
    save_file({"weight": torch.ones(1, 1)}, tmp_path / "outside.safetensors")
    (inner / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (inner / "linked").symlink_to(tmp_path, target_is_directory=True)
    (inner / "chain.safetensors").symlink_to("link.safetensors")
    (inner / "chained").symlink_to("linked", target_is_directory=True)
    return inner


def _index(folder: Path, name: str) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"weight": name}}), encoding="utf-8")
    return path


def _layer() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def _load_weights(folder: Path, name: str) -> None:
    _index(folder, name)
    load_weights(_layer(), folder)


def _load_in_model(folder: Path, name: str) -> None:
    load_checkpoint_in_model(_layer(), _index(folder, name))


def _load_and_dispatch(folder: Path, name: str) -> None:
    _index(folder, name)
    load_checkpoint_and_dispatch(_layer(), folder, device_map={"": "cpu"})


def _merge(folder: Path, name: str) -> None:
    _index(folder, name)
    merge_fsdp_weights(str(folder), str(folder / "merged"))


def _manifest(folder: Path, name: str) -> None:
    record = measure(folder.parent / "outside.safetensors")
    (folder / "manifest.json").write_bytes(Manifest({name: record}).to_bytes())
    found = read_manifest(folder)
    assert found is not None
    problems(folder, found.files, contents=True)


def _distributed(folder: Path, name: str) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    found = Metadata({}, None, {MetadataIndex("weight"): _StorageInfo(name, 0, 1)})
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    read_metadata(folder)


def _offloaded(folder: Path, name: str) -> None:
    weight = name.removesuffix(".safetensors")
    (folder.parent / "outside.dat").write_bytes(b"\0" * 4)
    (folder / "link.dat").symlink_to(folder.parent / "outside.dat")
    (folder / "chain.dat").symlink_to("link.dat")
    (folder / "index.json").write_text(json.dumps({weight: {"dtype": "float32", "shape": [1]}}), encoding="utf-8")
    OffloadedWeightsLoader(save_folder=folder)[weight]


ATTACKS: Final[dict[str, Callable[[Path, str], None]]] = {
    "index, into a model": _load_weights,
    "index, through a device map": _load_in_model,
    "index, dispatched": _load_and_dispatch,
    "index, merged": _merge,
    "manifest": _manifest,
    "metadata of a distributed checkpoint": _distributed,
    "index of an offload folder": _offloaded,
}


@pytest.mark.parametrize(
    ("attack", "name"),
    # The file of an offloaded weight has an extension, so that its name is never empty.
    [(attack, name) for attack in ATTACKS for name in HOSTILE if name or attack != "index of an offload folder"],
)
def test_a_file_outside_of_the_folder_is_refused_by_name(attack: str, name: str, folder: Path) -> None:
    given = name.format(out=folder.parent / "outside.safetensors")
    with pytest.raises(CheckpointError) as caught:
        ATTACKS[attack](folder, given)
    assert HOSTILE[name] in str(caught.value)
    assert repr(given.removesuffix(".safetensors"))[1:-1] in str(caught.value)


def test_tensors_beside_a_state_are_not_read_through_a_link_that_leads_out(folder: Path) -> None:
    content = {"format": "accelerate-state", "version": 1, "state": {}, "tensors_in": "link.safetensors"}
    (folder / "link.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="a link that leads to"):
        read_state(folder, "link")


def test_files_in_the_folder_and_in_folders_of_it_are_read(folder: Path) -> None:
    (folder / "inner").mkdir()
    save_file({"weight": torch.full((1, 1), 3.0)}, folder / "inner" / "a..b.safetensors")
    (folder / "near.safetensors").symlink_to(folder / "inner" / "a..b.safetensors")
    for name in ("inner/a..b.safetensors", "./inner/a..b.safetensors", "near.safetensors"):
        layer = _layer()
        load_checkpoint_in_model(layer, _index(folder, name))
        assert layer.weight.item() == 3.0


def test_a_folder_that_is_reached_through_a_link_is_read(folder: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.full((1, 1), 3.0)}, folder / "shard.safetensors")
    _index(folder, "shard.safetensors")
    (tmp_path / "alias").symlink_to(folder, target_is_directory=True)
    layer = _layer()
    load_weights(layer, tmp_path / "alias")
    assert layer.weight.item() == 3.0


def test_the_cache_of_the_hub_is_read_although_its_files_are_links_to_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"weight": torch.full((1, 1), 3.0)}, blobs / "0a")
    _index(blobs, "shard.safetensors").rename(blobs / "0b")
    (snapshot / "shard.safetensors").symlink_to("../../blobs/0a")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/0b")
    for load in (load_weights, load_checkpoint_in_model):
        layer = _layer()
        load(layer, snapshot)
        assert layer.weight.item() == 3.0


@pytest.mark.parametrize("name", [None, 3, ["a"], "", ".", "./", "./."])
def test_what_is_no_name_is_refused(name: Any, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is no file name"):
        inside(folder, name, folder / "index.json")


# ------------------------------------------------------------------------------ what a save, or a load, replaces


@pytest.fixture
def victim(folder: Path) -> Path:
    """A folder of somebody's own, which the checkpoint's folder has a link to."""
    path = folder.parent / "home"
    path.mkdir()
    (path / "kept.txt").write_text("mine", encoding="utf-8")
    (folder / "way").symlink_to(path, target_is_directory=True)
    return path


def _contents(path: Path) -> dict[str, str]:
    return {each.name: each.read_text(encoding="utf-8") for each in path.iterdir()}


def _interrupted(folder: Path, *, files: tuple[str, ...] = (), replaces: tuple[str, ...] = ()) -> Path:
    """A commit into ``folder`` that seems to have been cut short, so that the next reader finishes it."""
    staging = folder / f".{folder.name}.tmp-0"
    for name in files:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text("theirs", encoding="utf-8")
    staging.mkdir(exist_ok=True)
    manifest = Manifest({name: measure(staging / name) for name in files}, replaces=replaces).with_identity()
    (staging / "manifest.json").write_bytes(manifest.to_bytes())
    return staging


@pytest.mark.parametrize(
    "said", [{"files": ("way/new.txt",)}, {"files": ("way/kept.txt",)}, {"replaces": ("way/kept.txt",)}]
)
def test_finishing_a_commit_neither_writes_nor_removes_through_a_link_that_leads_out(
    said: dict[str, tuple[str, ...]], folder: Path, victim: Path
) -> None:
    _interrupted(folder, **said)
    with pytest.raises(CheckpointError, match="a link that leads to"):
        CheckpointStore(folder).require()
    assert _contents(victim) == {"kept.txt": "mine"}


def test_a_link_to_another_checkpoint_is_no_commit_to_finish(folder: Path, victim: Path) -> None:
    record = measure(victim / "kept.txt")
    (victim / "manifest.json").write_bytes(Manifest({"kept.txt": record}).with_identity().to_bytes())
    (folder / f".{folder.name}.tmp-0").symlink_to(victim, target_is_directory=True)
    CheckpointStore(folder).require()
    assert (victim / "kept.txt").read_text(encoding="utf-8") == "mine" and (victim / "manifest.json").is_file()


@pytest.mark.parametrize("has_hooks", [False, True])
def test_saving_over_a_checkpoint_of_somebody_else_touches_nothing_outside(
    has_hooks: bool, folder: Path, victim: Path
) -> None:
    foreign = Manifest({"way/kept.txt": measure(victim / "kept.txt")}).with_identity()
    (folder / "manifest.json").write_bytes(foreign.to_bytes())
    hooks = [lambda models, weights, output_dir: None] if has_hooks else []
    with pytest.raises(CheckpointError, match="a link that leads to"):
        write_checkpoint(folder, models=[_layer()], weights=[_layer().state_dict()], pre_hooks=hooks)
    assert _contents(victim) == {"kept.txt": "mine"}
    assert inspect(folder).problem is not None and "a link that leads to" in str(inspect(folder).problem)


def test_a_link_of_the_name_of_a_file_is_replaced_by_the_file(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    before = outside.read_bytes()
    (folder / "model.safetensors").symlink_to(outside)
    write_checkpoint(folder, models=[_layer()], weights=[_layer().state_dict()])
    assert outside.read_bytes() == before and not (folder / "model.safetensors").is_symlink()


def test_a_listing_of_a_remote_store_can_not_lead_out_of_the_folder_of_downloads(tmp_path: Path) -> None:
    class Listing:
        def files(self) -> dict[str, int]:
            return {"model.safetensors": 1, "../outside.txt": 1}

        def download(self, name: str, local: Path) -> None:
            local.write_text(name, encoding="utf-8")

    downloads = tmp_path / "downloads"
    downloads.mkdir()
    storage = storage_of("memory://bucket/run")
    assert isinstance(storage, RemoteStorage)
    with pytest.raises(CheckpointError, match=r"memory://bucket/run names the file '\.\./outside\.txt'"):
        RemoteStore(storage, Ranks())._fetch_unmanaged(cast("Any", Listing()), downloads)
    assert [path.name for path in tmp_path.rglob("*")] == ["downloads"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "way/evil", "C:evil"])
def test_weights_are_not_offloaded_out_of_their_folder(name: str, folder: Path, victim: Path) -> None:
    with pytest.raises(CheckpointError, match="names the file"):
        offload_state_dict(folder, {name: torch.ones(1)})
    assert _contents(victim) == {"kept.txt": "mine"} and not (folder.parent / "evil.dat").exists()


# ------------------------------------------------------------------------------- every place that opens a file

_OPENERS: Final = frozenset(
    [
        "open",
        "read_bytes",
        "read_text",
        "write_bytes",
        "write_text",
        "read_pickle",
        "read_described_pickle",
        "open_tensors",
        "safe_open",
        "mmap",
        "MappedFile",
        "FileSystemReader",
        "load_file",
        "load_tensors",
    ]
)
OWN: Final = "a name of this package's own in a folder that the caller gives, or a file that it writes"
GIVEN: Final = "the path itself comes from the caller, or from a place of this table that has checked it"
#: Every place that opens a file of a checkpoint -> where the name comes from; or the attack above that tries it.
PLACES: Final[dict[str, str]] = {
    "checkpointing/dcp.py _load_classes.Planner.load_bytes": GIVEN,
    "checkpointing/dcp.py read_metadata": "metadata of a distributed checkpoint",
    "checkpointing/store.py DurableFile.__init__": OWN,
    "checkpointing/layout.py StateFiles.read": OWN,
    "checkpointing/items.py _add_files": OWN,
    "checkpointing/store.py is_locked": OWN,
    "checkpointing/store.py lock": OWN,
    "checkpointing/manifest.py measure": "manifest",
    "checkpointing/objects.py load": GIVEN,
    "checkpointing/objects.py save": GIVEN,
    "checkpointing/layout.py read_state": "test_tensors_beside_a_state_are_not_read_through_a_link_that_leads_out",
    "checkpointing/storage.py LocalStorage.read": OWN,
    "checkpointing/storage.py LocalStorage.write": OWN,
    "checkpointing/loading.py Loading._read_model": OWN,
    "checkpointing/dcp.py _unpacked": "no file: what other ranks say",
    "checkpointing/background.py _allocate_huge_pages": "no file: memory",
    "checkpointing/storage.py fsync_path": OWN,
    "checkpointing/tensor_files.py open_tensors": GIVEN,
    "checkpointing/weights.py shards_of": "index, into a model",
    "checkpointing/weights.py open_weights": "index, merged",
    "big_models/budget.py _container_memory": "a file of the kernel",
    "big_models/budget.py _meminfo_bytes": "a file of the kernel",
    "big_models/load.py PickleFile.__init__": GIVEN,
    "big_models/load.py open_weight_file": GIVEN,
    "big_models/sizes.py check_tied_parameters_in_config": "no file: a configuration's method of that name",
    "guests/estimate/subject.py _from_config": OWN,
    "big_models/offload.py save_offload_index": OWN,
    "checkpointing/remote.py RemoteStore._fetch": OWN,
    "big_models/offload.py offload_weight": "test_weights_are_not_offloaded_out_of_their_folder",
    "big_models/offload.py load_offloaded_weight": "index of an offload folder",
    "big_models/offload.py read_index": OWN,
    "big_models/offload.py MappedFile.__init__": GIVEN,
    # By its documented purpose an offload index points at the safetensors files of a checkpoint elsewhere, which then
    # need no copy; such a file holds tensors and no code.
    "big_models/offload.py MappedFiles.__getitem__": "an entry `safetensors_file` of an offload index",
    "parallel/fsdp/files.py load_fsdp_model": OWN,
    "parallel/fsdp/files.py save_fsdp_model": OWN,
    "parallel/fsdp/files.py save_fsdp_optimizer": OWN,
    "guests/diloco/state.py DiLoCoState.write": OWN,
    "seams.py _may_have_guests": "no checkpoint: entry points of installed distributions",
}
#: Packages whose files are the user's configuration, the machine's, or of a run that this user has started.
_OTHER_PACKAGES: Final = (
    "commands", "launch", "settings", "plugins", "distributed", "tracking", "watching", "test_utils", "devices",
    "cores.py", "guests/clusters", "guests/completion", "guests/deepspeed", "guests/fault_tolerance", "guests/monitor",
    "guests/preemption", "guests/reproduce", "guests/rewind", "guests/scripts", "guests/xla",
)  # fmt: skip


def _opening(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            function = child.func
            called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if called in _OPENERS:
                yield inner
        yield from _opening(child, inner)


def test_every_place_that_opens_a_file_says_where_its_name_comes_from() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {function}"
        for path in PACKAGE.rglob("*.py")
        if not any(path.is_relative_to(PACKAGE / other) for other in _OTHER_PACKAGES)
        for function in _opening(ast.parse(path.read_text(encoding="utf-8")), "")
    }
    assert found == PLACES.keys()


#: What moves, replaces or removes files.
_CHANGERS: Final = frozenset(["os.replace", "os.rename", "unlink", "rmtree", "copy2", "download", "rm_file", "rmdir"])
OF_A_MANIFEST: Final = "a name in a manifest or a listing: inside(..., is_replaced=True)"
LISTED: Final = "what lies in the folder itself; links are neither followed nor taken for folders"
#: Every place that moves, replaces or removes a file of a checkpoint -> where the name comes from.
CHANGES: Final[dict[str, str]] = {
    "checkpointing/objects.py _HookFolder._collect": LISTED,
    "checkpointing/objects.py _HookFolder._set_aside": OF_A_MANIFEST,
    "checkpointing/objects.py _HookFolder.close": OWN,
    "checkpointing/objects.py _HookFolder.prepare": OWN,
    "checkpointing/items.py AddedItems.close": OWN,
    "checkpointing/store.py remove_lock_file": OWN,
    "checkpointing/store.py unlock": OWN,
    "checkpointing/dcp.py _remove": GIVEN,
    "checkpointing/objects.py atomic_file": OWN,
    "checkpointing/storage.py LocalStorage.delete": OWN,
    "checkpointing/storage.py LocalStorage.remove": LISTED,
    "checkpointing/storage.py LocalStorage.write": OWN,
    "checkpointing/storage.py RemoteStorage.delete": "no file of this machine",
    "checkpointing/remote.py RemoteStore._fetch_unmanaged": OF_A_MANIFEST,
    "checkpointing/remote.py RemoteStore.abandon": OWN,
    "checkpointing/remote.py RemoteStore.close": OWN,
    "checkpointing/remote.py RemoteStore.commit": OWN,
    "checkpointing/remote.py _fetched": OF_A_MANIFEST,
    "checkpointing/store.py CheckpointStore._move_in": OF_A_MANIFEST,
    "checkpointing/store.py CheckpointStore._move_to_target": OWN,
    "checkpointing/store.py CheckpointStore._remove_leftovers": LISTED,
    "checkpointing/store.py CheckpointStore.abandon": OWN,
    "checkpointing/store.py CheckpointStore.restore": OWN,
    "checkpointing/weights.py staged_files": LISTED,
    "checkpointing/saving.py _clear_stale_weights": LISTED,
    "big_models/offload.py save_offload_index": OWN,
}


def _changing(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            called = ast.unparse(child.func)
            if called in _CHANGERS or called.rpartition(".")[2] in _CHANGERS:
                yield inner
        yield from _changing(child, inner)


def test_every_place_that_replaces_or_removes_a_file_says_where_its_name_comes_from() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {function}"
        for folder in ("checkpointing", "big_models", "parallel")
        for path in (PACKAGE / folder).rglob("*.py")
        for function in _changing(ast.parse(path.read_text(encoding="utf-8")), "")
    }
    assert found == CHANGES.keys()
    asking = {place.partition(" ")[0] for place, source in CHANGES.items() if source == OF_A_MANIFEST}
    for file in asking:
        assert "is_replaced=True" in (PACKAGE / file).read_text(encoding="utf-8"), file


def test_every_place_that_follows_a_name_in_a_file_asks_the_one_function() -> None:
    followers = {place.partition(" ")[0] for place, source in PLACES.items() if source in ATTACKS}
    followers |= {"checkpointing/layout.py", "big_models/offload.py"}
    followers |= {place.partition(" ")[0] for place, source in CHANGES.items() if source == OF_A_MANIFEST}
    asking = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"import .*\binside\b", path.read_text(encoding="utf-8"))
    }
    assert asking == followers
