"""Checks the collectives: run it under ``accelerate launch``, on any number of processes."""

from __future__ import annotations

import torch

from accelerate.distributed.collectives import (
    broadcast,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.nested import concatenate
from accelerate.state import PartialState


def create_tensor(state: PartialState) -> torch.Tensor:
    """Return ``num_processes`` numbers, different on every rank: 1, 2, ... over all ranks."""
    first = state.process_index * state.num_processes
    return (torch.arange(state.num_processes) + 1.0 + first).to(state.device)


def test_gather(state: PartialState) -> None:
    """Check that the tensors of all ranks are gathered in order."""
    gathered = gather(create_tensor(state))
    assert gathered.tolist() == list(range(1, state.num_processes**2 + 1)), gathered


def test_gather_object(state: PartialState) -> None:
    """Check that the objects of all ranks are gathered in order."""
    gathered = gather_object([state.process_index])
    assert gathered == list(range(state.num_processes)), gathered


def test_gather_non_contiguous(state: PartialState) -> None:
    """Check that a non-contiguous tensor is gathered too."""
    tensor = torch.arange(12).view(4, 3).t().to(state.device)
    assert not tensor.is_contiguous()
    assert gather(tensor).shape == (3 * state.num_processes, 4)


def test_broadcast(state: PartialState) -> None:
    """Check that every rank gets the first rank's tensor."""
    received = broadcast(create_tensor(state))
    assert received.tolist() == list(range(1, state.num_processes + 1)), received


def test_pad_across_processes(state: PartialState) -> None:
    """Check that tensors of different lengths are padded with zeros to the longest."""
    length = state.num_processes + (1 if state.is_main_process else 0)
    padded = pad_across_processes(torch.arange(length, device=state.device))
    assert padded.shape == (state.num_processes + 1,), padded.shape
    if state.num_processes > 1 and not state.is_main_process:
        assert padded.tolist() == [*range(state.num_processes), 0], padded


def test_reduce(state: PartialState) -> None:
    """Check the element-wise sum and mean over ranks."""
    count = state.num_processes
    expected = torch.arange(1.0, count**2 + 1).view(count, count)
    torch.testing.assert_close(reduce(create_tensor(state), "sum").cpu(), expected.sum(0))
    torch.testing.assert_close(reduce(create_tensor(state), "mean").cpu(), expected.mean(0))


def test_copy_tensor_to_devices(state: PartialState) -> None:
    """Check that every rank gets the first rank's tensor on its device."""
    tensor = torch.tensor([1, 2, 3], device=state.device) if state.is_main_process else None
    assert copy_tensor_to_devices(tensor).tolist() == [1, 2, 3]


def test_concatenate(state: PartialState) -> None:
    """Check that containers are concatenated leaf by leaf."""
    part = {"x": create_tensor(state)}
    assert concatenate([part, part])["x"].shape == (2 * state.num_processes,)


def main() -> None:
    """Run all checks."""
    state = PartialState()
    for check in (
        test_gather,
        test_gather_object,
        test_gather_non_contiguous,
        test_broadcast,
        test_pad_across_processes,
        test_reduce,
        test_copy_tensor_to_devices,
        test_concatenate,
    ):
        state.print(f"{check.__name__.removeprefix('test_').replace('_', ' ')}: {check.__doc__}")
        check(state)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
