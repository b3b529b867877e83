from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.big_models import prefetch
from accelerate.big_models.offload import OffloadedWeightsLoader, offload_state_dict
from accelerate.big_models.prefetch import WeightPrefetcher

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MIN_UNIT_BYTES", 0)
    monkeypatch.setattr("accelerate.big_models.offload.MIN_UNIT_BYTES", 0)
    monkeypatch.setattr(prefetch, "MIN_PREFETCH_BYTES", 0)


class FakeStore:
    """A store of weights of four bytes each that remembers who read them, and when."""

    def __init__(self, *names: str, mapped: bool = False) -> None:
        self.values = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
        self.mapped = mapped
        self.read: list[tuple[str, bool]] = []
        self.announced: list[str] = []
        self.wait: threading.Event | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if self.wait is not None:
            self.wait.wait(10)
        self.read.append((key, threading.current_thread() is threading.main_thread()))
        return self.values[key]

    def num_bytes(self, key: str) -> int:
        return 4

    def will_need(self, keys: Any) -> bool:
        self.announced += keys if self.mapped else []
        return self.mapped

    def release(self, keys: Any) -> None:
        raise AssertionError("on the host, who uses the weights releases them")


def run(prefetcher: WeightPrefetcher, *units: tuple[str, ...]) -> list[list[float]]:
    return [[value.item() for value in prefetcher.fetch(unit, HOST)] for unit in units]


def test_the_second_pass_is_foreseen() -> None:
    store = FakeStore("a", "b", "c")
    prefetcher = WeightPrefetcher(store)
    units = [("a", "b"), ("c",)]
    assert run(prefetcher, *units) == [[0, 1], [2]]
    assert prefetcher.num_prefetched == 0 and all(in_main for _, in_main in store.read)
    store.read.clear()
    assert run(prefetcher, *units, *units) == [[0, 1], [2], [0, 1], [2]]
    assert prefetcher.num_prefetched == 3, "nothing was known of what follows the last unit before the second pass"
    assert [key for key, in_main in store.read if not in_main].count("c") >= 2


def test_what_is_mapped_is_left_to_the_kernel() -> None:
    store = FakeStore("a", "b", mapped=True)
    prefetcher = WeightPrefetcher(store)
    run(prefetcher, ("a",), ("b",), ("a",))
    assert store.announced == ["b"] or store.announced == ["b", "b"]
    assert all(in_main for _, in_main in store.read)


def test_no_more_is_prefetched_than_the_largest_unit() -> None:
    store = FakeStore(*"abcdefgh", mapped=True)
    prefetcher = WeightPrefetcher(store)
    units = [("a", "b", "c"), ("d",), ("e",), ("f",), ("g",), ("h",)]
    run(prefetcher, *units)
    store.announced.clear()
    run(prefetcher, units[0])
    assert store.announced == ["d", "e", "f"], "three weights, as in the largest unit"


def test_small_units_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MIN_UNIT_BYTES", 5)
    store = FakeStore(*"abcd", mapped=True)
    prefetcher = WeightPrefetcher(store)
    units = [("a",), ("b",), ("c", "d")]
    run(prefetcher, *units, units[0])
    assert store.announced == ["c", "d"]


def test_another_way_through_the_model_drops_what_was_prefetched() -> None:
    store = FakeStore(*"abc")
    prefetcher = WeightPrefetcher(store)
    run(prefetcher, ("a",), ("b",), ("a",))
    assert set(prefetcher._in_flight) == {(("b",), HOST)}
    assert run(prefetcher, ("c",)) == [[2]]
    assert (("b",), HOST) not in prefetcher._in_flight


def test_an_error_while_reading_reaches_who_asked() -> None:
    store = FakeStore(*"ab")
    prefetcher = WeightPrefetcher(store)
    run(prefetcher, ("a",), ("b",))
    store.wait = threading.Event()
    del store.values["b"]
    store.wait.set()
    run(prefetcher, ("a",))
    with pytest.raises(KeyError):
        prefetcher.fetch(("b",), HOST)


# --------------------------------------------------------------------------------------------- whole models


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


X = torch.ones(2, 64)


def loader_of(model: Chain) -> Any:
    hook: Any = model.layers[0]._hf_hook
    return hook.weights_map.dataset


def test_a_model_in_a_folder_is_prefetched_with_the_same_outputs(tmp_path: Path) -> None:
    model = disk_offload(chain(), tmp_path)
    for _ in range(3):
        assert torch.equal(model(X), chain()(X))
    assert loader_of(model).prefetcher.num_prefetched >= 10


def test_a_model_in_its_checkpoint_is_prefetched_with_the_same_outputs(tmp_path: Path) -> None:
    save_file(chain().state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Chain()
    model = load_checkpoint_and_dispatch(empty, tmp_path, {"": "disk"})
    for _ in range(3):
        assert torch.equal(model(X), chain()(X))
    assert loader_of(model).prefetcher.num_prefetched >= 10


def test_copies_learn_for_themselves(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(3)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    loader.prefetcher.fetch(("w",), HOST)
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert twin.prefetcher is not loader.prefetcher
        assert twin.prefetcher.fetch(("w",), HOST)[0].sum() == 3


def test_what_is_in_memory_already_is_not_prefetched() -> None:
    loader = OffloadedWeightsLoader(state_dict={"w": torch.ones(3)})
    assert not loader.is_worth_prefetching(["w"], HOST)
    assert loader.is_worth_prefetching(["w"], torch.device("cuda"))
    assert not loader.is_worth_prefetching(["w"], torch.device("meta"))


# -------------------------------------------------------------------------------------------- accelerators


class PretendedStream:
    """The interface of a copy stream, on the host."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        self.log.append("send")
        return [value.clone() for value in values], SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    def receive(self, sent: tuple[list[torch.Tensor], Any]) -> list[torch.Tensor]:
        self.log.append("receive")
        return sent[0]


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The pinned buffers that were allocated."""
    found: list[torch.Tensor] = []

    def pinned_buffer(num_bytes: int) -> torch.Tensor:
        found.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return found[-1]

    monkeypatch.setattr(prefetch, "pinned_buffer", pinned_buffer)
    return found


def test_pinned_buffers_take_turns_and_hold_every_dtype(buffers: list[torch.Tensor]) -> None:
    stream: Any = PretendedStream()
    copies = prefetch._StagedCopies(stream)
    values = [
        torch.arange(3),
        torch.ones(5, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones(()),
    ]
    for turn in range(3):
        sent, _ = copies.send(values)
        assert all(torch.equal(one, value) for one, value in zip(sent, values, strict=True)), turn
    assert len(buffers) == 2, "both were large enough the second time"
    assert stream.log == ["send", "send", "synchronize", "send"], "a buffer is filled again when it has been sent"


@pytest.mark.parametrize("has_streams", [True, False])
def test_weights_are_received_when_they_are_used(
    has_streams: bool, buffers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = PretendedStream()
    monkeypatch.setattr(prefetch, "copy_stream", lambda device: stream if has_streams else None)
    monkeypatch.setattr(FakeStore, "release", lambda self, keys: None)
    prefetcher = WeightPrefetcher(FakeStore("a", "b"))
    for _ in range(3):
        assert run(prefetcher, ("a",), ("b",)) == [[0.0], [1.0]]
    assert prefetcher.num_prefetched == 3
    assert stream.log.count("receive") == (3 if has_streams else 0)
    assert len(buffers) == (2 if has_streams else 0)
