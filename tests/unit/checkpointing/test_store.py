from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate.checkpointing import store as store_module
from accelerate.checkpointing.manifest import Manifest, read_manifest
from accelerate.checkpointing.store import CheckpointStore, StagingDirectory
from accelerate.errors import CheckpointError, CheckpointNotFound
from tests.checkpoint_parts import transaction


def save(folder: Path, **files: str) -> None:
    """A committed checkpoint whose files have these contents."""
    with transaction(CheckpointStore(folder)) as staging:
        for name, text in files.items():
            write(staging, name, text)


def write(staging: StagingDirectory, name: str, text: str) -> None:
    with staging.create(name) as file:
        file.write(text.encode())


def contents(folder: Path) -> dict[str, str]:
    names = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in names}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir() if path.name != folder.name]


def in_a_child(function: Callable[[], object]) -> str:
    """What ``function`` raised in a forked process, as ``Type: text``; "" when it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            text = ""
        except BaseException as error:  # everything is told to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_new_folder_appears_with_its_files_and_a_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "ck"
    save(folder, a="one", b="two")
    assert contents(folder) == {"a": "one", "b": "two"}
    assert leftovers(folder) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["a"] == {"size": 3, "crc32": "7a6c86f1"}
    assert CheckpointStore(folder).problem() is None


def test_nothing_is_there_before_the_block_ends(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    with transaction(CheckpointStore(folder)) as staging:
        write(staging, "a", "one")
        assert not folder.exists()
        assert staging.folder.name.startswith(".ck.tmp-")
        assert not (staging.folder / "manifest.json").exists()


def test_files_that_others_wrote_into_the_staging_folder_belong_to_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    with transaction(CheckpointStore(folder)) as staging:
        (staging.folder / "unet").mkdir()
        (staging.folder / "unet" / "weights.bin").write_text("by a hook")
    assert contents(folder) == {"unet/weights.bin": "by a hook"}
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.files["unet/weights.bin"].size == 9


def test_an_error_in_the_block_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    with pytest.raises(KeyError, match="mine"), transaction(CheckpointStore(folder)) as staging:
        write(staging, "a", "one")
        raise KeyError("mine")
    assert list(tmp_path.iterdir()) == []


def test_into_an_existing_folder_files_move_and_foreign_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "notes.txt").write_text("foreign")
    inode = folder.stat().st_ino
    save(folder, a="one", b="two")
    save(folder, a="three")
    assert contents(folder) == {"a": "three", "notes.txt": "foreign"}
    assert folder.stat().st_ino == inode
    assert leftovers(folder) == []


def test_the_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link", a="one")
    assert contents(tmp_path / "real") == {"a": "one"}
    assert (tmp_path / "link").is_symlink()


def test_somebody_else_s_manifest_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(CheckpointError, match="not written by this library"):
        save(folder, a="one")
    assert (folder / "manifest.json").read_text() == '{"name": "web app"}'
    assert leftovers(folder) == []


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ck").write_text("a file")
    with pytest.raises(CheckpointError, match="is a file"):
        save(tmp_path / "ck", a="one")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "a").write_text("on"), "a: truncated to 2 bytes of 3"),
        (lambda f: (f / "a").write_text("one more"), "a: grown to 8 bytes of 3"),
        (lambda f: (f / "a").write_text("onE"), "a: its content changed"),
        (lambda f: (f / "a").unlink(), "a: missing"),
        (lambda f: (f / "manifest.json").write_text('{"format": "accel'), "manifest.json is not whole"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not written by this library"),
        (lambda f: (f / "manifest.json").unlink(), "no manifest.json: the save never finished"),
        (lambda f: edit(f, format_version=2), "format version 2, this library reads 1"),
        (lambda f: edit(f, files={"../../etc/passwd": {"size": 1, "crc32": "0"}}), "leads out of the folder"),
        (lambda f: edit(f, files={"a": {}}), "lacks a field"),
    ],
)
def test_damage_is_found_with_its_reason(damage: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(folder, a="one", b="two")
    damage(folder)
    assert reason in str(CheckpointStore(folder).problem())


def edit(folder: Path, **fields: object) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **fields}))


def test_a_flipped_bit_at_any_place_of_any_file_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(folder, a="one", b="two")
    for name in ("a", "b"):
        before = (folder / name).read_bytes()
        for bit in range(8 * len(before)):
            flipped = bytearray(before)
            flipped[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(flipped)
            assert CheckpointStore(folder).problem() is not None
        (folder / name).write_bytes(before)
    assert CheckpointStore(folder).problem() is None


STEPS = ["rename", "replace", "unlink", "fsync"]


@pytest.mark.parametrize("existing", [False, True], ids=["fresh", "existing"])
def test_a_crash_at_every_single_system_call_leaves_the_old_or_the_new_state(existing: bool, tmp_path: Path) -> None:
    """The process dies at the n-th call that changes a folder, for every n until the save gets through."""
    for number in range(200):
        folder = tmp_path / f"run{number}" / "ck"
        if existing:
            save(folder, a="old", gone="old")
            (folder / "notes.txt").write_text("foreign")
        survived = _save_dying_at(number, folder)
        store = CheckpointStore(folder)
        if existing:
            store.require()
            assert store.problem() is None
            found = contents(folder)
            assert found.pop("notes.txt") == "foreign"
            assert found in ({"a": "old", "gone": "old"}, {"a": "new", "b": "new"})
        else:
            store.recover()
            assert not folder.exists() or (store.problem() is None and contents(folder) == {"a": "new", "b": "new"})
        save(folder, c="later")  # the next save works and clears what the crash left
        assert CheckpointStore(folder).problem() is None
        assert leftovers(folder) == []
        if survived:
            assert number >= 8
            return
    raise AssertionError("the save never got through")


def _save_dying_at(number: int, folder: Path) -> bool:
    child = os.fork()
    if child == 0:
        left = [number]

        def dying(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call

        for name in STEPS:
            setattr(store_module.os, name, dying(getattr(os, name)))
        save(folder, a="new", b="new")
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_staging_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    with transaction(CheckpointStore(folder)) as staging:
        write(staging, "a", "mine")
        save(folder, b="another save of the same folder meanwhile")
        assert staging.folder.exists()
    assert contents(folder) == {"a": "mine"}


@pytest.mark.parametrize("call", ["save", "recover"])
def test_a_staging_folder_that_another_job_removes_at_any_moment_is_no_error(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs clean up after the same killed save: one finds a folder, and the other has removed it meanwhile."""
    folder = tmp_path / "ck"
    left = tmp_path / ".ck.tmp-left"
    with transaction(CheckpointStore(left)) as staging:
        write(staging, "a", "of a killed save")
    is_locked = store_module.is_locked

    def removed_meanwhile(path: Path) -> bool:
        shutil.rmtree(path)
        return is_locked(path)

    monkeypatch.setattr(store_module, "is_locked", removed_meanwhile)
    if call == "save":
        save(folder, a="one")
        assert contents(folder) == {"a": "one"}
    else:
        folder.mkdir()
        (folder / "a").write_text("of a killed save")  # as if the other job had moved it
        assert not CheckpointStore(folder).recover()
    assert not left.exists()


def test_a_worker_that_outlives_a_killed_save_does_not_hold_its_lock(tmp_path: Path) -> None:
    """As a loader's worker does: forked while a save was under way, and not yet aware that its parent is dead."""
    folder = tmp_path / "ck"
    save(folder, a="old")
    reader, writer = os.pipe()
    ready, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        replace = os.replace

        def fork_and_die(source: Path, target: Path) -> None:
            if Path(target) == folder / "a":
                if os.fork() == 0:
                    os.close(writer)
                    os.write(to_parent, b".")  # fork() has returned, so the lock's copy is closed
                    os.read(reader, 1)
                    os._exit(0)
                os.read(ready, 1)
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        store_module.os.replace = fork_and_die  # type: ignore[assignment]
        save(folder, a="new")
        os._exit(0)
    os.close(reader)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert CheckpointStore(folder).recover()
    assert contents(folder) == {"a": "new"}
    for descriptor in (writer, ready, to_parent):
        os.close(descriptor)


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(folder, a="old")

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        save(folder, a="x" * 10_000)

    assert "File too large" in (text := in_a_child(fill)) and text.startswith("CheckpointError: can't save"), text
    assert contents(folder) == {"a": "old"}
    assert leftovers(folder) == []
    assert CheckpointStore(folder).problem() is None


def test_a_read_only_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    parent = tmp_path / "locked"
    parent.mkdir()
    parent.chmod(0o555)

    def attempt() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        save(parent / "ck", a="x")

    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    text = in_a_child(attempt)
    assert text.startswith("CheckpointError: can't save") and "Permission denied" in text and "locked" in text, text


def test_where_the_parent_cannot_be_written_files_are_staged_inside(tmp_path: Path) -> None:
    folder = tmp_path / "locked" / "ck"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (tmp_path / "locked").chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)

    def attempt() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        save(folder, a="one")
        save(folder, a="two")

    assert in_a_child(attempt) == ""
    assert contents(folder) == {"a": "two"}
    assert sorted(path.name for path in folder.iterdir()) == ["a", "manifest.json"]


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint folder"):
        CheckpointStore(tmp_path / "nowhere").require()


def test_the_manifest_records_what_was_saved(tmp_path: Path) -> None:
    description = Manifest({}, step=7, strategy="MULTI_CPU", details={"epoch": 2})
    with transaction(CheckpointStore(tmp_path / "ck"), description) as staging:
        with staging.create("x.pkl", pickle=True) as file:
            file.write(b"1")
        staging.details["metrics"] = {"loss": 0.5}
    manifest = read_manifest(tmp_path / "ck")
    assert manifest is not None
    assert (manifest.step, manifest.strategy, manifest.world_size) == (7, "MULTI_CPU", 1)
    assert manifest.details == {"epoch": 2, "metrics": {"loss": 0.5}}
    assert manifest.pickled == ("x.pkl",)


def test_an_unlocked_folder_is_free_and_its_lock_is_closed(tmp_path: Path) -> None:
    descriptor = store_module.lock(tmp_path)
    assert store_module.is_locked(tmp_path)
    store_module.unlock(descriptor)
    assert not store_module.is_locked(tmp_path)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)
