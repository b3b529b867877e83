"""Part c: fp8 over bf16, synchronisations of a step, and copies of batches that the computation doesn't hide."""

from __future__ import annotations

import importlib.util
import statistics
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .models import LARGE, TINY, LlamaShaped
from .sheet import Sheet
from .smoke import accelerator_on
from .step import in_turns, loss_of, ratio, sharing, synchronize
from .workers import Session

BATCHES = 6


def run(sheet: Sheet, session: Session) -> None:
    """Add the rows of fp8, synchronisations and copies."""
    for kind in ("compiled", "eager"):
        if session.dry:
            sheet.skip(f"fp8 over bf16, {kind}", "left out of a dry run for its time")
        elif importlib.util.find_spec("torchao") is None:
            sheet.skip(f"fp8 over bf16, {kind}", "torchao isn't installed; `make wheels` puts it beside the checkout")
        else:
            sheet.attempt(f"fp8 over bf16, {kind}", partial(_fp8, sheet, session, kind == "compiled"))
    sheet.attempt("synchronisations", partial(_synchronisations, sheet, session))
    sheet.attempt("copies", partial(_copies, sheet, session))


def _fp8(sheet: Sheet, session: Session, compiled: bool) -> None:
    found = session.ask("ours", "overlap:fp8", at_most=120, compiled=compiled, seconds=session.seconds)
    mode = "compiled" if compiled else "eager"
    goal = 1.2 if compiled else None
    note = f"{found['fp8']:,.0f} and {found['bf16']:,.0f} tokens/s"
    sheet.add(f"1.2B: fp8 over bf16, {mode}", found["speed"], "x", at_least=goal, note=note)


def _synchronisations(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "overlap:synchronisations", at_most=60)
    for name, places in found["places"].items():
        # The CPU's own optimizers read scalars, which costs nothing there.
        goal = None if session.dry else 0
        note = "; ".join([found["how"], *dict.fromkeys(places)])
        sheet.add(f"synchronisations of an epoch of {BATCHES}, {name}", len(places), at_most=goal, note=note)


def _copies(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "overlap:copies", at_most=90)
    note = f"{found['ms']:.2f} ms a step; {found['resident_ms']:.2f} ms with the batch on the device; {found['how']}"
    limit = None if session.dry else 0.05
    sheet.add("copies that the computation doesn't hide, of a step", found["exposed"], at_most=limit, note=note)
    sheet.add("a copy by itself, of a step", found["copy_share"])


# ------------------------------------------------------------------------------------------------ the workers


def fp8(*, dry: bool, device: str, compiled: bool, seconds: float) -> dict[str, float]:
    """Return the rates of a step in bf16 and in fp8."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    shape = TINY if dry else LARGE
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaShaped(shape)
        tokens = torch.randint(shape.vocabulary, (shape.samples, shape.sequence))

    def made(precision: str) -> Any:
        AcceleratorState._reset_state(True)  # each has a precision of its own
        options = {"dynamo_plugin": TorchDynamoPlugin(backend="inductor")} if compiled else {}
        accelerator = accelerator_on(device, mixed_precision=precision, **options)
        own = sharing(model)
        prepared, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=1e-5, fused=True))

        def step() -> None:
            accelerator.backward(loss_of(prepared(tokens), tokens))
            optimizer.step()
            optimizer.zero_grad()

        return step

    times = in_turns({"raw": made("bf16"), "fp8": made("fp8")}, device, seconds)
    rates = {name: tokens.numel() / statistics.median(each) for name, each in times.items()}
    return {"bf16": rates["raw"], "fp8": rates["fp8"], "speed": 1 / ratio(times, "fp8")}


def _waits(step: Any, device: str) -> list[str]:
    """Return the place of each operation of a call that made the host wait for the device."""
    if device == "cpu":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as record:
            step()
        counts = [event.count for event in record.key_averages() if event.key == "aten::_local_scalar_dense"]
        return ["aten::_local_scalar_dense"] * sum(counts)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [
        f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"
        for warning in heard
        if "called a synchronizing" in str(warning.message)  # the mode warns of itself, too
    ]


def synchronisations(*, dry: bool, device: str) -> dict[str, Any]:
    """Return where the host waits in a steady epoch of each kind of loop."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    places: dict[str, list[str]] = {}
    for name, options, clips in (
        ("fp32", {"mixed_precision": "no"}, False),
        ("bf16, clipping", {"mixed_precision": "bf16"}, True),
        ("bf16, accumulating", {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}, True),
    ):
        AcceleratorState._reset_state(True)
        config = DataLoaderConfiguration(non_blocking=True)
        accelerator = accelerator_on(device, step_scheduler_with_optimizer=False, dataloader_config=config, **options)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        data = DataLoader(Rows(BATCHES, 64), batch_size=None)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

        def epoch(
            accelerator: Any = accelerator, model: Any = model, optimizer: Any = optimizer, data: Any = data,
            schedule: Any = schedule, clips: bool = clips,
        ) -> None:  # fmt: skip
            for rows in data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).square().mean())
                    if clips and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()

        epoch()  # builds the optimizer's state
        places[name] = _waits(epoch, device)
    how = "torch.cuda.set_sync_debug_mode" if device == "cuda" else "scalars read"
    return {"places": places, "how": how}


class Rows(Dataset[torch.Tensor]):
    """Batches that are ready in host memory: what is timed is their copy."""

    def __init__(self, length: int, width: int, batch: int = 16) -> None:
        self.batches = [torch.randn(batch, width) for _ in range(min(length, 4))]
        if torch.cuda.is_available():
            self.batches = [each.pin_memory() for each in self.batches]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.length:
            raise IndexError(index)
        return self.batches[index % len(self.batches)]


def copies(*, dry: bool, device: str) -> dict[str, Any]:
    """Return the time of a step that reads batches from the host beside one whose batch is on the device."""
    from accelerate.utils import DataLoaderConfiguration

    width, batch, depth, steps = (64, 16, 2, 6) if dry else (8192, 4096, 8, 60)
    config = DataLoaderConfiguration(non_blocking=True, prefetch_to_device=2)
    accelerator = accelerator_on(device, mixed_precision="bf16", dataloader_config=config)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rows = Rows(steps, width, batch)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=None))
    resident = rows[0].to(accelerator.device)

    def train(batches: Any) -> float:
        synchronize(device)
        start = time.perf_counter()
        for each in batches:
            accelerator.backward(model(each).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        synchronize(device)
        return (time.perf_counter() - start) / steps

    train(data)
    pairs = [(train(data), train([resident] * steps)) for _ in range(3)]
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        resident.copy_(rows[1], non_blocking=True)
    synchronize(device)
    copy = (time.perf_counter() - start) / 10
    own, bare = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {
        "exposed": max(0.0, statistics.median((one - other) / other for one, other in pairs)),
        "copy_share": copy / bare,
        "ms": own * 1e3,
        "resident_ms": bare * 1e3,
        "how": f"{resident.numel() * 4 / 1e6:.0f} MB a batch",
    }
