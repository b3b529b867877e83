"""A run that gets a notice at a named place of its script, on ranks whose interpreters end as those of scripts do.

Started as a program, it imports torch once and forks the ranks of each start of a run, which end as interpreters do.
What a resume has to bring back takes part: shuffled order, dropout, a schedule that steps between two epochs,
accumulation, and an evaluation that draws random numbers.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.ports import get_free_port
from accelerate.utils import PreemptionPolicy, ProjectConfiguration
from tests.oracle.killed_runs import digest, noter
from tests.python_path import python_path

EPOCHS = 2
GRACE_SECONDS = 30.0
#: Where a notice comes; those in loops come in the first epoch, those of the tail after the last one.
PLACES = (
    *("the start", "before the loop", "a batch", "a window", "a save", "between loops", "an evaluation"),
    *("the last evaluation", "after an evaluation", "the tail", "after end_training", "atexit", "the teardown"),
)


class Rows(Dataset[Any]):
    """Rows with noise from the streams of the process that reads them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return index, torch.full((4,), index / 32) + torch.rand(4) + random.random()


class AtTeardown:
    """Calls a function when the interpreter takes its modules apart."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __del__(self) -> None:
        self.call()


class Counted:
    """A registered object, whose state is asked for inside of every save."""

    def __init__(self, at: Callable[[str], None]) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        self.at("a save")
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take nothing over."""


def train(folder: Path, at: Callable[[str], None], notice_file: str | None) -> None:
    """The script; ``at`` is called at each place."""
    torch.set_num_threads(1)
    sys.modules["at_teardown"] = AtTeardown(lambda: at("the teardown"))  # type: ignore[assignment]
    atexit.register(at, "atexit")  # the first to be registered is the last to be called
    policy = PreemptionPolicy(grace_seconds=GRACE_SECONDS, notice_file=notice_file)
    project = ProjectConfiguration(str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2, preemption=policy)
    at("the start")
    torch.manual_seed(3 + accelerator.process_index)
    random.seed(3)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    size = 8 // accelerator.num_processes
    training: Any = DataLoader(Rows(), batch_size=size, shuffle=True)
    evaluation: Any = DataLoader(Rows(), batch_size=size, shuffle=True)
    model, optimizer, schedule, training, evaluation = accelerator.prepare(
        model, optimizer, schedule, training, evaluation
    )
    accelerator.register_for_checkpointing(Counted(at))
    accelerator.resume()
    note = noter(f"{folder}/notes.{accelerator.process_index}")
    at("before the loop")
    while training.iteration < EPOCHS:
        epoch = training.iteration
        model.train()
        for number, (ids, rows) in enumerate(training):
            with accelerator.accumulate(model):
                at("a window" if number == 0 else "a batch")
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            place = training.state_dict()
            note(f"{place['epoch']}/{place['rounds']}", [ids.tolist(), loss.item().hex(), schedule.get_last_lr()])
            if number == 1 and not (folder / "run").exists():
                accelerator.save_state()
        at("between loops")
        model.eval()
        total = 0.0
        for number, (_, rows) in enumerate(evaluation):
            if number == 1:
                at("an evaluation" if epoch == 0 else "the last evaluation")
            with torch.no_grad():
                loss = (model(rows) + torch.randn(len(rows), 1)).square().mean()  # draws, in each batch
            total += float(accelerator.gather(loss).sum())
        schedule.step()
        torch.rand(7)  # such as images that a trainer samples
        note(f"{epoch}/evaluated", total.hex())
        at("after an evaluation")
    at("the tail")
    note("end", digest(accelerator.unwrap_model(model)))
    accelerator.end_training()
    at("after end_training")


def _end(script: Callable[[], None], whole: bool) -> None:
    """Run the script, and end as its interpreter would; without taking its modules apart, unless ``whole``.

    That takes longer than all the rest of a run.
    """
    if whole:
        return script()
    code: Any = 0
    try:
        script()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


# -- starts ------------------------------------------------------------------------------------------------


def _notifier(case: Mapping[str, Any], rank: int) -> Callable[[str], None]:
    """What gives the notice, once in a run, at the case's place, where ``rank`` is to get it."""
    is_done = False

    def at(place: str) -> None:
        nonlocal is_done
        if place != case["place"] or is_done or os.getpid() != pid or case["number"] > 0:
            return
        is_done = True
        if rank in case["victims"]:
            if case["kind"] == "file":
                Path(case["folder"], "notice").touch()
            else:
                os.kill(pid, getattr(signal, case["kind"]))
            if place not in ("atexit", "the teardown"):
                time.sleep(0.05)  # the notice comes first, as far as it can

    pid = os.getpid()
    return at


def _wait_for(pids: list[int], seconds: float) -> list[int | str]:
    codes: dict[int, int | str] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = "didn't end"
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _main() -> None:
    cases: list[dict[str, Any]] = json.loads(sys.argv[1])
    for case in cases:
        folder, size = Path(case["folder"]), case["size"]
        folder.mkdir(parents=True, exist_ok=True)
        starts: list[Any] = []
        while len(starts) < 4:
            port, pids = get_free_port(), list[int]()
            for rank in range(size):
                if (pid := os.fork()) == 0:
                    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
                    os.environ.update({name: str(value) for name, value in environment.items()})
                    log = os.open(f"{folder}/log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    notice_file = f"{folder}/notice" if case["kind"] == "file" else None
                    at = _notifier({**case, "number": len(starts)}, rank)
                    _end(partial(train, folder, at, notice_file), case["place"] == PLACES[-1])
                    return
                pids.append(pid)
            began = time.monotonic()
            starts.append([_wait_for(pids, case["seconds"]), time.monotonic() - began])
            if starts[-1][0] != [75] * size:
                break
        print(json.dumps(starts), flush=True)


def run_cases(cases: list[dict[str, Any]], seconds: float = 240.0) -> list[list[tuple[list[int | str], float]]]:
    """Run the cases one after the other; return each one's starts: (exit codes of the ranks, seconds).

    A case is started again as long as all its ranks ended with 75.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = python_path(root)
    command = [sys.executable, "-m", "tests.oracle.ended_runs", json.dumps([{"seconds": 60.0, **one} for one in cases])]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    _main()
