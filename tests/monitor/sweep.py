"""The files of a sweep, made up: runs with other settings, of which a few failed, were preempted or still go on."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

BEGAN = 1.79e9
_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def write_sweep(folder: Path, runs: int = 50, *, reports: int = 60, running: int = 2) -> None:
    """Write ``runs`` runs into ``folder``, each as its only rank and its tracker would have done."""
    draw = random.Random(7)
    for number in range(runs):
        settings = {
            "lr": _RATES[number % 5],
            "width": draw.choice([64, 128, 256, 512]),
            "dropout": draw.choice([0.0, 0.1, 0.2, 0.3]),
            "optimizer": draw.choice(["adamw", "lion", "sgd"]),
            "warmup steps": draw.randrange(0, 500, 10),
        }
        _write_run(folder, f"run_{number:02d}", settings, draw, reports, is_running=number < running)


def _write_run(
    folder: Path, name: str, settings: dict[str, Any], draw: random.Random, reports: int, *, is_running: bool
) -> None:
    run, seed = folder / name, draw.randrange(1000)
    is_lost = settings["lr"] == 1e-2 and settings["optimizer"] == "sgd"
    last = reports // 3 if is_lost else reports // 2 if is_running else reports
    began = time.time() - 2 * last if is_running else BEGAN + 400 * int(name[4:])
    rate = settings["lr"] ** 0.5 * 2
    floor = 0.35 + 0.2 * abs(math.log10(settings["lr"] / 1e-3)) + settings["dropout"] / 4
    floor += {"adamw": 0.0, "lion": 0.06, "sgd": 0.2}[settings["optimizer"]] - 0.03 * math.log2(settings["width"] / 64)
    command = f"train.py --lr {settings['lr']} --seed {seed} --output_dir out/{name} --amp"
    start = {"event": "start", "rank": 0, "ranks": 1, "device": "cpu", "precision": "no", "strategy": "NO",
             "command": command, "total_steps": 20 * reports}  # fmt: skip
    lines: list[dict[str, Any]] = [{"time": began, **start}]
    logged: list[dict[str, Any]] = [{"time": began, "config": {**settings, "epochs": 3, "tags": ["sweep"]}}]
    for report in range(1, last + 1):
        step, now = 20 * report, began + 2 * report
        loss = floor + 2 * math.exp(-rate * report) + draw.gauss(0, 0.02)
        learning_rate = settings["lr"] * (1 - report / (reports + 1))
        numbers = {"learning_rate": learning_rate, "samples_per_second": 300 + draw.gauss(0, 9)}
        times = {"step_seconds": 0.1, "wait_seconds": 0.01, "memory_bytes": (2 + settings["width"] / 256) * 10**8}
        is_nan = is_lost and report == last
        lines.append({"time": now, "step": step, "epoch": 0, "loss": "nan" if is_nan else loss, **numbers, **times})
        if report % 6 == 0:
            evaluated = {"eval_loss": loss + 0.1, "eval_accuracy": max(0.1, 1 - loss / 2.5)}
            logged.append({"time": now, "step": step, **evaluated})
    ending: dict[str, Any] = {"event": "end"}
    if is_lost:
        ending = {"event": "stop", "text": f"the loss on rank 0 is not finite since step {20 * last}"}
    elif int(name[4:]) % 17 == 9:
        ending = {"event": "error", "text": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}
    if not is_running:
        lines.append({"time": began + 2 * last + 1, "step": 20 * last, **ending})
    for path, content in ((run / "monitor" / "rank_0.jsonl", lines), (run / "sweep.jsonl", logged)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
