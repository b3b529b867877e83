"""Part e: a save of 20 GB in the background, and peak memory beside what `estimate-memory` says."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .sheet import Sheet
from .smoke import accelerator_on
from .step import synchronize
from .workers import Session

GIGABYTES = 20.0
LAYERS = 16
#: Six of benchmarks/estimates.py's models, made so large that the device's memory is theirs.
MODELS = ("classifier", "convolutions", "U-Net", "vision transformer", "language model", "encoder and decoder")
PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None, "bfloat16 autocast": torch.bfloat16, "float16 autocast": torch.float16,
}  # fmt: skip


def run(sheet: Sheet, session: Session) -> None:
    """Add the rows of the save and of the estimates."""
    sheet.attempt("background save", partial(_save, sheet, session))
    for precision in PRECISIONS:
        sheet.attempt(f"estimates, {precision}", partial(_estimates, sheet, session, precision))


def _save(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "saves:background", at_most=180)
    size = f"{found['bytes'] / 1e9:.2f} GB"
    sheet.add("a save that the loop waits for", found["save"], "s", note=size)
    limit = None if session.dry else 0.05
    sheet.add("background save: the loop stands still, of a save", found["stall"] / found["save"], at_most=limit)
    sheet.add("the same, the first time", found["first_stall"] / found["save"], note="the memory is made that it needs")
    sheet.add("steps during the save over steps without", found["slowdown"], "x", note=f"{found['step'] * 1e3:.1f} ms")
    sheet.add("background save: values that differ after loading it", found["differ"], at_most=0)


def _estimates(sheet: Sheet, session: Session, precision: str) -> None:
    found = session.ask("ours", "saves:estimates", at_most=60, precision=precision)
    for name, (estimated, measured) in found.items():
        off = abs(estimated / measured - 1)
        note = f"{estimated / 2**20:,.1f} and {measured / 2**20:,.1f} MiB"
        sheet.add(f"estimate, {precision}, {name}: off by", off, at_most=0.10, note=note)


# ------------------------------------------------------------------------------------------------ the workers


def background(*, dry: bool, device: str) -> dict[str, Any]:
    """Save once while the loop waits and twice while it goes on; return the times, in seconds."""
    from accelerate.utils import ProjectConfiguration

    folder = tempfile.mkdtemp()
    try:
        # Two of them lie on the disk at once, and three are written within the limit, in 15 s each.
        num_bytes = 1e6 if dry else min(GIGABYTES * 1e9, shutil.disk_usage(folder).free * 0.4, _rate(folder) * 15)
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
        accelerator = accelerator_on(device, mixed_precision="no", project_config=project)
        width = int((num_bytes / 3 / 4 / LAYERS) ** 0.5)
        with torch.device(device):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
            rows = torch.randn(256, width)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))

        def steps(seconds: float) -> float:
            """Return the median seconds of a step."""
            times, until = [], time.perf_counter() + seconds
            while not times or time.perf_counter() < until:
                start = time.perf_counter()
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                synchronize(device)
                times.append(time.perf_counter() - start)
            return statistics.median(times)

        def saved(in_background: bool) -> float:
            synchronize(device)
            start = time.perf_counter()
            accelerator.save_state(asynchronous=in_background)
            return time.perf_counter() - start

        steps(0.05 if dry else 2.0)
        alone = steps(0.05 if dry else 4.0)
        save = saved(in_background=False)
        first_stall = saved(in_background=True)
        accelerator.wait_for_checkpoint()
        at_save = [p.detach().to("cpu", copy=True) for p in model.parameters()]
        stall = saved(in_background=True)
        during = steps(min(save / 2, 10.0))
        accelerator.wait_for_checkpoint()
        accelerator.load_state(f"{folder}/checkpoints/checkpoint_2")
        return {
            "bytes": num_bytes, "save": save, "first_stall": first_stall, "stall": stall, "step": alone,
            "slowdown": during / alone,
            "differ": sum(int((p.cpu() != was).sum()) for p, was in zip(model.parameters(), at_save, strict=True)),
        }  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rate(folder: str) -> float:
    """Return the bytes per second at which a file reaches the disk."""
    block, count = os.urandom(1 << 24), 64
    start = time.perf_counter()
    with open(f"{folder}/rate", "wb") as file:
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    os.remove(f"{folder}/rate")
    return len(block) * count / seconds


def estimates(*, dry: bool, device: str, precision: str) -> dict[str, tuple[int, int]]:
    """Return the estimated and the measured bytes of each model's step."""
    from benchmarks.estimates import MODELS as SUBJECTS
    from benchmarks.estimates import compare

    subjects = [each for each in SUBJECTS if each.name in MODELS[: 1 if dry else None]]
    if not dry:
        subjects = [larger(each) for each in subjects]
    rows = compare(subjects, device, PRECISIONS[precision])
    return {row.name: (row.estimated, row.measured) for row in rows}


def larger(subject: Any) -> Any:
    """Return the subject with 64 times its batch: the allocator's rounding is then small beside it."""
    return replace(subject, batch=subject.batch * 64)
