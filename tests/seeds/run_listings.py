"""Runs the seeds' code listings one after the other in this process, and writes down what came out.

    [launcher] run_listings.py RESULTS_FOLDER listing [listing ...]

Each listing gets the names that its document says are defined beforehand. What is left behind in its namespace
(parameters, learning rate, metrics) goes to RESULTS_FOLDER/rank_N.json.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def training_names() -> dict[str, Any]:
    """training_dataloader, model, optimizer, scheduler and loss_function, as the migration page presumes."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    inputs = torch.randn(24, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "training_dataloader": DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        "loss_function": torch.nn.MSELoss(),
    }


def evaluation_names() -> dict[str, Any]:
    """Eleven samples in batches of four, and a metric that says what it was given."""
    import numpy
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator

    samples = torch.arange(11.0)
    seen: dict[str, Any] = {}

    def metric_compute(predictions: Any, labels: Any) -> None:
        seen.update(predictions=predictions.ravel().tolist(), labels=labels.ravel().tolist())

    loader = DataLoader(TensorDataset(samples.unsqueeze(1), samples), batch_size=4)
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Identity())
    return {
        "accelerator": accelerator,
        "eval_dataloader": loader,
        "validation_dataloader": accelerator.prepare(loader),
        "model": model,
        "metric_compute": metric_compute,
        "np": numpy,
        "torch": torch,
        "seen": seen,
    }


def init_names() -> dict[str, Any]:
    names = training_names()
    return {"model": names["model"], "optim": names["optimizer"], "data": names["training_dataloader"]}


NAMES = {
    "migrating_base": training_names,
    "migrated": training_names,
    "blog_evaluation": evaluation_names,
    "blog_evaluation_base": evaluation_names,
    "notes_gather": evaluation_names,
    "notes_init": init_names,
}


def summary(names: dict[str, Any]) -> dict[str, Any]:
    """What a test may look at: numbers only."""
    found: dict[str, Any] = dict(names.get("seen", {}))
    model = names.get("model", names.get("mlp"))
    if model is not None:
        found["parameters"] = [parameter.double().sum().item() for parameter in model.parameters()]
    if "loss" in names:
        found["loss"] = names["loss"].item()
        found["loss_dtype"] = str(names["loss"].dtype)
    if "scheduler" in names:
        found["learning_rate"] = names["scheduler"].get_last_lr()[0]
    if "all_predictions" in names:
        found["last_gathered"] = len(names["all_predictions"])
    if "accelerator" in names:
        found["num_processes"] = names["accelerator"].num_processes
        found["mixed_precision"] = names["accelerator"].mixed_precision
        found["distributed_type"] = str(names["accelerator"].distributed_type)
    return found


def main() -> None:
    import torch

    # python -m torch.distributed.launch adds --local-rank=N to the words of the script.
    words = [word for word in sys.argv[1:] if not word.startswith("--local")]
    folder, listings = Path(words[0]), words[1:]
    results: dict[str, Any] = {}
    for name in listings:
        source = (HERE / "listings" / f"{name}.py").read_text()
        names = {"__name__": "__main__", "__file__": name, **NAMES.get(name, dict)()}
        torch.manual_seed(42)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(HERE / "listings" / f"{name}.py"), "exec"), names)
        results[name] = {**summary(names), "printed": printed.getvalue()}
        names.clear()
        gc.collect()
    (folder / f"rank_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
    if any("ddp" in name for name in listings):  # it began a process group by hand, so it ends it by hand
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
