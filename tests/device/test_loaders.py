"""Batches on their way to the device: nothing is used before it has arrived, nothing is reused before it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import Accelerator
from accelerate.devices.memory import CopyStream
from accelerate.devices.table import kind_of
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.device.devices import on_devices
from tests.slow import slow_for


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": torch.full((512,), float(index)), "noise": torch.rand(2)}


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.full((512,), float(index)) for index in range(first, 37, step))


def sums_of_batches(kind: str, num_workers: int, pin: bool, **configuration: Any) -> list[list[float]]:
    torch.sim.set_copy_delay(3_000)  # longer than a step: what isn't waited for is NaN or another batch's
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True, **configuration))
    set_seed(2)
    data: Any = Rows() if kind == "map" else Stream()
    loader = DataLoader(data, batch_size=4, shuffle=kind == "map", num_workers=num_workers, pin_memory=pin)
    found: list[list[float]] = []
    for _epoch in range(2):
        for batch in accelerator.prepare(loader):
            rows = batch["rows"] if kind == "map" else batch
            assert rows.device == accelerator.device
            mean = rows.mean(1)
            kept = accelerator.gather_for_metrics(mean)
            assert torch.equal(rows.min(1).values, rows.max(1).values)  # each row is whole
            found.append(kept.cpu().tolist())
    return found


@pytest.mark.parametrize("pin", [True, pytest.param(False, marks=slow_for("nothing to overlap", "device"))])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_every_sample_arrives_whole_and_once(kind: str, num_workers: int, pin: bool) -> None:
    for num_ranks in (1, 2):
        configuration = {"dispatch_batches": num_workers == 0} if kind == "stream" else {}
        for found in on_devices(sums_of_batches, num_ranks, kind, num_workers, pin, **configuration):
            half = len(found) // 2
            for epoch in (found[:half], found[half:]):
                assert sorted(value for values in epoch for value in values) == [float(i) for i in range(37)]


class Impatient(CopyStream):  # type: ignore[misc]  # final, for others
    """A copy stream that forgets to let the current stream wait for the copy."""

    def receive(self, sent: tuple[Any, Any]) -> Any:
        return sent[0]


def unordered_reads_of_training(num_workers: int, forgets: bool) -> list[str]:
    accelerator = Accelerator()
    model = torch.nn.Linear(512, 4)
    loader = DataLoader(Rows(), batch_size=4, num_workers=num_workers, pin_memory=True)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    kind = kind_of(accelerator.device)
    prefetch = Impatient if forgets else CopyStream
    prepared.device_prefetch = prefetch(kind, accelerator.device, kind.side_stream(accelerator.device))
    with torch.sim.unordered_reads() as found:
        for batch in prepared:
            accelerator.backward(model(batch["rows"]).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_read_waits_for_the_copy_of_what_it_reads(num_ranks: int, num_workers: int) -> None:
    assert on_devices(unordered_reads_of_training, num_ranks, num_workers, False) == [[]] * num_ranks


def test_a_wait_that_a_loader_forgot_is_found() -> None:
    found = on_devices(unordered_reads_of_training, 1, 2, True)[0]
    assert len(found) >= 10  # in every batch
    assert all("wrote, and nothing waits for that" in one for one in found)


def streams_of_random_numbers(folder: str) -> list[bool]:
    accelerator = Accelerator()
    set_seed(11, device_specific=True)
    device = accelerator.device
    torch.rand(3, device=device)
    accelerator.save_state(folder)
    expected = [torch.rand(3, device=device).cpu(), torch.rand(3)]
    torch.rand(100, device=device)
    accelerator.load_state(folder)
    return [torch.equal(torch.rand(3, device=device).cpu(), expected[0]), torch.equal(torch.rand(3), expected[1])]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_holds_each_devices_generator(num_ranks: int, tmp_path: Any) -> None:
    assert on_devices(streams_of_random_numbers, num_ranks, str(tmp_path / "saved")) == [[True, True]] * num_ranks
