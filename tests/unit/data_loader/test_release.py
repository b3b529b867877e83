"""A loader and its workers are gone as soon as nobody has it: the garbage collector would wait 10 s for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState

CPU = torch.device("cpu")


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(40.0))


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("stops_after", [None, 2], ids=["to the end", "left early"])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(40.0)), Stream()], ids=["map", "stream"])
def test_a_loader_that_nobody_has_is_gone(
    dataset: torch.utils.data.Dataset, is_dispatched: bool, num_workers: int, stops_after: int | None
) -> None:
    base = DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0)
    loader = prepare_data_loader(base, CPU, 1, 0, put_on_device=True, dispatch_batches=is_dispatched)
    count = 0
    for _ in loader:
        count += 1
        if count == stops_after:
            break
    assert count == (stops_after or 10)
    reference = weakref.ref(loader)
    del loader, base
    assert reference() is None


@pytest.mark.parametrize("stops_after", [None, 2], ids=["to the end", "left early"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_gradient_state_goes_with_the_accelerator_and_the_loader(num_workers: int, stops_after: int | None) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    base = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=num_workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, base)
    rows = None
    for number, (rows,) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows[:, None]).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == stops_after:
            break
    references = [weakref.ref(accelerator.gradient_state), weakref.ref(accelerator), weakref.ref(loader)]
    assert GradientState() is references[0]()
    del accelerator, loader, base, model, optimizer, scheduler, rows
    assert [reference() for reference in references] == [None] * 3


def test_a_pass_that_ends_late_leaves_the_next_one_alone() -> None:
    base = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(base, CPU, 1, 0, put_on_device=True)
    left = iter(loader)
    next(left)
    batches = iter(loader)
    seen = [next(batches)]
    left.close()
    seen += list(batches)
    assert torch.equal(torch.cat([rows for (rows,) in seen]), torch.arange(40.0))
