"""A notice of preemption to one rank, at any instant: all ranks save the same step, end, and go on bit for bit.

Real processes and real signals, in training, evaluation, waiting for data, accumulation and background saves. A handful
of signals by default; ``make kills`` sends 200.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, PrefixStore
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing import list_checkpoints
from accelerate.checkpointing.background import Background
from accelerate.distributed.environment import ProcessIdentity
from accelerate.distributed.rendezvous import agree_on_name
from accelerate.distributed.store_client import Coordinator
from accelerate.errors import SettingError
from accelerate.guests.preemption import agreement as preemption
from accelerate.guests.preemption import notices
from accelerate.guests.preemption.agreement import StopAgreement
from accelerate.guests.preemption.loop import Preemption
from accelerate.utils import DataLoaderConfiguration, PreemptionPolicy, ProjectConfiguration, set_seed
from tests.oracle.ended_runs import GRACE_SECONDS, PLACES, run_cases
from tests.oracle.killed_runs import Attempt, Augmented, digest, noter, read_notes
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW, slow_for

EPOCHS = 2
CODE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Slow(Augmented):
    """Rows that take a while to read, now and then."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index % 11 == 0:
            time.sleep(0.02)
        return super().__getitem__(index)


def train(folder: str, notes: str, num_workers: int, accumulates: bool, **options: Any) -> None:
    """The loop of a script: every rank notes each step and each batch of an evaluation, then a hash of the weights."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2, save_asynchronously=True)
    accelerator = Accelerator(
        cpu=True,
        project_config=project,
        gradient_accumulation_steps=3 if accumulates else 1,
        dataloader_config=DataLoaderConfiguration(),
        preemption=PreemptionPolicy(**options),
    )
    set_seed(5, device_specific=True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    training = DataLoader(Slow(), batch_size=2, shuffle=True, num_workers=num_workers)
    evaluation = DataLoader(list(range(24)), batch_size=2)
    model, optimizer, schedule, training, evaluation = accelerator.prepare(
        model, optimizer, schedule, training, evaluation
    )
    accelerator.resume()
    note = noter(f"{notes}.{accelerator.process_index}")
    note("begin", os.getpid())
    while training.iteration < EPOCHS:
        model.train()
        for ids, rows in training:
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            place = training.state_dict()
            note(f"{place['epoch']}/{place['rounds']}", [ids.tolist(), loss.item().hex(), schedule.get_last_lr()])
            if place["rounds"] % 4 == 0:
                accelerator.save_state(details={"by": "the script"})
        num_seen = 0
        model.eval()
        for numbers in evaluation:
            num_seen += len(accelerator.gather_for_metrics(numbers))
            time.sleep(0.003)
        note(f"{training.iteration}/evaluated", num_seen)
    accelerator.wait_for_checkpoint()
    note("end", digest(model))


def wait_until(is_so: Callable[[], bool], attempt: Attempt, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline and not any(p.exitcode for p in attempt.processes), attempt.failures()
        time.sleep(0.01)


def begun(notes: Path, num_ranks: int) -> list[int]:
    """How often each rank has begun its loop."""
    return [sum(step == "begin" for step, _ in one) for one in read_notes(notes, num_ranks)]


def signalled(folder: Path, attempt: Attempt, num_ranks: int, chance: random.Random, delay_seconds: float) -> bool:
    """Sends a signal to one rank, or to all, some time after the loop began; whether the run had not ended before.

    It ends within 30 s, with the exit code of a run that is to be started again, on all ranks.
    """
    time.sleep(chance.uniform(0.0, delay_seconds))
    number = chance.choice(SIGNALS)
    victims = range(num_ranks) if chance.random() < 0.2 else [chance.randrange(num_ranks)]
    if any(not attempt.processes[victim].is_alive() for victim in victims):
        return False
    for victim in victims:
        os.kill(attempt.processes[victim].pid, number)
    assert attempt.wait(30.0), attempt.kill() and attempt.failures()
    codes = [process.exitcode for process in attempt.processes]
    assert codes == [CODE] * num_ranks or has_ended(folder, num_ranks), (codes, attempt.failures())
    return codes[0] == CODE


def has_ended(folder: Path, num_ranks: int) -> bool:
    """Whether every rank came to the end of the script."""
    return all(one and one[-1][0] == "end" for one in read_notes(folder / "notes", num_ranks))


def start(folder: Path, num_ranks: int, num_workers: int, accumulates: bool) -> Attempt:
    function = partial(train, str(folder), str(folder / "notes"), num_workers, accumulates)
    return Attempt(function, num_ranks, folder / "log")


def saved_by_notice(folder: Path) -> list[str]:
    """The numbered checkpoints that hold a preemption's save, whole; the newest last."""
    entries = [entry for entry in list_checkpoints(folder) if entry.problem is None and entry.manifest is not None]
    return [entry.name for entry in entries if "preempted" in entry.manifest.details]


def undisturbed(folder: Path, num_ranks: int, num_workers: int, accumulates: bool) -> tuple[list[dict], float]:
    attempt = start(folder, num_ranks, num_workers, accumulates)
    wait_until(lambda: begun(folder / "notes", num_ranks) == [1] * num_ranks, attempt)
    began = time.monotonic()
    assert attempt.wait(120.0), attempt.kill() and attempt.failures()
    seconds = time.monotonic() - began
    return [dict(one) for one in read_notes(folder / "notes", num_ranks)], seconds


#: ranks, workers, whether it accumulates, signals
PLAN = [(2, 0, False, 25), (2, 0, True, 25), (2, 2, False, 25), (2, 2, True, 25)]
PLAN += [(4, 0, False, 25), (4, 0, True, 25), (4, 2, False, 25), (4, 2, True, 25)]
QUICK_PLAN = [(2, 0, True, 1)]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("num_ranks", "num_workers", "accumulates", "num_signals"), PLAN if IS_SLOW else QUICK_PLAN)
def test_a_preempted_run_is_the_undisturbed_one(
    num_ranks: int, num_workers: int, accumulates: bool, num_signals: int, tmp_path: Path
) -> None:
    chance = random.Random(100 * num_ranks + 10 * num_workers + accumulates)
    (tmp_path / "undisturbed").mkdir()
    expected, seconds = undisturbed(tmp_path / "undisturbed", num_ranks, num_workers, accumulates)
    sent = trial = 0
    while sent < num_signals:
        folder = tmp_path / f"trial_{trial}"
        folder.mkdir()
        seconds *= 0.95  # a machine that is less busy than before would be done before the signal
        sent += preempted(folder, num_ranks, num_workers, accumulates, chance, seconds, min(3, num_signals - sent))
        compare(folder / "notes", expected)
        trial += 1


def preempted(
    folder: Path, num_ranks: int, num_workers: int, accumulates: bool, chance: random.Random, seconds: float, most: int
) -> int:
    """Runs to the end through at most ``most`` signals; returns how many there were."""
    num_signals = 0
    for number in range(1, 2 * most + 2):
        attempt = start(folder, num_ranks, num_workers, accumulates)
        wait_until(lambda n=number: begun(folder / "notes", num_ranks) == [n] * num_ranks, attempt)
        is_wanted = num_signals < most
        if is_wanted and signalled(folder, attempt, num_ranks, chance, seconds / most):
            num_signals += 1
            assert saved_by_notice(folder), attempt.failures()
            continue
        assert attempt.wait(120.0), attempt.kill() and attempt.failures()
        assert has_ended(folder, num_ranks), attempt.failures()
        return num_signals
    raise AssertionError("the run didn't end")


def compare(notes: Path, expected: list[dict[str, Any]]) -> None:
    """All ranks noted each step once, as the undisturbed run did; an evaluation that was left is missing, not cut."""
    for rank, (found, right) in enumerate(zip(read_notes(notes, len(expected)), expected, strict=True)):
        noted = [(step, what) for step, what in found if step != "begin"]
        assert len({step for step, _ in noted}) == len(noted), f"rank {rank} did a step twice: {noted}"
        assert [one for one in noted if right.get(one[0]) != one[1]] == []
        missing = set(right) - {step for step, _ in noted} - {"begin"}
        assert all(step.endswith("evaluated") for step in missing), (rank, missing)


# -- every place of a script -------------------------------------------------------------------------------

#: As often as not a notice comes here: after the last update, in an evaluation, and once all is done.
QUICK_PLACES = (
    *("a save", "between loops", "an evaluation", "the last evaluation"),
    *("the tail", "after end_training", "the teardown"),
)


def _cases(folder: Path, size: int) -> list[dict[str, Any]]:
    """The undisturbed run, then one for each place: with each kind of notice in turn, to one rank or to all."""
    kinds, who = ("SIGTERM", "SIGUSR1", "SIGUSR2", "file"), ([0], [size - 1], list(range(size)))
    found = [{"place": "", "victims": [], "kind": "SIGTERM"}]
    for number, place in enumerate(PLACES if IS_SLOW else QUICK_PLACES):
        kind = kinds[(number + size) % 4]
        if kind == "file" and place in ("after end_training", "atexit", "the teardown"):
            kind = "SIGTERM"  # which would end a process that doesn't listen; a file wouldn't
        found.append({"place": place, "victims": who[number % 3], "kind": kind})
    return [{**one, "size": size, "folder": str(folder / f"{n}")} for n, one in enumerate(found)]


@pytest.mark.timeout(1800 if IS_SLOW else 400)
@pytest.mark.parametrize("num_ranks", [1, 2, 4] if IS_SLOW else [2])
def test_after_a_notice_at_any_place_all_ranks_end_alike_and_the_run_is_the_undisturbed_one(
    num_ranks: int, tmp_path: Path
) -> None:
    cases = _cases(tmp_path, num_ranks)
    all_starts = run_cases(cases, seconds=1500.0 if IS_SLOW else 360.0)
    expected = [dict(one) for one in read_notes(tmp_path / "0/notes", num_ranks)]
    for case, starts in zip(cases, all_starts, strict=True):
        codes = [codes for codes, _ in starts]
        log = "".join((Path(case["folder"]) / f"log.{rank}").read_text() for rank in range(num_ranks))
        assert codes in ([[0] * num_ranks], [[CODE] * num_ranks, [0] * num_ranks]), (case, starts, log)
        assert max(seconds for _, seconds in starts) < GRACE_SECONDS, (case, starts, log)  # 1 s where nobody waits
        noted = read_notes(Path(case["folder"]) / "notes", num_ranks)
        assert [len(one) for one in noted] == [len(one) for one in expected], f"steps done twice or never: {case}"
        assert [dict(one) for one in noted] == expected, case


# -- other ways --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def metadata_server(notice: Path) -> Iterator[str]:
    """A cloud's address, which says nothing until the file is there."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"TRUE" if notice.exists() else b"FALSE")

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/preempted"
    finally:
        server.shutdown()
        server.server_close()


def test_the_answer_of_an_address_is_a_notice(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    with metadata_server(notice) as url:
        stops_by_notice(tmp_path, notice, notice_url=url)


@slow_for("as the address; one process hears of a file below", "kills")
def test_a_file_that_appears_on_a_host_is_a_notice(tmp_path: Path) -> None:
    stops_by_notice(tmp_path, tmp_path / "notice", notice_file=str(tmp_path / "notice"))


def stops_by_notice(tmp_path: Path, notice: Path, **given: str) -> None:
    def run() -> tuple[int, Any]:
        notices._URL_SECONDS = 0.05  # pyright: ignore[reportAttributeAccessIssue]
        policy = PreemptionPolicy(signals=(), exit_code=76, **given)  # pyright: ignore[reportArgumentType]
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), preemption=policy)
        loader = accelerator.prepare(DataLoader(list(range(4)), batch_size=1))
        num_steps = 0
        try:
            while True:
                for _ in loader:
                    num_steps += 1
                    accelerator.wait_for_everyone()
                    if num_steps == 3 and accelerator.is_last_process:
                        notice.write_text("")
        except SystemExit as end:
            assert accelerator.preempted
            return num_steps, end.code

    (first, first_code), (second, second_code) = run_on_ranks(run, 2)
    assert first == second >= 3 and first_code == second_code == 76
    assert saved_by_notice(tmp_path) == ["checkpoint_0"]


def test_a_signal_inside_of_a_background_save_leaves_both_checkpoints_whole(tmp_path: Path) -> None:
    def run() -> tuple[int, bool]:
        held, start = threading.Event(), Background.start
        Background.start = lambda background, save: start(background, lambda: (held.wait(60), save()))
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project, preemption=PreemptionPolicy())
        model = nn.Linear(1, 1)
        data = DataLoader(torch.ones(40, 1), batch_size=1)  # pyright: ignore
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
        number, is_saving = 0, False
        with pytest.raises(SystemExit):
            for number, rows in enumerate(loader):
                accelerator.backward(model(rows).sum())
                optimizer.step()
                if number == 2:
                    accelerator.save_state(asynchronous=True)
                if number == 3:
                    is_noticed(accelerator, sends=bool(accelerator.is_last_process))
                    is_saving = accelerator._background.is_running
                    threading.Timer(0.3, held.set).start()  # the stop has to wait for it
        return number, is_saving

    first, second = run_on_ranks(run, 2)
    assert first == second and first[1] and first[0] < 10
    entries = list_checkpoints(tmp_path)
    assert sorted((entry.name, entry.problem) for entry in entries) == [("checkpoint_0", None), ("checkpoint_1", None)]
    assert saved_by_notice(tmp_path) == ["checkpoint_1"]


def test_a_signal_inside_of_a_window_while_data_is_waited_for_stops_at_the_windows_end(tmp_path: Path) -> None:
    def run() -> int:
        policy = PreemptionPolicy()
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), preemption=policy, gradient_accumulation_steps=3)

        class Rows(torch.utils.data.Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 48

            def __getitem__(self, index: int) -> torch.Tensor:
                if index == 9:  # the fifth row of rank 1
                    is_noticed(accelerator, sends=True)
                return torch.ones(1)

        model = nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Rows(), batch_size=1)
        )
        num_trained = 0
        with pytest.raises(SystemExit):
            for rows in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                num_trained += 1
        return num_trained

    first, second = run_on_ranks(run, 2)
    assert first == second and first in (6, 9)
    assert saved_by_notice(tmp_path) == ["checkpoint_0"]


def test_a_loop_without_prepared_loaders_stops_where_a_window_begins(tmp_path: Path) -> None:
    def run() -> int:
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), preemption=PreemptionPolicy())
        number = 0
        model = accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(SystemExit):
            for number in range(100_000):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1, 1)).sum())
                if number == 3 and accelerator.is_main_process:
                    os.kill(os.getpid(), signal.SIGUSR2)
        return number

    first, second = run_on_ranks(run, 2)
    assert first == second > 3
    assert saved_by_notice(tmp_path) == ["checkpoint_0"]


@pytest.mark.parametrize(
    ("finishes", "grace_seconds", "num_left"), [(False, 0.0, 2), (False, 600.0, 5), (True, 0.0, 5)]
)
def test_an_evaluation_is_finished_where_time_allows_and_the_next_one_is_whole(
    finishes: bool, grace_seconds: float, num_left: int, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"

    def prepared(policy: PreemptionPolicy | None) -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), preemption=policy)
        model = nn.Linear(1, 1)
        loaders = [DataLoader(torch.ones(size, 1), batch_size=1) for size in (3, 5)]  # pyright: ignore
        return accelerator, *accelerator.prepare(model, *loaders)

    def run() -> tuple[int, int, bool]:
        policy = PreemptionPolicy(
            signals=(), notice_file=str(notice), finish_evaluation=finishes, grace_seconds=grace_seconds
        )
        accelerator, model, training, evaluation = prepared(policy)
        num_trained = num_evaluated = 0
        with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
            for _ in range(3):
                model.train()
                for rows in training:
                    accelerator.backward(model(rows).sum())
                    num_trained += 1
                model.eval()
                for _ in evaluation:
                    num_evaluated += 1
                    if num_evaluated == 2:
                        notice.write_text("")
                        until = time.monotonic() + 30
                        while not leading_agreement().is_asked and time.monotonic() < until:
                            time.sleep(0.01)
        assert "preempted by the file" in said.getvalue()
        return num_trained, num_evaluated, "inside of an evaluation that isn't repeated" in said.getvalue()

    def resume() -> tuple[int, int, int]:
        accelerator, _, training, evaluation = prepared(None)
        accelerator.resume()
        return training.iteration, len(list(training)), len(list(evaluation))

    assert run_on_ranks(run, 1) == [(3, num_left, num_left < 5)]
    assert run_on_ranks(resume, 1) == [(1, 3, 5)]


def _loop(folder: str, loaders: int = 1) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, project_dir=folder, preemption=PreemptionPolicy())
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [DataLoader(torch.arange(size)[:, None].float(), batch_size=1) for size in (24, 3)[:loaders]]  # pyright: ignore
    prepared = accelerator.prepare(model, optimizer, *data)
    accelerator.resume()
    return accelerator, *prepared


def leading_agreement() -> StopAgreement:
    assert Preemption._leading is not None
    return Preemption._leading._agreement


def is_noticed(accelerator: Accelerator, sends: bool = True) -> None:
    """Wait until this rank knows of the notice, which it has sent itself or not."""
    if sends:
        os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 30
    while not leading_agreement().is_asked and time.monotonic() < until:  # pyright: ignore
        time.sleep(0.005)


def _train(kind: str, folder: str, when: int | None) -> list[int]:
    """The batches that a loop of this kind trained on up to the notice at batch ``when``, and the step after it."""
    accelerator, model, optimizer, loader, *others = _loop(folder, 2 if kind == "two loaders" else 1)
    trained: list[int] = []
    pending: list[int] = []
    iterator = iter(others[0]) if others else iter(())
    try:
        for rows in loader:
            number = int(rows.item())
            if number == when and kind != "two loaders":
                is_noticed(accelerator)
            if kind == "skips" and 4 <= number < 9:
                trained.append(number)
                continue
            if kind == "two loaders":
                try:
                    rows = rows + next(iterator)
                except StopIteration:
                    if number == when:
                        is_noticed(accelerator)
                    iterator = iter(others[0])
                    rows = rows + next(iterator)
            loss = model(rows).sum()
            pending.append(number)
            if kind == "torch's backward":
                loss.backward()
            elif kind != "collects":
                accelerator.backward(loss)
            elif len(pending) == 4:
                for _ in pending:
                    accelerator.backward(model(rows).sum())
            if len(pending) == 4 or kind not in ("collects", "accumulates by hand"):
                optimizer.step()
                optimizer.zero_grad()
                trained += pending
                pending.clear()
    except SystemExit as end:
        assert when is not None and end.code == CODE
    return trained


@pytest.mark.parametrize(
    ("kind", "when", "stops_after"),
    [
        ("skips", 5, 10),
        ("torch's backward", 5, 6),
        ("collects", 5, 8),
        ("accumulates by hand", 5, 8),
        ("two loaders", 3, 4),
    ],
)
def test_no_batch_is_lost(kind: str, when: int, stops_after: int, tmp_path: Path) -> None:
    assert run_on_ranks(partial(_train, kind, str(tmp_path), when), 1) == [list(range(stops_after))]
    assert run_on_ranks(partial(_train, kind, str(tmp_path), None), 1) == [list(range(stops_after, 24))]


def test_the_newest_accelerator_stops_its_loop(tmp_path: Path) -> None:
    def run() -> tuple[int, bool]:
        first = Accelerator(cpu=True, project_dir=str(tmp_path), preemption=PreemptionPolicy())
        early = first.prepare(DataLoader(list(range(4)), batch_size=1))  # pyright: ignore
        next(iter(early))
        second, model, optimizer, loader = _loop(str(tmp_path))
        with pytest.raises(SystemExit):
            for rows in loader:
                second.backward(model(rows).sum())
                optimizer.step()
                if rows.item() == 3:
                    is_noticed(second)
        list(early)  # isn't stopped any more
        return second.gradient_state.num_backwards, first.preempted

    assert run_on_ranks(run, 1) == [(4, False)]
    assert saved_by_notice(tmp_path) == ["checkpoint_0"]


def test_an_accelerator_of_another_thread_says_that_it_hears_no_signals(tmp_path: Path) -> None:
    def run() -> str:
        lines = _logged("accelerate.guests.preemption.loop")
        thread = threading.Thread(target=_loop, args=(str(tmp_path),))
        thread.start()
        thread.join()
        return "".join(lines)

    assert "SIGTERM, SIGUSR1, SIGUSR2 aren't heard, because" in run_on_ranks(run, 1)[0]


@pytest.mark.parametrize(("job", "code", "is_told"), [("17", 99, True), ("17", CODE, False), ("", 99, False)])
def test_a_code_after_which_slurm_does_not_queue_the_job_again_is_told(
    job: str, code: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    settings = SimpleNamespace(preemption=SimpleNamespace(save_on_signal=True))
    run: Any = SimpleNamespace(settings=settings, world=SimpleNamespace(is_main=True))
    made: Any = SimpleNamespace(_run=run, _world=run.world, _policy=PreemptionPolicy(exit_code=code))
    Preemption._warn_of_exit_code(made)
    told = caplog.text
    assert ("PreemptionPolicy(exit_code=99), but" in told and "(17) again after exit code 75 only" in told) == is_told


def test_a_script_can_decide_itself() -> None:
    def run() -> tuple[int, bool]:
        accelerator = Accelerator(cpu=True, preemption=PreemptionPolicy(save_on_signal=False))
        num_asked = 0
        while not accelerator.preempted:
            num_asked += 1
            if num_asked == 3 and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.002)
        return num_asked, accelerator.preempted

    (first, first_says), (second, second_says) = run_on_ranks(run, 2)
    assert first == second >= 3
    assert first_says and second_says


def test_a_rank_that_does_not_come_is_named_and_nothing_is_saved() -> None:
    def run() -> str:
        accelerator = Accelerator(cpu=True, preemption=PreemptionPolicy(save_on_signal=False, grace_seconds=2.0))
        lines = _logged()
        if accelerator.is_main_process:
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 5.0
            while not lines and time.monotonic() < until:
                assert not accelerator.preempted
                time.sleep(0.001)
        accelerator.wait_for_everyone()
        return "".join(lines)

    told, late = run_on_ranks(run, 2)
    assert "SIGTERM to rank 0" in told and "rank 1 didn't come to the step within 2 s" in told
    assert not late or "rank 1 hasn't come to the end of a step" in late


def _logged(name: str = "accelerate.guests.preemption.agreement") -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger(name).addHandler(handler)
    return lines


class Silent:
    """No notices of this process's own."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def take(self) -> None:
        self.stopped.wait()

    def settle(self) -> None:
        pass

    close = settle

    def stop(self) -> None:
        self.stopped.set()


def test_a_rank_that_was_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One notice, and one time to come together; rank 1's loop begins once the first round has failed."""
    monkeypatch.setattr(preemption, "_SHARE_OF_ROUND", 0.02)
    lines, store = _logged(), HashStore()
    stopped_at: dict[int, int] = {}
    agreements = [
        StopAgreement(Silent(), Coordinator(store, rank, 2, timedelta(seconds=60)), 75.0)  # pyright: ignore[reportArgumentType]
        for rank in range(2)
    ]

    def loop(rank: int) -> None:
        agreement, number = agreements[rank], 0
        while rank == 1 and not any("are asked again" in line for line in lines):
            time.sleep(0.01)
        while rank not in stopped_at:
            number += 1
            agreement.passed = point = (0, number, 0)
            if agreement.is_asked:
                agreed = agreement.wait_for_decision(point)
                if agreed is not None and point > agreed and agreement.meet(f"step {number}"):
                    stopped_at[rank] = number
            time.sleep(0.001)

    threads = [threading.Thread(target=loop, args=(rank,), daemon=True) for rank in range(2)]
    for one in (*agreements, *threads):
        one.start()
    agreements[0]._tell_all(preemption.Notice(0, "here", "a test"))
    for thread in threads:
        thread.join(60.0)
    for agreement in agreements:
        agreement.stop()
    assert len(stopped_at) == 2 and stopped_at[0] == stopped_at[1]
    assert "rank 1 didn't come to the step" in lines[0] and not any("nothing is saved" in line for line in lines)


def test_a_rank_at_the_end_of_its_script_keeps_nobody_waiting() -> None:
    """A notice to a rank that has one batch left, when another one has left the world: the run ends by itself."""
    lines, store = _logged(), HashStore()
    first, second = (
        StopAgreement(Silent(), Coordinator(store, rank, 2, timedelta(seconds=60)), 500.0)  # pyright: ignore[reportArgumentType]
        for rank in range(2)
    )
    first.start()
    second.start()
    first._tell_all(preemption.Notice(0, "here", "a test"))
    until = time.monotonic() + 60.0
    while second._agreed is None and time.monotonic() < until:
        time.sleep(0.01)
    assert second.wait_for_decision((0, 1, 0)) == (0, 0, 0)
    waiting = threading.Thread(target=first.stop)  # its program has ended
    waiting.start()
    began = time.monotonic()
    assert not second.meet("step 1") and not second.is_asked
    second._tell_all(preemption.Notice(1, "here", "another test"))  # is to be heard by nobody
    second.stop()
    waiting.join()
    assert time.monotonic() - began < 60.0 and not lines, "as long as the grace period"


def test_a_notice_to_an_earlier_attempt_is_none_to_the_next_one_in_the_same_store() -> None:
    """Each world has a name of its own in a store, so that keys of the one before, which nobody deletes, aren't its."""
    store, noticed = HashStore(), []
    for _ in range(2):
        identity = ProcessIdentity(0, 1, 0, 1, "node1", 29500, "torchrun")
        own = PrefixStore(agree_on_name(store, identity, timedelta(seconds=20)), store)
        agreement = StopAgreement(Silent(), Coordinator(own, 0, 1, timedelta(seconds=20)), 5.0)  # pyright: ignore[reportArgumentType]
        agreement.start()
        if not noticed:
            agreement._tell_all(preemption.Notice(0, "here", "a test"))
        until = time.monotonic() + (60.0 if not noticed else 0.5)
        while not agreement.is_asked and time.monotonic() < until:
            time.sleep(0.01)
        noticed.append(agreement.is_asked)
        agreement.stop()
    assert noticed == [True, False]


def test_the_mark_of_an_earlier_attempt_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[bool]:
        monkeypatch.setenv("ACCELERATE_RECORDS_FOLDER", str(tmp_path))
        mark = tmp_path / "saved_0"
        mark.write_text("75")
        Accelerator(cpu=True, preemption=PreemptionPolicy(save_on_signal=False))
        found = [mark.exists()]
        mark.write_text("75")
        Accelerator(cpu=True, preemption=PreemptionPolicy(save_on_signal=False))  # of the same attempt
        return [*found, mark.exists()]

    assert run_on_ranks(run, 1) == [[False, True]]


def test_a_second_accelerator_without_a_folder_leaves_saving_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[str]:
        monkeypatch.setenv("ACCELERATE_SAVE_ON_SIGNAL", "true")
        with pytest.raises(SettingError, match="has no folder"):
            Accelerator(cpu=True)
        Accelerator(cpu=True, project_dir=str(tmp_path))
        lines = _logged("accelerate.guests.preemption.loop")
        Accelerator(cpu=True)
        return lines

    (lines,) = run_on_ranks(run, 1)
    assert len(lines) == 1 and "this Accelerator has no folder" in lines[0] and "save_on_signal" in lines[0].lower()


def test_a_run_without_a_folder_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"Accelerator\(preemption=...\) .* has no folder. Give Accelerator\(project_dir"
    ):
        Accelerator(cpu=True, preemption=PreemptionPolicy())
    with pytest.raises(TypeError, match="PreemptionPolicy"):
        Accelerator(cpu=True, preemption=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingError, match="names such as 'SIGTERM'"):
        PreemptionPolicy(signals=("15",))
