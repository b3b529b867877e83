"""The record of a run: what is in it, what never is, and what happens when it can't be written."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.commands.main import main
from accelerate.guests.reproduce.chain import LOCK, ChainFile, read_chain
from accelerate.guests.reproduce.recording import Recorder, next_mark
from accelerate.guests.reproduce.runs import runs_of, write_copies
from accelerate.guests.reproduce.surroundings import code, command, inputs
from accelerate.seams import LoopHook
from accelerate.utils import ProjectConfiguration
from tests.reproduce.scripts import NET, SECRETS, TRAIN, write_scripts

STEPS = ("before_step", "after_step")


def entries_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    chain = read_chain(folder / LOCK)
    assert not chain.problems, chain.problems
    return [entry for entry in chain.entries if kind in (None, entry["kind"])]


def train(folder: Path | None, updates: int = 3, *, resumes: bool = False) -> Accelerator:
    """Train in this process, with a checkpoint at the end."""
    project = ProjectConfiguration(project_dir=folder and str(folder), automatic_checkpoint_naming=folder is not None)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(updates * 2, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumes:
        accelerator.resume()
    for (rows,) in loader:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state()
    return accelerator


def test_a_run_leaves_its_launch_its_points_and_its_checkpoints(recorded: Path) -> None:
    entries = entries_of(recorded / "run")
    assert [entry["kind"] for entry in entries if entry["kind"] != "update"] == [
        "launch",
        "checkpoint",
        "checkpoint",
        "end",
    ]
    updates = [entry["updates"] for entry in entries if entry["kind"] == "update"]
    assert updates == [1, 2, 4, 8, 16] and entries[-1]["updates"] == 24
    launch = entries[0]
    folder = recorded.resolve()
    assert launch["command"]["words"][:4] == [str(recorded / "train.py"), "run", "--seed", "1"]
    assert launch["command"]["folder"] == str(folder)
    assert launch["project"] == str(folder / "run")
    hashes = {
        str(folder / name): hashlib.sha256(text.encode()).hexdigest()
        for name, text in (("train.py", TRAIN), ("net.py", NET))
    }
    assert {name: launch["code"]["files"].get(name) for name in hashes} == hashes
    assert launch["packages"]["torch"] == torch.__version__ and launch["packages"]["python"]
    assert launch["ranks"] == 1 and launch["seeds"]["torch_seed"] == "1"
    assert launch["machine"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert launch["data"] == [{"dataset": "TensorDataset", "samples": 48, "global_batch": 4}]
    weights = [entry["weights"] for entry in entries if entry["kind"] != "checkpoint"]
    assert len(set(weights)) == len(weights)
    by_update = {entry["updates"]: entry["weights"] for entry in entries if entry["kind"] == "end"}
    assert entries[-2]["kind"] == "checkpoint" and entries[-2]["weights"] == by_update[24]


def test_copies_of_files_outside_of_a_commit_are_kept(recorded: Path) -> None:
    launch = entries_of(recorded / "run", "launch")[0]
    code, texts = launch["code"], launch["texts"]
    assert "commit" not in code
    copies = {Path(name).name: texts[code["files"][name]] for name in code["copies"]}
    assert copies["train.py"] == TRAIN and copies["net.py"] == NET


def test_no_secret_is_in_any_file_of_the_run(recorded: Path) -> None:
    files = [path for path in (recorded / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    secrets = [*SECRETS.values(), "pass-of-reader", "pw-of-me"]
    found = [(path, secret) for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    assert not found
    launch = entries_of(recorded / "run", "launch")[0]
    words = launch["command"]["words"]
    assert words[words.index("--api_key") + 1] == "***"
    assert words[words.index("--index_url") + 1] == "https://***@files.example.com/simple"
    assert not {"HF_TOKEN", "FSDP_TRANSFORMER_CLS_TO_WRAP", "NCCL_SOCKET_TOKEN"} & launch["variables"].keys()


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and its module, which seem to run in this process."""
    write_scripts(tmp_path)
    for name, file in (("__main__", "train.py"), ("net", "net.py")):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, module)
    return tmp_path


def copies_of(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The code as it is recorded, and the copies by the names of the files in ``folder``."""
    found, texts = code()
    assert not any("a-secret-value" in text for text in texts.values())
    own = [name for name in found["copies"] if Path(name).parent in (folder, Path())]
    return found, {Path(name).name: texts[found["files"][name]] for name in own}


def test_a_source_with_a_secret_is_hashed_and_not_copied(scripts: Path) -> None:
    with (scripts / "net.py").open("a") as file:
        file.write('api_key = "a-secret-value"\n')
    found, copies = copies_of(scripts)
    name = str(scripts / "net.py")
    assert name in found["files"] and copies.keys() == {"train.py"} and "secret" in found["without_copy"][name]


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    command = ["git", *settings, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_in_a_work_tree_the_commit_and_the_changes_are_recorded(scripts: Path) -> None:
    git(scripts, "init")
    git(scripts, "add", "train.py")
    git(scripts, "commit", "-m", "One")
    with (scripts / "train.py").open("a") as file:
        file.write("# one more line\n")
    found, copies = copies_of(scripts)
    assert found["commit"] == git(scripts, "rev-parse", "HEAD")
    assert copies.keys() == {"train.py", "net.py", "uncommitted changes"}  # net.py isn't tracked
    assert "+# one more line" in copies["uncommitted changes"]
    git(scripts, "add", "train.py", "net.py")
    git(scripts, "commit", "-m", "Two")
    found, copies = copies_of(scripts)
    assert not copies and found["commit"] == git(scripts, "rev-parse", "HEAD")


def test_kept_code_comes_back_byte_for_byte_and_is_kept_once(scripts: Path, tmp_path: Path) -> None:
    data = "# caf\xe9\n".encode("latin-1") + NET.encode()
    (scripts / "net.py").write_bytes(data)
    for _ in range(2):
        train(tmp_path / "run").end_training()
    entries = read_chain(tmp_path / "run" / LOCK).entries
    first, second = (entry for entry in entries if entry["kind"] == "launch")
    assert first["texts"] and not second["texts"]
    for number, launch in enumerate((first, second)):
        files = write_copies(launch, entries, tmp_path / f"copies_{number}")
        assert [path.read_bytes() for path in files if path.name == "net.py"] == [data]


def test_without_git_all_files_are_copied(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found, copies = copies_of(scripts)
    assert "commit" not in found and copies == {"train.py": TRAIN, "net.py": NET}


def test_resumed_launches_continue_the_record_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for resumes in range(3):
        monkeypatch.setattr("accelerate.guests.reproduce.recording._numbers", count())  # as in a process of its own
        train(tmp_path, updates=5, resumes=resumes > 0).end_training()
        if not resumes:
            with (tmp_path / LOCK).open("a") as file:
                file.write('{"kind": "update", "launch": "abc", "upd')  # killed while it wrote
    chain = read_chain(tmp_path / LOCK)
    assert not chain.problems and len(chain.notes) == 1 and "torn" in chain.notes[0]
    launches = [entry for entry in chain.entries if entry["kind"] == "launch"]
    assert [entry["updates"] for entry in launches] == [0, 5, 10]
    assert launches[1]["resumed"]["folder"] == "checkpoints/checkpoint_0"
    (run,) = runs_of(chain.entries)
    assert run.last == 15 and len(run.launches) == 3 and not run.repeated
    assert run.launch_at(4) is launches[0] and run.launch_at(5) is launches[1] and run.launch_at(50) is launches[2]


def test_several_runs_share_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        train(tmp_path).end_training()
    runs = runs_of(entries_of(tmp_path))
    assert len(runs) == 2 and runs[0].points == runs[1].points
    assert runs[0].launches[0]["number"] != runs[1].launches[0]["number"]  # of one process


def test_a_checkpoint_in_the_background_is_recorded_when_it_is_written(tmp_path: Path) -> None:
    accelerator = train(tmp_path)
    folder = accelerator.save_state(asynchronous=True)
    accelerator.end_training()
    newest = entries_of(tmp_path, "checkpoint")[-1]
    manifest = Path(folder, "manifest.json").read_bytes()
    assert newest["manifest"] == hashlib.sha256(manifest).hexdigest() and Path(folder) == tmp_path / newest["folder"]


def rewritten(path: Path, entries: list[dict[str, Any]]) -> None:
    """Write these entries as a whole record."""
    path.unlink()
    for entry in entries:
        ChainFile(path).append({k: v for k, v in entry.items() if k not in ("previous", "hash")}, is_durable=False)


def test_a_record_of_another_version_ends_no_run_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(folder)
    train(folder, resumes=True).end_training()
    path, entries = folder / LOCK, entries_of(folder)
    kinds = {entry["kind"]: entry for entry in entries}
    assert kinds.keys() == {"launch", "update", "checkpoint", "end"}
    absent = [(kind, key) for kind, entry in kinds.items() for key in entry if key not in ("previous", "hash", "kind")]
    assert len(absent) > 25
    for kind, key in absent:
        rewritten(path, [{k: v for k, v in one.items() if one["kind"] != kind or k != key} for one in entries])
        capsys.readouterr()
        assert main(["reproduce", str(folder), "--verify-only"]) == 0
        told = capsys.readouterr().out
        assert key in ("epoch", "batches", "order", "batch", "time") or "another version" in told, (kind, key)
        train(folder, resumes=True)
        assert entries_of(folder, "launch")[-1]["resumed"] is not None, (kind, key)


def test_a_record_that_begins_with_a_resumed_launch_is_not_repeated_from_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(folder).end_training()
    train(folder, resumes=True).end_training()
    rewritten(folder / LOCK, [one for one in entries_of(folder) if one.get("resumed") is not None])
    assert main(["reproduce", str(folder)]) == 2
    assert "went on from update 3" in capsys.readouterr().err


def test_loading_in_the_middle_sets_the_count_back(tmp_path: Path) -> None:
    accelerator = train(tmp_path, updates=3)
    accelerator.load_state()
    entry = entries_of(tmp_path, "load")[0]
    assert entry["updates"] == 3 and entry["folder"] == "checkpoints/checkpoint_0"


def test_nothing_is_called_in_an_update_without_a_folder(tmp_path: Path) -> None:
    assert not train(None).gradient_state.hooks.of(Recorder)
    hooks = train(tmp_path).gradient_state.hooks
    (recorder,) = hooks.of(Recorder)
    called = [
        moment
        for moment in (
            "begin_batch",
            "between_batches",
            "before_backward",
            "after_backward",
            "before_step",
            "after_step",
        )
        if any(getattr(one, "__self__", None) is recorder for one in getattr(hooks, moment))
    ]
    assert called == ["after_step"]
    assert not [hook for hook in hooks.of(LoopHook) if type(hook).__name__ == "Beginning"]


def test_a_folder_that_cannot_be_written_ends_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOCK).mkdir()  # so it can't be opened, by root neither
    accelerator = train(tmp_path)
    accelerator.end_training()
    assert (tmp_path / "checkpoints" / "checkpoint_0").is_dir()
    assert len([record for record in caplog.records if "Training continues without a record" in record.message]) == 1


def test_two_optimizers_and_a_new_one_after_free_memory_count_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    for _ in range(2):
        models = [torch.nn.Linear(2, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
        accelerator.free_memory()
    assert [entry["updates"] for entry in entries_of(tmp_path, "update")] == [1, 2, 4, 8]


def test_points_are_dense_at_first_and_regular_later() -> None:
    points, update = [], 0
    while update < 450:
        update = next_mark(update)
        points.append(update)
    assert points == [1, 2, 4, 8, 16, 32, 64, 100, 128, 200, 256, 300, 400, 500]


def test_a_library_that_another_thread_imports_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))  # as it is at the beginning of its import
    found, _ = code()
    assert "notebook cells" not in found["files"]


def test_a_notebook_has_no_command_and_its_cells_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = types.SimpleNamespace(user_ns={"In": ["", "x = 1", "train(x)"]})
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    assert command()["words"] == [] and command()["started_in"] == "a notebook"
    train(tmp_path).end_training()
    launch = entries_of(tmp_path, "launch")[0]
    assert "notebook cells" in launch["code"]["copies"]
    assert launch["texts"][launch["code"]["files"]["notebook cells"]] == "\n\nx = 1\n\ntrain(x)"


def test_files_that_arguments_name_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2")
    found = inputs(
        [str(tmp_path / "data.csv"), f"--data={tmp_path / 'data.csv'}", "--lr", "0.1", str(tmp_path), "none"]
    )
    assert found == {str((tmp_path / "data.csv").resolve()): hashlib.sha256(b"1,2").hexdigest()}


def test_the_launch_is_json_for_people(recorded: Path) -> None:
    launch = json.loads((recorded / "run" / LOCK).read_text().splitlines()[0])
    assert launch["kind"] == "launch" and launch["time"].endswith("Z")


@pytest.mark.parametrize("folder", ["", None, "memory://run"])
def test_a_run_without_a_folder_on_a_disk_keeps_no_record(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(3, 2)).sum())
    optimizer.step()
    accelerator.end_training()
    assert not list(tmp_path.iterdir())
