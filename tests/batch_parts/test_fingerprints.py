"""Fingerprints of a run: those of its checkpoints, and the file of one each n updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing.series import inspect
from accelerate.commands.main import main
from accelerate.errors import SettingError
from accelerate.utils import set_seed
from tests.batch_parts.training import Dense, data, layout_options
from tests.ranks import run_on_ranks


def trains(folder: str, layout: str = "replicas", last: int = 10, num_parts: int | None = 6) -> str:
    """Train to the update ``last``, save in the loop's body, and return the last fingerprint."""
    accelerator = Accelerator(
        cpu=True, batch_parts=num_parts, fingerprint_every=3, project_dir=folder, **layout_options(layout)
    )
    set_seed(3)
    net: Any = Dense()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader: Any = DataLoader(data(53, noisy=True), batch_size=2, shuffle=True)  # an epoch has 5 updates
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    while optimizer.num_updates < last:
        for rows, targets in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(rows), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and optimizer.num_updates in (6, 7):
                accelerator.save_state(f"{folder}/{optimizer.num_updates}")
            if optimizer.num_updates == last and accelerator.sync_gradients:
                break
    accelerator.end_training()
    return accelerator.fingerprint()


def lines_of(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "fingerprints.jsonl").read_text().splitlines()
    return [(line["step"], line["fingerprint"]) for line in map(json.loads, lines)]


def test_a_file_has_the_fingerprint_of_each_third_update_on_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, sharded = (tmp_path / name for name in ("one", "two", "sharded"))
    (last,) = run_on_ranks(trains, 1, str(one))
    assert run_on_ranks(trains, 2, str(two)) == [last] * 2
    assert run_on_ranks(trains, 2, str(sharded), "fsdp2") == [last] * 2
    lines = lines_of(one)
    assert [step for step, _ in lines] == [3, 6, 9] and len({print_ for _, print_ in lines}) == 3
    assert lines_of(two) == lines_of(sharded) == lines
    saved = inspect(one / "6").manifest
    assert saved is not None and saved.details["fingerprint"] == lines[1][1]  # it was saved in the same body
    capsys.readouterr()
    assert main(["checkpoints", str(one), "--compare", str(sharded)]) == 0
    assert capsys.readouterr().out.count("equal") == 2
    assert main(["checkpoints", str(one / "7"), "--compare", str(two / "6")]) == 2  # of other updates


def test_the_last_update_before_a_break_and_of_an_epoch_is_written(tmp_path: Path) -> None:
    (last,) = run_on_ranks(trains, 1, str(tmp_path / "broken"), "replicas", 9)
    assert lines_of(tmp_path / "broken")[-1] == (9, last)
    (last,) = run_on_ranks(trains, 1, str(tmp_path / "whole"), "replicas", 15)
    assert lines_of(tmp_path / "whole")[-1][0] == 15


def test_a_run_without_parts_has_fingerprints_too(tmp_path: Path) -> None:
    (last,) = run_on_ranks(trains, 1, str(tmp_path), "replicas", 9, None)
    assert lines_of(tmp_path)[-1] == (9, last)


def test_a_run_without_a_folder_is_refused() -> None:
    with pytest.raises(SettingError, match=r"fingerprint_every=3.*no folder.*project_dir"):
        Accelerator(cpu=True, fingerprint_every=3)


VALUES = """
import functools, numpy, torch
from accelerate.guests.batch_parts.hashes import _plain

class Warmup:
    def __init__(self, end): self.end, self.names = end, {"a", "b", "c", "d"}

class Slotted:
    __slots__ = ()

long = numpy.arange(5000)
values = [None, 1, 1.5, float("nan"), "a", b"a", 1j, {"b": 1, 2: "c", (3, 4): 5}, (1, [2]), {"x", "y", "z"}, Warmup(3),
          {"end": Warmup(4)}, lambda: 1, len, Warmup, Warmup(1).__init__, Slotted(), functools.partial(len), long,
          numpy.float64(2), torch.ones(3), torch.float32, object()]
print([_plain(value) for value in values])
changed = long.copy(); changed[2500] = 0
assert _plain(long) != _plain(changed) and _plain(Warmup(3)) != _plain(Warmup(4)) and _plain({"x"}) != _plain({"y"})
"""


def test_no_value_of_a_state_brings_an_address_or_an_order_of_this_process_into_a_fingerprint() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", VALUES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1


def noisy(layout: str) -> str:
    """Draw in the step, and from it to the next batch; weights have fewer rows than there are ranks."""

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    local = getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
                    with torch.no_grad():
                        local.add_(torch.randn(()) * 0.01)
            return super().step(closure)

    accelerator = Accelerator(cpu=True, batch_parts=4, **layout_options(layout))
    set_seed(3)
    net: Any = torch.nn.Linear(6, 1)
    optimizer: Any = Noisy(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data(16), batch_size=2))  # pyright: ignore[reportUnknownVariableType]
    for rows, _ in loader:
        with accelerator.accumulate(net):
            accelerator.backward((net(rows) * (1 + torch.rand(()))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.use_distributed:
            torch.rand(5)  # what is drawn here doesn't change what the parts draw
    return accelerator.fingerprint()


def test_noise_of_the_optimizer_is_that_of_the_update_and_small_weights_have_fingerprints() -> None:
    (expected,) = run_on_ranks(noisy, 1, "replicas")
    assert run_on_ranks(noisy, 2, "replicas") == [expected] * 2
    assert run_on_ranks(noisy, 2, "fsdp2") == [expected] * 2
    assert run_on_ranks(noisy, 4, "fsdp2") == [expected] * 4
