"""Loops that part ways on some rank end, with the result or with an error that says why; none of them hangs.

Every loop runs on real processes with a limit far below the timeout of the process group.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.errors import CollectiveError
from accelerate.utils import DataLoaderConfiguration
from tests.oracle.killed_runs import Attempt
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW, slow

LIMIT_SECONDS = 60.0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


def prepared(**options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator: Any, model: Any, optimizer: Any, samples: torch.Tensor) -> None:
    accelerator.backward(model(samples[:, None].float()).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def uneven(skips: bool) -> int:
    accelerator, model, optimizer = prepared(even_batches=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(7), batch_size=1))
    if skips:
        loader = skip_first_batches(loader, 1)
        accelerator._dataloaders.append(loader)
    count = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for samples in loader:
            step(accelerator, model, optimizer, samples)
            count += 1
    return count


@pytest.mark.parametrize(("skips", "counts"), [(False, [4, 3]), (True, [3, 2])])
def test_uneven_inputs_are_joined(skips: bool, counts: list[int]) -> None:
    assert run_on_ranks(uneven, 2, skips, timeout_seconds=LIMIT_SECONDS) == counts


def stops_together(dispatches: bool) -> int:
    accelerator, model, optimizer = prepared(dispatch_batches=dispatches)
    loader = accelerator.prepare_data_loader(DataLoader(Stream(), batch_size=2))
    count = 0
    for samples in loader:
        step(accelerator, model, optimizer, samples)
        count += 1
        if accelerator.process_index == 1 and count == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    accelerator.wait_for_everyone()
    return count


@pytest.mark.parametrize("dispatches", [False, True])
def test_one_rank_that_wants_to_stop_stops_all_by_the_trigger(dispatches: bool) -> None:
    assert run_on_ranks(stops_together, 2, dispatches, timeout_seconds=LIMIT_SECONDS) == [3, 3]


def breaks_alone(kind: str) -> str:
    """Rank 1 leaves the loop; what the others do next can't work, and says so."""
    accelerator, model, optimizer = prepared(dispatch_batches=kind == "dispatched")
    loader = accelerator.prepare_data_loader(DataLoader(Stream(), batch_size=2))
    try:
        for number, samples in enumerate(loader):
            if accelerator.process_index == 1 and number == 2:
                break
            if kind == "metrics":
                accelerator.gather_for_metrics(samples)
            elif kind == "training":
                step(accelerator, model, optimizer, samples)
        accelerator.wait_for_everyone()
    except (CollectiveError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", ["dispatched", "metrics", "training"])
def test_a_rank_that_breaks_alone_is_named_instead_of_waited_for(kind: str) -> None:
    said = run_on_ranks(breaks_alone, 2, kind, timeout_seconds=LIMIT_SECONDS)
    # In training, the rank that waits in backward is ended by its connections, and the other one names the cause.
    assert all(text.startswith("CollectiveError") for text in (said[1:] if kind == "training" else said)), said
    assert "wait_for_everyone" in said[kind == "training"] and all(said)


def trains_while_the_main_process_is_in(call: str) -> str:
    accelerator, model, optimizer = prepared()
    try:
        for number in range(5):
            step(accelerator, model, optimizer, torch.ones(2, 1))
            if number == 2 and accelerator.is_main_process:
                if call == "wait_for_everyone":
                    accelerator.wait_for_everyone()
                else:
                    getattr(accelerator, call)(torch.ones(1))
    except (CollectiveError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "call", ["gather", "wait_for_everyone", *(["reduce", "gather_for_metrics"] if IS_SLOW else [])]
)
def test_a_call_of_the_main_process_alone_ends_on_all_where_the_others_wait_in_backward(call: str) -> None:
    said = run_on_ranks(trains_while_the_main_process_is_in, 2, call, timeout_seconds=LIMIT_SECONDS)
    assert said[0].startswith(f"CollectiveError: Rank 0 is in `{call.removesuffix('_for_metrics')}`"), said
    assert "rank 1 waits in a collective of torch's at" in said[0] and said[1] != "", said


class Slow(torch.autograd.Function):
    """A backward that computes for 9 s of wall time."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        until, matrix = time.monotonic() + 9, torch.ones(300, 300)
        while time.monotonic() < until:
            matrix = (matrix @ matrix).clamp(max=1)
        return gradients[0]


def computes_on_a_crowded_core() -> int:
    accelerator, model, _ = prepared()
    if accelerator.process_index == 1:
        core = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, core)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(7)]
        with accelerator.no_sync(model):
            accelerator.backward(Slow.apply(model(torch.ones(2, 1))).sum())
        for process in busy:
            process.kill()
            process.wait()
    return len(accelerator.gather(torch.ones(1)))


@slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_a_rank_that_computes_with_an_eighth_of_a_core_is_waited_for() -> None:
    assert run_on_ranks(computes_on_a_crowded_core, 2, timeout_seconds=LIMIT_SECONDS) == [2, 2]


def breaks_and_goes_on() -> list[list[int]]:
    """Rank 1 leaves its evaluation early; nothing in that loop needs the others, so the next one is whole."""
    accelerator = prepared()[0]
    loader = accelerator.prepare_data_loader(DataLoader(range(11), batch_size=2, shuffle=True))
    for number, _ in enumerate(loader):
        if accelerator.process_index == 1 and number == 1:
            break
    accelerator.wait_for_everyone()
    loader.set_epoch(1)
    return [sorted(s for batch in loader for s in accelerator.gather_for_metrics(batch).tolist())]


def test_a_loop_without_communication_may_be_left_by_one_rank() -> None:
    assert run_on_ranks(breaks_and_goes_on, 2, timeout_seconds=LIMIT_SECONDS) == [[list(range(11))]] * 2


def raises_while_reading() -> str:
    class Broken(IterableDataset):
        def __iter__(self):
            yield from range(4)
            raise OSError("the disk is gone")

    accelerator = prepared()[0]
    loader = accelerator.prepare_data_loader(DataLoader(Broken(), batch_size=1))
    try:
        for _ in loader:
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failure_of_the_rank_that_reads_for_all_reaches_all() -> None:
    said = run_on_ranks(raises_while_reading, 2, timeout_seconds=LIMIT_SECONDS)
    assert all("the disk is gone" in text for text in said)


def trains_on(folder: Path) -> None:
    accelerator, model, optimizer = prepared()
    loader = accelerator.prepare_data_loader(DataLoader(range(1_000_000), batch_size=2))
    for samples in loader:
        step(accelerator, model, optimizer, torch.ones_like(samples))
        (folder / f"trains.{accelerator.process_index}").touch()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others(victim: int, tmp_path: Path) -> None:
    attempt = Attempt(lambda: trains_on(tmp_path), 2, tmp_path / "log")
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(list(tmp_path.glob("trains.*"))) < 2:
            assert not attempt.wait(0.05) and time.monotonic() < deadline, attempt.failures()
        attempt.processes[victim].kill()
        assert attempt.wait(LIMIT_SECONDS)
        assert attempt.processes[1 - victim].exitcode != 0
    finally:
        attempt.kill()
