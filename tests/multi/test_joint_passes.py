"""Memory runs out on one rank of several that hold one model in pieces: all give the pass up, and the run is the same.

The model has wires at every place where a rank may fail: before, in and after its units, in the loss, and in the
backward of each. All runs of one test share their processes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.sharded_runs import Block

NUM_MICRO_BATCHES = 6
ACCUMULATION = 2
GLOBAL_BATCH = 8
WHERE = ("before the units", "in unit 0", "in unit 1", "after the units", "loss")
PLACES = [(where, way) for where in WHERE for way in ("forward", "backward")]


class OutOfMemory(RuntimeError):
    """What torch's own error says."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate 20.00 MiB")


class Device:
    """At one place of the pass no more than ``limit`` samples fit, from one micro-batch on."""

    def __init__(self, place: tuple[str, str] | None, limit: int, since: int) -> None:
        self.place, self.limit, self.since = place, limit, since
        self.micro_batch = self.failures = 0

    def allocate(self, place: tuple[str, str], size: int) -> None:
        if place == self.place and self.micro_batch >= self.since and size > self.limit:
            self.failures += 1
            raise OutOfMemory


class _Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device, where: str, size: int) -> torch.Tensor:
        ctx.wire = (device, where, size)
        device.allocate((where, "forward"), size)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        device, where, size = ctx.wire
        device.allocate((where, "backward"), size)
        return gradients[0], None, None, None


class Wired(nn.Module):
    """Two units between layers of the root's own, with a wire at each place."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.entrance, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        units = [Block(), Block()]
        self.layers = nn.ModuleList(units)
        for number, unit in enumerate(units):
            unit.up.register_forward_hook(functools.partial(self._trip, f"in unit {number}"))

    def _trip(self, where: str, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return self.wire(where, output)

    def wire(self, where: str, x: torch.Tensor, size: int | None = None) -> torch.Tensor:
        return _Wire.apply(x, self.device, where, len(x) if size is None else size)  # pyright: ignore[reportReturnType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wire("before the units", self.entrance(x))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.wire("after the units", hidden))


def _batches(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 8, generator=generator), torch.randint(0, 8, (n,), generator=generator)) for n in sizes]


def _alone(sizes: list[int]) -> dict[str, torch.Tensor]:
    """The weights of a plain loop over the global batches."""
    torch.manual_seed(0)
    model = Wired(Device(None, 0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(_batches(sizes), start=1):
        (nn.functional.cross_entropy(model(x), y) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def _train(
    place: tuple[str, str] | None,
    options: dict[str, Any],
    *,
    since: int = 0,
    limit: int = 1,
    full_rank: int = 1,
    sizes: list[int] | None = None,
    instead: Callable[[], Exception] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **options
        ),
    )
    rank, count = accelerator.process_index, accelerator.num_processes
    device = Device(place if rank == full_rank else None, limit, since)
    torch.manual_seed(0)
    model = Wired(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)

    def compute_loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(part[0]), part[1])
        return accelerator.unwrap_model(model).wire("loss", loss, len(part[0]))

    for x, y in _batches(sizes or [GLOBAL_BATCH] * NUM_MICRO_BATCHES):
        with accelerator.accumulate(model):
            accelerator.backward_in_parts(compute_loss, (x[rank::count], y[rank::count]), **asked)
            optimizer.step()
            optimizer.zero_grad()
        device.micro_batch += 1
    weights = accelerator.get_state_dict(model)
    result = {"weights": weights, "failures": device.failures, "parts": accelerator._micro_batches.num_parts}
    accelerator.free_memory()
    return result


def _all_places(options: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    gc.freeze()  # what the process was forked with need not be looked through after every failure
    return [_train(place, options, **how) for place in PLACES]


def _assert_as_alone(run: dict[str, Any], reference: dict[str, torch.Tensor], what: Any) -> None:
    for name, value in reference.items():
        torch.testing.assert_close(run["weights"][name], value, rtol=1e-6, atol=1e-6, msg=f"{what}: {name} differs")


@pytest.mark.parametrize("since", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_version": 2},
        {"fsdp_version": 1, "use_orig_params": True},
        {"fsdp_version": 1, "use_orig_params": False},
    ],
    ids=["fsdp2", "fsdp1", "fsdp1 of flat parameters"],
)
def test_wherever_memory_runs_out_all_ranks_split_and_the_update_stays(options: dict[str, Any], since: int) -> None:
    reference = _alone([GLOBAL_BATCH] * NUM_MICRO_BATCHES)
    main, full = run_on_ranks(functools.partial(_all_places, options, since=since), 2)
    for place, run, other in zip(PLACES, main, full, strict=True):
        assert (run["failures"], run["parts"]) == (0, 4), place
        assert other["failures"] > 0 and other["parts"] == 4, place
        _assert_as_alone(run, reference, place)
