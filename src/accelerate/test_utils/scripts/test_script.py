"""The script of ``accelerate test``: process control, random numbers, loaders, and a training run.

Training must give the same result on any number of processes. The script needs nothing but this package, and exits with
code 0 if everything holds.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.distributed.random import set_seed, synchronize_rng_states
from accelerate.plugins.handlers import DataLoaderConfiguration
from accelerate.settings.labels import PrecisionType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.test_utils.training import RegressionDataset, RegressionModel, Sample

LENGTH = 96


def _gathered(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    found = accelerator.gather(tensor)
    assert isinstance(found, torch.Tensor)
    return found.cpu()


def process_execution_check(accelerator: Accelerator) -> None:
    """Check that guards run on their ranks, in the promised order."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        from accelerate.distributed.collectives import broadcast_object_list

        broadcast_object_list(folder, 0)
        path = Path(folder[0]) / "order"
        with accelerator.main_process_first(), path.open("a") as file:
            file.write(f"{accelerator.process_index}\n")
        accelerator.wait_for_everyone()
        ranks = path.read_text().split()
        assert ranks[0] == "0" and len(ranks) == accelerator.num_processes, ranks
        accelerator.wait_for_everyone()
    for guard, expected in (
        (accelerator.on_main_process, accelerator.process_index == 0),
        (accelerator.on_local_main_process, accelerator.local_process_index == 0),
        (accelerator.on_last_process, accelerator.process_index == accelerator.num_processes - 1),
    ):
        ran: list[int] = []
        guard(lambda ran=ran: ran.append(1))()
        assert bool(ran) == expected, guard
    shown = io.StringIO()
    with redirect_stdout(shown):
        accelerator.print("once")
    assert (shown.getvalue() == "once\n") == accelerator.is_local_main_process


def rng_sync_check(accelerator: Accelerator) -> None:
    """Check that every rank draws the same numbers after synchronising."""
    torch.manual_seed(100 + accelerator.process_index)
    synchronize_rng_states(["torch"])
    draws = _gathered(accelerator, torch.rand(1, device=accelerator.device))
    assert torch.all(draws == draws[0]), draws
    generator = torch.Generator().manual_seed(accelerator.process_index)
    synchronize_rng_states(["generator"], generator=generator)
    own = torch.rand(1, generator=generator).to(accelerator.device)
    draws = _gathered(accelerator, own)
    assert torch.all(draws == draws[0]), draws


def _check_coverage(accelerator: Accelerator, loader: Iterable[torch.Tensor], *, shuffled: bool) -> None:
    seen = torch.cat([_gathered(accelerator, batch) for batch in loader])
    assert sorted(seen.tolist()) == list(range(LENGTH)), sorted(seen.tolist())
    assert (seen.tolist() == list(range(LENGTH))) != shuffled


def loader_check(accelerator: Accelerator, *, dispatch: bool) -> None:
    """Check that each sample reaches one rank, in order or shuffled, with the batch split or not."""
    num_processes = accelerator.num_processes
    for split_batches in (False, True):
        for shuffle in (False, True):
            size = 8 if not split_batches else 4 * num_processes
            loader = DataLoader(range(LENGTH), batch_size=size, shuffle=shuffle)  # type: ignore[arg-type]
            prepared = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes,
                accelerator.process_index,
                split_batches=split_batches,
                put_on_device=True,
                dispatch_batches=dispatch,
            )
            _check_coverage(accelerator, prepared, shuffled=shuffle)
            accelerator.wait_for_everyone()


class _EveryOther(Sampler[int]):
    """A user's own sampler: even indices first, then odd ones."""

    def __iter__(self) -> Iterator[int]:
        yield from range(0, LENGTH, 2)
        yield from range(1, LENGTH, 2)

    def __len__(self) -> int:
        return LENGTH


def custom_sampler_check(accelerator: Accelerator) -> None:
    """Check that a user's own sampler decides the order, also through a batch sampler."""
    batches = BatchSampler(_EveryOther(), batch_size=4, drop_last=False)
    data = TensorDataset(torch.arange(LENGTH))
    for loader in (DataLoader(data, sampler=_EveryOther(), batch_size=4), DataLoader(data, batch_sampler=batches)):
        prepared = accelerator.prepare_data_loader(loader)
        seen = torch.cat([_gathered(accelerator, batch) for (batch,) in prepared])
        assert sorted(seen.tolist()) == list(range(LENGTH))
        assert all(value % 2 == 0 for value in seen[: LENGTH // 2].tolist())


class _Stream(IterableDataset[int]):
    """An iterable dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(LENGTH)


def stream_check(accelerator: Accelerator) -> None:
    """Check that the ranks shard an iterable dataset without gaps and without duplicates."""
    prepared = accelerator.prepare_data_loader(DataLoader(_Stream(), batch_size=4))
    seen = torch.cat([_gathered(accelerator, batch) for batch in prepared])
    assert sorted(seen.tolist()) == list(range(LENGTH)), sorted(seen.tolist())


def seedable_sampler_check(accelerator: Accelerator) -> None:
    """Check that the order is a function of the seed and the epoch."""
    orders: list[list[int]] = []
    for _ in range(2):
        sampler = SeedableRandomSampler(range(LENGTH), data_seed=42)  # type: ignore[arg-type]
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
    assert orders[0] == orders[2] and orders[1] == orders[3] and orders[0] != orders[1]
    first = torch.tensor(orders[0], device=accelerator.device)
    everywhere = _gathered(accelerator, first).view(accelerator.num_processes, LENGTH)
    assert torch.all(everywhere == everywhere[0])


def _bare_weights(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights that the loop gives without this package, on one process."""
    set_seed(42)
    loader = _regression_loader(batch_size)
    model, losses = RegressionModel(), torch.nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            losses(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    return model.a.detach().clone(), model.b.detach().clone()


def _regression_loader(batch_size: int) -> DataLoader[Sample]:
    generator = torch.Generator().manual_seed(42)
    data = RegressionDataset(length=LENGTH, seed=42)
    return DataLoader(data, shuffle=True, batch_size=batch_size, generator=generator)


def training_check(accelerator: Accelerator, *, split_batches: bool, mixed_precision: str, tolerance: float) -> None:
    """Check that a training run gives the weights of the plain loop on the same global batches."""
    global_batch_size = 4 * accelerator.num_processes
    expected = _bare_weights(global_batch_size)
    _forget_state()
    own = Accelerator(
        cpu=accelerator.device.type == "cpu",
        mixed_precision=PrecisionType(mixed_precision),
        dataloader_config=DataLoaderConfiguration(split_batches=split_batches),
    )
    set_seed(42)
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = _regression_loader(global_batch_size if split_batches else 4)
    model, optimizer, loader = own.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            own.backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]))
            optimizer.step()
    trained = own.unwrap_model(model)
    for name, value in zip("ab", expected, strict=True):
        difference = (getattr(trained, name).detach().cpu() - value).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference} in {mixed_precision}"


def split_check(accelerator: Accelerator) -> None:
    """Check that inputs of any kind are split among the processes, and padded if requested."""
    total = list(range(2 * accelerator.num_processes + 1))
    with accelerator.split_between_processes(total) as mine:
        numbers = torch.tensor([len(mine)], device=accelerator.device)
    assert int(_gathered(accelerator, numbers).sum()) == len(total)
    with accelerator.split_between_processes({"a": total, "b": total}, apply_padding=True) as mine:
        assert len(mine["a"]) == len(mine["b"]) == 3


def trigger_check(accelerator: Accelerator) -> None:
    """Check that a trigger set by one rank is seen by all, once."""
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def state_check(accelerator: Accelerator) -> None:
    """Check that the state objects can be reset and made again with the same values."""
    before = (accelerator.num_processes, accelerator.process_index, accelerator.device)
    _forget_state()
    state = PartialState(cpu=accelerator.device.type == "cpu")
    assert (state.num_processes, state.process_index, state.device) == before


def _forget_state() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


def checks(accelerator: Accelerator) -> dict[str, Callable[[], None]]:
    """Return the checks by their titles, in the order of execution."""
    found: dict[str, Callable[[], None]] = {
        "process control": lambda: process_execution_check(accelerator),
        "random numbers": lambda: rng_sync_check(accelerator),
        "loaders, sharded": lambda: loader_check(accelerator, dispatch=False),
        "loaders, read by the main process": lambda: loader_check(accelerator, dispatch=True),
        "loaders, with samplers of one's own": lambda: custom_sampler_check(accelerator),
        "loaders, over a stream": lambda: stream_check(accelerator),
        "seedable sampler": lambda: seedable_sampler_check(accelerator),
        "inputs split between processes": lambda: split_check(accelerator),
        "triggers": lambda: trigger_check(accelerator),
    }
    for split_batches in (False, True):
        for precision, tolerance in (("no", 1e-5), ("bf16", 0.1), ("fp16", 0.1)):
            batches = "whole batches split" if split_batches else "batches per process"
            found[f"training, {batches}, {precision}"] = (
                lambda split=split_batches, precision=precision, tolerance=tolerance: training_check(
                    accelerator, split_batches=split, mixed_precision=precision, tolerance=tolerance
                )
            )
    found["state made again"] = lambda: state_check(accelerator)
    return found


def main() -> None:
    """Run all checks, or exit with the reason."""
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device.type}")
    for name, check in checks(accelerator).items():
        accelerator.print(f"  {name} ...", flush=True)
        check()
        accelerator.wait_for_everyone()
    accelerator.print("All checks passed.")
    accelerator.end_training()


if __name__ == "__main__":
    main()
