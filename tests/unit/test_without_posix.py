"""What runs where POSIX is missing: child interpreters in which this package finds none of its parts.

An imitation: other libraries, torch above all, are those of this system, and so are its paths. It finds what this
package imports or calls without a look; it can't find what Windows does differently under the same name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from accelerate.checkpointing import store as locks
from accelerate.checkpointing.storage import check_name, problem_on_windows
from accelerate.errors import CheckpointError
from tests.python_path import QUICK_START, python_path
from tests.slow import slow_for

slow = slow_for("processes of their own")
#: Runs at the start of every child interpreter, and of those that it starts.
TAKEN_AWAY = """
import builtins, io, os, select, signal, socket, sys, types

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses"}
MISSING = {
    "os": set(
        "fork forkpty register_at_fork getuid geteuid getgid getegid sched_getaffinity sched_setaffinity statvfs"
        " fstatvfs O_DIRECTORY O_NOFOLLOW set_blocking wait4 wait3 killpg setsid getpgid setpgid getpgrp pidfd_open"
        " uname getloadavg mkfifo sysconf nice fchmod chown lchown posix_fallocate openpty sync posix_spawn".split()
    ),
    "signal": set("SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD alarm setitimer pthread_kill".split()),
    "select": {"poll", "epoll"},
    "socket": {"AF_UNIX"},
}

def is_ours(frame):
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("accelerate", "__main__")

class Poorer(types.ModuleType):
    def __getattribute__(self, name):
        if name in MISSING[types.ModuleType.__getattribute__(self, "__name__")] and is_ours(sys._getframe(1)):
            raise AttributeError(f"module has no attribute {name!r}", name=name, obj=self)
        return types.ModuleType.__getattribute__(self, name)

for module in (os, signal, select, socket):
    module.__class__ = Poorer

whole_import = builtins.__import__

def poorer_import(name, *args, **kwargs):
    if name.partition(".")[0] in MODULES and is_ours(sys._getframe(1)):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return whole_import(name, *args, **kwargs)

builtins.__import__ = poorer_import

def is_absent(path):
    try:
        text = os.fsdecode(path)
    except TypeError:
        return False  # a descriptor
    return text in ("/proc", "/sys") or text.startswith(("/proc/", "/sys/"))

def without_proc(function, folders=True):
    def call(path=".", *args, **kwargs):
        if is_absent(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        if not folders and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return function(path, *args, **kwargs)
    return staticmethod(call)  # no method of a class that keeps it, as pathlib of Python 3.10 does

os_open = os.open
for home, name in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "listdir"), (os, "scandir"), (os, "access")):
    setattr(home, name, without_proc(getattr(home, name)))
os.open = without_proc(os_open, folders=False)

def refuse(*args, **kwargs):
    raise OSError("[WinError 1314] A required privilege is not held by the client")

os.symlink = refuse

import multiprocessing
multiprocessing.set_start_method("spawn")  # the only one there is
"""


def run(folder: Path, *command: str, stdin: str = "", code: int = 0) -> str:
    """What ``command`` printed in an interpreter without POSIX."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        (QUICK_START / "sitecustomize.py").read_text() + TAKEN_AWAY, encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(site)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


TRAIN = """
    import os
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset
    assert not hasattr(os, "fork") and not hasattr(os, "register_at_fork")
    def begin():
        torch.manual_seed(0)
        run = Accelerator(cpu=True)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=2, shuffle=True)
        return run, *run.prepare(model, optimizer, data)
    def train(run, model, optimizer, data):
        for inputs, targets in data:
            with run.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                run.backward(loss)
                run.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    objects = begin()
"""


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        script(
            tmp_path,
            """
            import importlib, os, pkgutil, warnings
            warnings.simplefilter("ignore")
            import accelerate
            assert not hasattr(os, "fork")
            failed = []
            for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
                if ".scripts" in module.name or module.name.endswith(("__main__", "reaper")):
                    continue
                try:
                    importlib.import_module(module.name)
                except Exception as error:
                    failed.append((module.name, repr(error)))
            print("failed:", failed)
            """,
        ),
    )
    assert "failed: []" in found


def test_training_goes_on_exactly_from_a_checkpoint(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        script(
            tmp_path,
            TRAIN
            + """
    train(*objects)
    objects[0].save_state("runs/one")
    train(*objects)
    expected = [p.detach().clone() for p in objects[1].parameters()]
    objects[0].load_state("runs/one")
    train(*objects)
    assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(expected, objects[1].parameters()))
    objects[0].save_state("runs/one")  # into the folder that is there
    objects[0].save_model(objects[1], "model")
    print(sorted(os.listdir("runs")), sorted(os.listdir("model")))
    """,
        ),
    )
    assert "['one'] ['model.safetensors']" in found


TRAIN_WITH_WORKERS = """
    import multiprocessing, sys
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader, Dataset
    class Rows(Dataset):
        def __len__(self):
            return 10
        def __getitem__(self, row):
            return torch.full((3,), float(row)) + torch.rand(3), torch.rand(1)
    def begin(is_stateful):
        torch.manual_seed(0)
        run = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=is_stateful))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return run, *run.prepare(model, optimizer, DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=1))
    def train(run, model, optimizer, data, save_after=None):
        losses = []
        for inputs, targets in data:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            if len(losses) == save_after:
                run.save_state("middle")
        return losses
    if __name__ == "__main__":
        assert multiprocessing.get_start_method() == "spawn"
        is_stateful = sys.argv[1] == "stateful"
        undisturbed = train(*begin(is_stateful), save_after=2)
        again = begin(is_stateful)
        again[0].load_state("middle")
        assert train(*again) == undisturbed[2:] and len(undisturbed) == 5
        print("the same losses")
"""


@pytest.mark.parametrize("kind", ["stateful", pytest.param("plain", marks=slow)])
def test_workers_are_spawned_and_a_run_goes_on_exactly_inside_an_epoch(kind: str, tmp_path: Path) -> None:
    assert "the same losses" in run(tmp_path, script(tmp_path, TRAIN_WITH_WORKERS), kind)


def test_one_process_is_launched(tmp_path: Path) -> None:
    where = script(tmp_path, TRAIN + '\n    train(*objects); print("trained", objects[0].num_processes)\n')
    command = ["-m", "accelerate.commands.main", "launch", "--cpu", "--num_processes", "1", where]
    assert "trained 1" in run(tmp_path, *command)


#: Windows can't replace a process; what is imported as `sys` by the one file that asks says that this is Windows.
LAUNCH_THERE = """
    import sys, types
    from accelerate.launch import local
    local.sys = types.SimpleNamespace(platform="win32", stdout=sys.stdout, stderr=sys.stderr)
    from accelerate.commands.launch import main
    raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise SystemExit(7)", 7), ("raise LookupError('row 5')", 1)])
def test_a_launched_process_is_waited_for_where_it_can_not_take_the_launchers_place(
    ending: str, code: int, tmp_path: Path
) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(textwrap.dedent(LAUNCH_THERE), encoding="utf-8")
    program = script(tmp_path, f"import os; print('started by', os.getppid(), flush=True); {ending}")
    found = run(tmp_path, str(launcher), "--cpu", "--num_processes", "1", program, code=code)
    assert f"started by {os.getpid()}" not in found and "started by" in found
    assert ("LookupError: row 5" in found) == (code == 1)


def test_a_function_is_launched_here_or_refused_with_what_to_do(tmp_path: Path) -> None:
    text = """
        from accelerate import debug_launcher, notebook_launcher
        def work():
            print("worked")
        if __name__ == "__main__":
            notebook_launcher(work, (), num_processes=1)
            debug_launcher(work, (), num_processes=2)
    """
    found = run(tmp_path, script(tmp_path, text), code=1)
    assert "worked" in found and "torchrun" in found and "AttributeError" not in found


def test_several_processes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    command = ["-m", "accelerate.commands.main", "launch", "--cpu", "--num_processes", "2", script(tmp_path, "")]
    found = run(tmp_path, *command, code=2)
    assert "torchrun" in found and "AttributeError" not in found


def test_the_questions_are_asked_and_answered_by_lines(tmp_path: Path) -> None:
    where = tmp_path / "config.yaml"
    found = run(tmp_path, "-m", "accelerate.commands.main", "config", "--config_file", str(where), stdin="\n" * 40)
    assert "distributed_type" in where.read_text(encoding="utf-8"), found


def test_the_environment_is_described(tmp_path: Path) -> None:
    assert "PyTorch" in run(tmp_path, "-m", "accelerate.commands.main", "env")


class FileLocks:
    """Windows' locks of bytes, as far as they are used: one process at a time, gone with the descriptor."""

    LK_NBLCK = 2

    def locking(self, descriptor: int, mode: int, num_bytes: int) -> None:
        import fcntl

        assert (mode, num_bytes) == (self.LK_NBLCK, 1)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error


def test_folders_are_marked_by_a_locked_file_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", FileLocks())
    folder = tmp_path / ".one.tmp-1"
    folder.mkdir()
    assert not locks.is_locked(folder)
    mark = locks.lock(folder)
    assert locks.is_locked(folder)
    folder.rename(tmp_path / "one")  # as a commit does, which an open file inside would forbid on Windows
    locks.unlock(mark)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    (tmp_path / ".two.tmp-1").mkdir()
    os.close(locks.lock(tmp_path / ".two.tmp-1"))  # its process was killed
    assert not locks.is_locked(tmp_path / ".two.tmp-1")
    locks.remove_lock_file(tmp_path / ".two.tmp-1")
    assert not (tmp_path / ".two.tmp-1.lock").exists()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("runs/checkpoint_1", None),
        ("C:\\runs\\checkpoint_1", None),
        ("C:runs", None),
        ("\\\\server\\share\\checkpoint_1", None),
        ("..\\.\\checkpoint.v1", None),
        ("console", None),
        ("runs/con", "device"),
        ("NUL", "device"),
        ("runs\\aux.old\\1", "device"),
        ("com1 .txt", "device"),
        ("LPT³", "device"),
        ("runs/loss:0.3", "':'"),
        ("best?", "'?'"),
        ("a\tb", "has"),
        ("run1.", "dot or a space"),
        ("run1 /2", "dot or a space"),
    ],
)
def test_names_that_windows_can_not_make_are_known(path: str, problem: str | None) -> None:
    found = problem_on_windows(path)
    assert found is None if problem is None else found is not None and problem in found
    check_name(path, is_windows=False)
    if problem is not None:
        with pytest.raises(CheckpointError, match=r"on Windows.*Rename it"):
            check_name(path, is_windows=True)


def test_the_names_of_our_own_files_are_portable_and_differ_without_case() -> None:
    from accelerate import names

    own = [value for key, value in vars(names).items() if key.endswith("_NAME") and isinstance(value, str)]
    assert len(own) > 10 and [name for name in own if problem_on_windows(name)] == []
    assert len({name.lower() for name in own}) == len(set(own))
