"""What a loop calls leaves nothing for the garbage collector: tensors would stay in memory until it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, cpu_offload, utils
from accelerate.utils import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks


def _loader(num_workers: int) -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def garbage_of_calls(folder: str, fsdp: bool) -> dict[str, list[str]]:
    """Return our objects and the tensors that three rounds of each call leave in reference cycles."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = torch.nn.Linear(4, 1) if fsdp else _model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, scheduler, loader, with_workers = accelerator.prepare(
        model, optimizer, scheduler, _loader(0), _loader(2)
    )
    offloaded, numbers = cpu_offload(_model().eval(), torch.device("cpu")), torch.ones(2)
    nested = {"a": [numbers, (numbers, "text")], "b": {"c": numbers}}

    def epoch(of: Any = loader) -> None:
        for inputs, targets in of:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    def leave_early() -> None:
        for _ in with_workers:
            return

    def evaluate() -> None:
        mean = accelerator.streaming_mean()
        for inputs, targets in loader:
            with torch.no_grad():
                outputs = model(inputs)
            accelerator.gather_for_metrics({"outputs": outputs, "targets": [targets]})
            mean.update((outputs - targets).square())
        mean.mean()

    def offload() -> None:
        with torch.no_grad():
            offloaded(torch.ones(2, 4))

    calls: dict[str, Callable[[], object]] = {
        "epoch": epoch,
        "epoch with workers": lambda: epoch(with_workers),
        "a loop that is left": leave_early,
        "evaluation": evaluate,
        "gather": lambda: accelerator.gather(nested["b"]),
        "reduce": lambda: accelerator.reduce(nested["b"]),
        "pad_across_processes": lambda: accelerator.pad_across_processes(nested["b"]),
        "gather_object": lambda: utils.gather_object([1]),
        "broadcast_object_list": lambda: utils.broadcast_object_list([1]),
        "broadcast": lambda: utils.broadcast(nested["b"]),
        "send_to_device": lambda: utils.send_to_device(nested, "cpu"),
        "recursively_apply": lambda: utils.recursively_apply(torch.clone, nested),
        "concatenate": lambda: utils.concatenate([nested["b"], nested["b"]]),
        "find_batch_size": lambda: utils.find_batch_size(nested),
        "convert_to_fp32": lambda: utils.convert_to_fp32(nested["b"]),
        "wait_for_everyone": accelerator.wait_for_everyone,
        "check_trigger": accelerator.check_trigger,
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "save_state": lambda: accelerator.save_state(f"{folder}/state"),
        "load_state": lambda: accelerator.load_state(f"{folder}/state"),
        "save_model": lambda: accelerator.save_model(model, f"{folder}/model"),
        "skip_first_batches": lambda: [*accelerator.skip_first_batches(loader, 2)],
        "a forward of a model with hooks": offload,
    }
    found: dict[str, list[str]] = {}
    for name, call in calls.items():
        call()
        call()
        gc.collect()
        gc.disable()
        for _ in range(3):
            call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        kept: list[Any] = gc.garbage
        ours = [one for one in kept if str(getattr(one, "__module__", "")).startswith("accelerate")]
        tensors = [one for one in kept if isinstance(one, torch.Tensor) and one.numel()]
        found[name] = sorted({getattr(one, "__qualname__", type(one).__qualname__) for one in [*ours, *tensors]})
        gc.garbage.clear()
        gc.enable()
    return {name: kinds for name, kinds in found.items() if kinds}


@pytest.mark.parametrize(("num_ranks", "fsdp"), [(1, False), (2, False), (2, True)])
def test_calls_of_a_loop_leave_no_tensors_in_cycles(num_ranks: int, fsdp: bool, tmp_path: Path) -> None:
    for found in run_on_ranks(garbage_of_calls, num_ranks, str(tmp_path), fsdp, timeout_seconds=120):
        assert found == {}
