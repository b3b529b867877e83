"""What can't be combined with DiLoCo is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, DiLoCo, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.errors import SettingError
from accelerate.settings.checks import check
from accelerate.settings.run import collect
from accelerate.settings.tree import encode_settings
from accelerate.utils import DDPCommunicationHookType
from tests.ranks import run_on_ranks

HOOK = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
V1, V2 = (FullyShardedDataParallelPlugin(fsdp_version=version) for version in (1, 2))

#: What a run is made with, the arguments of DiLoCo, and words of the error.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "parts": ({"batch_parts": 2}, {}, ("batch_parts with DiLoCo",)),
    "hook": ({"kwargs_handlers": [HOOK]}, {}, ("communication hook", "Leave one of them out")),
    "flat shards": ({"fsdp_plugin": V1}, {}, ("DiLoCo over FlatShard", "Prepare the model for DDP")),
    "one island": ({"fsdp_plugin": V2}, {}, ("all 2 processes are one island", "dp_replicate_size")),
    "one island of replicas": ({}, {"islands": 1}, ("DiLoCo(islands=1) over", "all 2 processes are one island")),
    "three islands": ({}, {"islands": 3}, ("2 processes can't be divided into 3 islands",)),
    "compression": ({}, {"compression": "fp4"}, ("compression='fp4'", "'int8', '2bit'")),
    "steps": ({}, {"inner_steps": 0}, ("inner_steps=0", "at least 1")),
    "fragments": ({}, {"inner_steps": 2, "fragments": 3}, ("fragments=3, inner_steps=2",)),
    "share": ({}, {"kept": 1.0}, ("kept=1.0",)),
    "no optimizer": ({}, {"outer_optimizer": lambda _: None}, ("returned a NoneType",)),
    "optimizer of some": ({}, {"outer_optimizer": lambda given: torch.optim.SGD(given[:1])}, ("returned a SGD",)),
}


def _refused(names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        options, given, _ = ASKED[name]
        arguments: dict[str, Any] = {"inner_steps": 4, "fragments": 1} | given
        accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Linear(4, 4)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            DiLoCo(accelerator, model, **arguments)
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("names", [[name for name in ASKED if name not in ("parts",)], ["parts"]], ids=["", "parts"])
def test_what_cannot_be_combined_is_refused_by_name(names: list[str]) -> None:
    for found in run_on_ranks(_refused, 2, names):
        for name, message in zip(names, found, strict=True):
            assert all(words in message for words in ASKED[name][2]), f"{name}: {message}"


def _unprepared() -> None:
    DiLoCo(Accelerator(cpu=True), torch.nn.Linear(4, 4))


def _made() -> None:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    DiLoCo(Accelerator(cpu=True), torch.nn.Linear(4, 4), outer_optimizer=optimizer)


def _float64() -> None:
    accelerator = Accelerator(cpu=True)
    DiLoCo(accelerator, accelerator.prepare(torch.nn.Linear(4, 4, dtype=torch.float64)))


def _outside() -> None:
    accelerator = Accelerator(cpu=True)
    DiLoCo(accelerator, accelerator.prepare(torch.nn.Linear(4, 4))).step()


def _unequally_often() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with DiLoCo(accelerator, model, inner_steps=4, fragments=2) as diloco:
        for _ in range(8 + 4 * accelerator.process_index):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_unprepared, r"accelerator\.prepare"),
        (_made, "Give a function"),
        (_float64, "float32"),
        (_outside, "outside of `with DiLoCo"),
        (_unequally_often, "different numbers of exchanges"),
    ],
)
def test_a_model_or_optimizer_that_does_not_fit_is_refused(function: Callable[[], None], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_on_ranks(function, 2)


def test_one_process_trains_as_without_it() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    with DiLoCo(accelerator, accelerator.prepare(model)) as diloco:
        diloco.step()
    assert (diloco.num_steps, diloco.bytes_sent) == (1, 0)


def _islands(asked: list[int | None]) -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[str] = []
    for islands in asked:
        try:
            diloco = DiLoCo(accelerator, model, inner_steps=4, fragments=1, islands=islands)
            found.append(f"{diloco._islands.count} of {diloco._islands.num_parts}")
        except ValueError as error:
            found.append(str(error))
    return found


def test_the_launcher_says_the_islands_unless_the_script_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ISLANDS", "2")
    assert run_on_ranks(_islands, 4, [None, 4]) == [["2 of 2", "4 of 1"]] * 4
    monkeypatch.setenv("ACCELERATE_ISLANDS", "3")
    for refused, _ in run_on_ranks(_islands, 4, [None, 4]):
        assert refused.startswith("`ACCELERATE_ISLANDS=3`") and "4 processes can't be divided into 3" in refused


def test_islands_are_a_flag_and_a_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("islands: 2\n")
    for asked in (collect({}, {}, flags={"islands": 2}), collect({}, {}, file=tmp_path / "config.yaml")):
        assert encode_settings(asked)["ACCELERATE_ISLANDS"] == "2"
    assert "ACCELERATE_ISLANDS" not in encode_settings(collect({}, {}, flags={}))
    with pytest.raises(SettingError, match=r"`--islands 2` .*`--num_processes 3` .* can't be divided"):
        check(collect({}, {}, flags={"islands": 2, "num_processes": 3}))
    with pytest.raises(SettingError, match=r"`--islands 2` .* each replica is an island"):
        check(collect({}, {}, flags={"islands": 2, "keep_replicas": 1}))
