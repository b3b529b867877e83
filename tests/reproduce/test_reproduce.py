"""``accelerate reproduce`` of real runs; most of them need seconds each, so ``make slow`` runs them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from accelerate.commands.main import main
from accelerate.seams import guests
from tests.reproduce.scripts import SECRETS, TRAIN, reproduce, run_script, write_scripts
from tests.slow import slow

needs_rewind = pytest.mark.skipif("rewind" not in guests(), reason="the guest that starts a script again isn't there")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def run_of(folder: Path, *arguments: str, num_processes: int = 1) -> Path:
    write_scripts(folder)
    ended = run_script(folder, "run", *arguments, num_processes=num_processes)
    assert ended.returncode == 0, ended.stderr
    return folder


@needs_rewind
def test_a_run_is_equal_and_nothing_of_it_changes(recorded: Path) -> None:
    before = contents(recorded)
    url = SECRETS["--index_url"]
    again = reproduce(recorded, "run", "--", "--api_key", "abc", "--index_url", url)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Equal: 8 fingerprints, from update 0 to update 24." in again.stdout
    assert contents(recorded) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "run.lock.json is not there"),
        (["run", "--run", "2"], "has 1 run"),
        (["run", "--from_update", "5"], "There are checkpoints at updates 12, 24"),
        (["run", "--from_update", "24"], "No fingerprint was recorded after update 24"),
        (["run", "--from-update", "12", "--to-update", "13"], "There are fingerprints at updates 0, 1, 2"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    arguments: list[str], text: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recorded)
    assert main(["reproduce", *arguments]) == 2
    assert text in capsys.readouterr().err


@needs_rewind
def test_left_out_secrets_are_asked_for(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recorded)
    assert main(["reproduce", "run"]) == 2
    assert "--api_key" in capsys.readouterr().err


@needs_rewind
def test_each_left_out_secret_is_asked_for(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recorded)
    assert main(["reproduce", "run", "--", "--api_key", "abc"]) == 2
    assert "--index_url" in capsys.readouterr().err


def test_an_empty_record_and_one_without_its_end_are_told(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(recorded / "run", copied)
    lock = copied / "run.lock.json"
    whole = lock.read_bytes()
    assert main(["reproduce", str(copied), "--verify_only"]) == 0
    assert "It has no end" not in capsys.readouterr().out
    lock.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert main(["reproduce", str(copied), "--verify_only"]) == 0
    assert "It has no end: the program was killed, still runs, or its last entries" in capsys.readouterr().out
    lock.write_bytes(whole.replace(b"\n", b"\r\n"))
    assert main(["reproduce", str(copied), "--verify_only"]) == 1
    assert "line ends of run.lock.json were converted" in capsys.readouterr().out
    lock.write_bytes(b"")
    assert main(["reproduce", str(copied), "--verify_only"]) == 1
    assert "it was emptied" in capsys.readouterr().out


@needs_rewind
def test_a_script_that_is_gone_is_named_with_its_copy(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "train.py").rename(tmp_path / "train.py")
    try:
        assert main(["reproduce", str(recorded / "run")]) == 2
    finally:
        (tmp_path / "train.py").rename(recorded / "train.py")
    assert "--write_code" in (said := capsys.readouterr().err) and "train.py" in said


def test_kept_code_is_written_to_a_new_folder(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = tmp_path / "copies"
    assert main(["reproduce", str(recorded / "run"), "--write_code", str(copies)]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(copies))]
    assert {path.name: path.read_text() for path in files if path.name == "train.py"} == {"train.py": TRAIN}
    assert main(["reproduce", str(recorded / "run"), "--write_code", str(copies)]) == 2  # nothing is written over
    assert "Name a new folder." in capsys.readouterr().err


@needs_rewind
@slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["replicas", "fsdp"])
def test_runs_on_ranks_are_equal_and_so_are_their_parts(
    num_processes: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    if options and num_processes == 1:
        pytest.skip("one rank shards nothing")
    folder = run_of(tmp_path, "--seed", "1", *options, num_processes=num_processes)
    before = contents(folder)
    for arguments, text in (
        ((), "from update 0 to update 24"),
        (("--to_update", "4"), "from update 0 to update 4"),
        (("--from_update", "13"), "from update 12 to update 24"),
        (("--from_update", "12", "--to_update", "20"), "from update 12 to update 16"),
    ):
        again = reproduce(folder, "run", *arguments)
        assert again.returncode == 0 and text in again.stdout, again.stdout + again.stderr
    assert contents(folder) == before


@needs_rewind
@slow
def test_a_resumed_run_is_equal_to_one_without_interruption(tmp_path: Path) -> None:
    write_scripts(tmp_path)
    assert run_script(tmp_path, "run", "--seed", "1", "--epochs", "3", "--fails_at", "15").returncode == 3
    assert run_script(tmp_path, "run", "--seed", "1", "--epochs", "3").returncode == 0
    again = reproduce(tmp_path, "run", "--", "--fails_at", "1000")
    assert again.returncode == 0 and "to update 36" in again.stdout, again.stdout + again.stderr


@needs_rewind
@slow
def test_planted_changes_are_found_with_their_cause(tmp_path: Path) -> None:
    samples = torch.randn(48, 4)
    torch.save(samples, tmp_path / "samples.pt")
    folder = run_of(tmp_path, "--seed", "1", "--data", "samples.pt")
    script, net = folder / "train.py", folder / "net.py"
    net_before = net.read_text()

    script.write_text(TRAIN.replace("lr=0.01", "lr=0.02"))
    again = reproduce(folder, "run")
    assert again.returncode == 1 and "Different at update 1 (update 0 is equal): the weights" in again.stdout
    assert "Likely cause: the code." in again.stdout and "train.py has changed" in again.stdout
    script.write_text(TRAIN)

    net.write_text(net_before.replace("Dropout(0.1)", "Dropout(0.2)"))
    again = reproduce(folder, "run")
    assert again.returncode == 1 and "net.py has changed" in again.stdout, again.stdout
    net.write_text(net_before)

    samples[17] += 1e-3
    torch.save(samples, folder / "samples.pt")
    again = reproduce(folder, "run")
    assert again.returncode == 1 and "samples.pt has changed" in again.stdout, again.stdout
    assert "Likely cause: the code" not in again.stdout


@needs_rewind
@slow
def test_a_run_without_a_seed_differs_at_its_start(tmp_path: Path) -> None:
    again = reproduce(run_of(tmp_path), "run")
    assert again.returncode == 1 and "Different at update 0" in again.stdout, again.stdout
    assert "Likely cause: the seed." in again.stdout


@needs_rewind
@slow
def test_a_run_on_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    again = reproduce(run_of(tmp_path, "--seed", "1"), "run", "--num_processes", "2")
    assert again.returncode in (0, 1)
    assert again.returncode == 0 or "ranks: 2 now, 1 in the run" in again.stdout, again.stdout


@needs_rewind
@slow
def test_a_folder_that_was_moved_is_repeated_too(tmp_path: Path) -> None:
    folder = run_of(tmp_path, "--seed", "1")
    shutil.move(folder / "run", folder / "elsewhere")
    before = contents(folder / "elsewhere")
    for arguments in ((), ("--from_update", "12")):
        again = reproduce(folder, "elsewhere", *arguments)
        assert again.returncode == 0 and "Equal" in again.stdout, again.stdout + again.stderr
    assert not (folder / "run").exists() and contents(folder / "elsewhere") == before


@needs_rewind
@slow
def test_a_script_that_ends_earlier_is_told(tmp_path: Path) -> None:
    folder = run_of(tmp_path, "--seed", "1")
    (folder / "train.py").write_text(TRAIN.replace("default=2", "default=1"))
    again = reproduce(folder, "run")
    assert again.returncode == 1 and "ended after update" in again.stdout, again.stdout


@slow
def test_a_killed_run_keeps_a_record_that_holds(tmp_path: Path) -> None:
    import subprocess
    import sys

    write_scripts(tmp_path)
    command = [sys.executable, "train.py", "run", "--seed", "1", "--epochs", "100000"]
    process = subprocess.Popen(command, cwd=tmp_path)
    lock = tmp_path / "run" / "run.lock.json"
    deadline = time.monotonic() + 100
    while not (lock.exists() and lock.read_bytes().count(b"\n") > 12) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert main(["reproduce", str(tmp_path / "run"), "--verify_only"]) == 0
