"""Save hooks see the final folder; what they write there is committed with the rest, and nothing whole is ever torn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import read_checkpoint, write_checkpoint
from accelerate.checkpointing.manifest import read_manifest
from accelerate.checkpointing.series import inspect
from accelerate.errors import CheckpointError


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def writing(text: str, *, then: Callable[[], object] = lambda: None) -> Callable[..., None]:
    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        (Path(output_dir) / "unet").mkdir(exist_ok=True)
        (Path(output_dir) / "unet" / "config.json").write_text(text)
        then()

    return hook


def save(folder: Path, value: int, hook: Callable[..., None]) -> None:
    weights = [{"w": torch.full((2,), float(value))}]
    write_checkpoint(folder, weights=weights, custom_objects=[Counter(value)], pre_hooks=[hook])


def loaded(folder: Path) -> tuple[int, str]:
    counter, model = Counter(-1), torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2))
    read_checkpoint(folder, models=[model], custom_objects=[counter])
    assert model.w.tolist() == [float(counter.value)] * 2
    return counter.value, (folder / "unet" / "config.json").read_text()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_programs_find_the_hooks_in_ordered_dicts_run_them_and_put_their_own_there(tmp_path: Path) -> None:
    """PixArt-sigma's trainers do, under these two names."""
    accelerator, calls = Accelerator(cpu=True), list[str]()
    handle = accelerator.register_save_state_pre_hook(lambda *_: calls.append("save"))
    accelerator.register_load_state_pre_hook(lambda *_: calls.append("load"))
    for hook in accelerator._save_model_state_pre_hook.values():
        hook([], [], str(tmp_path))
    for hook in accelerator._load_model_state_pre_hook.values():
        hook([], str(tmp_path))
    assert calls == ["save", "load"]
    accelerator._save_model_state_pre_hook[-1] = lambda *_: calls.append("the program's own")
    accelerator._save_model_state_pre_hook.move_to_end(-1, last=False)
    accelerator._load_model_state_pre_hook.clear()
    accelerator.load_state(accelerator.save_state(tmp_path / "ck"))
    assert calls[2:] == ["the program's own", "save"]
    handle.remove()
    assert list(accelerator._save_model_state_pre_hook) == [-1]


def test_files_of_hooks_are_in_the_manifest(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1, writing("one"))
    manifest = read_manifest(tmp_path / "ck")
    assert manifest is not None and "unet/config.json" in manifest.files
    assert names(tmp_path) == {"ck"} and inspect(tmp_path / "ck", contents=True).problem is None


def test_a_checkpoint_is_replaced_with_its_hooks_files_and_foreign_files_stay(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1, writing("one"))
    (tmp_path / "ck" / "notes.txt").write_text("mine")
    (tmp_path / "ck" / "empty").mkdir()
    save(tmp_path / "ck", 2, writing("two"))
    assert loaded(tmp_path / "ck") == (2, "two")
    assert (tmp_path / "ck" / "notes.txt").read_text() == "mine" and (tmp_path / "ck" / "empty").is_dir()
    assert names(tmp_path) == {"ck"} and inspect(tmp_path / "ck", contents=True).problem is None


def test_a_hook_that_fails_leaves_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1, writing("one"))
    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "ck", 2, writing("two", then=lambda: 1 / 0))
    assert loaded(tmp_path / "ck") == (1, "one") and names(tmp_path) == {"ck"}
    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "new", 2, writing("two", then=lambda: 1 / 0))
    assert names(tmp_path) == {"ck"}


def in_a_child(act: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(1)
    os.waitpid(child, 0)


def test_a_kill_inside_a_hook_tears_nothing(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1, writing("one"))
    in_a_child(lambda: save(tmp_path / "ck", 2, writing("two", then=lambda: os._exit(9))))
    assert loaded(tmp_path / "ck") == (1, "one")
    in_a_child(lambda: save(tmp_path / "new", 2, writing("two", then=lambda: os._exit(9))))
    with pytest.raises(CheckpointError, match="the save never finished"):
        loaded(tmp_path / "new")
    for name in ("ck", "new"):  # the next save cleans up
        save(tmp_path / name, 3, writing("three"))
        assert loaded(tmp_path / name) == (3, "three")
    assert names(tmp_path) == {"ck", "new"}
    assert names(tmp_path / "new") == {
        *("manifest.json", "model.safetensors", "random_states_0.json", "unet"),
        *("custom_checkpoint_0.json", "custom_checkpoint_0.safetensors"),
    }


def test_files_of_a_killed_hook_that_cant_be_removed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_child(lambda: save(tmp_path / "new", 2, writing("two", then=lambda: os._exit(9))))
    unlink = os.unlink

    def refuse(path: str | Path, **where: Any) -> None:
        if os.path.basename(path) == "config.json":
            raise PermissionError(path)
        unlink(path, **where)

    monkeypatch.setattr(os, "unlink", refuse)
    save(tmp_path / "new", 3, writing("three"))
    assert loaded(tmp_path / "new") == (3, "three")


@pytest.mark.parametrize("number", range(12))
def test_a_kill_at_any_move_tears_nothing(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "ck", 1, writing("one"))
    replace, calls = os.replace, []

    def killed(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) > number:
            os._exit(9)
        replace(*args, **kwargs)

    def act() -> None:
        os.replace = killed
        save(tmp_path / "ck", 2, writing("two"))

    in_a_child(act)
    assert loaded(tmp_path / "ck") in [(1, "one"), (2, "two")]


def test_a_save_that_is_refused_before_its_hooks_run_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "of another program"}')
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not written by this library"):
        save(tmp_path, 1, writing("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
